"""Plot the figure of bench_amp: speed-up and saved memory of each arm."""

from pathlib import Path

from verl_precision.bench.amp_measure import ArmResult, arms_in, scenarios_in
from verl_precision.bench.amp_ratio import memory_of, ratio, seconds_of
from verl_precision.bench.amp_scenarios import BASE, TF32
from verl_precision.format import significant


def plot_ratios(rows: list[ArmResult], title: str, file: Path) -> None:
    """Plot speed-up and memory by scenario and arm: the median, and the range over the repeats."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names, colours = scenarios_in(rows), {"fp16": "tab:blue", "bf16": "tab:orange", TF32: "tab:green"}
    colours = {arm: colour for arm, colour in colours.items() if arm in arms_in(rows)}
    apart = 0.8 / len(colours)
    figure, (speed, memory) = plt.subplots(
        1, 2, figsize=(10, 1.8 + 0.4 * len(colours) * len(names)), sharey=True, layout="constrained"
    )
    for number, (arm, colour) in enumerate(colours.items()):
        for place, name in enumerate(names):
            y = place + apart * (number - (len(colours) - 1) / 2)
            beside = {"textcoords": "offset points", "va": "center", "color": colour}
            gain, less = ratio(rows, name, arm, seconds_of), ratio(rows, name, arm, memory_of)
            if gain.reason:
                for axis, x in ((speed, 1.0), (memory, 0.0)):
                    axis.annotate(f"{arm}: n/a", (x, y), xytext=(6, 0), **beside)
                continue
            ends = [[gain.median - gain.low], [gain.high - gain.median]]
            speed.errorbar(gain.median, y, xerr=ends, fmt="o", color=colour, capsize=4)
            speed.annotate(
                f"{arm}: {significant(gain.median)}×", (gain.median, y), xytext=(0, 10), ha="center", **beside
            )
            percent = 100 * (1 - 1 / less.median)
            memory.barh(y, percent, height=0.85 * apart, color=colour)
            memory.annotate(f"{arm}: {less.less}", (max(percent, 0.0), y), xytext=(8, 0), **beside)
    speed.axvline(1.0, color="black", linewidth=0.8)
    memory.axvline(0.0, color="black", linewidth=0.8)
    speed.set(xscale="log", xlabel=f"speed-up: seconds of {BASE} / seconds\nright of 1 is faster")
    memory.set(xlabel=f"memory saved, % of {BASE}'s")
    speed.margins(x=0.2, y=0.12)
    low, high = speed.get_xlim()
    speed.set_xlim(min(low, 0.8), max(high, 1.25))
    memory.set_xlim(min(memory.get_xlim()[0], 0.0), max(memory.get_xlim()[1] * 1.3, 60.0))
    ticks = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
    low, high = speed.get_xlim()
    speed.set_xticks([tick for tick in ticks if low <= tick <= high])
    speed.xaxis.set_major_formatter("{x:g}")
    speed.minorticks_off()
    speed.set_yticks(range(len(names)), names)
    speed.invert_yaxis()
    figure.suptitle(f"Training in 16 bits against {BASE} on {title}: median and range of the repeats")
    figure.savefig(file, dpi=120)
    plt.close(figure)
