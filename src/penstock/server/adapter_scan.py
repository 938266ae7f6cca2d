"""Scans of adapters: one server at a time lists an adapter's files, and makes a job of each that is new and complete.

Which server that is does not matter: all that is remembered is in the database, and a file's record is written in the
transaction that makes its job (ADR 16).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from uuid import UUID

import psycopg

from penstock.adapters import files
from penstock.adapters.config import Adapter
from penstock.adapters.paths import explain_bad_path
from penstock.adapters.source import FileNotReady, FileUnreadable, FoundFile, Source, SourceUnavailable
from penstock.adapters.sources import open_source
from penstock.api.multipart import Feeder, clean_filename
from penstock.api.upload_threads import UploadWork
from penstock.config import Config
from penstock.db.lead import lead
from penstock.db.pool import Pool, borrowed
from penstock.dispatch.providers import Provider
from penstock.errors import UsageError
from penstock.intake.job_upload import JobUpload
from penstock.server.job_spec import JobSpec, NewJob, SourceReference, place_job

_log = logging.getLogger("penstock.adapters")

TAKE_AT_ONCE = 1_000
"""Files that one scan takes; what is left is for the next, which follows at once."""


_MAX_FAILURES = 3
"""Files that cannot be read, one after the other, after which a scan ends."""


class _TakenError(Exception):
    """Another server made a job of this version of the file."""


@dataclass(slots=True)
class ScanReport:
    """What a scan found."""

    adapter: str
    found: int = 0
    """Files that match the adapter's pattern, whether new or not."""
    taken: list[tuple[str, UUID]] = field(default_factory=list)
    """Files of which a job was made, with the job."""
    set_aside: list[tuple[str, str]] = field(default_factory=list)
    """Files that cannot be taken as they are, with the reason."""
    settling: int = 0
    """New files that may not be complete yet."""
    settled_in_s: float | None = None
    """When the first of them may be complete."""
    more: bool = False
    """There are more files to take than one scan takes."""
    problem: str | None = None
    """Why not all could be listed or read."""

    def fail(self, error: SourceUnavailable) -> None:
        self.problem = error.message
        _log.warning("adapter %s: %s", self.adapter, error.message)

    def waits(self, seconds: float) -> None:
        self.settling += 1
        self.settled_in_s = seconds if self.settled_in_s is None else min(seconds, self.settled_in_s)


@dataclass(frozen=True, slots=True)
class _Target:
    """What becomes of an adapter's files."""

    spec: JobSpec
    pool: str
    route: str


