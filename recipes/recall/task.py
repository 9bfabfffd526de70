"""Recall sixteen digits among free characters: a task whose answers are long and mostly free, like chains of thought.

The prompt is ``a=``. An answer has 16 blocks, and each block ends with a digit that the prompt determines; all other
characters are free, 64 kinds that are equally likely. The reward is 1 if all 16 digits are right. The length of an
answer thus changes the mismatch that adds up over its tokens, but not the difficulty.
"""

import random
import string
from dataclasses import dataclass

BLOCKS = 16
FREE = [character for character in map(chr, range(33, 127)) if not character.isdigit() and character not in '="\\'][:64]
PROMPTS = string.ascii_lowercase[:8]
LENGTH = 128  # tokens of an answer without the end token
POSITIONS = 1024  # of the model


@dataclass(frozen=True)
class Recall:
    """The task with answers of ``length`` tokens, with the functions of a task of ``recipes.arithmetic``.

    Raises:
        ValueError: ``length`` is not a multiple of 16, or does not fit into the positions of the model.
    """

    length: int = LENGTH
    PROBLEMS = len(PROMPTS)  # the same in both files: there is nothing to generalize
    PROMPT_LENGTH = 3  # tokens of every prompt: the start token and "a="

    def __post_init__(self) -> None:
        most = (POSITIONS - self.PROMPT_LENGTH - 1) // BLOCKS * BLOCKS
        if self.length % BLOCKS or not 2 * BLOCKS <= self.length <= most:
            raise ValueError(f"length={self.length}: must be a multiple of {BLOCKS} from {2 * BLOCKS} to {most}")

    @property
    def RESPONSE_LENGTH(self) -> int:
        """Tokens of every demonstration: the text and the end token."""
        return self.length + 1

    @staticmethod
    def problems(number: int, rng: random.Random) -> list[tuple[str]]:
        """Return ``number`` prompts, cycling through all of them from a random one."""
        first = rng.randrange(len(PROMPTS))
        return [(PROMPTS[(first + index) % len(PROMPTS)],) for index in range(number)]

    @staticmethod
    def prompt(name: str) -> str:
        return f"{name}="

    @staticmethod
    def answer(name: str) -> str:
        """Return the 16 digits that belong to a prompt."""
        rng = random.Random(name)
        return "".join(rng.choice(string.digits) for _ in range(BLOCKS))

    def demonstration(self, name: str, rng: random.Random, corruption: float = 0.0) -> str:
        """Return an answer to ``prompt(name)``. Each digit is random with probability ``corruption``."""
        blocks = []
        for right in self.answer(name):
            free = rng.choices(FREE, k=self.length // BLOCKS - 1)
            blocks += [*free, rng.choice(string.digits) if rng.random() < corruption else right]
        return "".join(blocks)

    @staticmethod
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
        """Return 1.0 if the blocks of an answer end with the right digits, else 0.0."""
        block, rest = divmod(len(solution_str), BLOCKS)
        return float(block > 1 and not rest and solution_str[block - 1 :: block] == ground_truth)


compute_score = Recall.compute_score  # a reward function of verl
