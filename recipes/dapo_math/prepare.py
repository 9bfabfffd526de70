"""Write DAPO-Math-17k and AIME 2024 for verl: ``python -m recipes.dapo_math.prepare --out DIR``.

Both are in verl's schema on the Hub, with every problem many times: 1,791,700 rows of 17,398 prompts, and 960 of 30
(issue 3065 of verl, issue 36 of DAPO). Writes ``DIR/train.parquet`` and ``DIR/test.parquet`` with the first row of each
prompt; ``rollout.val_kwargs.n`` sets the answers per validation problem.

verl scores their ``math_dapo`` itself, 1 or −1: the last ``Answer: …`` of a response must be the ground truth, or else
the last ``\\boxed{…}`` (``verl/utils/reward_score/math_dapo.py``).

Source: Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", arXiv 2503.14476.
"""

import argparse
import sys
from pathlib import Path

import datasets

from verl.utils.reward_score import default_compute_score

COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")


def unique(source: str) -> datasets.Dataset:
    """Return the first row of each prompt of ``source``, after checking that verl scores its ground truth as right."""
    rows = datasets.load_dataset(source, split="train")
    missing = [column for column in COLUMNS if column not in rows.column_names]
    if missing:
        raise ValueError(f"lacks the column {missing[0]!r}; it has {', '.join(rows.column_names)}")
    first: dict[str, int] = {}
    for start in range(0, len(rows), 10_000):
        for index, prompt in enumerate(rows[start : start + 10_000]["prompt"], start):
            first.setdefault("\n".join(message["content"] for message in prompt), index)
    kept = rows.select(first.values()).select_columns(list(COLUMNS))
    for index, row in zip(first.values(), kept, strict=True):
        answer = row["reward_model"]["ground_truth"]
        if not isinstance(answer, str) or not answer:
            raise ValueError(f"row {index}: its ground truth is {answer!r}, not a string")
        if default_compute_score(row["data_source"], f"Answer: {answer}", answer)["score"] != 1:
            raise ValueError(f"row {index}: verl scores its ground truth {answer!r} as wrong")
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="output folder")
    for option, split, name in (("source", "train", "DAPO-Math-17k"), ("test-source", "test", "AIME-2024")):
        help = f"of {split}.parquet: a Hub name or a local copy (default: %(default)s)"
        parser.add_argument(f"--{option}", default=f"BytedTsinghua-SIA/{name}", help=help)
    arguments = parser.parse_args()
    splits = {}
    for split, option in (("train", "source"), ("test", "test_source")):
        source = getattr(arguments, option)
        try:
            splits[split] = unique(source)
        except (OSError, ValueError, KeyError, NotImplementedError) as error:
            sys.exit(f"--{option.replace('_', '-')} {source}: {' '.join(str(error).split())}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        rows.to_parquet(str(arguments.out / f"{split}.parquet"))
        print(f"{arguments.out}/{split}.parquet: {len(rows)} prompts")


if __name__ == "__main__":
    main()
