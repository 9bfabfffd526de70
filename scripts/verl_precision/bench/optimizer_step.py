"""Time the optimizer step of verl's FSDP engine in each regime."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from verl_precision.bench.cost_report import RegimeTiming, timings_of
from verl_precision.bench.measurement import alternate

WIDTH = 1024  # 2**20 elements per parameter, as typical for small models
MOST_LAYERS = 300  # larger models have larger parameters, not more: 290 in Qwen2.5-0.5B, 338 in 1.5B, 339 in 7B
SCALE, CLIP, GRADIENT = 1024.0, 1.0, 1e-3  # the norm exceeds CLIP from 10 million parameters on
BYTES_PER_PARAMETER = 4 + 4 + 8 + 4  # weight, gradient, Adam's state, foreach AdamW's intermediate
LEAST_ROUNDS = 41


def fully_sharded(millions: int) -> torch.nn.Module:
    """Return a module of fp32 masters under FSDP2, like verl's actor."""
    factor = -(-millions // MOST_LAYERS)
    layers = (torch.nn.Linear(WIDTH, factor * WIDTH, bias=False) for _ in range(millions // factor))
    module = torch.nn.Sequential(*layers)
    for layer in module:
        fully_shard(layer)
    return fully_shard(module)


def upstream_step(engine: SimpleNamespace, scaler: torch.amp.GradScaler) -> float:
    """Step in fp16 by unpatched verl 0.9.1's sequence of calls. Returns the gradient norm."""
    from verl.utils.fsdp_utils import fsdp2_clip_grad_norm_

    scaler.unscale_(engine.optimizer)
    norm = fsdp2_clip_grad_norm_(engine.module.parameters(), max_norm=CLIP)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    scaler.step(engine.optimizer)
    scaler.update()
    return norm.item()


def optimizer_steps(module: torch.nn.Module, fused: bool, device: str) -> dict[str, Callable[[], float]]:
    """Return the step of verl's engine in each regime, all on the same parameters and Adam states."""
    from verl.utils.precision import GradScalerConfig, LossScaler, Precision
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    def engine(dtype, scaler):
        made = object.__new__(FSDPEngine)  # only its optimizer_step is called
        made.module, made.optimizer, made.scaler, made._qat_enabled = module, optimizer, scaler, False
        made.optimizer_config = SimpleNamespace(clip_grad=CLIP)
        made.precision = Precision.of_worker(dtype, {}, trained=True)
        return made

    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6, fused=fused, foreach=not fused)
    scaler = LossScaler(GradScalerConfig(init_scale=SCALE), device=device)
    # torch's ShardedGradScaler raises with a fused optimizer; GradScaler has the same sequence without the all-reduce.
    upstream = (torch.amp.GradScaler if fused else ShardedGradScaler)(device, init_scale=SCALE, growth_interval=10**9)
    for each in (scaler, upstream):
        each.scale(torch.zeros((), device=device))
    plain = engine("bfloat16", None)
    return {
        "bf16": plain.optimizer_step,
        "fp16": engine("float16", scaler).optimizer_step,
        "fp16 upstream": lambda: upstream_step(plain, upstream),
        "fp32": plain.optimizer_step,  # bf16's code: its ratio to bf16 is the noise
    }


def measure_optimizer(millions: int, fused: bool, seconds: float, device: str) -> list[RegimeTiming]:
    """Return the timings of the optimizer step of a model of ``millions`` of parameters."""
    with torch.device(device):
        module = fully_sharded(millions)

    def fill_gradients(regime: str) -> None:
        value = GRADIENT * (SCALE if regime.startswith("fp16") else 1.0)
        for parameter in module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.to_local().fill_(value)

    times = alternate(optimizer_steps(module, fused, device), seconds, LEAST_ROUNDS, device, fill_gradients)
    return timings_of(times, "optimizer step", f"{'fused' if fused else 'foreach'} AdamW", millions)
