"""Lookup of a batch by its id, or by enough digits of it to be the only one."""

from __future__ import annotations

import re

from penstock.cli.api import Api
from penstock.cli.client import Json
from penstock.cli.figures import age, state_of
from penstock.errors import UsageError

_PREFIX = "batch_"
_DIGITS = 32
_LISTED = 10
_TAIL_DIGITS_MIN = 4
_TAIL_SEARCHED = 1_000
_PAGE = 100


async def find_batch(api: Api, text: str) -> Json:
    """Find the only batch whose id is, begins with or ends in `text`."""
    digits = text.strip().lower().removeprefix(_PREFIX)
    if not re.fullmatch(r"[0-9a-f]{1,32}", digits):
        raise UsageError(f"'{text}' is not a batch id", hint="An id is batch_ and 32 digits; `penstock ls` lists them.")
    if len(digits) == _DIGITS:
        return await api.get(f"/v1/batches/{_PREFIX}{digits}")
    # Ids sort by their digits and the list goes downwards: ids with this beginning follow the highest such id.
    page = await api.get("/v1/batches", {"after": _PREFIX + digits.ljust(_DIGITS, "f"), "limit": _LISTED + 1})
    found: list[Json] = [batch for batch in page["data"] if batch["id"].startswith(_PREFIX + digits)]
    if not found and not text.startswith(_PREFIX) and len(digits) >= _TAIL_DIGITS_MIN:
        found = await _find_ending_in(api, digits)
    if not found:
        raise UsageError(f"no batch has an id like '{text}'", hint="`penstock ls --all` lists every batch.")
    if len(found) > 1:
        listed = "".join(
            f"\n  {batch['id']}  {state_of(batch)}, {age(batch['created_at'])} old" for batch in found[:_LISTED]
        )
        more = "\n  ..." if len(found) > _LISTED else ""
        raise UsageError(
            f"'{text}' may mean any of these batches:{listed}{more}", hint="Give more digits, or the whole id."
        )
    return found[0]


async def _find_ending_in(api: Api, digits: str) -> list[Json]:
    """Find batches by their last digits. Ids begin with a time and end randomly: a few last digits tell those of a day
    apart."""
    found, seen = [], 0
    async for batch in api.walk("/v1/batches", page=_PAGE):
        seen += 1
        if batch["id"].endswith(digits):
            found.append(batch)
        if seen >= _TAIL_SEARCHED or len(found) > _LISTED:
            break
    return found
