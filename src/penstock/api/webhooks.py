"""Webhook endpoints: urls that get an event when an owner's batch ends. A secret is shown when it is made, and only
then."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec

from penstock.api.endpoint import KIND_WORDS, Call, Endpoint
from penstock.api.errors import ApiError, not_found
from penstock.api.objects import Page, seconds, seconds_or_none
from penstock.db.pool import borrowed
from penstock.deliver import endpoints, signing
from penstock.deliver.addresses import AddressRefused, parse_url
from penstock.deliver.endpoints import EVENT_TYPES, Delivery, EventType, WebhookEndpoint
from penstock.deliver.sealing import SecretBox, secret_box
from penstock.deliver.webhooks import send_sample, sender_for
from penstock.model import parse_id, public_id

_KEEP_OLD_SECRET_S = 24 * 3600.0
_DELIVERY_ID = re.compile(r"whd_([0-9a-f]{16})")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Url = Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]
Events = Annotated[list[EventType], msgspec.Meta(min_length=1, max_length=16)]


class WebhookCreate(msgspec.Struct, forbid_unknown_fields=True):
    event_types: Events
    name: Name
    url: Url


class WebhookUpdate(msgspec.Struct, forbid_unknown_fields=True):
    event_types: Events | None = None
    name: Name | None = None
    url: Url | None = None


class WebhookRotate(msgspec.Struct, forbid_unknown_fields=True):
    keep_old_secret_active_for_24_hours: bool = False


class WebhookTest(msgspec.Struct, forbid_unknown_fields=True):
    event_type: EventType


class WebhookQuery(msgspec.Struct):
    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20


class WebhookObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["webhook_endpoint"] = "webhook_endpoint"
    created_at: int
    updated_at: int
    name: str
    url: str
    event_types: list[str]
    signing_secret_hint: str


class WebhookObjectWithSecret(WebhookObject, kw_only=True):
    signing_secret: str


class WebhookList(Page[WebhookObject]): ...


class WebhookDeleted(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["webhook_endpoint.deleted"] = "webhook_endpoint.deleted"
    deleted: bool = True


class WebhookTestResult(msgspec.Struct, kw_only=True):
    object: Literal["webhook_endpoint.test"] = "webhook_endpoint.test"
    webhook_endpoint_id: str
    event_type: str
    status_code: int
    success: Literal[True] = True


class WebhookEventTypes(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[str]


class DeliveryObject(msgspec.Struct, kw_only=True):
    """Delivery of one event to one endpoint. Receivers get `event_id` as `webhook-id`, on every attempt."""

    id: str
    object: Literal["webhook_delivery"] = "webhook_delivery"
    event_id: str
    event_type: str
    batch_id: str | None
    created_at: int
    status: Literal["pending", "delivered", "given_up"]
    attempts: int
    next_attempt_at: int | None
    delivered_at: int | None
    given_up_at: int | None
    status_code: int | None
    error: str | None


class DeliveryList(Page[DeliveryObject]): ...


async def create_webhook(call: Call[None, WebhookCreate]) -> WebhookObjectWithSecret:
    body = call.body
    name = _clean_name(body.name)
    await _check_url(call, body.url)
    async with borrowed(call.database) as connection:
        made = await endpoints.create_endpoint(
            connection,
            _box(call),
            owner=call.caller.owner,
            name=name,
            url=body.url,
            event_types=list(dict.fromkeys(body.event_types)),
        )
    if made is None:
        most = endpoints.MAX_ENDPOINTS
        raise ApiError(400, f"You have {most} webhook endpoints, as many as are allowed.", code="too_many_endpoints")
    return _with_secret(made)


async def list_webhooks(call: Call[WebhookQuery, None]) -> WebhookList:
    query = call.query
    after = None
    if query.after is not None:
        after = parse_id("webhook", query.after)
        if after is None:
            raise _bad_cursor()
    async with borrowed(call.database) as connection:
        rows = await endpoints.list_endpoints(
            connection, _box(call), owner=call.caller.owner, after=after, limit=query.limit + 1
        )
    data = [_object(row) for row in rows[: query.limit]]
    return WebhookList.of(data, has_more=len(rows) > query.limit)


async def retrieve_webhook(call: Call[None, None]) -> WebhookObject:
    return _object(await _find(call))


async def update_webhook(call: Call[None, WebhookUpdate]) -> WebhookObject:
    endpoint_id, body = _id(call), call.body
    await _find(call)  # before the url is checked: an endpoint that does not exist answers 404 whatever is sent
    name = None if body.name is None else _clean_name(body.name)
    if body.url is not None:
        await _check_url(call, body.url)
    event_types = None if body.event_types is None else list(dict.fromkeys(body.event_types))
    async with borrowed(call.database) as connection:
        changed = await endpoints.update_endpoint(
            connection, _box(call), endpoint_id, call.caller.scope, name=name, url=body.url, event_types=event_types
        )
    return _object(_require(call, changed))


async def delete_webhook(call: Call[None, None]) -> WebhookDeleted:
    endpoint_id = _id(call)
    async with borrowed(call.database) as connection:
        if not await endpoints.delete_endpoint(connection, endpoint_id, call.caller.scope):
            raise _missing(call)
    return WebhookDeleted(id=public_id("webhook", endpoint_id))


async def rotate_webhook_secret(call: Call[None, WebhookRotate | None]) -> WebhookObjectWithSecret:
    keep = call.body is not None and call.body.keep_old_secret_active_for_24_hours
    async with borrowed(call.database) as connection:
        rotated = await endpoints.rotate_secret(
            connection, _box(call), _id(call), call.caller.scope, keep_s=_KEEP_OLD_SECRET_S if keep else 0
        )
    return _with_secret(_require(call, rotated))


async def test_webhook(call: Call[None, WebhookTest]) -> WebhookTestResult:
    """Answers the receiver's status, whatever it is; a receiver that could not be reached is an error of the
    endpoint."""
    found = await _find(call)
    result = await send_sample(
        call.database, sender_for(call.server.config), _box(call), found.id, found.url, call.body.event_type
    )
    if result.status_code is None:
        raise ApiError(400, f"The event was not delivered: {result.error}.", code="webhook_not_delivered")
    return WebhookTestResult(
        webhook_endpoint_id=public_id("webhook", found.id),
        event_type=call.body.event_type,
        status_code=result.status_code,
    )


async def list_webhook_event_types(_call: Call[None, None]) -> WebhookEventTypes:
    return WebhookEventTypes(data=list(EVENT_TYPES))


async def list_webhook_deliveries(call: Call[WebhookQuery, None]) -> DeliveryList:
    query = call.query
    after = None
    if query.after is not None:
        match = _DELIVERY_ID.fullmatch(query.after)
        after = int(match[1], 16) if match else 2**63
        if after >= 2**63:
            raise _bad_cursor()
    found = await _find(call)
    async with borrowed(call.database) as connection:
        rows = await endpoints.list_deliveries(connection, found.id, after=after, limit=query.limit + 1)
    data = [_delivery(row) for row in rows[: query.limit]]
    return DeliveryList.of(data, has_more=len(rows) > query.limit)


def _box(call: Call[Any, Any]) -> SecretBox:
    return secret_box(call.server.config)


def _id(call: Call[Any, Any]) -> UUID:
    return call.id("webhook", "webhook_endpoint_id")


async def _find(call: Call[Any, Any]) -> WebhookEndpoint:
    async with borrowed(call.database) as connection:
        return _require(call, await endpoints.get_endpoint(connection, _box(call), _id(call), call.caller.scope))


def _require(call: Call[Any, Any], found: WebhookEndpoint | None) -> WebhookEndpoint:
    if found is None:
        raise _missing(call)
    return found


def _missing(call: Call[Any, Any]) -> ApiError:
    return not_found(KIND_WORDS["webhook"], call.path["webhook_endpoint_id"])


def _bad_cursor() -> ApiError:
    return ApiError(400, "'after' is not an id from this list.", param="after")


def _clean_name(name: str) -> str:
    if _CONTROL.search(name):
        raise ApiError(422, "'name' has control characters in it.", param="name")
    return name


async def _check_url(call: Call[Any, Any], url: str) -> None:
    """Check a url early, so that the caller learns of it; the same check at every delivery is the one that protects."""
    try:
        await sender_for(call.server.config).policy.addresses(parse_url(url))
    except AddressRefused as refusal:
        raise ApiError(422, f"'url' {refusal}.", param="url", code="url_not_allowed") from None


def _fields(row: WebhookEndpoint) -> dict[str, Any]:
    return {
        "id": public_id("webhook", row.id),
        "created_at": seconds(row.created_at),
        "updated_at": seconds(row.updated_at),
        "name": row.name,
        "url": row.url,
        "event_types": row.event_types,
        "signing_secret_hint": signing.hint(row.secret),
    }


def _object(row: WebhookEndpoint) -> WebhookObject:
    return WebhookObject(**_fields(row))


def _with_secret(row: WebhookEndpoint) -> WebhookObjectWithSecret:
    return WebhookObjectWithSecret(**_fields(row), signing_secret=signing.encode_secret(row.secret))


def _delivery(row: Delivery) -> DeliveryObject:
    status: Literal["pending", "delivered", "given_up"] = "pending"
    if row.delivered_at is not None:
        status = "delivered"
    elif row.given_up_at is not None:
        status = "given_up"
    return DeliveryObject(
        id=f"whd_{row.id:016x}",
        event_id=public_id("event", row.event_id),
        event_type=row.type,
        batch_id=None if row.batch_id is None else public_id("batch", row.batch_id),
        created_at=seconds(row.event_at),
        status=status,
        attempts=row.attempts,
        next_attempt_at=seconds(row.due_at) if status == "pending" else None,
        delivered_at=seconds_or_none(row.delivered_at),
        given_up_at=seconds_or_none(row.given_up_at),
        status_code=row.status_code,
        error=row.error,
    )


_ALL = "/v1/webhook_endpoints"
_ONE = "/v1/webhook_endpoints/{webhook_endpoint_id}"

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint("POST", _ALL, create_webhook, "Create an endpoint that gets events. The answer holds the signing secret."),
    Endpoint("GET", _ALL, list_webhooks, "Your endpoints, newest first."),
    Endpoint("GET", _ONE, retrieve_webhook, "One endpoint.", errors=(404,)),
    Endpoint("POST", _ONE, update_webhook, "Change the given fields.", errors=(404,)),
    Endpoint("DELETE", _ONE, delete_webhook, "Delete an endpoint with all its deliveries.", errors=(404,)),
    Endpoint(
        "POST",
        f"{_ONE}/rotate_secret",
        rotate_webhook_secret,
        "Make a new signing secret; messages are signed with the old one too for a day if wanted.",
        errors=(404,),
    ),
    Endpoint(
        "POST",
        f"{_ONE}/test",
        test_webhook,
        "Send a sample event now; the answer says what the receiver answered.",
        errors=(404,),
    ),
    Endpoint(
        "GET",
        f"{_ONE}/deliveries",
        list_webhook_deliveries,
        "Deliveries to an endpoint, newest first, with their results.",
        errors=(404,),
    ),
    Endpoint("GET", "/v1/webhook_event_types", list_webhook_event_types, "The types of events."),
)
