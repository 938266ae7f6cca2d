"""Calls of rows: rendered, sent to their provider, judged."""

from __future__ import annotations

from functools import partial

from penstock.dispatch.dispatcher import Dispatcher
from penstock.dispatch.http.answer import short
from penstock.dispatch.http.processor import HttpProcessor
from penstock.dispatch.rows.definition import Definition, RefusedDefinition
from penstock.dispatch.rows.judge import judge_row
from penstock.dispatch.rows.render import Image, render
from penstock.dispatch.rows.work import RenderError
from penstock.model import Item, Outcome, OutcomeState, Verdict

_UNKNOWN_MEDIA_TYPE = "application/octet-stream"


def provider_dispatcher(http: HttpProcessor) -> Dispatcher:
    """Dispatcher of a provider's work: requests as they are, rows as their job's definition says."""

    async def call(item: Item) -> Verdict:
        if item.job is None:
            return await http.call(item)
        definition = item.job.definition
        if isinstance(definition, RefusedDefinition):
            return Outcome(
                OutcomeState.FAILED, error_code="refused_definition", error_message=short(definition.message)
            )
        return await call_row(http, definition, item)

    return http.dispatcher(call)


async def call_row(http: HttpProcessor, definition: Definition, item: Item) -> Verdict:
    """One attempt at a row of a chat or HTTP job, through the processor of the definition's provider. A processor
    without a name, that of `penstock run --base-url`, is for any."""
    if http.name and http.name != definition.provider:
        # Whoever made the job chose who is sent its rows, and under whose key.
        message = f"the row is for the provider '{definition.provider}', and this worker is that of '{http.name}'"
        return Outcome(OutcomeState.FAILED, error_code="wrong_provider", error_message=short(message))
    row = item.body
    image = None
    if item.image is not None:
        image = Image(str(row.get("media_type") or _UNKNOWN_MEDIA_TYPE), item.image)
    try:
        request = render(definition, row, attempt=item.attempt, image=image)
    except RenderError as error:
        # No other attempt would have another row.
        return Outcome(OutcomeState.FAILED, error_code="template_error", error_message=short(str(error)))
    headers = dict(request.headers)
    if definition.strategies:
        # Another strategy is another request: under the same key an upstream would repeat its old answer.
        headers["Idempotency-Key"] = f"{item.idempotency_key}-{(item.attempt - 1) % len(definition.strategies)}"
    judge = partial(judge_row, definition)
    return await http.send(item, request.method, request.path, headers, request.body, judge)
