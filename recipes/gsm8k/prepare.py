"""Write GSM8K in verl's schema: ``python -m recipes.gsm8k.prepare --out DIR``.

Writes ``DIR/train.parquet`` (7,473 problems) and ``DIR/test.parquet`` (1,319). verl scores ``openai/gsm8k`` itself: the
number after the last ``####`` of a response must be the answer (``verl/utils/reward_score/gsm8k.py``).

Source: Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems", arXiv 2110.14168.
"""

import argparse
import sys
from pathlib import Path

import datasets

INSTRUCTION = "Think step by step, and write the final number after ####."


def to_verl(example: dict, index: int, split: str) -> dict:
    """Convert a problem, ``{"question", "answer"}`` with the number after ``####`` in the answer, to verl's schema."""
    _, marker, number = example["answer"].rpartition("####")
    if not marker:
        raise ValueError(f"{split} row {index}: the answer has no number after ####")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{example['question']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": number.strip().replace(",", "")},
        "extra_info": {"split": split, "index": index},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="output folder")
    parser.add_argument("--source", default="openai/gsm8k", help="a Hub name or a local copy (default: %(default)s)")
    arguments = parser.parse_args()
    rows = {}
    try:
        problems = datasets.load_dataset(arguments.source, "main")
        for split in ("train", "test"):
            options = {"fn_kwargs": {"split": split}, "remove_columns": problems[split].column_names}
            rows[split] = problems[split].map(to_verl, with_indices=True, **options)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"--source {arguments.source}: {' '.join(str(error).split())}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for split, converted in rows.items():
        converted.to_parquet(str(arguments.out / f"{split}.parquet"))
        print(f"{arguments.out}/{split}.parquet: {converted.num_rows} problems")


if __name__ == "__main__":
    main()
