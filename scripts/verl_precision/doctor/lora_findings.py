"""Findings on the rank of LoRA's adapters."""

from collections.abc import Iterator
from typing import Any

from verl_precision.doctor.config import select
from verl_precision.doctor.finding import Finding
from verl_precision.doctor.resolver import MODEL, DtypeResolver


def ranks(resolver: DtypeResolver) -> dict[str, Any]:
    """Return the ranks that are set for the trained models, by their keys."""
    keys = [f"{MODEL}.lora_rank", f"{MODEL}.lora.rank", *(["critic.model.lora_rank"] * resolver.uses("critic"))]
    nodes = {key: select(resolver.config.values, key.rpartition(".")[0]) for key in keys}
    return {key: node[name] for key, node in nodes.items() if (name := key.rpartition(".")[2]) in (node or {})}


def refused_rank(resolver: DtypeResolver) -> str | None:
    """Return the line on a rank with which no worker starts; None without one."""
    for key, rank in ranks(resolver).items():
        if not isinstance(rank, int):
            return f"TypeError: {key}={rank} must be a whole number, 0 to train without adapters"
    return None


def lora_findings(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield ranks below 0, which verl takes for 0."""
    for key, rank in ranks(resolver).items():
        if rank < 0:
            effect = "makes no adapters: all weights are trained"
            yield Finding(key, rank, effect, f"{key}=0, or a rank of at least 1", applies=False)
