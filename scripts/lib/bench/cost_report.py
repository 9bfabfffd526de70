"""Report the cost of each regime as a line on the screen, CSV, Markdown and a figure."""

import csv
import importlib.metadata
import platform
import statistics
from dataclasses import asdict, dataclass, fields
from pathlib import Path

REGIMES = ("bf16", "fp16", "fp16 upstream", "fp32")
NEEDED = {"norm": 4, "step": 28}  # bytes per parameter: read g; read p, g, m, v and write p, m, v; all in fp32


@dataclass(frozen=True)
class RegimeTiming:
    """The time of one regime in one configuration; a row of the CSV.

    Args:
        what: "optimizer step" or "training step".
        parameters_m: parameters in millions.
        seconds: median over ``rounds``.
        ratio: median of the ratio to bf16 in the same round.
        peak_gib: peak memory above the weights, on a GPU.
    """

    what: str
    optimizer: str
    parameters_m: float
    ranks: int
    regime: str
    seconds: float
    ratio: float
    rounds: int
    peak_gib: float | None = None


def timings_of(
    times: dict[str, list[float]], peaks: dict[str, float] | None = None, **configuration
) -> list[RegimeTiming]:
    """Summarize the seconds of each regime by round."""
    ratios = {name: [t / base for t, base in zip(times[name], times["bf16"], strict=True)] for name in times}
    return [
        RegimeTiming(
            **configuration,
            regime=name,
            seconds=statistics.median(times[name]),
            ratio=statistics.median(ratios[name]),
            rounds=len(times[name]),
            peak_gib=peaks and peaks[name],
        )
        for name in times
    ]


def one_line(rows: list[RegimeTiming]) -> str:
    """Return the timings of one configuration as a line for the screen."""
    first = rows[0]
    regimes = ", ".join(f"{row.regime} {row.ratio:.3f}" for row in rows[1:])
    where = f"{first.what}, {first.optimizer}, {first.parameters_m:g} M, {first.ranks} rank(s)"
    return f"{where}: bf16 {first.seconds * 1e3:.1f} ms; × bf16: {regimes}; {first.rounds} rounds"


def write(
    rows: list[RegimeTiming], traffic: dict[tuple[str, str], float], device: str, machine: str, out: Path
) -> list[Path]:
    """Write ``cost-DEVICE.csv``, ``.md`` and ``.png`` and return their paths.

    Args:
        traffic: bytes per parameter, by optimizer and regime.
        machine: its name, for titles.
    """
    out.mkdir(parents=True, exist_ok=True)
    files = [out / f"cost-{device}.{suffix}" for suffix in ("csv", "md", "png")]
    with files[0].open("w", newline="") as file:
        table = csv.DictWriter(file, [field.name for field in fields(RegimeTiming)])
        table.writeheader()
        table.writerows(asdict(row) for row in rows)
    files[1].write_text(markdown(rows, traffic, machine))
    plot(rows, machine, files[2])
    return files


def markdown(rows: list[RegimeTiming], traffic: dict[tuple[str, str], float], machine: str) -> str:
    versions = {name: importlib.metadata.version(name) for name in ("torch", "verl")}
    lines = [
        "# What fp16 costs",
        "",
        f"Measured by `make bench` on {machine}; Python {platform.python_version()}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + ".",
        "",
        "Ratios are to bf16 in the same round, the median over the rounds; below 1 is faster. fp32 runs bf16's code:",
        "its distance from 1 is the noise. `fp16 upstream` is verl's sequence (unscale, clip, step, update); with",
        "fused AdamW it takes torch's `GradScaler`, because `ShardedGradScaler`, which verl uses, raises there.",
        "",
    ]
    for what in dict.fromkeys(row.what for row in rows):
        of = [row for row in rows if row.what == what]
        regimes = list(dict.fromkeys(row.regime for row in of))
        memory = "" if of[0].peak_gib is None else " peak GiB above the weights |"
        lines += [
            f"## The {what}",
            "",
            f"| optimizer | M parameters | ranks | bf16 ms | {' | '.join(regimes[1:])} | rounds |{memory}",
        ]
        lines += ["|" + "---|" * (5 + len(regimes) - 1 + bool(memory))]
        configurations = dict.fromkeys((row.optimizer, row.parameters_m, row.ranks) for row in of)
        for configuration in configurations:
            same = [row for row in of if (row.optimizer, row.parameters_m, row.ranks) == configuration]
            optimizer, size, ranks = configuration
            cells = [
                optimizer,
                f"{size:g}",
                ranks,
                f"{same[0].seconds * 1e3:.1f}",
                *(f"{r.ratio:.3f}" for r in same[1:]),
            ]
            cells += [same[0].rounds]
            if memory:
                cells += [", ".join(f"{row.regime} {row.peak_gib:.2f}" for row in same)]
            lines += ["| " + " | ".join(map(str, cells)) + " |"]
        lines += [""]
    if not any(row.what == "training step" for row in rows):
        lines += ["## The training step", "", "Not measured: no CUDA device.", ""]
    lines += [
        "## Bytes moved a parameter",
        "",
        "Counted over the operators of a step, every tensor that one reads and every one that it writes. Needed are "
        f"{NEEDED['norm']} for the norm and {NEEDED['step']} for one pass of AdamW: {sum(NEEDED.values())}.",
        "",
        f"| optimizer | {' | '.join(REGIMES)} |",
        "|" + "---|" * (len(REGIMES) + 1),
    ]
    for optimizer in dict.fromkeys(name for name, _ in traffic):
        lines += [f"| {optimizer} | " + " | ".join(f"{traffic[optimizer, regime]:.1f}" for regime in REGIMES) + " |"]
    return "\n".join(lines) + "\n"


def plot(rows: list[RegimeTiming], title: str, file: Path) -> None:
    """Draw the ratios to bf16 over the sizes: a panel per optimizer, a line per regime, dashed for two ranks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [row for row in rows if row.what == "optimizer step"]
    optimizers = list(dict.fromkeys(row.optimizer for row in steps))
    figure, axes = plt.subplots(1, len(optimizers), figsize=(10, 4), sharey=True, layout="constrained", squeeze=False)
    colours = {"fp16": "tab:blue", "fp16 upstream": "tab:red", "fp32": "tab:grey"}
    for axis, optimizer in zip(axes[0], optimizers, strict=True):
        axis.axhline(1.0, color="black", linewidth=0.8)
        for regime, colour in colours.items():
            for ranks, style in zip(sorted({row.ranks for row in steps}), ("o-", "s--"), strict=False):
                line = [r for r in steps if (r.optimizer, r.regime, r.ranks) == (optimizer, regime, ranks)]
                label = f"{regime}, {ranks} rank{'s' * (ranks > 1)}"
                axis.plot([r.parameters_m for r in line], [r.ratio for r in line], style, color=colour, label=label)
        axis.set(title=optimizer, xlabel="million parameters", xscale="log")
        axis.set_xticks(
            sorted({row.parameters_m for row in steps}), [f"{s:g}" for s in sorted({r.parameters_m for r in steps})]
        )
        axis.minorticks_off()
    axes[0, 0].set_ylabel("time of the optimizer step, × bf16")
    axes[0, 0].legend(fontsize="small", ncols=2)
    figure.suptitle(title)
    figure.savefig(file, dpi=120)
    plt.close(figure)
