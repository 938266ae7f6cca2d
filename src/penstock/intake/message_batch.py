"""Takes the body that creates a message batch apart while it arrives: one line of JSON out for each request in.

A push parser that looks at brackets and strings alone until a request is whole, and holds no more than one of them.
What a request says is then decoded and checked at once, so that the client is told which one is wrong and where.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final
from uuid import UUID

import msgspec

from penstock.config import IntakeLimits
from penstock.intake import explain
from penstock.intake.files import MESSAGE_BATCH
from penstock.intake.intake import FileIntake
from penstock.intake.refusal import IntakeRefused
from penstock.intake.writer import StoredFile

URL: Final = "/v1/messages"
_FILENAME = "message_batch.jsonl"
_TOO_LARGE = "file_too_large"
_BLANK = b" \t\r\n"
_CUSTOM_ID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_LINE = b'{"custom_id":"%b","method":"POST","url":"/v1/messages","body":%b}\n'

# Possessive, so that a long string leaves no states behind to go back to.
_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_BLANKS = re.compile(rb"[ \t\r\n]*+")
_NEXT_MARK = re.compile(rb'["{}\[\]]')
_NOT_DECODED = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    params: msgspec.Raw


class _Params(msgspec.Struct):
    model: str
    stream: bool | None = None


_decode_request = msgspec.json.Decoder(_Request).decode
_decode_params = msgspec.json.Decoder(_Params).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode


class Splitter:
    """Finds the requests in `{"requests": [...]}`, cut anywhere, and makes a line of each."""

    def __init__(self, limits: IntakeLimits, serves: Callable[[str], bool] = lambda _: True) -> None:
        self._limits = limits
        self._serves = serves
        self._held = bytearray()
        self._at = 0
        """How far what is held has been looked at."""
        self._depth = 0
        """Of brackets, inside the request that has begun."""
        self._in_string = False
        self._expect: Callable[[], bool] = self._opening
        self._ids: dict[str, int] = {}
        self._served: set[str] = set()
        self._read_bytes = 0

    @property
    def requests(self) -> int:
        return len(self._ids)

    @property
    def held_bytes(self) -> int:
        return len(self._held)

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes; returns the lines of the requests that became whole."""
        self._read_bytes += len(data)
        if self._read_bytes > self._limits.max_message_batch_bytes:
            limit = self._limits.max_message_batch_bytes
            raise IntakeRefused(f"The body is larger than {limit:,} bytes.", code=_TOO_LARGE)
        self._held += data
        self._lines: list[bytes] = []
        while self._expect():
            pass
        if len(self._held) > self._limits.max_line_bytes:
            raise self._too_long()
        return b"".join(self._lines)

    def finish(self) -> None:
        """The body is at its end."""
        if self._expect != self._nothing_more:
            raise _malformed(f"it ends in the middle, after {self.requests:,} requests")
        if not self.requests:
            raise _fault("requests", "at least one request is needed", "empty_file")

    # -- the frame: what may come next. Each takes it and says whether to go on; False waits for more bytes.

    def _opening(self) -> bool:
        return self._take(b"{", self._key)

    def _key(self) -> bool:
        if self._skipped() and self._held[0] == ord("}"):
            raise _fault("requests", "Field required", "missing_required_parameter")
        key = self._string()
        if key is None:
            return False
        if key != "requests":
            raise _fault(explain.quoted(key).strip('"'), "Extra inputs are not permitted")
        self._expect = self._colon
        return True

    def _colon(self) -> bool:
        return self._take(b":", self._array)

    def _array(self) -> bool:
        if self._skipped() and self._held[0] != ord("["):
            raise _fault("requests", "Input should be an array")
        return self._take(b"[", self._first)

    def _first(self) -> bool:
        if self._skipped() and self._held[0] == ord("]"):
            return self._take(b"]", self._after)
        return self._request()

    def _request(self) -> bool:
        """Look for the end of the request at the beginning of what is held."""
        if not self._at and not self._skipped():
            return False
        if not self._at and self._held[0] != ord("{"):
            raise _fault(f"requests.{self.requests}", "Input should be an object")
        end = self._end_of_value()
        if end is None:
            self._expect = self._request
            return False
        self._lines.append(self._line(bytes(self._held[:end])))
        self._drop(end)
        self._expect = self._comma
        return True

    def _comma(self) -> bool:
        if self._skipped() and self._held[0] == ord("]"):
            return self._take(b"]", self._after)
        return self._take(b",", self._request)

    def _after(self) -> bool:
        if self._skipped() and self._held[0] == ord(","):
            del self._held[0]
            self._expect = self._second_key
            return True
        return self._take(b"}", self._nothing_more)

    def _second_key(self) -> bool:
        key = self._string()
        if key is None:
            return False
        what = "the key is there twice; expected once" if key == "requests" else "Extra inputs are not permitted"
        raise _fault(explain.quoted(key).strip('"'), what)

    def _nothing_more(self) -> bool:
        if self._skipped():
            raise _malformed("there is something after its end")
        return False

    # -- the bytes

    def _skipped(self) -> bool:
        """Skip blanks; whether anything comes after them."""
        if self._held and self._held[0] in _BLANK:
            blanks = _BLANKS.match(self._held)
            del self._held[: blanks.end() if blanks else 0]
        return bool(self._held)

    def _take(self, mark: bytes, then: Callable[[], bool]) -> bool:
        if not self._skipped():
            return False
        if self._held[0] != ord(mark):
            where = f"after {self.requests:,} requests" if self.requests else "near its beginning"
            raise _malformed(f"expected '{mark.decode()}' {where}, found {_shown(self._held)}")
        del self._held[0]
        self._expect = then
        return True

    def _string(self) -> str | None:
        """The string at the beginning of what is held, taken, if it is whole."""
        if not self._skipped():
            return None
        if self._held[0] != ord('"'):
            raise _malformed(f"expected a key, found {_shown(self._held)}")
        found = _IN_STRING.match(self._held, 1)
        end = found.end() if found else len(self._held)
        if end >= len(self._held) or self._held[end] != ord('"'):
            return None
        text = bytes(self._held[: end + 1])
        del self._held[: end + 1]
        try:
            return _decode_text(text)
        except _NOT_DECODED as error:
            raise _malformed(f"a key cannot be read: {error}") from None

    def _end_of_value(self) -> int | None:
        """Where the value at the beginning of what is held ends, if it has. Nothing is looked at twice."""
        held, at, depth, in_string = self._held, self._at, self._depth, self._in_string
        while True:
            if in_string:
                end = held.find(b'"', at)
                if end >= 0 and held.find(b"\\", at, end) < 0:  # nearly always, and many times faster
                    at = end
                else:
                    found = _IN_STRING.match(held, at)
                    at = found.end() if found else at
                if at >= len(held) or held[at] != _QUOTE:
                    break
                in_string = False
                at += 1
            mark = _NEXT_MARK.search(held, at)
            if mark is None:
                at = len(held)
                break
            at = mark.end()
            kind = held[at - 1]
            if kind == _QUOTE:
                in_string = True
            elif kind in _OPENING:
                depth += 1
            else:
                depth -= 1
                if depth == 0:
                    return at
        self._at, self._depth, self._in_string = at, depth, in_string
        return None

    def _drop(self, end: int) -> None:
        del self._held[:end]
        self._at, self._depth, self._in_string = 0, 0, False

    # -- one request

    def _line(self, text: bytes) -> bytes:
        number = self.requests
        place = f"requests.{number}"
        if number >= self._limits.max_message_batch_requests:
            raise _fault("requests", f"more than {self._limits.max_message_batch_requests:,}", "too_many_tasks")
        if len(text) > self._limits.max_line_bytes:
            raise self._too_long()
        try:
            text.decode()
            request = _decode_request(text)
        except _NOT_DECODED as error:
            raise self._explained(place, text, error) from None
        custom_id, params = request.custom_id, bytes(request.params)
        if not _CUSTOM_ID.fullmatch(custom_id):
            found = explain.quoted(custom_id)
            raise _fault(f"{place}.custom_id", f"found {found}; expected 1 to 64 letters, digits, '_' or '-'")
        first = self._ids.setdefault(custom_id, number)
        if first != number:
            found = f"{explain.quoted(custom_id)} is already used by requests.{first}"
            raise _fault(f"{place}.custom_id", f"{found}; expected once in the batch", "duplicate_custom_id")
        self._check_params(f"{place}.params", params)
        if shape := explain.shape_fault(text, self._limits):
            raise _fault(".".join(filter(None, (place, shape.field))), shape.reason, shape.code)
        if b"\n" in params or b"\r" in params:  # between its parts: a string cannot hold one as it is
            params = params.replace(b"\r", b" ").replace(b"\n", b" ")
        return _LINE % (custom_id.encode(), params)

    def _check_params(self, place: str, params: bytes) -> None:
        if not params.startswith(b"{"):
            raise _fault(place, "Input should be an object")
        try:
            decoded = _decode_params(params)
        except _NOT_DECODED as error:
            if "model" not in _decode_fields(params):
                raise _fault(f"{place}.model", "Field required", "missing_required_parameter") from None
            reason, _, field = str(error).rstrip("`").partition(" - at `$.")
            raise _fault(".".join(filter(None, (place, field))), reason) from None
        if decoded.stream:
            raise _fault(f"{place}.stream", "requests of a batch are not streamed; leave it out")
        if fault := explain.model_fault(decoded.model):
            raise _fault(f"{place}.model", fault.reason)
        if decoded.model not in self._served:
            if not self._serves(decoded.model):
                raise _fault(f"{place}.model", f"{explain.quoted(decoded.model)} is not served here", "model_not_found")
            self._served.add(decoded.model)

    def _explained(self, place: str, text: bytes, error: Exception) -> IntakeRefused:
        try:
            text.decode()
            fields = _decode_fields(text)
        except RecursionError:
            return _fault(place, f"nested deeper than {self._limits.max_nesting} levels (max_nesting)")
        except _NOT_DECODED:
            return _fault(place, f"not valid JSON: {error}", "invalid_json_line")
        for name in fields:
            if name not in ("custom_id", "params"):
                return _fault(f"{place}.{explain.quoted(name).strip(chr(34))}", "Extra inputs are not permitted")
        for name in ("custom_id", "params"):
            if name not in fields:
                return _fault(f"{place}.{name}", "Field required", "missing_required_parameter")
        return _fault(f"{place}.custom_id", "Input should be a string")

    def _too_long(self) -> IntakeRefused:
        limit = self._limits.max_line_bytes
        return _fault(f"requests.{self.requests}", f"longer than {limit:,} bytes (max_line_bytes)", _TOO_LARGE)


