"""What a rank reads from a worker: its state, dtypes and metrics; and what puts an overflow into its gradients."""

import itertools
import math

import torch
from harness import RANK, Worker
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state(worker: Worker) -> list[torch.Tensor]:
    """Return weights and Adam state of this rank, as clones."""
    tensors = [local(parameter).detach().clone() for parameter in worker.module.parameters()]
    for entry in worker.optimizer.state.values():
        tensors += [local(value).detach().clone() for value in entry.values()]
    return tensors


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def spoil(module: torch.nn.Module, value: float, which: int = 0) -> None:
    """Put ``value`` into one element of a gradient of rank 1."""
    if RANK == 1:
        gradients = [local(parameter.grad) for parameter in module.parameters() if parameter.grad is not None]
        [gradient for gradient in gradients if gradient.numel()][which].view(-1)[0] = value


def poison(worker: Worker, value: float = math.inf, which: int = 0, times: int = 1) -> None:
    """Before each of the next ``times`` optimizer steps, put ``value`` into one element of a gradient of rank 1."""
    step, steps = getattr(worker.policy, worker.step_name), itertools.count(1)

    def poisoned(*args, **kwargs):
        if next(steps) == times:
            setattr(worker.policy, worker.step_name, step)
        spoil(worker.module, value, which)
        return step(*args, **kwargs)

    setattr(worker.policy, worker.step_name, poisoned)


def scale_of(worker: Worker) -> float | None:
    return None if worker.scaler is None else worker.scaler.get_scale()


def numbers(value) -> list[float]:
    """Return all numbers in a metric, which is a number, a list or an object that aggregates some."""
    if hasattr(value, "aggregate"):
        value = value.aggregate()
    return [float(value)] if not hasattr(value, "__iter__") else [n for each in value for n in numbers(each)]


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def watch(module: torch.nn.Module) -> dict[str, str]:
    """Return a dict that a forward pass fills: the dtypes of the first block's up_proj, and of the head's logits."""
    observed: dict[str, str] = {}

    def inside(linear, args, output):
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        observed.update(linear=name(output.dtype), autocast=name(autocast), weight=name(linear.weight.dtype))

    def head(linear, args, output):
        observed.update(logits=name(output.dtype))

    first = [part for path, part in module.named_modules() if ".0." in path and "mlp.up_proj" in path]
    # Under LoRA the layer is a part of an adapted one.
    next(part for part in first if isinstance(part, torch.nn.Linear)).register_forward_hook(inside)
    for path, part in module.named_modules():
        if path.endswith("lm_head"):
            part.register_forward_hook(head)
    return observed


def inner_dtypes(observed: dict[str, str]) -> str:
    return ", ".join(f"{key} {observed[key]}" for key in ("linear", "autocast", "weight"))
