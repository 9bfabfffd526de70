"""Write, read and check the checkpoint files of :class:`recipes.amp.trainer.FP16Trainer`."""

import os
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

import torch

VERSION = 1  # of the layout
PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
PARAMETER_SHAPED = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}  # state of Adam and SGD


class InvalidCheckpointError(ValueError):
    """Raised for a file that is not a checkpoint of this trainer; the message names the file and the reason."""


def write_checkpoint(path: Path, saved: Mapping[str, Any]) -> None:
    """Write a checkpoint whole or not at all, first into ``NAME.part`` beside it."""
    part = path.with_name(path.name + ".part")
    try:
        torch.save({"version": VERSION, **saved}, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_checkpoint(path: str | os.PathLike, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the content of a checkpoint of :class:`recipes.amp.trainer.FP16Trainer`, its tensors on ``device``.

    Raises:
        FileNotFoundError: there is no such file.
        InvalidCheckpointError: truncated, no checkpoint, or from a newer version.
    """
    with open(path, "rb") as file:
        try:
            saved = torch.load(file, map_location=device, weights_only=True)
        except Exception as error:  # whatever the bytes lead torch's reader to, OSError among it
            raise InvalidCheckpointError(f"{path}: truncated, or not a checkpoint") from error
    complete = isinstance(saved, dict) and all(isinstance(saved.get(part), Mapping) for part in ("model", "optimizer"))
    if not complete or not saved["optimizer"].keys() >= {"state", "param_groups"}:
        raise InvalidCheckpointError(f"{path}: not a checkpoint of this trainer: it has no model or no optimizer")
    version = saved.get("version", VERSION)
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        raise InvalidCheckpointError(f"{path}: version {version}, but this trainer reads up to {VERSION}: update it")
    for part in ("optimizer_of", "counters", "extra", "provenance"):  # other trainers' checkpoints may lack them
        if not isinstance(saved.setdefault(part, {}), Mapping):
            kind = type(saved[part]).__name__
            raise InvalidCheckpointError(f"{path}: not a checkpoint of this trainer: its {part} is {kind}")
    return saved


def check_model(saved: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], path: str | os.PathLike) -> None:
    """Check that two state dicts have the same names and shapes.

    Raises:
        InvalidCheckpointError: naming the first difference.
    """
    for name in sorted(saved.keys() ^ own.keys()):
        owner = "the checkpoint" if name in saved else "this model"
        raise InvalidCheckpointError(f"{path}: of another model: only {owner} has {name}")
    for name, tensor in own.items():
        shape, own_shape = (getattr(value, "shape", None) for value in (saved[name], tensor))  # extra state has none
        if shape != own_shape:
            shapes = f"{_shape(shape)}, here {_shape(own_shape)}"
            raise InvalidCheckpointError(f"{path}: of another model: {name} has shape {shapes}")


def _shape(shape: Optional[torch.Size]) -> str:
    return "none" if shape is None else str(tuple(shape))


def optimizer_identity(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.nn.Parameter, str]
) -> dict[str, str | list[list[str]]]:
    """Return the optimizer's class and the parameter names of its groups: its state is stored by position alone."""
    groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "groups": groups}


def check_optimizer(
    saved: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.nn.Parameter, str],
    path: str | os.PathLike,
) -> list[dict[str, Any]]:
    """Check that a checkpoint's optimizer state is of this optimizer's class, parameters and shapes.

    Args:
        saved: what :func:`read_checkpoint` returns.
        names: of the optimizer's parameters.

    Returns:
        the checkpoint's parameter groups, with this optimizer's implementation (``foreach``, ``fused``).

    Raises:
        InvalidCheckpointError: naming the first difference.
    """
    state, own = saved["optimizer"], optimizer.state_dict()
    sizes, own_sizes = ([len(group["params"]) for group in each["param_groups"]] for each in (state, own))
    if sizes != own_sizes:
        message = f"groups of {sizes} parameters, here {own_sizes}"
        raise InvalidCheckpointError(f"{path}: of another optimizer: {message}")
    own_identity = optimizer_identity(optimizer, names)
    identity = saved["optimizer_of"] or own_identity
    if identity["class"] != own_identity["class"]:
        message = f"{identity['class']}, here {own_identity['class']}"
        raise InvalidCheckpointError(f"{path}: of another optimizer: {message}")
    if identity["groups"] != own_identity["groups"]:
        message = "its parameters are in a different order or in different groups"
        raise InvalidCheckpointError(f"{path}: of another optimizer: {message}")
    places = [place for group in state["param_groups"] for place in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for place, parameter in zip(places, parameters, strict=True):
        for key, value in state["state"].get(place, {}).items():
            if key in PARAMETER_SHAPED and value is not None and value.shape != parameter.shape:
                shapes = f"{tuple(value.shape)}, {names[parameter]} has {tuple(parameter.shape)}"
                raise InvalidCheckpointError(f"{path}: of another optimizer: {key} has shape {shapes}")
    kept = [{key: group[key] for key in ("foreach", "fused") if key in group} for group in own["param_groups"]]
    return [group | own_keys for group, own_keys in zip(state["param_groups"], kept, strict=True)]


def check_plain(value: Any, where: str) -> None:
    """Check that ``torch.load(weights_only=True)`` would read ``value`` back.

    Raises:
        ValueError: naming the place, which starts with ``where``, and the type that it would refuse.
    """
    if type(value) in (dict, OrderedDict, Counter):
        for key, each in value.items():
            check_plain(key, f"{where} (a key)")
            check_plain(each, f"{where}.{key}")
    elif type(value) in (list, tuple, set):
        for place, each in enumerate(value):
            check_plain(each, f"{where}.{place}")
    elif not isinstance(value, torch.Tensor) and type(value) not in PLAIN_TYPES:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ValueError(f"{where} is of {kind}: save tensors and plain Python values, a NumPy number as float(x)")
