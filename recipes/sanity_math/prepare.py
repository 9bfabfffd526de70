"""Write the sanity test's MATH problems for verl: ``python -m recipes.sanity_math.prepare --out DIR``.

The 1460 problems of MATH that DeepSeek-R1-Distill-Qwen-1.5B solves in 20% to 80% of 40 answers, as their authors
published them, already in verl's schema: ``sail/Sanity-Test-R1D-1.5B`` on the Hub. Leaves ``DIR/train.parquet``.

Every problem is given to verl's own scorer of MATH, so that the mean reward is the accuracy: 1 where the last
``\\boxed{…}`` of an answer is the ground truth up to notation, else 0 (``verl/utils/reward_score/math_reward.py``). The
authors graded by another program, which may take more notations for the same.

Source: Qi et al. 2025, "Defeating the Training-Inference Mismatch via FP16", arXiv 2510.26788, section 4.
"""

import argparse
import sys
from pathlib import Path

import datasets

from verl.utils.reward_score import default_compute_score

SOURCE = "sail/Sanity-Test-R1D-1.5B"
COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")
SCORER = "lighteval/MATH"  # the data_source by which verl finds its scorer of MATH


def scored(source: str) -> tuple[datasets.Dataset, int]:
    """The problems of ``source``, a Hub name or a local copy, and how many were left out.

    Left out are those whose own ground truth verl does not take for right: no answer could earn their reward.

    Raises:
        OSError, ValueError: it cannot be loaded, lacks a column or a ground truth, or has no problem that is left.
    """
    rows = datasets.load_dataset(source, split="train")
    missing = [column for column in ("prompt", "reward_model") if column not in rows.column_names]
    if missing:
        raise ValueError(f"lacks the column {missing[0]!r}; it has {', '.join(rows.column_names)}")
    kept = []
    for index, row in enumerate(rows):
        answer = row["reward_model"].get("ground_truth")
        if not isinstance(answer, str) or not answer:
            raise ValueError(f"row {index}: its ground truth is {answer!r}, not a text")
        if default_compute_score(SCORER, rf"\boxed{{{answer}}}", answer) == 1:
            verl = {"data_source": SCORER, "ability": "math", "reward_model": {"style": "rule", "ground_truth": answer}}
            kept.append({"prompt": row["prompt"], "extra_info": {"index": index}} | verl)
    if not kept:
        raise ValueError("verl takes none of its ground truths for right")
    return datasets.Dataset.from_list(kept).select_columns(list(COLUMNS)), len(rows) - len(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--source", default=SOURCE, help="a Hub name or a local copy (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        rows, without = scored(arguments.source)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"--source {arguments.source}: {' '.join(str(error).split())}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "train.parquet"
    rows.to_parquet(str(file))
    remark = f"; {without} left out, whose ground truth verl does not take for right" if without else ""
    print(f"{file}: {len(rows)} problems{remark}")


if __name__ == "__main__":
    main()
