"""Time forward and backward of a model's decoder layers in each dtype."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from verl_precision.bench.gpu_formats import lacks_ampere, set_tf32
from verl_precision.bench.host_calls import host_calls
from verl_precision.bench.model_shape import ModelShape
from verl_precision.bench.ranks import alternate, join
from verl_precision.bench.regime_timing import RegimeTiming, one_line, timings_of
from verl_precision.bench.resource_usage import allocate_workspaces, peak_memory, too_large
from verl_precision.facts.dtypes import SHORT_NAMES, torch_dtype

LEAST_ROUNDS = 11  # fp32 takes seconds a round on some GPUs
MARGIN = 1.25  # for what the estimates of memory leave out


def dtypes_on(device: str) -> tuple[dict[str, torch.dtype], dict[str, str]]:
    """Return the dtype of each regime that ``device`` can compute in, and of each other regime the reason."""
    reason = lacks_ampere("bfloat16") if device == "cuda" else ""
    left_out = {"bf16": reason} if reason else {}
    return {name: torch_dtype(name) for name in SHORT_NAMES if name not in left_out}, left_out


def layer_pass(
    config: Mapping[str, Any], rows: int, length: int, dtype: torch.dtype, device: str
) -> Callable[[], None]:
    """Return what runs forward and backward of decoder layers once, and clears the gradients.

    As in verl's engine under FSDP2, which casts the weights: weights and activations are of ``dtype``, and 16 bits run
    under autocast, too. Attention is torch's SDPA.

    Args:
        config: entries of a Qwen2 model's ``config.json``.
        rows, length: of the batch; no row is padded.
    """
    from transformers import Qwen2Config, Qwen2Model

    chosen = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device(device):
        model = Qwen2Model(Qwen2Config(**chosen, attn_implementation="sdpa")).to(dtype)
        hidden, gradient = torch.randn(2, rows, length, config["hidden_size"], dtype=dtype)
    hidden.requires_grad_()

    def run() -> None:
        with nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype):
            output = model(inputs_embeds=hidden, use_cache=False).last_hidden_state
        output.backward(gradient)
        model.zero_grad(set_to_none=True)
        hidden.grad = None

    return run


def activation_bytes(shape: ModelShape, rows: int, length: int) -> int:
    """Return an estimate of the bytes of a model's activations in fp32.

    There SDPA may take its math kernel, which keeps the scores of each layer and needs three times as much within one.
    """
    scores = 4 * shape.heads * rows * length**2
    return shape.layers * rows * length * shape.saved_bytes(4) + (shape.layers + 3) * scores


def needed_bytes(shape: ModelShape, rows: int, length: int) -> int:
    """Return an estimate of the bytes of the passes in all dtypes, which take turns."""
    weights = shape.layers * shape.block * (2 + 2 + 4 + 4)  # bf16, fp16, fp32 and its gradients
    return round(MARGIN * (weights + activation_bytes(shape, rows, length)))


def measure_layers(
    rank: int,
    store: str,
    models: Mapping[str, Mapping[str, Any]],
    layers: int,
    rows: list[int],
    length: int,
    seconds: float,
    device: str,
    queue,
) -> None:
    """Time ``layers`` decoder layers of each model; puts the timings into ``queue``.

    Args:
        models: the ``config.json`` of each, by name.
        rows: of the micro-batch, in descending order: the first that fits into the memory.
    """
    join(store, rank, 1, device)
    dtypes, left_out = dtypes_on(device)
    if device == "cuda":
        set_tf32(False)
        allocate_workspaces()
    for name, entries in models.items():
        config = {**entries, "num_hidden_layers": layers, "vocab_size": 1}
        shape = ModelShape.of(config, name)
        configuration = {"what": "forward and backward", "optimizer": "", "ranks": 1}
        configuration |= {
            "model": f"{name}, {layers} layer{'s' * (layers > 1)}",
            "parameters_m": round(layers * shape.block / 1e6, 1),
        }
        reasons = {count: too_large(needed_bytes(shape, count, length), device) for count in rows}
        fitting = next((count for count, reason in reasons.items() if not reason), None)
        if fitting is None:
            timings = [RegimeTiming(**configuration, regime="all", left_out=reasons[rows[-1]])]
        else:
            passes = {key: layer_pass(config, fitting, length, dtype, device) for key, dtype in dtypes.items()}
            configuration["tokens"] = fitting * length
            timings = time_passes(passes, seconds, device, configuration)
            timings += [RegimeTiming(**configuration, regime=key, left_out=why) for key, why in left_out.items()]
            del passes
        queue.put(timings)
        print(one_line(timings), flush=True)
    dist.destroy_process_group()


def time_passes(
    passes: dict[str, Callable[[], object]], seconds: float, device: str, configuration: dict
) -> list[RegimeTiming]:
    """Time each regime's pass in turns, then measure its peak memory above the weights and count its calls."""
    times = alternate(passes, lambda name: None, seconds, device, LEAST_ROUNDS)
    peaks = {}
    for name, run in passes.items():
        with peak_memory(torch.device(device)) as peak:
            run()
            peaks[name] = peak() / 2**30
    calls = {name: host_calls(run, device) for name, run in passes.items()}
    return timings_of(times, calls, peaks, **configuration)
