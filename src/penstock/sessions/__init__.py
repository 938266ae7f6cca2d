"""Sessions: open lanes of width 1. Requests accepted in order, answered one at a time; CloudEvents in and out."""
