"""Report what the GPUs of this machine compute natively and emulate, and refuse a preset of another GPU."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from verl_precision.doctor.config import parse_overrides
from verl_precision.doctor.diagnosis import Diagnosis, diagnose, refused
from verl_precision.doctor.finding import Finding
from verl_precision.doctor.tree import Tree
from verl_precision.facts.gpus import Gpu, find_gpus
from verl_precision.facts.packages import package_folder
from verl_precision.run.presets import GUIDE, PRESETS, oldest
from verl_precision.words import gpu_present

# The hops in whose dtype a GPU multiplies.
COMPUTING = ("actor.compute", "actor.autocast", "ref.compute", "critic.compute", "rollout.weights")
LEAST_CAPABILITY = (8, 0)  # vLLM's documents; older GPUs get no batch-invariant matrix multiplication, and no error


def gpus_here() -> tuple[Gpu, ...]:
    """Return the GPUs of this machine; none where nvidia-smi lists none or this Python has no torch."""
    return find_gpus() if gpu_present() and package_folder("torch") else ()


def diagnose_on(gpus: tuple[Gpu, ...], tree: Tree, overrides: Sequence[str], config_name: str) -> Diagnosis:
    """Diagnose a job as ``diagnose`` does, for a machine with these GPUs.

    Raises:
        Refused: the words are no overrides, or there is no such config.
    """
    finding = preset_finding(gpus, overrides)
    if finding is None:
        return replace(diagnose(tree, overrides, config_name), gpus=gpus)
    return replace(refused(tree, finding.sentence, (finding,)), sentence=f"{finding.sentence}.", gpus=gpus)


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


def hardware_lines(diagnosis: Diagnosis) -> list[str]:
    """Return a line for each kind of GPU: what it computes natively, and which of the job's dtypes it emulates."""
    in_bf16 = [name for name in COMPUTING if diagnosis.hops[name].effective_dtype == "bfloat16"]
    lines = []
    for gpu, count in Counter(diagnosis.gpus).items():
        line = f"{f'{count} x ' if count > 1 else ''}{gpu}: fp16 and fp32 native, bf16 "
        line += "native" if gpu.bf16 else "emulated in fp32"
        if in_bf16 and not gpu.bf16:
            line += f"; {', '.join(in_bf16)} in bf16, which is slow there, and vLLM refuses it: +precision=fp16"
        if diagnosis.deterministic.get("rollout") and gpu.capability < LEAST_CAPABILITY:
            line += "; vLLM has batch-invariant kernels from sm80 on"
        lines.append(line + ("" if gpu.kernels else f"; the torch of this Python has no kernels for it: {GUIDE}"))
    return lines
