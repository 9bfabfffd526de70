"""List what a probe compares: trainers with rollouts, and trainers with themselves in other micro-batches."""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import OmegaConf

from verl_precision.errors import Refused
from verl_precision.facts.dtypes import short_name
from verl_precision.facts.gpus import find_gpus
from verl_precision.facts.vllm_float16 import float16_support
from verl_precision.paths import CONFIGS
from verl_precision.probe.numerics import RolloutNumerics, TrainerNumerics
from verl_precision.probe.options import HEADS, ProbeOptions

# How the micro-batches of two passes of a trainer differ: what is replaced in the numerics of the one and the other.
CHANGES = {
    "size": ({}, {"doubled": True}),
    "padding": ({}, {"packed": True}),
    "packing": ({"packed": True}, {"packed": True, "doubled": True}),
}


@dataclass(frozen=True)
class Variant:
    """A row of the report: a regime, its wire, which heads compute in fp32, and what its trainer is compared with."""

    regime: str
    wire: str
    head: str
    trainer: TrainerNumerics
    rollout: RolloutNumerics
    change: str | None = None  # a key of CHANGES; None for the comparison with the rollout
    other: TrainerNumerics | None = None  # with a change: compared instead of the rollout, on its answers

    def rollout_file(self, work: Path) -> Path:
        return work / f"{self.rollout.name}.jsonl"

    def trainer_files(self, work: Path) -> dict[Path, TrainerNumerics]:
        """Return the files of all trainers, the other one first."""
        trainers = [trainer for trainer in (self.other, self.trainer) if trainer]
        return {work / f"{trainer.name}-on-{self.rollout.name}.jsonl": trainer for trainer in trainers}

    def files(self, work: Path) -> tuple[Path, Path]:
        """Return the files of the log-probabilities that are compared: the trainer's, and the rollout's or other's."""
        *other, trainer = self.trainer_files(work)
        return trainer, other[0] if other else self.rollout_file(work)

    def columns(self) -> dict[str, str]:
        """Return what identifies the row in the JSON report."""
        if self.change:
            return {"regime": self.regime, "change": self.change}
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


def rebatched(options: ProbeOptions) -> list[Variant]:
    """Return every change of micro-batches in the trainer of each regime.

    In verl such a change makes ``log_prob`` differ from ``old_log_prob`` on-policy, where
    ``log_prob_micro_batch_size_per_gpu`` is twice ``ppo_micro_batch_size_per_gpu``, as verl recommends.
    """
    plain = replace(options, wire=options.wire[:1], head=options.head[:1])
    changed = []
    for regime in variants(plain):
        for change in options.batch:
            other, trainer = (replace(regime.trainer, **each) for each in CHANGES[change])
            changed.append(replace(regime, change=change, trainer=trainer, other=other))
    return changed


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
