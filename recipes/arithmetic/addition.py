"""Three-digit addition with a scratchpad: problems, demonstrations and the reward.

The prompt is ``704+220=``; the response works from the units upwards, one column a comma, and then copies the sum:
``400:04,020:02,720:09=0924``. A column reads: digit, digit, carry in, ``:``, two-digit sum.
"""

import random

PROBLEMS = 64  # in each of the two files
DIGITS = 3
PROMPT_LENGTH = 9  # tokens of every prompt: the start token and "704+220="
RESPONSE_LENGTH = 26  # tokens of every demonstration: the text and the end token


def problems(number: int, rng: random.Random) -> list[tuple[int, int]]:
    """Return ``number`` distinct pairs of numbers below 1000."""
    pairs = rng.sample(range(10 ** (2 * DIGITS)), number)
    return [divmod(pair, 10**DIGITS) for pair in pairs]


def prompt(a: int, b: int) -> str:
    return f"{a:03d}+{b:03d}="


def answer(a: int, b: int) -> str:
    return f"{a + b:04d}"


def demonstration(a: int, b: int, rng: random.Random, corruption: float = 0.0) -> str:
    """Return the scratchpad response to ``prompt(a, b)``.

    Each column's sum is random with probability ``corruption``, which determines the rest. A model trained on these
    knows the right answer and errs at times, which leaves something for reinforcement learning.
    """
    columns, digits, carry = [], "", 0
    for place in range(DIGITS):
        x, y = (number // 10**place % 10 for number in (a, b))
        total = rng.randrange(20) if rng.random() < corruption else x + y + carry
        columns.append(f"{x}{y}{carry}:{total:02d}")
        carry, digit = divmod(total, 10)
        digits = f"{digit}{digits}"
    return f"{','.join(columns)}={carry}{digits}"


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Return 1.0 if the text after the last ``=`` is the sum, else 0.0; a reward function of verl."""
    _, equals, sum_ = solution_str.rpartition("=")
    return float(bool(equals) and sum_ == ground_truth)
