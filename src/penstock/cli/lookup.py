"""Lookup of a batch or a job by its id, or by enough digits of it to be the only one."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from penstock.cli.client import Json
from penstock.cli.figures import age, job_moment, state_of
from penstock.client.api import Api, Refused
from penstock.errors import UsageError

_DIGITS = 32
_LISTED = 10
_TAIL_DIGITS_MIN = 4
_TAIL_SEARCHED = 1_000
_PAGE = 100


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of object that commands name by its id."""

    noun: str
    path: str
    lists_all: str
    """The command that lists every one."""
    walk: Callable[[Api, str | None, int], AsyncIterator[Json]]
    """Every object after an id, newest first, read by pages of a size."""
    about: Callable[[Json], str]

    @property
    def prefix(self) -> str:
        return f"{self.noun}_"


async def _walk_batches(api: Api, after: str | None, page: int) -> AsyncIterator[Json]:
    async for batch in api.walk("/v1/batches", page=page, **({} if after is None else {"after": after})):
        yield batch


async def walk_jobs(api: Api, after: str | None, page: int) -> AsyncIterator[Json]:
    """Every job after an id, newest first."""
    query: dict[str, str | int] = {"pageSize": page} if after is None else {"pageSize": page, "after": after}
    while True:
        found = await api.get("/api/jobs", query)
        # A server of an early release has none.
        for job in found.get("jobs", ()):
            yield job
        if found.get("next") is None:
            return
        query["after"] = found["next"]


BATCH = Kind(
    "batch",
    "/v1/batches",
    "penstock ls --all",
    _walk_batches,
    lambda batch: f"{state_of(batch)}, {age(batch['created_at'])} old",
)
JOB = Kind(
    "job",
    "/api/jobs",
    "penstock jobs ls --all",
    walk_jobs,
    lambda job: f"{job['state']}, {age(job_moment(job['createdAt']))} old",
)


async def find_job(api: Api, text: str) -> Json:
    """Find the only job whose id is, begins with or ends in `text`."""
    return await find(api, text, JOB)


async def find(api: Api, text: str, *kinds: Kind) -> Json:
    """Find the only object, of the first of these kinds that has any, whose id is, begins with or ends in `text`."""
    text, others = text.strip().lower(), kinds
    kinds = tuple(kind for kind in kinds if text.startswith(kind.prefix)) or kinds
    kind, digits = kinds[0], text.removeprefix(kinds[0].prefix).replace("-", "")
    if not re.fullmatch(r"[0-9a-f]{1,32}", digits):
        hint = f"An id is {kind.prefix} and 32 digits; `{kind.lists_all}` lists them."
        raise UsageError(f"'{text}' is not a {kind.noun} id", hint=hint)
    if len(digits) == _DIGITS:
        return await _get_any(api, digits, kinds, others)
    for each in kinds:
        if found := await _list_like(api, each, text, digits):
            return _only(found, each, text)
    raise UsageError(f"no {kind.noun} has an id like '{text}'", hint=f"`{kind.lists_all}` lists every {kind.noun}.")


async def _get_any(api: Api, digits: str, kinds: Sequence[Kind], others: Sequence[Kind]) -> Json:
    """Get the object with all these digits: of one of the kinds that its id names, else of one of the others."""
    refused: Refused | None = None
    for kind in (*kinds, *(kind for kind in others if kind not in kinds)):
        try:
            return await api.get(f"{kind.path}/{kind.prefix}{digits}")
        except Refused as error:
            if error.status != 404:
                raise
            refused = refused or error
    raise refused or UsageError("no kind of object is named", hint="See `--help`.")


def _only(found: list[Json], kind: Kind, text: str) -> Json:
    if len(found) == 1:
        return found[0]
    listed = "".join(f"\n  {one['id']}  {kind.about(one)}" for one in found[:_LISTED])
    more = "\n  ..." if len(found) > _LISTED else ""
    plural = "batches" if kind is BATCH else "jobs"
    raise UsageError(
        f"'{text}' may mean any of these {plural}:{listed}{more}", hint="Give more digits, or the whole id."
    )


async def _list_like(api: Api, kind: Kind, text: str, digits: str) -> list[Json]:
    """List objects whose id begins with these digits; if there is none, those whose id ends in them."""
    # Ids sort by their digits and the list goes downwards: ids with this beginning follow the highest such id.
    found: list[Json] = []
    async for one in kind.walk(api, kind.prefix + digits.ljust(_DIGITS, "f"), _LISTED + 1):
        if not one["id"].startswith(kind.prefix + digits):
            break
        found.append(one)
        if len(found) > _LISTED:
            break
    if found or text.startswith(kind.prefix) or len(digits) < _TAIL_DIGITS_MIN:
        return found
    # Ids begin with a time and end randomly: a few last digits tell those of a day apart.
    seen = 0
    async for one in kind.walk(api, None, _PAGE):
        seen += 1
        if one["id"].endswith(digits):
            found.append(one)
        if seen >= _TAIL_SEARCHED or len(found) > _LISTED:
            break
    return found
