"""Which dtype each hop of a verl command computes in, resolved without running it."""
