"""Draw the outcomes of the recall task: two regimes over the steps, and all runs over T·k3."""

from collections.abc import Sequence
from pathlib import Path

from verl_precision.collapse.outcomes import RecallOutcome
from verl_precision.report.figures import COLOURS, STYLE, centre, drawable
from verl_precision.sequence_weights import UNTRUNCATED

MARKERS = "osD^vP*Xh"
LEFT = 1e-3  # nats: a smaller T·k3 has no effect and would stretch the axis


def draw_curves(outcomes: Sequence[RecallOutcome], file: Path) -> None:
    """Draw accuracy and k3 over the steps: a thin line per run, a thick one for a regime's mean."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        for name in dict.fromkeys(each.run.precision for each in outcomes):
            members = [each for each in outcomes if each.run.precision == name]
            for axis, series, scale in ((left, "accuracy", "linear"), (right, "k3", "log")):
                lines = [getattr(each, series) for each in members]
                for line in lines:
                    axis.plot(range(1, len(line) + 1), line, color=COLOURS[name], linewidth=0.8, alpha=0.45)
                means = {}
                for step, values in enumerate(zip(*lines, strict=False), 1):  # of common steps
                    if shown := [value for value in values if drawable(value, scale)]:
                        means[step] = centre(shown, scale)[0]
                axis.plot(list(means), list(means.values()), color=COLOURS[name], linewidth=2.0, label=name)
        left.set(ylabel="accuracy", ylim=(0, 1))
        right.set(ylabel="k3, nats per token", yscale="log")
        for axis in (left, right):
            axis.set_xlabel("training step")
            axis.xaxis.get_major_locator().set_params(integer=True)
        left.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2)
        figure.savefig(file, dpi=120)


def draw_threshold(outcomes: Sequence[RecallOutcome], file: Path) -> None:
    """Draw the accuracy of the last steps over T·k3, one point per run: colors for regimes, markers for the weights.

    Runs with a T·k3 below ``LEFT``, which is rounding, are drawn at the left edge.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 3.6), layout="constrained")
        axis = figure.add_subplot()
        axis.axvspan(*UNTRUNCATED, color="#eeeeee", linewidth=0)
        for marker, weighting in zip(MARKERS, dict.fromkeys(each.run.weighting for each in outcomes), strict=False):
            axis.plot([], [], marker, color="#444444", fillstyle="none", label=weighting)
            for each in (each for each in outcomes if each.run.weighting == weighting):
                across = max(each.total_k3, LEFT)
                axis.plot(across, each.last, marker, color=COLOURS[each.run.precision], fillstyle="none")
        for name in dict.fromkeys(each.run.precision for each in outcomes):
            axis.plot([], [], color=COLOURS[name], linewidth=4, label=name)
        axis.set(xscale="log", xlabel=f"T·k3 at the first step, nats per answer; below {LEFT:g} at the left edge")
        axis.set(ylabel="accuracy, last ten steps", ylim=(-0.03, 1))
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
        figure.savefig(file, dpi=120)
