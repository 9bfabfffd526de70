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


def prepare(source: str, out: Path) -> dict[str, int]:
    """Convert ``source``, a Hub name or a local copy of that dataset, to parquet files. Returns rows by split.

    Raises:
        OSError, ValueError: ``source`` cannot be loaded, or is not GSM8K.
    """
    problems, rows = datasets.load_dataset(source, "main"), {}
    for split in ("train", "test"):
        columns = problems[split].column_names
        rows[split] = problems[split].map(
            to_verl, with_indices=True, fn_kwargs={"split": split}, remove_columns=columns
        )
    out.mkdir(parents=True, exist_ok=True)  # once nothing can be refused any more
    for split, converted in rows.items():
        converted.to_parquet(str(out / f"{split}.parquet"))
    return {split: converted.num_rows for split, converted in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="output folder")
    parser.add_argument("--source", default="openai/gsm8k", help="a Hub name or a local copy (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        rows = prepare(arguments.source, arguments.out)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"--source {arguments.source}: {' '.join(str(error).split())}")
    print(f"{arguments.out}: " + ", ".join(f"{split}.parquet with {number} rows" for split, number in rows.items()))


if __name__ == "__main__":
    main()
