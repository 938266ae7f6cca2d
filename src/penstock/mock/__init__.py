"""A fake OpenAI- and Anthropic-compatible upstream whose misbehaviour is chosen, for demos and load tests."""

from penstock.mock.behaviour import Behaviour, Latency, RateLimit
from penstock.mock.server import MockUpstream

__all__ = ["Behaviour", "Latency", "MockUpstream", "RateLimit"]