class MessageBatchIntake:
    """Takes the body that creates a message batch; it becomes a file that nobody sees. Used like `FileIntake`."""

    def __init__(
        self,
        conninfo: str,
        *,
        owner: str,
        worker_id: UUID,
        limits: IntakeLimits,
        serves: Callable[[str], bool] = lambda _: True,
        idempotency_key: str | None = None,
        expires_after_s: float | None = None,
        max_stored_bytes: int = 0,
    ) -> None:
        self._splitter = Splitter(limits, serves)
        self._intake = FileIntake(
            conninfo,
            owner=owner,
            worker_id=worker_id,
            filename=_FILENAME,
            limits=limits,
            purpose=MESSAGE_BATCH,
            keep_bytes=True,
            expires_after_s=expires_after_s,
            idempotency_key=idempotency_key,
            max_stored_bytes=max_stored_bytes,
        )

    @property
    def held_bytes(self) -> int:
        return self._splitter.held_bytes + self._intake.held_bytes

    def feed(self, data: bytes) -> None:
        """Take the next bytes, cut anywhere."""
        if lines := self._splitter.feed(data):
            self._intake.feed(lines)

    def finish(self) -> StoredFile:
        """The body is at its end: seal the file."""
        self._splitter.finish()
        try:
            return self._intake.finish()
        except IntakeRefused as refused:  # what the splitter lets pass and the parser does not
            if not refused.bad_lines:
                raise
            bad = refused.bad_lines[0]
            field = bad.field.replace("body", "params", 1)
            place = ".".join(filter(None, (f"requests.{bad.line - 1}", field)))
            raise _fault(place, bad.reason, bad.code) from None

    def close(self) -> None:
        self._intake.close()


_QUOTE = ord('"')
_OPENING = b"{["


def _fault(place: str, reason: str, code: str = "invalid_request") -> IntakeRefused:
    return IntakeRefused(f"{place}: {reason}", code=code)


def _malformed(what: str) -> IntakeRefused:
    return IntakeRefused(f"The body is not valid JSON: {what}", code="invalid_request")


def _shown(held: bytes | bytearray) -> str:
    return explain.quoted(bytes(held[:20]).decode("utf-8", "replace"))
