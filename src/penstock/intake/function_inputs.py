"""Lines for a Python function: any JSON object, or a request in the Batch API's shape.

An object of nothing but `custom_id`, `method`, `url` and a `body` that is an object is a request, and the function gets
its body. Any other object is itself what the function gets. Neither needs an id: the number of its line serves.
"""

from __future__ import annotations

import msgspec

from penstock.intake import explain
from penstock.intake.explain import Fault
from penstock.intake.jsonl import DEFAULT_ROUTE, NOTHING, Found, JsonlParser

URL = "/"
"""Path of an input that names none."""

_REQUEST = {"custom_id", "method", "url", "body"}
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_id = msgspec.json.Decoder(str | int)


class FunctionInputParser(JsonlParser):
    """Parser of lines for a Python function."""

    _whole_answers = False
    _expected = "Expected one JSON object per line."

    def _look_closely(self, number: int, line: bytes) -> Found:
        if self.hopeless or explain.is_blank(line):
            return NOTHING
        fault = explain.object_fault(line, self._limits) or explain.number_fault(line)
        if fault is not None:
            return self._note(number, fault)
        fields = _fields.decode(line)
        body, wrapped = line, fields.keys() <= _REQUEST and bytes(fields.get("body", b"")).startswith(b"{")
        if wrapped:
            if "custom_id" in fields and "url" in fields:
                return super()._look_closely(number, line)
            body = bytes(fields["body"])
        custom_id = self._custom_id(number, fields)
        if isinstance(custom_id, Fault):
            return self._note(number, custom_id)
        lane = self._lanes.open(URL, DEFAULT_ROUTE)
        return self._note(number, lane, custom_id) if isinstance(lane, Fault) else Found(custom_id.encode(), lane, body)

    def _custom_id(self, number: int, fields: dict[str, msgspec.Raw]) -> str | Fault:
        """The line's own id, a text or a whole number; without one, the number of the line."""
        if "custom_id" not in fields:
            return str(number)
        try:
            custom_id = str(_id.decode(fields["custom_id"]))
        except msgspec.ValidationError:
            return Fault(
                "custom_id", "neither a text nor a whole number; leave it out or correct it", "invalid_request"
            )
        return explain.custom_id_fault(custom_id, self._limits) or custom_id
