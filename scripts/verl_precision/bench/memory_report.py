"""Report a memory plan as a table."""

from verl_precision.bench.memory_plan import GIB, OUTSIDE_TENSORS, MemoryPlan, peak

PARTS = ("weights", "Adam", "gradients", "gathered", "reduced", "activations", "logits")
PARTS += ("rollout's weights", "KV cache")


def table(title: str, plan: MemoryPlan) -> str:
    """Return the model and the machines, the parts of each moment in GiB, and whether the job fits.

    An asterisk marks the largest sum; parts that are zero throughout are left out.
    """
    shown = [part for part in PARTS if any(parts.get(part) for parts in plan.moments.values())]
    largest, _ = peak(plan.moments)
    rows = [["GiB of each worker", *shown, "sum"]]
    for name, parts in plan.moments.items():
        cells = [f"{parts.get(part, 0) / GIB:.1f}" if parts.get(part) else "" for part in shown]
        rows.append([name, *cells, f"{sum(parts.values()) / GIB:.1f}{' *' if name == largest else ''}"])
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows]
    return "\n".join([*heading(title, plan), "", *lines, "", *verdict(plan)])


def heading(title: str, plan: MemoryPlan) -> list[str]:
    """Return the lines that name the model and the machines."""
    experts = f", {plan.shape.experts} experts, {plan.shape.active} of them active" if plan.shape.experts else ""
    gpus = "" if plan.on_cpu else f"{plan.nodes} nodes of {plan.gpus} GPUs of "
    return [
        f"{title}: {plan.model}, {plan.shape.total / 1e9:.2f} G parameters{experts}",
        f"{gpus or 'a machine of '}{plan.memory / GIB:.0f} GiB, micro-batches of {plan.tokens:,} tokens a worker",
    ]


def verdict(plan: MemoryPlan) -> list[str]:
    """Return the lines below the table: whether the job fits, and the size of the KV cache."""
    fit = f"{'fits' if plan.fits else 'DOES NOT FIT'} into {plan.memory / GIB:.0f}"
    if plan.on_cpu:
        processes = ", ".join(f"{name} {size / GIB:.1f}" for name, size in plan.host_memory.items())
        return [f"the job: {sum(plan.host_memory.values()) / GIB:.1f} GiB ({processes}): {fit}"]
    moment, size = peak(plan.moments)
    tokens, per_token = plan.rollout.cache // plan.rollout.cache_per_token, plan.rollout.cache_per_token / 1024
    return [
        f"{size / GIB:.1f} GiB of tensors at most ({moment}) and {OUTSIDE_TENSORS / GIB:.0f} outside tensors: {fit}",
        f"KV cache: {tokens:,} tokens a rollout server at most, {per_token:.0f} KiB each on a GPU",
    ]
