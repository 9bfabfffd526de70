"""Plot the curves of a run over its steps."""

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


def plot_curves(data: list[dict], title: str, file: Path) -> None:
    """Plot reward, mismatch, loss scale, response length, and the metrics of ``FLOWRL`` that exist into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    data = training_rows(data)
    curves = [
        ("reward", [REWARD], "linear"),
        ("mismatch, k3_kl", [K3_KL], "log"),
        ("loss scale, × skipped", [LOSS_SCALE, CRITIC_LOSS_SCALE], "log"),
        ("response length", ["response_length/mean"], "linear"),
        *((metric, [metric], "linear") for metric in FLOWRL.values() if metric_values(data, metric)),
    ]
    rows = -(-len(curves) // 2)  # of two figures each
    figure, axes = plt.subplots(rows, 2, figsize=(10, 3 * rows), sharex=True, layout="constrained")
    for axis, (heading, names, scale) in zip(axes.flat, curves, strict=False):
        for name, style in zip(names, ("-", "--"), strict=False):
            reported = [row for row in data if metric_values([row], name)]
            axis.plot([row["step"] for row in reported], metric_values(reported, name), style, color="C0")
        axis.set(title=heading, yscale=scale)
    loss_scale, length = axes.flat[2:4]
    loss_scale.set_yscale("log", base=2)
    skipped = [row for row in data if row["data"].get(SKIPPED)]
    loss_scale.plot([row["step"] for row in skipped], metric_values(skipped, LOSS_SCALE), "x", color="tab:red")
    low, high = length.get_ylim()
    length.set_ylim(min(low, high - 2), max(high, low + 2))  # at least 2 tokens: a flat length is no noise
    for axis in axes[-1]:
        axis.set_xlabel("step")
        axis.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title)
    figure.savefig(file, dpi=120)
    plt.close(figure)
