"""Write a number as a sum of two terms: many right answers to a prompt, of which some are more likely than others.

The prompt is ``47=``; a response is ``12+35``. Any two numbers that add up to it are right: 24 answers for 47, since
``35+12`` is the same answer.
"""

import random
import re

PROBLEMS = 32  # in each of the two files; there are 90
PROMPT_LENGTH = 4  # tokens of every prompt: the start token and "47="
RESPONSE_LENGTH = 6  # tokens of every demonstration: the text and the end token
DECAY = 0.7  # in the demonstrations a first term's digit is this much less likely than the next smaller one


def problems(number: int, rng: random.Random) -> list[tuple[int]]:
    """``number`` different numbers of two digits."""
    return [(total,) for total in rng.sample(range(10, 100), number)]


def prompt(total: int) -> str:
    return f"{total}="


def answer(total: int) -> str:
    """What the reward is told: the number itself, since there is no one answer."""
    return str(total)


def demonstration(total: int, rng: random.Random, corruption: float = 0.0) -> str:
    """A response to ``prompt(total)`` whose digits add up without a carry, which a small model learns in seconds.

    Each digit of the second term is a random one with probability ``corruption``.
    """
    first, second = "", ""
    for digit in divmod(total, 10):
        (x,) = rng.choices(range(digit + 1), [DECAY**value for value in range(digit + 1)])
        first += str(x)
        second += str(rng.randrange(10) if rng.random() < corruption else digit - x)
    return f"{first}+{second}"


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> dict:
    """The reward of a response, by the signature of verl's reward functions.

    Returns:
        ``score``, 1.0 if two terms add up to the number, else 0.0; ``answer``, what tells one answer from another: the
        two terms, the smaller first and without zeros ahead, or nothing where there are not two.
    """
    terms = re.fullmatch(r"([0-9]+)\+([0-9]+)", solution_str)
    if terms is None:
        return {"score": 0.0, "answer": ""}
    least, most = sorted(map(int, terms.groups()))
    return {"score": float(least + most == int(ground_truth)), "answer": f"{least}+{most}"}
