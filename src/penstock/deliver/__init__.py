"""Telling others what happened: webhooks, signed, and only to where they may go."""
