"""Limits per owner: what was set for each, what it uses, and the checks under the owner's lock."""
