"""Parse commands by OAT's own parser and validation: ``oat_parser.py FILE``, a list of lists of words.

``FILE.settled`` is then a list of the arguments as text, by name.
"""

import json
import sys
from pathlib import Path

from oat.args import default_args_validation, get_default_args
from oat.experiment.run_math_rl import TEMPLATE_FACTORY, ZeroMathArgs


def settled(words: list[str]) -> dict[str, str]:
    sys.argv = ["oat", *words]
    args = get_default_args(ZeroMathArgs)
    args.algo = "PPO"  # as run_math_rl itself does
    args = default_args_validation(args)
    assert args.prompt_template in TEMPLATE_FACTORY
    return {name: str(value) for name, value in vars(args).items()}


if __name__ == "__main__":
    given = Path(sys.argv[1])
    Path(f"{given}.settled").write_text(json.dumps([settled(words) for words in json.loads(given.read_text())]))
