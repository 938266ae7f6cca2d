"""Batches: create, validate, read, steer, run again, grow, finish; and upkeep while they are open."""
