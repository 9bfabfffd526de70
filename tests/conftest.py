"""For all tests."""

import signal


def pytest_configure(config):
    """Take SIGINT as a foreground process does: one started in the background, as CI does, hands on an ignored one."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
