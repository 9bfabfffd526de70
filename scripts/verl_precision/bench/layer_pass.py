"""Time forward and backward of a model's decoder layers in each dtype."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from verl_precision.bench.gpu_formats import lacks_ampere
from verl_precision.bench.host_calls import host_calls
from verl_precision.bench.model_shape import ModelShape
from verl_precision.bench.ranks import alternate
from verl_precision.bench.regime_timing import BASE, RegimeTiming, timings_of
from verl_precision.bench.resource_usage import peak_memory
from verl_precision.facts.dtypes import torch_dtype

LEAST_ROUNDS = 11  # fp32 takes seconds a round on some GPUs


def dtypes_on(device: str) -> tuple[dict[str, torch.dtype], dict[str, str]]:
    """Return the dtype of each regime that ``device`` can compute in, and the reason for each regime that it cannot."""
    reason = lacks_ampere("bfloat16") if device == "cuda" else ""
    left_out = {"bf16": reason} if reason else {}
    return {name: torch_dtype(name) for name in (BASE, "fp16", "fp32") if name not in left_out}, left_out


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


def measure_layers(
    models: Mapping[str, Mapping[str, Any]], layers: int, rows: int, length: int, seconds: float, device: str
) -> Iterator[list[RegimeTiming]]:
    """Yield the timings of ``layers`` decoder layers of each model, a ``config.json`` by name."""
    for name, entries in models.items():
        config = {**entries, "num_hidden_layers": layers, "vocab_size": 1}
        dtypes, left_out = dtypes_on(device)
        yield time_passes(
            {regime: layer_pass(config, rows, length, dtype, device) for regime, dtype in dtypes.items()},
            left_out,
            seconds,
            device,
            part="forward and backward",
            subject=f"{name}, {layers} layer{'s' * (layers > 1)}",
            parameters_m=round(layers * ModelShape.of(config, name).block / 1e6, 1),
            tokens=rows * length,
        )


def time_passes(
    passes: dict[str, Callable[[], object]], left_out: dict[str, str], seconds: float, device: str, **configuration
) -> list[RegimeTiming]:
    """Measure each regime's peak memory above the weights, time the regimes in turns, and count their calls.

    Args:
        passes: by regime; a pass that runs out of the GPU's memory is removed and left out.
        left_out: the regimes that the device cannot compute in, each with the reason.
    """
    left_out, peaks = dict(left_out), {}
    for regime in list(passes):
        try:
            with peak_memory(torch.device(device)) as peak:
                passes[regime]()  # allocates Adam's state
                passes[regime]()
                peaks[regime] = peak() / 2**30
        except torch.OutOfMemoryError:
            left_out[regime] = f"needs more than the {torch.cuda.mem_get_info()[1] / 1e9:.1f} GB of this GPU"
            del passes[regime]
    times = alternate(passes, lambda regime: None, seconds, device, LEAST_ROUNDS) if passes else {}
    counts = {regime: host_calls(run, device) for regime, run in passes.items()}
    without = [RegimeTiming(**configuration, regime=regime, left_out=why) for regime, why in left_out.items()]
    return timings_of(times, counts, peaks, **configuration) + without
