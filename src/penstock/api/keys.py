"""API keys: random, shown once, kept as a hash."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

import msgspec

from penstock.api.endpoint import Call, Endpoint, Nothing, Role
from penstock.api.errors import ApiError, not_found
from penstock.api.objects import Page, seconds, seconds_or_none
from penstock.db import sql
from penstock.db.pool import Connection, borrowed
from penstock.model import new_id, parse_id, public_id

_SQL = sql.load("penstock.api", "keys.sql")

_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_VISIBLE_CHARS = 12
_SECRET_BYTES = 24
KEY = re.compile(rf"(sk-penstock-[A-Za-z0-9]{{{_VISIBLE_CHARS}}})-[A-Za-z0-9_-]{{22,64}}")
_MAX_LIFE_S = 100 * 365 * 86_400

_Printable = r"^[^\x00-\x1f\x7f]+$"


@dataclass(frozen=True, slots=True)
class Key:
    """API key as it is listed: everything but its secret."""

    id: UUID
    owner: str
    name: str
    role: Role
    prefix: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


@dataclass(frozen=True, slots=True)
class FoundKey:
    """API key as authentication needs it."""

    id: UUID
    owner: str
    role: Role
    hash: bytes
    usable: bool


def hash_of(secret: str) -> bytes:
    # Random keys of 192 bits cannot be guessed from a plain hash; slow hashes are for passwords that people choose.
    return hashlib.sha256(secret.encode()).digest()


async def create_key(
    connection: Connection, *, owner: str, name: str, role: Role, expires_after_s: float | None = None
) -> tuple[Key, str]:
    """Create a key. Its secret is returned and stored nowhere."""
    prefix = "sk-penstock-" + "".join(secrets.choice(_ALPHABET) for _ in range(_VISIBLE_CHARS))
    secret = f"{prefix}-{secrets.token_urlsafe(_SECRET_BYTES)}"
    cursor = await connection.execute(
        _SQL["insert_key"],
        {
            "id": new_id(),
            "owner": owner,
            "name": name,
            "role": role,
            "prefix": prefix,
            "hash": hash_of(secret),
            "expires_after_s": expires_after_s,
        },
    )
    row = await cursor.fetchone()
    if row is None:
        raise AssertionError("INSERT ... RETURNING answers one row")
    return Key(*row), secret


async def list_keys(connection: Connection, after: UUID | None, limit: int) -> list[Key]:
    """List keys, newest first."""
    cursor = await connection.execute(_SQL["list_keys_before"], {"after": after, "limit": limit})
    return [Key(*row) for row in await cursor.fetchall()]


async def revoke_key(connection: Connection, key_id: UUID) -> Key | None:
    """Revoke a key: it is refused from now on, by servers that remember it after `key_cache_s`. None if there is no
    such key."""
    row = await (await connection.execute(_SQL["revoke_key"], {"id": key_id})).fetchone()
    return None if row is None else Key(*row)


async def find_key(connection: Connection, digest: bytes) -> FoundKey | None:
    row = await (await connection.execute(_SQL["find_key_by_hash"], {"hash": digest})).fetchone()
    return None if row is None else FoundKey(row[0], row[1], row[2], bytes(row[3]), row[4])


async def find_signed_in(connection: Connection, digest: bytes) -> FoundKey | None:
    """The key behind a sign-in, by the hash of its token."""
    row = await (await connection.execute(_SQL["find_key_by_sign_in"], {"hash": digest})).fetchone()
    return None if row is None else FoundKey(row[0], row[1], row[2], bytes(row[3]), row[4])


async def sign_in(connection: Connection, key_id: UUID, life_s: float) -> str:
    """Store a sign-in under a key. Its token is returned and stored nowhere."""
    token = secrets.token_urlsafe(_SECRET_BYTES)
    await connection.execute(_SQL["sign_in"], {"hash": hash_of(token), "key_id": key_id, "life_s": life_s})
    return token


async def sign_out(connection: Connection, token: str) -> None:
    await connection.execute(_SQL["sign_out"], {"hash": hash_of(token)})


async def list_usable_keys(connection: Connection, ids: Sequence[UUID]) -> set[UUID]:
    """Those of some keys that can be used now."""
    cursor = await connection.execute(_SQL["list_usable_keys"], {"ids": list(ids)})
    return {row[0] for row in await cursor.fetchall()}


async def has_any_key(connection: Connection) -> bool:
    """Whether a key was ever made: a server without keys has a single user."""
    row = await (await connection.execute(_SQL["has_any_key"])).fetchone()
    return row is not None and bool(row[0])


# -- the routes


class KeyRequest(msgspec.Struct, forbid_unknown_fields=True):
    owner: Annotated[str, msgspec.Meta(min_length=1, max_length=255, pattern=_Printable)]
    name: Annotated[str, msgspec.Meta(max_length=255, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""
    role: Literal["user", "admin"] = "user"
    expires_after_s: Annotated[int, msgspec.Meta(ge=1, le=_MAX_LIFE_S)] | None = None


class KeyObject(msgspec.Struct, rename={"kind": "object"}, kw_only=True):
    id: str
    kind: Literal["api_key"] = "api_key"
    owner: str
    name: str
    role: Literal["user", "admin"]
    prefix: str
    created_at: int
    expires_at: int | None
    revoked_at: int | None


class NewKeyObject(KeyObject, kw_only=True):
    key: str
    """Shown here, once."""


class KeyList(Page[KeyObject]): ...


class KeyQuery(msgspec.Struct):
    after: Annotated[str, msgspec.Meta(pattern="^key_[0-9a-f]{32}$")] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


def _fields(key: Key) -> dict[str, object]:
    return {
        "id": public_id("key", key.id),
        "owner": key.owner,
        "name": key.name,
        "role": key.role,
        "prefix": key.prefix,
        "created_at": seconds(key.created_at),
        "expires_at": seconds_or_none(key.expires_at),
        "revoked_at": seconds_or_none(key.revoked_at),
    }


def key_object(key: Key) -> KeyObject:
    return msgspec.convert(_fields(key) | {"object": "api_key"}, KeyObject)


def new_key_object(key: Key, secret: str) -> NewKeyObject:
    return msgspec.convert(_fields(key) | {"object": "api_key", "key": secret}, NewKeyObject)


async def _create(call: Call[None, KeyRequest]) -> NewKeyObject:
    wanted = call.body
    async with borrowed(call.database) as connection:
        key, secret = await create_key(
            connection,
            owner=wanted.owner,
            name=wanted.name,
            role=wanted.role,
            expires_after_s=wanted.expires_after_s,
        )
    return new_key_object(key, secret)


async def _list(call: Call[KeyQuery, None]) -> KeyList:
    after = None
    if call.query.after is not None:
        after = parse_id("key", call.query.after)
        if after is None:
            raise ApiError(400, "Invalid 'after': not the id of a key.", param="after", code="invalid_value")
    async with borrowed(call.database) as connection:
        found = await list_keys(connection, after, call.query.limit + 1)
    data = [key_object(key) for key in found[: call.query.limit]]
    return KeyList.of(data, has_more=len(found) > call.query.limit)


async def _revoke(call: Call[None, Nothing | None]) -> KeyObject:
    async with borrowed(call.database) as connection:
        key = await revoke_key(connection, call.id("key", "key_id"))
    if key is None:
        raise not_found("Key", call.path["key_id"])
    return key_object(key)


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/keys",
        _create,
        "Make an API key. Its secret is in this answer and nowhere else.",
        role="admin",
        name="create_key",
    ),
    Endpoint("GET", "/v1/keys", _list, "API keys, newest first.", role="admin", name="list_keys"),
    Endpoint(
        "POST",
        "/v1/keys/{key_id}/revoke",
        _revoke,
        "Revoke an API key. It stays in the list.",
        role="admin",
        errors=(404,),
        name="revoke_key",
        frees=True,
    ),
)
