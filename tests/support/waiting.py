"""Wait for events of other processes: every limit is generous, and scaled by ``TEST_TIMEOUT_SCALE``."""

import os
import time
from collections.abc import Callable
from typing import TypeVar

# The longest that anything in a test may take; on a slow or busy machine, set e.g. TEST_TIMEOUT_SCALE=3.
TIMEOUT_S = 900 * float(os.environ.get("TEST_TIMEOUT_SCALE", "1"))
STUCK_S = TIMEOUT_S / 10  # the longest that a rank waits for another
Value = TypeVar("Value")


def wait_until(condition: Callable[[], Value], what: str, timeout_s: float = TIMEOUT_S) -> Value:
    """Return the first true value of ``condition``, which is called every tenth of a second.

    Raises:
        TimeoutError: it was not true within ``timeout_s``; the message contains ``what``.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s:.0f} s; TEST_TIMEOUT_SCALE scales this limit")
        time.sleep(0.1)
    return value
