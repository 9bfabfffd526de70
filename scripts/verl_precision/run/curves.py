"""Plot the curves of runs over their steps."""

from pathlib import Path

from verl_precision.facts.metrics import (
    CRITIC_LOSS_SCALE,
    FLOWRL,
    K3_KL,
    LOSS_SCALE,
    REWARD,
    SKIPPED,
    metric_values,
    training_rows,
)


def plot_curves(several: list[tuple[str, list[dict]]], title: str, file: Path) -> None:
    """Plot reward, mismatch, loss scale, response length, and the metrics of ``FLOWRL`` that exist into a PNG.

    Args:
        several: each run's label and rows; runs of one label, as with other seeds, have one colour.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    several = [(label, training_rows(data)) for label, data in several]
    curves = [
        ("reward", [REWARD], "linear"),
        ("mismatch, k3_kl", [K3_KL], "log"),
        ("loss scale, × skipped", [LOSS_SCALE, CRITIC_LOSS_SCALE], "log"),
        ("response length", ["response_length/mean"], "linear"),
    ]
    reported = [metric for metric in FLOWRL.values() if any(metric_values(data, metric) for _, data in several)]
    curves += [(metric, [metric], "linear") for metric in reported]
    colours = {label: f"C{index}" for index, label in enumerate(dict.fromkeys(label for label, _ in several))}
    size = (-(-len(curves) // 2), 2)
    figure, axes = plt.subplots(*size, figsize=(10, 3 * size[0]), sharex=True, layout="constrained")
    for axis, (heading, names, scale) in zip(axes.flat, curves, strict=False):
        for label, data in several:
            for name, style in zip(names, ("-", "--"), strict=False):
                having = [row for row in data if metric_values([row], name)]
                axis.plot([row["step"] for row in having], metric_values(having, name), style, color=colours[label])
        axis.set(title=heading, yscale=scale)
    loss_scale, length = axes.flat[2:4]
    loss_scale.set_yscale("log", base=2)
    for _, data in several:
        skipped = [row for row in data if row["data"].get(SKIPPED)]
        loss_scale.plot([row["step"] for row in skipped], metric_values(skipped, LOSS_SCALE), "x", color="tab:red")
    low, high = length.get_ylim()
    length.set_ylim(min(low, high - 2), max(high, low + 2))  # tokens: or a flat length would look like noise
    for axis in axes[-1]:
        axis.set_xlabel("step")
        axis.xaxis.get_major_locator().set_params(integer=True)
    if len(colours) > 1:
        handles = [plt.Line2D([], [], color=colour) for colour in colours.values()]
        axes.flat[0].legend(handles, colours, loc="lower right")
    figure.suptitle(title)
    figure.savefig(file, dpi=120)
    plt.close(figure)