class AdapterScans:
    """Adapters of one server."""

    def __init__(
        self,
        config: Config,
        conninfo: str,
        database: Pool,
        providers: Iterable[Provider] = (),
        adapters: Iterable[Adapter] = (),
    ) -> None:
        """Raises UsageError if an adapter lacks its package or a secret, or names a processor that there is not."""
        self._config = config
        self._conninfo = conninfo
        self._database = database
        self._adapters = {adapter.name: adapter for adapter in adapters}
        timeout_s = config.scan.scan_timeout_s
        self._sources = {name: open_source(adapter, timeout_s) for name, adapter in self._adapters.items()}
        known = list(providers)
        self._targets = {
            adapter.name: _target(adapter, adapter.spec, config, known)
            for adapter in self._adapters.values()
            if adapter.spec is not None
        }

    @property
    def scanned(self) -> Iterator[Adapter]:
        """Adapters that have a spec for their files."""
        return (self._adapters[name] for name in self._targets)

    def changes(self, name: str) -> AsyncGenerator[None] | None:
        """A moment each time an adapter's files may have changed; None where that cannot be watched."""
        return self._sources[name].changes()

    # -- by reference

    async def find(self, reference: SourceReference, owner: str | None) -> tuple[Source, FoundFile]:
        """A file by its reference, for an owner or for an admin (None). An adapter that another owns answers like one
        that does not exist. Raises FileUnreadable or SourceUnavailable."""
        name, path = reference.adapter, reference.path
        adapter = self._adapters.get(name)
        if adapter is None or owner not in (None, adapter.owner):
            raise FileUnreadable(f"there is no adapter '{name[:100]}' whose files you may use")
        if reason := explain_bad_path(path):
            raise FileUnreadable(f"path: {reason}")
        source = self._sources[name]
        return source, await source.find(path)

    # -- scanning

    async def scan(self, name: str, worker_id: UUID, limit: int = TAKE_AT_ONCE) -> ScanReport | None:
        """Take the new files of an adapter; None if another server is scanning it. `worker_id` is registered: what it
        leaves half-stored is swept if it dies."""
        work = partial(self._scan, name, worker_id, limit)
        return await lead(self._conninfo, f"penstock scan {name}", self._config.liveness.heartbeat_grace_s, work)

    async def _scan(self, name: str, worker_id: UUID, limit: int) -> ScanReport:
        report, failures = ScanReport(name), 0
        try:
            for file in await self._find_complete(name, limit, report):
                try:
                    await self._take(name, worker_id, file, report)
                except SourceUnavailable as error:
                    # Perhaps it is this file that the source cannot send: the others need not wait for it.
                    failures += 1
                    if failures == _MAX_FAILURES:
                        raise
                    report.fail(error)
                else:
                    failures = 0
        except SourceUnavailable as error:
            report.fail(error)
        return report

    async def _find_complete(self, name: str, limit: int, report: ScanReport) -> list[FoundFile]:
        """List the source; the new files that are complete, at most `limit`."""
        source = self._sources[name]
        settled_s = 0.0 if source.whole_when_listed else self._adapters[name].settled_s
        complete: list[FoundFile] = []
        async with borrowed(self._database) as connection:
            began = await files.read_time(connection)
        async with aclosing(source.list_files()) as pages:
            async for page in pages:
                report.found += len(page)
                async with borrowed(self._database) as connection:
                    sighted = await files.sight_files(connection, name, page)
                for file, seconds in sighted:
                    if seconds < settled_s:
                        report.waits(settled_s - seconds)
                    else:
                        complete.append(file)
                if len(complete) > limit:
                    report.more = True
                    return complete[:limit]
        async with borrowed(self._database) as connection:
            await files.forget_unseen(connection, name, began)
        return complete

    async def _take(self, name: str, worker_id: UUID, file: FoundFile, report: ScanReport) -> None:
        owner = self._adapters[name].owner
        try:
            job_id = await self._make_job(name, worker_id, file)
        except _TakenError:
            return
        except FileNotReady as error:
            report.waits(self._adapters[name].settled_s)
            _log.info("adapter %s: left for the next scan: %s", name, error.message)
        except UsageError as error:
            async with borrowed(self._database) as connection:
                await files.set_aside(connection, name, owner, file, error.advice)
            report.set_aside.append((file.path, error.advice))
            _log.warning("adapter %s: set aside: %s", name, file.path)
        else:
            report.taken.append((file.path, job_id))
            _log.info("adapter %s: %s is job %s", name, file.path, job_id)

    async def _make_job(self, name: str, worker_id: UUID, file: FoundFile) -> UUID:
        target, owner = self._targets[name], self._adapters[name].owner
        job = NewJob(owner, target.spec, target.pool, target.route, client=f"adapter {name}", actor=f"adapter {name}")

        def create(connection: psycopg.Connection, file_id: UUID) -> None:
            if not files.record_taken(connection, name, owner, file, job.id):
                raise _TakenError
            job.create(connection, file_id)

        upload = JobUpload(
            self._conninfo,
            owner=owner,
            worker_id=worker_id,
            filename=clean_filename(file.path),
            limits=self._config.intake,
            table_limits=self._config.tables,
        )
        async with Feeder(upload, UploadWork(owner)) as feeder:
            await feed_file(feeder, self._sources[name], file)
            await feeder.finish(partial(upload.finish, target.spec.columns, create, through=job.check(upload.filename)))
        return job.id


async def feed_file(feeder: Feeder, source: Source, file: FoundFile) -> None:
    """Read a file to its end, and hand all of it on."""
    async with aclosing(source.read(file)) as blocks:
        async for block in blocks:
            await feeder.put(block)
    await feeder.flush()


def _target(adapter: Adapter, spec: JobSpec, config: Config, providers: list[Provider]) -> _Target:
    try:
        return _Target(spec, *place_job(spec, adapter.owner, config.processors, providers))
    except UsageError as error:
        raise UsageError(f"adapter '{adapter.name}': spec: {error.message}", hint=error.hint) from None
