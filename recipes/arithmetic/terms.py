"""Write a number as a sum of two terms: a task with many right answers per prompt, some more likely than others.

The prompt is ``47=``; a response is ``12+35``. Any two numbers that add up to it are right: 24 answers for 47, since
``35+12`` is the same answer.
"""

import random
import re

PROBLEMS = 32  # in each of the two files; 90 exist
PROMPT_LENGTH = 4  # tokens of every prompt: the start token and "47="
RESPONSE_LENGTH = 6  # tokens of every demonstration: the text and the end token
DECAY = 0.7  # in the demonstrations a first term's digit is this much less likely than the next smaller one


def problems(number: int, rng: random.Random) -> list[tuple[int]]:
    """Return ``number`` distinct numbers of two digits."""
    return [(total,) for total in rng.sample(range(10, 100), number)]


def prompt(total: int) -> str:
    return f"{total}="


def answer(total: int) -> str:
    """Return the ground truth: the number itself, since there are many answers."""
    return str(total)


def demonstration(total: int, rng: random.Random, corruption: float = 0.0) -> str:
    """Return a response to ``prompt(total)`` without carries, which a small model learns in seconds.

    Each digit of the second term is random with probability ``corruption``.
    """
    first, second = "", ""
    for digit in divmod(total, 10):
        (x,) = rng.choices(range(digit + 1), [DECAY**value for value in range(digit + 1)])
        first += str(x)
        second += str(rng.randrange(10) if rng.random() < corruption else digit - x)
    return f"{first}+{second}"


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> dict:
    """Return the reward of a response; a reward function of verl.

    Returns:
        ``score``, 1.0 if two terms add up to the number, else 0.0; ``answer``, which identifies equal answers: the two
        terms, the smaller first and without leading zeros, or "" if there are not two.
    """
    terms = re.fullmatch(r"([0-9]+)\+([0-9]+)", solution_str)
    if terms is None:
        return {"score": 0.0, "answer": ""}
    least, most = sorted(map(int, terms.groups()))
    return {"score": float(least + most == int(ground_truth)), "answer": f"{least}+{most}"}
