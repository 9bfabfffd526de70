"""Write the sanity test's MATH problems for verl and OAT: ``python -m recipes.sanity_math.prepare --out DIR``.

The 1460 problems of MATH that DeepSeek-R1-Distill-Qwen-1.5B solves in 20% to 80% of 40 answers, as their authors
published them, already in verl's schema: ``sail/Sanity-Test-R1D-1.5B`` on the Hub. Leaves ``DIR/train.parquet`` for
verl and, with the same problems in the same order, the folder ``DIR/oat`` for OAT: a split ``train`` to learn from and,
where the source has one, ``test`` to be evaluated on, of ``problem`` and ``answer``.

verl's prompt is a chat that asks for a box. OAT's templates ask for it themselves: for OAT the sentence is taken off
with which all prompts of a split ask for it.

Every problem is given to verl's own scorer of MATH, so that the mean reward is the accuracy: 1 where the last
``\\boxed{…}`` of an answer is the ground truth up to notation, else 0 (``verl/utils/reward_score/math_reward.py``). The
authors graded by another program, which may take more notations for the same.

Source: Qi et al. 2025, "Defeating the Training-Inference Mismatch via FP16", arXiv 2510.26788, section 4.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import datasets

from verl.utils.reward_score import default_compute_score

SOURCE = "sail/Sanity-Test-R1D-1.5B"
COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")
SCORER = "lighteval/MATH"  # the data_source by which verl finds its scorer of MATH


def scored(rows: datasets.Dataset) -> tuple[datasets.Dataset, int]:
    """The problems of a split, and how many were left out.

    Left out are those whose own ground truth verl does not take for right: no answer could earn their reward.

    Raises:
        ValueError: it lacks a column or a ground truth, or has no problem that is left.
    """
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


def instruction(texts: Sequence[str]) -> str:
    """The last sentence of what all texts end with, from the space before it, if it asks for a box; else ""."""
    common = os.path.commonprefix([text[::-1] for text in texts])[::-1]
    found = re.search(r"\s+[A-Z][^.?!]*\\boxed.*$", common, re.DOTALL)
    return found[0] if found else ""


def for_oat(rows: datasets.Dataset) -> tuple[datasets.Dataset, str]:
    """What verl learns from, as OAT reads it, and the instruction that was taken off its prompts."""
    texts = [row["prompt"][-1]["content"] for row in rows]
    asked = instruction(texts)
    answers = [row["reward_model"]["ground_truth"] for row in rows]
    return datasets.Dataset.from_dict({"problem": [t.removesuffix(asked) for t in texts], "answer": answers}), asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--source", default=SOURCE, help="a Hub name or a local copy (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        source = datasets.load_dataset(arguments.source)
        if "train" not in source:
            raise ValueError(f"has no split 'train'; it has {', '.join(source)}")
        rows, without = scored(source["train"])
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"--source {arguments.source}: {' '.join(str(error).split())}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "train.parquet"
    rows.to_parquet(str(file))
    folder = arguments.out / "oat"
    splits = {"train": rows}
    if "test" in source:
        try:
            splits["test"], _ = scored(source["test"])
        except ValueError as error:
            print(f"{folder}: test: left out: {error}")
    oat = {split: for_oat(of) for split, of in splits.items()}
    datasets.DatasetDict({split: of for split, (of, _) in oat.items()}).save_to_disk(folder)
    for split, (of, asked) in oat.items():
        taken = asked.strip() or "none, they share none"
        print(f"{folder}: {split}: {len(of)} problems; instruction taken off: {taken}")
    remark = f"; {without} left out, whose ground truth verl does not take for right" if without else ""
    print(f"{file}: {len(rows)} problems{remark}")


if __name__ == "__main__":
    main()
