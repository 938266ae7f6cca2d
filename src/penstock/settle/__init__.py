"""Recording what became of leased work: the coalescing buffer and the fenced write."""
