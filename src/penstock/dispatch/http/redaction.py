"""Secrets of a provider taken out of what it answers: some upstreams, and some proxies before them, repeat the headers
they were sent. What they answer goes to the owner of the request, who must not learn the operator's key."""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping

import msgspec

from penstock.dispatch.http.answer import Answer
from penstock.dispatch.http.connection import Headers
from penstock.validators import CARRIES_SECRETS

_REDACTED = b"[redacted]"
# A good answer is kept to the byte, so only a text that cannot be there by chance is taken out of it: servers that need
# no key are given a word, such as "lm-studio", which an answer may well contain. Keys of providers have 32 characters
# or more.
_MIN_KEY_CHARS = 20
_MIN_SECRET_CHARS = 8
# What JSON need not escape and some servers do: those in Go, and those in .NET and PHP.
_ESCAPED_BY_FEW = re.compile(r"[&<>]")
_ESCAPED_BY_SOME = re.compile(r"[&<>'+`]|\\\"")


def secret_texts(api_key: str | None, headers: Mapping[str, str]) -> tuple[str, ...]:
    """Secrets that an upstream may echo, and an error's message must not contain."""
    values = [api_key or "", *headers.values()]
    values += [word for value in values for word in value.split()]
    return _as_written(value for value in values if len(value) >= _MIN_SECRET_CHARS)


def key_texts(api_key: str | None, headers: Mapping[str, str]) -> tuple[str, ...]:
    """What no answer may contain, not even a good one: the key, and the headers that hold secrets by their names."""
    values = [api_key or "", *(value for name, value in headers.items() if CARRIES_SECRETS.search(name))]
    return _as_written(word for value in values for word in value.split() if len(word) >= _MIN_KEY_CHARS)


def _as_written(values: Iterable[str]) -> tuple[str, ...]:
    """The values, also as JSON has them: servers differ in what they escape. Longest first, as one may contain
    another."""
    written = set()
    for value in values:
        plain = msgspec.json.encode(value).decode()[1:-1]
        few = _ESCAPED_BY_FEW.sub(lambda found: f"\\u{ord(found[0]):04x}", plain)
        some = _ESCAPED_BY_SOME.sub(lambda found: f"\\u{ord(found[0][-1]):04X}", plain)
        written |= {value, plain, plain.replace("/", "\\/"), few, some}
    return tuple(sorted(written, key=len, reverse=True))


class Redactor:
    """Takes these texts out of answers, wherever they are in them."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._hidden = tuple(text.encode() for text in texts)

    def body(self, content: bytes) -> bytes:
        for hidden in self._hidden:
            if hidden in content:
                content = content.replace(hidden, _REDACTED)
        return content

    def headers(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        if isinstance(headers, Headers) and headers.mention(self._hidden):
            return {name: self.body(value.encode()).decode() for name, value in headers.items() if self._is_plain(name)}
        return headers

    def _is_plain(self, name: str) -> bool:
        # Names are read in lower case.
        return not any(hidden.lower() in name.encode() for hidden in self._hidden)

    def answer(self, answer: Answer) -> Answer:
        body, headers = self.body(answer.body), self.headers(answer.headers)
        if body is answer.body and headers is answer.headers:
            return answer
        return msgspec.structs.replace(answer, body=body, headers=headers)

    async def pieces(self, pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        """The same in an answer that is read as it comes. A text may begin in one piece and end in another: what may be
        its beginning is held back until more is known."""
        held = b""
        async for piece in pieces:
            content = self.body(held + piece)
            held = content[len(content) - self._begun_at_end(content) :]
            if ready := content[: len(content) - len(held)]:
                yield ready
        if held:
            yield held

    def _begun_at_end(self, content: bytes) -> int:
        """Bytes at the end that a hidden text may begin with."""
        longest = 0
        for hidden in self._hidden:
            tail = content[-len(hidden) + 1 :]
            at = tail.find(hidden[:1])
            while at >= 0 and not hidden.startswith(tail[at:]):
                at = tail.find(hidden[:1], at + 1)
            if at >= 0:
                longest = max(longest, len(tail) - at)
        return longest
