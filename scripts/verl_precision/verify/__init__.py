"""Verify a device: stages of programs, the record of their results, and the report."""
