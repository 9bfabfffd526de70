"""Helpers of the tests, imported from here alone."""
