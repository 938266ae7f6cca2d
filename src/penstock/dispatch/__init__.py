"""Calls: from a ready item to its verdict.

`http` and `python` are the two kinds of processor, `retry` says what an answer or a failure means,
`pool` is what the worker drives, `signals` is what a user's function may raise. Nothing is imported
here: a user's module pays for `signals` alone.
"""
