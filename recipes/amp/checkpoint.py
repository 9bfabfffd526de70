"""Write, read and check the checkpoint files of :class:`recipes.amp.trainer.FP16Trainer`."""

import io
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
    """Write a checkpoint completely or not at all, first into ``NAME.part`` beside it."""
    part = path.with_name(path.name + ".part")
    try:
        torch.save({"version": VERSION, **saved}, part)
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
    version = saved.get("version")
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        raise InvalidCheckpointError(f"{path}: version {version}, but this trainer reads up to {VERSION}: update it")
    return saved


def check_model(saved: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], path: str | os.PathLike) -> None:
    """Check that two state dicts have the same names and shapes; name the first difference."""
    # Extra state of a module has no shape; a name that is missing has the shape None.
    shapes, here = ({name: tuple(getattr(value, "shape", ())) for name, value in each.items()} for each in (saved, own))
    for name in sorted(shapes.keys() | here.keys()):
        if shapes.get(name) != here.get(name):
            difference = f"{name} has shape {shapes.get(name)}, here {here.get(name)}"
            raise InvalidCheckpointError(f"{path}: of another model: {difference}")


def optimizer_identity(optimizer: torch.optim.Optimizer, names: Mapping[torch.nn.Parameter, str]) -> dict[str, Any]:
    """Return the optimizer's class and the parameter names of its groups: its state is stored by position only."""
    groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "groups": groups}


def check_optimizer(saved: Mapping[str, Any], identity: Mapping[str, Any], path: str | os.PathLike) -> None:
    """Check that a checkpoint's optimizer state is of the class, the parameters and the groups of ``identity``."""
    saved_class, own_class = (each.get("class") for each in (saved["optimizer_of"], identity))
    if saved_class != own_class:
        raise InvalidCheckpointError(f"{path}: of another optimizer: {saved_class}, here {own_class}")
    sizes = [len(group["params"]) for group in saved["optimizer"].get("param_groups", ())]
    if saved["optimizer_of"] != identity or sizes != [len(names) for names in identity["groups"]]:
        raise InvalidCheckpointError(
            f"{path}: of another optimizer: its parameters are in a different order or in different groups"
        )


def check_loadable(extra: Mapping[str, Any]) -> None:
    """Check that ``torch.load(weights_only=True)`` would read ``extra`` back; name the types that it would refuse."""
    written = io.BytesIO()
    torch.save(extra, written)
    written.seek(0)
    if refused := torch.serialization.get_unsafe_globals_in_checkpoint(written):
        types = ", ".join(refused)
        raise ValueError(f"extra contains {types}: save tensors and plain Python values, a NumPy number as float(x)")
