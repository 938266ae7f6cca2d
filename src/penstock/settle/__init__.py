"""Settle: results of leased items, by the coalescing buffer and the fenced write."""
