"""For all tests."""

import signal
from pathlib import Path


def pytest_addoption(parser):
    parser.addoption(
        "--verl-tree",
        type=lambda given: Path(given).resolve(),
        metavar="DIR",
        help="test this patched verl instead of a freshly patched one",
    )
    parser.addoption(
        "--write-results",
        action="store_true",
        help="tests/releases: write what was seen into docs/results/releases.json",
    )


def pytest_configure(config):
    """Take SIGINT as a foreground process does: one started in the background, as CI does, hands on an ignored one."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
