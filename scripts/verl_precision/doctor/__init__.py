"""Resolve the dtype that each hop of a verl job computes in, without running the job."""
