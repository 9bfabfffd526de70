"""Plot the curves of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

Curve = tuple[Sequence[float], Sequence[float | None]]  # x, y


def plot_panels(panels: Mapping[str, Mapping[str, Curve]], title: str, path: Path) -> None:
    """Plot a figure of panels, at most three in a row: ``{panel's title: {line's label: (x, y)}}``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.5 * columns, 3.2 * rows), squeeze=False, layout="constrained")
    for axis, (name, curves) in zip(axes.flat, panels.items(), strict=False):
        for label, (x, y) in curves.items():
            axis.plot(x, [float("nan") if value is None else value for value in y], label=label)
        axis.set_title(name, fontsize=10)
        axis.legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)
