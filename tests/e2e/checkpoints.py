"""Compare checkpoints and metrics of two runs bitwise."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl_precision.files import read_jsonl


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all leaves of a checkpoint file's content, each with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}/{index}")
    else:
        yield path, value


def same(one: Any, other: Any) -> bool:
    """Return whether two leaves are equal, tensors in dtype and in every bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return one == other


def assert_same_checkpoint(one: Path, other: Path, files: int) -> None:
    """Assert that two checkpoints consist of ``files`` ``.pt`` files each, with the same content."""
    names = sorted(path.relative_to(one) for path in one.rglob("*.pt"))
    assert names == sorted(path.relative_to(other) for path in other.rglob("*.pt"))
    assert len(names) == files
    for name in names:
        ours, theirs = (dict(leaves(torch.load(folder / name, weights_only=False))) for folder in (one, other))
        assert ours.keys() == theirs.keys()
        assert [path for path in ours if not same(ours[path], theirs[path])] == [], name


def training_metrics(out: Path) -> dict[int, dict[str, float]]:
    """Return every step's metrics without those that measure time and memory."""
    measured = re.compile("timing|perf/")
    return {
        row["step"]: {name: value for name, value in row["data"].items() if not measured.search(name)}
        for row in read_jsonl(out / "metrics.jsonl")
    }
