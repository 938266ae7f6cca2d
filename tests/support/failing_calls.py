"""Calls that are to fail: how they end is the same whether an answer is read whole or as it comes."""

from __future__ import annotations

import pytest

from penstock.dispatch.http.client import HttpClient
from penstock.dispatch.http.errors import TransportError


async def fails(client: HttpClient, url: str) -> TransportError:
    """How a call ends, and one whose answer is read as it comes."""
    with pytest.raises(TransportError) as caught:
        await client.request("POST", url, {}, b"{}")
    with pytest.raises(TransportError) as streamed:
        async with client.open("POST", url, {}, b"{}") as answer:
            await answer.read()
    assert str(streamed.value) == str(caught.value)
    return caught.value
