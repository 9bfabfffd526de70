"""List the pairs of trainer and rollout that a probe compares: a regime, the dtype of its weight sync, fp32 heads."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from verl_precision.errors import Refused
from verl_precision.facts.dtypes import short_name
from verl_precision.facts.gpus import find_gpus
from verl_precision.facts.vllm_float16 import float16_support
from verl_precision.paths import CONFIGS
from verl_precision.probe.numerics import RolloutNumerics, TrainerNumerics
from verl_precision.probe.options import HEADS, ProbeOptions
from verl_precision.probe.work_folder import rollout_file, trainer_file


@dataclass(frozen=True)
class Variant:
    """A row of the report: a regime, its wire, and which heads compute in fp32."""

    regime: str
    wire: str
    head: str
    trainer: TrainerNumerics
    rollout: RolloutNumerics

    @property
    def trainers(self) -> tuple[TrainerNumerics, ...]:
        return (self.trainer,)

    def files(self, work: Path) -> tuple[Path, Path]:
        """Return the files of the log-probabilities that are compared: the trainer's and the rollout's."""
        return trainer_file(work, self.trainer, self.rollout), rollout_file(work, self.rollout)

    @property
    def label(self) -> str:
        wire = "" if self.wire == "fp32" else f", {self.wire} wire"
        head = "" if self.head == "none" else f", fp32 head {'on' if self.head == 'both' else 'of'} {self.head}"
        return self.regime + wire + head


def variants(options: ProbeOptions) -> list[Variant]:
    """Return every regime over every wire, and every head over the first wire; numerically equal ones only once."""
    distinct: dict[tuple, Variant] = {}
    for regime in options.precision:
        config = OmegaConf.load(CONFIGS / "precision" / f"{regime}.yaml").actor_rollout_ref
        train, infer = short_name(config.actor.dtype), short_name(config.rollout.dtype)
        wires = [(wire, options.head[0]) for wire in options.wire]
        for wire, head in wires + [(options.wire[0], head) for head in options.head[1:]]:
            # A head of an fp32 trainer or rollout is in fp32 anyway.
            trainer_head, rollout_head = (
                in_fp32 and dtype != "fp32" for in_fp32, dtype in zip(HEADS[head], (train, infer), strict=True)
            )
            trainer = TrainerNumerics(train, trainer_head)
            rollout = RolloutNumerics(infer, wire, rollout_head).effective
            distinct.setdefault((regime, trainer, rollout), Variant(regime, wire, head, trainer, rollout))
    return list(distinct.values())


def is_plain(variant: Variant, options: ProbeOptions) -> bool:
    """Return whether the variant stands for its regime in the verdict and the curves."""
    return (variant.wire, variant.head) == (options.wire[0], options.head[0])


def refused_by_gpus(options: ProbeOptions) -> dict[str, str]:
    """Return the reasons by the regime that computes in bfloat16, if a GPU of this machine emulates it."""
    emulating = [gpu for gpu in find_gpus() if not gpu.bf16] if options.device == "cuda" else []
    in_bf16 = {each.regime for each in variants(options) if "bf16" in (each.trainer.dtype, each.rollout.dtype)}
    return {name: f"would compute in bfloat16, which {emulating[0]} emulates" for name in sorted(in_bf16) if emulating}


def refused_by_vllm(options: ProbeOptions) -> dict[str, str]:
    """Return the reasons by the regime whose rollout is in float16, if vLLM refuses the model in it."""
    support = float16_support(options.model)
    in_fp16 = [each.regime for each in variants(options) if each.rollout.dtype == "fp16"]
    return dict.fromkeys(in_fp16, support.reason) if support.supported is False else {}


def check_gpus(options: ProbeOptions) -> None:
    """Check that the GPUs of this machine compute in the dtypes of all regimes.

    Raises:
        Refused: a regime computes in bfloat16, which one of them emulates.
    """
    if refused := refused_by_gpus(options):
        others = " ".join(name for name in options.precision if name not in refused) or "fp16"
        raise Refused(
            f"PRECISION={' '.join(options.precision)}: {' and '.join(refused)} {next(iter(refused.values()))}; "
            f"use PRECISION={shlex.quote(others)}"
        )


def check_vllm(options: ProbeOptions) -> None:
    """Print that vLLM refuses the model in float16, if a regime's rollout is in float16.

    Raises:
        Refused: vLLM is the backend.
    """
    regimes = refused_by_vllm(options)
    if not regimes:
        return
    reason = next(iter(regimes.values()))
    if options.backend == "vllm":
        others = [name for name in options.precision if name not in regimes] or ["bf16"]
        raise Refused(
            f"MODEL={options.model}: {reason}; leave out {' and '.join(regimes)}: "
            f"PRECISION={shlex.quote(' '.join(others))}; or BACKEND=hf, which runs them"
        )
    print(f"{reason}: {' and '.join(regimes)} are measured here and cannot be run with it", flush=True)
