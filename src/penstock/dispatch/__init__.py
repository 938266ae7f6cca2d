"""Calls: from a ready item to its verdict.

`http` and `python` are the two kinds of processor, `retry` says what an answer or a failure means,
`dispatcher` is the interface the worker drives, `signals` are the exceptions a user's function may raise. Nothing
is imported here: a user's module pays for `signals` alone.
"""
