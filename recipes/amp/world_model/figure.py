"""Plot a run: predicted and true observations, and the training curves."""

from pathlib import Path
from typing import Any

from recipes.amp.world_model.model import WorldModel
from recipes.amp.world_model.trajectories import Trajectories

TRAJECTORIES, COMPONENTS = 3, 4  # of the observation; drawn at most


def plot_predictions(
    model: WorldModel, data: Trajectories, context: int, rows: list[dict[str, Any]], title: str, path: Path
):
    """Plot true and predicted observations of the longest held-out trajectories, and below them the training."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    longest = data.valid.sum(1).argsort(descending=True, stable=True)[:TRAJECTORIES]
    some = data.at(longest)
    predicted = model.predict(some.observations, some.actions, context).observations
    components = min(some.observations.shape[-1], COMPONENTS)
    figure = plt.figure(figsize=(4.2 * len(longest), 1.7 * components + 2.8), layout="constrained")
    figure.suptitle(title)
    top, bottom = figure.subfigures(2, 1, height_ratios=[1.7 * components, 2.8])
    panels = top.subplots(components, len(longest), sharex=True, sharey="row", squeeze=False)
    for column in range(len(longest)):
        steps = int(some.valid[column].sum())
        for component in range(components):
            panel = panels[component][column]
            panel.plot(some.observations[column, : steps + 1, component], "k", lw=1, label="true")
            panel.plot(range(1, steps + 1), predicted[column, :steps, component], "C1--", label="predicted")
            panel.axvline(context - 1, color="grey", ls=":", label="last one given")
        panels[0][column].set_title(f"held-out trajectory {longest[column]}", fontsize=9)
        panels[-1][column].set_xlabel("step")
    for component in range(components):
        panels[component][0].set_ylabel(f"observation {component}")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper right", ncols=3, fontsize=8)
    loss, error, overflow = bottom.subplots(1, 3)
    epochs = [row["epoch"] for row in rows]
    loss.plot(epochs, [row["train_loss"] for row in rows])
    loss.set(title="training loss", xlabel="epoch", yscale="log")
    for name, style in (("model", "C1-"), ("last_value", "C2:"), ("mean", "C3:")):
        error.plot(epochs, [row[f"error/{name}"] for row in rows], style, label=name.replace("_", " "))
    error.set(title="held-out open-loop error (std)", xlabel="epoch", ylim=(0, None))
    error.legend(fontsize=7)
    counts = [row["overflow_steps"] for row in rows]
    overflow.bar(epochs, counts, color="C3")
    overflow.set(title=f"overflows ({rows[-1]['effective_dtype']})", xlabel="epoch", ylim=(0, 1.1 * max(1, *counts)))
    for axis in (loss.xaxis, error.xaxis, overflow.xaxis, overflow.yaxis):
        axis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
