"""Report a memory plan as a table for the screen and for Markdown, and as a figure."""

from pathlib import Path

from verl_precision.bench.memory_plan import BESIDE_TENSORS, GIB, MemoryPlan, peak

PARTS = ("weights", "Adam", "gradients", "gathered", "reduced", "activations", "logits")
PARTS += ("rollout's weights", "KV cache")


def table(title: str, plan: MemoryPlan, markdown: bool = False) -> str:
    """Return one line per moment, its parts and their sum in GiB; the largest sum is marked with an asterisk."""
    head = heading(title, plan)
    lines = markdown_rows(rows(plan)) if markdown else plain_rows(rows(plan))
    return "\n".join([*head, "", *lines, "", *verdict(plan)])


def heading(title: str, plan: MemoryPlan) -> list[str]:
    """Return the lines that name the model and the machines."""
    experts = f", {plan.shape.experts} experts, {plan.shape.active} of them active" if plan.shape.experts else ""
    machines = (
        f"a machine of {plan.memory / GIB:.0f} GiB"
        if plan.device == "cpu"
        else f"{plan.nodes} nodes of {plan.gpus} GPUs of {plan.memory / GIB:.0f} GiB"
    )
    return [
        f"{title}: {plan.model}, {plan.shape.total / 1e9:.2f} G parameters{experts}",
        f"{machines}, micro-batches of {plan.tokens:,} tokens a worker",
    ]


def rows(plan: MemoryPlan) -> list[list[str]]:
    """Return the header and a row per moment, without the parts that are zero throughout."""
    shown = [part for part in PARTS if any(parts.get(part) for parts in plan.moments.values())]
    largest, _ = peak(plan.moments)
    result = [["GiB of each worker", *shown, "sum"]]
    for name, parts in plan.moments.items():
        cells = [f"{parts.get(part, 0) / GIB:.1f}" if parts.get(part) else "" for part in shown]
        result.append([name, *cells, f"{sum(parts.values()) / GIB:.1f}{' *' if name == largest else ''}"])
    return result


def aligned(cells: list[list[str]]) -> list[list[str]]:
    """Return the rows with cells of equal width per column, the first column aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    align = lambda row: [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
    return [align(row) for row in cells]


def plain_rows(cells: list[list[str]]) -> list[str]:
    return ["  ".join(row) for row in aligned(cells)]


def markdown_rows(cells: list[list[str]]) -> list[str]:
    header, *body = [f"| {' | '.join(row)} |" for row in aligned(cells)]
    return [header, "| --- " + "| ---: " * (len(cells[0]) - 1) + "|", *body]


def verdict(plan: MemoryPlan) -> list[str]:
    """Return the lines below the table: whether the job fits, and the size of the KV cache."""
    fit = f"{'fits' if plan.fits else 'DOES NOT FIT'} into {plan.memory / GIB:.0f}"
    if plan.device == "cpu":
        processes = ", ".join(f"{name} {size / GIB:.1f}" for name, size in plan.host_memory.items())
        return [f"the job: {sum(plan.host_memory.values()) / GIB:.1f} GiB ({processes}): {fit}"]
    moment, size = peak(plan.moments)
    cache, per_token = plan.rollout.cache // plan.rollout.cache_per_token, plan.rollout.cache_per_token / 1024
    return [
        f"{size / GIB:.1f} GiB of tensors at most ({moment}) and {BESIDE_TENSORS / GIB:.0f} beside them: {fit}",
        f"KV cache: {cache:,} tokens a rollout server at most, {per_token:.0f} KiB each on a GPU",
    ]


def plot(plans: dict[str, MemoryPlan], file: Path) -> None:
    """Draw the moments of each plan as stacked bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (11, 0.6 + sum(0.6 + 0.24 * len(plan.moments) for plan in plans.values()))
    figure, axes = plt.subplots(
        len(plans),
        figsize=size,
        layout="constrained",
        squeeze=False,
        sharex=True,
        gridspec_kw={"height_ratios": [2 + len(plan.moments) for plan in plans.values()]},
    )
    for axis, (title, plan) in zip(axes[:, 0], plans.items(), strict=True):
        names, left = list(plan.moments), [0.0] * len(plan.moments)
        for colour, part in enumerate(PARTS):
            sizes = [plan.moments[name].get(part, 0) / GIB for name in names]
            if any(sizes):
                axis.barh(names, sizes, left=left, color=f"C{colour}", label=part, height=0.8)
            left = [start + more for start, more in zip(left, sizes, strict=True)]
        axis.barh(names, BESIDE_TENSORS / GIB, left=left, color="lightgrey", label="beside tensors", height=0.8)
        axis.axvline(plan.memory / GIB, color="black", linewidth=1)
        axis.invert_yaxis()
        axis.set_title(f"{title}: {plan.model}, {plan.nodes} × {plan.gpus} GPUs", fontsize=10, loc="left")
        axis.tick_params(labelsize=8)
    axes[-1, 0].set_xlabel("GiB on each GPU")
    legends = [axis.get_legend_handles_labels() for axis in axes[:, 0]]
    handles = {label: handle for legend in legends for handle, label in zip(*legend, strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8)
    figure.savefig(file, dpi=110)
    plt.close(figure)
