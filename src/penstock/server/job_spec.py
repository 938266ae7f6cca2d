"""Job as it is asked for: what is done with each row, where that is worked off, and how it is made with its input."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any
from uuid import UUID

import msgspec
import psycopg

from penstock.batches import jobs
from penstock.dispatch.processors import ProcessorConfig
from penstock.dispatch.providers import Provider
from penstock.dispatch.rows.check import check_rendering
from penstock.dispatch.rows.definition import ChatDefinition, Definition, parse_definition
from penstock.errors import UsageError
from penstock.intake.job_upload import Part
from penstock.intake.tables.table import TableRow, TableSpec, Through
from penstock.model import new_id


class JobSpec(msgspec.Struct, rename="camel", forbid_unknown_fields=True, frozen=True):
    """What is done with each row."""

    processor: str | dict[str, Any]
    """A registered processor's name, or a definition of what is asked of a provider."""
    job_type: Annotated[str, msgspec.Meta(min_length=1, max_length=100)] = "job"
    columns: TableSpec = TableSpec()
    max_attempts: Annotated[int, msgspec.Meta(ge=1, le=100)] | None = None
    max_concurrency: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None
    """Rows that are in flight at once, over all workers; those that wait for another try count too."""
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    """Rows that are taken of the input, from the first on: a trial. None for all."""


class SourceReference(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """File that an adapter reaches."""

    adapter: str
    path: str


def place_job(
    spec: JobSpec, owner: str, processors: Iterable[ProcessorConfig], providers: Iterable[Provider]
) -> tuple[str, str]:
    """Pool and route of the job's lane. A spec names processors and providers; what these are, and what may be asked of
    them, the operator says. Raises UsageError."""
    if isinstance(spec.processor, str):
        known = {processor.name: processor for processor in processors}
        if spec.processor in known:
            return known[spec.processor].pool, spec.processor
        names = ", ".join(known) or "none is registered"
        raise UsageError(f"there is no processor '{spec.processor[:100]}'; there are: {names}")
    definition = parse_definition(spec.processor)
    for provider in providers:
        if provider.name == definition.provider:
            return provider.pool, _route(definition, owner, provider)
    raise UsageError(f"processor.provider: there is no provider '{definition.provider[:100]}'")


def _route(definition: Definition, owner: str, provider: Provider) -> str:
    if isinstance(definition, ChatDefinition):
        if not provider.serves(definition.model):
            raise UsageError(
                f"processor.model: the provider '{provider.name}' does not serve the model '{definition.model[:100]}'"
            )
        return definition.model
    for path in definition.paths:
        if not any(pattern.allows(definition.method, path) for pattern in provider.rows_paths):
            raise UsageError(
                f"processor.path: '{definition.method} {path[:200]}' is not allowed: "
                f"rows_paths of the provider '{provider.name}' says what HTTP jobs may ask of it"
            )
    # A route waits as a whole when its upstream asks for it. Which paths are called, and how often, is up to the owner:
    # so are the waits. A route for each job would give whoever has most jobs most of the calls.
    return f"http:{owner}"


@dataclass(frozen=True, slots=True)
class NewJob:
    """Job that is made when its input is sealed."""

    owner: str
    spec: JobSpec
    pool: str
    route: str
    client: str
    actor: str
    key: str | None = None
    source: SourceReference | None = None
    """The input, if it was asked for by reference."""
    parts: Sequence[Part] | None = None
    """Files of the input, if several came together."""
    max_open: int = 0
    """Open batches and jobs that the owner may have; 0 is no limit."""
    id: UUID = field(default_factory=new_id)

    @property
    def fingerprint(self) -> bytes:
        """Hash of what was asked: a repeated call under the same key must ask the same."""
        return hashlib.sha256(msgspec.json.encode([self._told(), self.parts], order="deterministic")).digest()

    def create(self, connection: psycopg.Connection, file_id: UUID) -> None:
        """Create the job, in the transaction that seals its input. Raises KeyTaken and QuotaExceeded."""
        jobs.create_job(
            connection,
            self.id,
            owner=self.owner,
            file_id=file_id,
            pool=self.pool,
            key=self.key,
            fingerprint=self.fingerprint,
            priority=self.spec.priority,
            job_type=self.spec.job_type,
            spec=json.dumps(self._told()),
            client=self.client,
            actor=self.actor,
            parts=None if self.parts is None else json.dumps(self.parts),
            max_open=self.max_open,
        )

    def check(self, filename: str) -> Through:
        """Check that the rows of the input have what a definition asks of them."""

        def check_rows(rows: Iterator[TableRow]) -> Iterator[TableRow]:
            some = islice(rows, self.spec.limit)
            if isinstance(self.spec.processor, str):
                return some
            return check_rendering(parse_definition(self.spec.processor), filename, some)

        return check_rows

    def _told(self) -> dict[str, Any]:
        told = {**msgspec.to_builtins(self.spec), "route": self.route}
        if self.spec.limit is None:
            del told["limit"]  # jobs were told without it before there was one
        return told if self.source is None else {**told, "source": msgspec.to_builtins(self.source)}
