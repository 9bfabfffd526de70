"""Trace an update of a planned job: what the ranks send each other, and the peak of memory beside the planned one."""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_precision.bench.memory_model import TrainedModel
from verl_precision.bench.memory_plan import GIB, sequence_parallel, trained_model
from verl_precision.bench.model_shape import ModelShape, model_config
from verl_precision.errors import Refused
from verl_precision.process import json_lines

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True)
class Collective:
    """What the ranks send by one operator in one dtype."""

    operator: str
    dtype: str
    size: int  # bytes of the whole tensors


@dataclass(frozen=True)
class Trace:
    """An update of the actor as one of its ranks ran it on tensors without data."""

    ranks: int
    planned: TrainedModel
    weights: int  # bytes of this rank's shards
    adam: int
    peak: int  # bytes of all tensors but Adam's at once, at most
    micro_batch: list[Collective]
    update: list[Collective]  # once per update
    sync: list[Collective]  # as the weights are collected for the rollout

    @property
    def planned_peak(self) -> int:
        return max(sum(parts.values()) - parts["Adam"] for parts in self.planned.update_moments().values())

    def __str__(self) -> str:
        sent = ", ".join(f"{each.operator} {each.dtype} {each.size / 1e9:,.1f} GB" for each in self.micro_batch)
        peak = f"{self.peak / GIB:.1f} GiB at most without Adam, {self.planned_peak / GIB:.1f} planned"
        return f"{self.ranks} ranks, for a micro-batch {sent}; {peak}"


def check_traceable(config: "DictConfig") -> None:
    """Refuse a job whose actor the trace does not cover."""
    ours = config.actor_rollout_ref
    if config.trainer.nnodes * config.trainer.n_gpus_per_node < 2:
        raise Refused("trainer.nnodes=1 trainer.n_gpus_per_node=1: trace-update supports two ranks or more")
    older = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
    newer = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
    for key, value, allowed in (
        ("actor_rollout_ref.actor.strategy", ours.actor.strategy, "fsdp2"),
        ("actor_rollout_ref.model.lora_rank", ours.model.lora_rank, 0),
        (older if ours.actor.ulysses_sequence_parallel_size > 1 else newer, sequence_parallel(config), 1),
    ):
        if value != allowed:
            raise Refused(f"{key}={value}: trace-update supports {allowed}")


def collectives(found: dict[tuple[str, str], int]) -> list[Collective]:
    return [Collective(*key, size) for key, size in sorted(found.items()) if size]


def trace_job(config: "DictConfig", length: int | None, environment: Mapping[str, str]) -> Trace:
    """Trace an update of a job that :func:`check_traceable` has passed, in a process.

    Args:
        config: composed and resolved.
        length: tokens of a prompt and its answer; None for the most that the configuration allows.
        environment: what makes verl run without a GPU.

    Raises:
        Refused: the process failed.
    """
    from omegaconf import OmegaConf

    name = config.actor_rollout_ref.model.path
    model = model_config(name)
    length = length or config.data.max_prompt_length + config.data.max_response_length
    planned = trained_model(config, ModelShape.of(model, name), length, critic=False)
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    job = {"config": OmegaConf.to_container(config), "model": dict(model), "ranks": ranks, "length": length}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(job | {"rows": planned.tokens // length}, file)
        file.flush()
        (found,) = json_lines("bench.traced_step", file.name, environment=environment)
    one, two, sync = ({(*key,): size for *key, size in found[part]} for part in ("one", "two", "sync"))
    of_a_micro_batch = {key: size - one[key] for key, size in two.items()}
    return Trace(
        ranks=ranks,
        planned=planned,
        weights=found["weights"],
        adam=found["Adam"],
        peak=found["peak"],
        micro_batch=collectives(of_a_micro_batch),
        update=collectives({key: size - of_a_micro_batch[key] for key, size in one.items()}),
        sync=collectives(sync),
    )
