"""List the trainers and rollouts that a probe compares, and refuse those that cannot run here."""

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


@dataclass(frozen=True)
class Variant:
    """A row of the report: a regime, its wire, and which heads compute in fp32."""

    regime: str
    wire: str
    head: str
    trainer: TrainerNumerics
    rollout: RolloutNumerics

    def files(self, work: Path) -> tuple[Path, Path]:
        """Return the files of the trainer's log-probabilities and of the rollout's."""
        return work / f"{self.trainer.name}-on-{self.rollout.name}.jsonl", work / f"{self.rollout.name}.jsonl"

    def columns(self) -> dict[str, str]:
        """Return what identifies the row in the JSON report."""
        dtypes = {"train": self.trainer.dtype, "infer": self.rollout.dtype}
        return {"regime": self.regime, "wire": self.wire, "fp32_head": self.head} | dtypes


def variants(options: ProbeOptions) -> list[Variant]:
    """Return every regime over every wire, and every head over the first wire; numerically equal ones only once."""
    distinct: dict[tuple, Variant] = {}
    for regime in options.precision:
        config = OmegaConf.load(CONFIGS / "precision" / f"{regime}.yaml").actor_rollout_ref
        train, infer = short_name(config.actor.dtype), short_name(config.rollout.dtype)
        wires = [(wire, options.head[0]) for wire in options.wire]
        for wire, head in wires + [(options.wire[0], head) for head in options.head[1:]]:
            # A head of an fp32 trainer or rollout is in fp32 anyway, and a wire in the rollout's dtype rounds alike.
            trainer_head, rollout_head = HEADS[head]
            rounded = "fp32" if wire == infer else wire
            trainer = TrainerNumerics(train, trainer_head and train != "fp32")
            rollout = RolloutNumerics(infer, rounded, rollout_head and infer != "fp32")
            distinct.setdefault((regime, trainer, rollout), Variant(regime, wire, head, trainer, rollout))
    return list(distinct.values())


def refused_regimes(options: ProbeOptions) -> dict[str, str]:
    """Return the regimes that a GPU of this machine emulates or that vLLM as the backend refuses, and why."""
    emulating = [gpu for gpu in find_gpus() if not gpu.bf16] if options.device == "cuda" else []
    in_bf16 = {each.regime for each in variants(options) if "bf16" in (each.trainer.dtype, each.rollout.dtype)}
    refused = {name: f"{emulating[0]} emulates bfloat16" for name in sorted(in_bf16) if emulating}
    if options.backend == "vllm":
        refused |= {name: f"{reason} (BACKEND=hf runs it)" for name, reason in refused_by_vllm(options).items()}
    return refused


def refused_by_vllm(options: ProbeOptions) -> dict[str, str]:
    """Return the regimes whose rollout is in float16, and why, if vLLM refuses the model in it."""
    support = float16_support(options.model)
    in_fp16 = [each.regime for each in variants(options) if each.rollout.dtype == "fp16"]
    return dict.fromkeys(in_fp16, support.reason) if support.supported is False else {}


def check_regimes(options: ProbeOptions) -> None:
    """Refuse regimes that cannot be measured here, and print which of the others vLLM would refuse."""
    if refused := refused_regimes(options):
        others = " ".join(name for name in options.precision if name not in refused) or "fp32"
        raise Refused(
            f"PRECISION={' '.join(options.precision)}: {'; '.join(dict.fromkeys(refused.values()))}; leave out "
            f"{' and '.join(refused)}: PRECISION={shlex.quote(others)}"
        )
    if regimes := refused_by_vllm(options):
        reason = next(iter(regimes.values()))
        print(f"{reason}: {' and '.join(regimes)} are measured here and cannot be run with it", flush=True)
