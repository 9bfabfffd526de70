"""Write, read and check the checkpoint files of :class:`recipes.amp.trainer.FP16Trainer`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

VERSION = 1  # of the layout
PARTS = ("model", "optimizer", "optimizer_of", "counters", "extra", "provenance")  # each a mapping


class InvalidCheckpointError(ValueError):
    """Raised for a file that is not a checkpoint of this trainer; the message names the file and the reason."""


def write_checkpoint(path: Path, saved: Mapping[str, Any]) -> None:
    """Write a checkpoint completely or not at all, first into ``NAME.part`` beside it.

    Raises ``ValueError`` for a type that ``torch.load(weights_only=True)`` would refuse to load.
    """
    part = path.with_name(path.name + ".part")
    try:
        torch.save({"version": VERSION, **saved}, part)
        if refused := torch.serialization.get_unsafe_globals_in_checkpoint(part):
            advice = "save tensors and plain Python values, a NumPy number as float(x)"
            raise ValueError(f"{path}: extra contains {', '.join(refused)}: {advice}")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_checkpoint(path: str | os.PathLike) -> dict[str, Any]:
    """Return the content of a checkpoint, its tensors on the CPU; raise ``InvalidCheckpointError`` if it is not one."""
    with open(path, "rb") as file:
        try:
            saved = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever the bytes lead torch's reader to, OSError among it
            raise InvalidCheckpointError(f"{path}: truncated, or not a checkpoint") from error
    if not isinstance(saved, dict) or not all(isinstance(saved.get(part), Mapping) for part in PARTS):
        raise InvalidCheckpointError(f"{path}: not a checkpoint of this trainer: it must have {', '.join(PARTS)}")
    if saved.get("version") != VERSION:
        raise InvalidCheckpointError(f"{path}: version {saved.get('version')}, but this trainer reads {VERSION}")
    return saved


def check_fits(saved: Mapping[str, Any], own: Mapping[str, Any], path: str | os.PathLike) -> None:
    """Check that two checkpoints are of the same model and optimizer: names, shapes, class, groups of parameters."""
    # Extra state of a module has no shape; a name that is missing has the shape None.
    shapes, here = (
        {name: tuple(getattr(value, "shape", ())) for name, value in each["model"].items()} for each in (saved, own)
    )
    for name in sorted(shapes.keys() | here.keys()):
        if shapes.get(name) != here.get(name):
            difference = f"{name} has shape {shapes.get(name)}, here {here.get(name)}"
            raise InvalidCheckpointError(f"{path}: of another model: {difference}")
    kind, own_kind = (each["optimizer_of"].get("class") for each in (saved, own))
    if kind != own_kind:
        raise InvalidCheckpointError(f"{path}: of another optimizer: {kind}, here {own_kind}")
    if saved["optimizer_of"] != own["optimizer_of"]:  # its state is stored by position only
        raise InvalidCheckpointError(
            f"{path}: of another optimizer: its parameters are in a different order or in different groups"
        )
