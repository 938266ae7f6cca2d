"""The caller as the server knows it, and what it can ask of this server: what the console begins with."""

from __future__ import annotations

from penstock import __version__
from penstock.api.endpoint import Call, Camel, Endpoint, Role


class MyProvider(Camel):
    name: str
    models: list[str]
    """Names of models, or patterns of them such as `llama-*`."""
    rows_paths: list[str]
    """What HTTP jobs may ask of it."""


class MyProcessor(Camel):
    name: str


class Me(Camel):
    owner: str
    role: Role
    signed_in: bool
    """Whether the caller came by a sign-in, which it can end."""
    keyless: bool
    """Whether the server has one user, and no keys."""
    version: str
    pending_dashboard: bool
    providers: list[MyProvider]
    processors: list[MyProcessor]


async def retrieve_me(call: Call[None, None]) -> Me:
    server, caller = call.server, call.caller
    return Me(
        owner=caller.owner,
        role=caller.role,
        signed_in=caller.signed_in,
        keyless=caller.key_id is None,
        version=__version__,
        pending_dashboard=server.config.serve.pending_dashboard,
        providers=[
            MyProvider(
                name=provider.name, models=list(provider.models), rows_paths=[str(path) for path in provider.rows_paths]
            )
            for provider in server.providers
        ],
        processors=[MyProcessor(name=processor.name) for processor in server.config.processors],
    )


ENDPOINTS = (Endpoint("GET", "/api/me", retrieve_me, "You, and what this server has for you."),)
