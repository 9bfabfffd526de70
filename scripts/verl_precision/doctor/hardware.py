"""Report what the GPUs of this machine compute natively and emulate, and refuse a preset of another GPU."""

from collections import Counter
from collections.abc import Mapping, Sequence

from verl_precision.doctor.config import parse_overrides
from verl_precision.doctor.finding import Finding
from verl_precision.doctor.resolver import Hop
from verl_precision.facts.gpus import Gpu
from verl_precision.run.presets import GUIDE, PRESETS, oldest

# The hops in whose dtype a GPU multiplies.
COMPUTING = ("actor.compute", "actor.autocast", "ref.compute", "critic.compute", "rollout.weights")
LEAST_CAPABILITY = (8, 0)  # vLLM's documents; older GPUs get no batch-invariant matrix multiplication, and no error


def preset_finding(gpus: tuple[Gpu, ...], overrides: Sequence[str]) -> Finding | None:
    """Return why ``+device=PRESET`` does not fit these GPUs; None if it does, or there are none."""
    chosen = [each.value() for each in parse_overrides(overrides) if each.key_or_group == "device"]
    preset = chosen[-1] if chosen else None
    if preset not in PRESETS or not gpus:
        return None
    gpu = oldest(gpus)
    if PRESETS[preset] > gpu.capability:
        own = next((f"+device={name}" for name, least in PRESETS.items() if gpu.capability >= least), GUIDE)
        return Finding("device", preset, f"is not for {gpu}", own)
    if not gpu.kernels:
        return Finding("device", preset, f"cannot be used: the torch of this Python has no kernels for {gpu}", GUIDE)
    return None


def hardware_lines(gpus: tuple[Gpu, ...], hops: Mapping[str, Hop], deterministic: bool) -> list[str]:
    """Return a line for each kind of GPU: what it computes natively, and which of the job's dtypes it emulates."""
    in_bf16 = [name for name in COMPUTING if hops[name].effective_dtype == "bfloat16"]
    lines = []
    for gpu, count in Counter(gpus).items():
        line = f"{f'{count} x ' if count > 1 else ''}{gpu}: fp16 and fp32 native, bf16 "
        line += "native" if gpu.bf16 else "emulated in fp32"
        if in_bf16 and not gpu.bf16:
            line += f"; {', '.join(in_bf16)} in bf16, which is slow there, and vLLM refuses it: +precision=fp16"
        if deterministic and gpu.capability < LEAST_CAPABILITY:
            line += "; vLLM has batch-invariant kernels from sm80 on"
        lines.append(line + ("" if gpu.kernels else f"; the torch of this Python has no kernels for it: {GUIDE}"))
    return lines
