"""Write the sanity test's MATH problems for verl and OAT: ``python -m recipes.sanity_math.prepare --out DIR``.

The source is ``sail/Sanity-Test-R1D-1.5B`` on the Hub, in verl's schema: the 1460 problems of MATH that
DeepSeek-R1-Distill-Qwen-1.5B solves in 20% to 80% of 40 answers. Writes ``DIR/train.parquet`` for verl and, with the
same problems in the same order, the folder ``DIR/oat`` for OAT: the splits ``train`` and, if the source has it,
``test`` for evaluation, with the columns ``problem`` and ``answer``.

verl's prompts ask for a box. OAT's templates add this instruction themselves, so the common instruction of all prompts
of a split is removed for OAT.

All problems use verl's own scorer of MATH, so the mean reward is the accuracy: 1 if the last ``\\boxed{…}`` of an
answer equals the ground truth up to notation, else 0 (``verl/utils/reward_score/math_reward.py``). The authors' grader
may accept more notations.

Source: Qi et al. 2025, "Defeating the Training-Inference Mismatch via FP16", arXiv 2510.26788, section 4.
"""

import argparse
import os
import re
import sys
from pathlib import Path

import datasets

from verl.utils.reward_score import default_compute_score

SOURCE = "sail/Sanity-Test-R1D-1.5B"
COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")
SCORER = "lighteval/MATH"  # the data_source by which verl finds its scorer of MATH


def scored(rows: datasets.Dataset) -> tuple[datasets.Dataset, int]:
    """Return the problems of a split, and the number of those left out.

    Problems whose own ground truth verl scores as wrong are left out: no answer could earn their reward.
    """
    missing = [column for column in ("prompt", "reward_model") if column not in rows.column_names]
    if missing:
        raise ValueError(f"lacks the column {missing[0]!r}; it has {', '.join(rows.column_names)}")
    kept = []
    for index, row in enumerate(rows):
        answer = row["reward_model"].get("ground_truth")
        if not isinstance(answer, str) or not answer:
            raise ValueError(f"row {index}: its ground truth is {answer!r}, not a string")
        if default_compute_score(SCORER, rf"\boxed{{{answer}}}", answer) == 1:
            verl = {"data_source": SCORER, "ability": "math", "reward_model": {"style": "rule", "ground_truth": answer}}
            kept.append({"prompt": row["prompt"], "extra_info": {"index": index}} | verl)
    if not kept:
        raise ValueError("verl scores all its ground truths as wrong")
    return datasets.Dataset.from_list(kept).select_columns(list(COLUMNS)), len(rows) - len(kept)


def for_oat(rows: datasets.Dataset) -> tuple[datasets.Dataset, str]:
    """Return the problems in OAT's schema, and the instruction that was removed from their prompts.

    It is the last sentence of their common ending, with the space before it, if it asks for a box.
    """
    texts = [row["prompt"][-1]["content"] for row in rows]
    common = os.path.commonprefix([text[::-1] for text in texts])[::-1]
    match = re.search(r"\s+[A-Z][^.?!]*\\boxed.*$", common, re.DOTALL)
    removed = match[0] if match else ""
    answers = [row["reward_model"]["ground_truth"] for row in rows]
    return datasets.Dataset.from_dict({"problem": [t.removesuffix(removed) for t in texts], "answer": answers}), removed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="output folder")
    parser.add_argument("--source", default=SOURCE, help="a Hub name or a local copy (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        source = datasets.load_dataset(arguments.source)
        if "train" not in source:
            raise ValueError(f"has no split 'train'; it has {', '.join(source)}")
        rows, left_out = scored(source["train"])
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"--source {arguments.source}: {' '.join(str(error).split())}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    file, folder = arguments.out / "train.parquet", arguments.out / "oat"
    rows.to_parquet(str(file))
    splits = {"train": rows}
    if "test" in source:
        try:
            splits["test"], _ = scored(source["test"])
        except ValueError as error:
            print(f"{folder}: test: left out: {error}")
    oat = {split: for_oat(problems) for split, problems in splits.items()}
    datasets.DatasetDict({split: problems for split, (problems, _) in oat.items()}).save_to_disk(folder)
    for split, (problems, removed) in oat.items():
        instruction = removed.strip() or "none in common"
        print(f"{folder}: {split}: {len(problems)} problems; instruction removed: {instruction}")
    remark = f"; {left_out} left out, whose ground truth verl scores as wrong" if left_out else ""
    print(f"{file}: {len(rows)} problems{remark}")


if __name__ == "__main__":
    main()
