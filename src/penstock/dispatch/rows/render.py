"""Requests: a definition and a row made into what is sent."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import msgspec

from penstock.config import KIB
from penstock.dispatch.rows.definition import ChatDefinition, Definition, HttpDefinition, check_path
from penstock.dispatch.rows.filters import as_text
from penstock.dispatch.rows.template import (
    MAX_RENDERED_BYTES,
    Write,
    as_path_segment,
    compiled,
    compiled_value,
    context_of,
)
from penstock.dispatch.rows.work import RenderError
from penstock.errors import UsageError
from penstock.validators import checked_value

CHAT_PATH = "/v1/chat/completions"
_SCHEMA_NAME = "result"
_MAX_QUERY_CHARS = 64 * KIB

_encoder = msgspec.json.Encoder()


class Image(msgspec.Struct, frozen=True):
    """Image: the bytes that an image's row stands for."""

    media_type: str
    data: bytes

    @property
    def data_url(self) -> str:
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"


class RenderedRequest(msgspec.Struct, frozen=True):
    """Request of one row, ready to be sent to its provider."""

    method: str
    path: str
    """With its query."""
    headers: Mapping[str, str]
    body: bytes | None


def render(
    definition: Definition, row: Mapping[str, Any], *, attempt: int, image: Image | None = None
) -> RenderedRequest:
    """The request of a row. Raises RenderError, which names the field and the reason."""
    image_url = None if image is None else image.data_url
    names: dict[str, Any] = {"strategy": definition.strategy(attempt), "attempt": attempt}
    if image_url is not None:
        names["image"] = image_url
    context = context_of(row, **names)
    chosen = definition.for_attempt(attempt)
    if isinstance(chosen, ChatDefinition):
        request = _render_chat(chosen, context, image_url)
    else:
        request = _render_http(chosen, context)
    if request.body is not None and len(request.body) > MAX_RENDERED_BYTES + len(image_url or ""):
        raise RenderError(f"the body has {len(request.body):,} bytes, more than {MAX_RENDERED_BYTES:,}")
    return request


def _render_chat(chat: ChatDefinition, context: Mapping[str, Any], image_url: str | None) -> RenderedRequest:
    prompt: Any = _render("prompt", chat.prompt, context)
    if image_url is not None:
        prompt = [{"type": "text", "text": prompt}, {"type": "image_url", "image_url": {"url": image_url}}]
    messages = [{"role": "user", "content": prompt}]
    if chat.system is not None:
        messages.insert(0, {"role": "system", "content": _render("system", chat.system, context)})
    body: dict[str, Any] = {"model": chat.model, "messages": messages, **chat.parameters}
    if chat.schema is not None:
        schema = {"name": _SCHEMA_NAME, "strict": True, "schema": chat.schema}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return RenderedRequest("POST", CHAT_PATH, {}, _encoder.encode(body))


def _render_http(http: HttpDefinition, context: Mapping[str, Any]) -> RenderedRequest:
    path = _render("path", http.path, context, as_path_segment)
    try:
        check_path(path)
    except UsageError as error:
        raise RenderError(f"path: {error.message}") from None
    if http.query:
        query = {name: _render(f"query.{name}", text, context) for name, text in http.query.items()}
        if sum(map(len, query.values())) > _MAX_QUERY_CHARS:
            raise RenderError(f"query: its values have more than {_MAX_QUERY_CHARS:,} characters")
        path = f"{path}?{urlencode(query)}"
    headers = {name: _render_header(name, text, context) for name, text in http.headers.items()}
    body = None if http.method == "GET" else b""
    if http.body is not msgspec.UNSET:
        body = _encoder.encode(_render_body("body", http.body, context))
    return RenderedRequest(http.method, path, headers, body)


def _render(place: str, source: str, context: Mapping[str, Any], write: Write = as_text) -> str:
    try:
        return compiled(source, write).render(context)
    except RenderError as error:
        raise RenderError(f"{place}: {error}") from None


def _render_header(name: str, source: str, context: Mapping[str, Any]) -> str:
    text = _render(f"headers.{name}", source, context)
    try:
        return checked_value(text, f"headers.{name}: it")
    except UsageError as error:
        raise RenderError(error.message) from None


def _render_body(place: str, value: Any, context: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        return {name: _render_body(f"{place}.{name}", each, context) for name, each in value.items()}
    if isinstance(value, list):
        return [_render_body(f"{place}[{at}]", each, context) for at, each in enumerate(value)]
    if not isinstance(value, str):
        return value
    template = compiled_value(value)
    try:
        text = template.render(context)
    except RenderError as error:
        raise RenderError(f"{place}: {error}") from None
    return msgspec.Raw(text.encode()) if template.is_json else text
