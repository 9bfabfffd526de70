"""Stacks of patches: identify a release, apply and remove its stack, export, port and submit it."""
