"""A report on several runs: aligned by step, as a page that works offline, figures, tables, and what it was made from.

``index.html`` and ``figures/``; ``table.csv`` and ``table.md`` by label, ``runs.csv`` by run, ``verdicts.csv``; and in
``runs/`` the runs themselves, cut down to what a report reads: a report on those is the same, number for number.
"""

import csv
import io
import json
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev

from lib.errors import Refused
from lib.files import write_json
from lib.format import number
from lib.report import catalog as measures
from lib.report import readers as sources
from lib.report.catalog import OUTCOMES, SERIES, Outcome, Series, Spread, Steps, Verdict
from lib.report.readers import RECORD, Run
from lib.run.checks import check_room
from lib.run.metrics import LOSS_SCALE, REWARD, SKIPPED

THRESHOLD = 0.95  # the sanity test of arXiv 2510.26788 is passed above 95 % training accuracy
SETTINGS = "report.json"
TEMPLATE = "page.html.jinja"
# Okabe and Ito's colours, which colour-blind readers tell apart; the regimes keep theirs from report to report.
COLOURS = {"fp16": "#0072B2", "bf16": "#D55E00", "bf16_train_fp16_infer": "#009E73", "fp32": "#4D4D4D"}
OTHERS = ("#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7B4FA3", "#1B7F79")
NONE = "–"
BESIDE = (
    "Runs of OAT beside runs of verl: a step of verl's is a batch of data.train_batch_size prompts, what one of OAT's "
    "is stands below. OAT's gradient norm is the largest of a step's updates and its entropy that of the last "
    "micro-batch, where verl has means."
)
LABEL = 28  # letters of a label in a figure


@dataclass(frozen=True)
class Entry:
    """A run in a report.

    Attributes:
        id: LABEL-seedN, or LABEL-N where the seed is not recorded; the folder's name in ``runs/``.
        shared: its metrics at the steps that all runs have.
        departure: why it does not count as a run of the regime that it names, "" where it does.
    """

    id: str
    run: Run
    shared: Steps
    outcomes: dict[str, float | None]
    passed: int | None
    collapsed: int | None
    departure: str


@dataclass(frozen=True)
class Report:
    """All that a report says.

    Attributes:
        labels: those that have runs; ``without`` those that should and have none.
        common: the steps that all runs have.
        notes: what a reader must know of the input.
        spreads: by label and outcome.
        departures: by label the first run's that does not count as one of its regime, "" where all do.
        nospeed: why no speed may be claimed for any run, "" where it may; ``unclaimed`` by label that or the departure.
        differs: of the composed configuration the keys in which runs differ, by run; None where it is not recorded.
    """

    title: str
    threshold: float
    labels: tuple[str, ...]
    without: tuple[str, ...]
    entries: tuple[Entry, ...]
    common: tuple[int, ...]
    notes: tuple[str, ...]
    spreads: dict[str, dict[str, Spread]]
    departures: dict[str, str]
    nospeed: str
    unclaimed: dict[str, str]
    verdicts: tuple[Verdict, ...]
    differs: dict[str, dict[str, str | None]]

    def of(self, label: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.run.label == label]


def build(
    several: Sequence[Run], threshold: float, title: str, expected: Sequence[str] = (), nospeed: str = ""
) -> Report:
    """A report on runs.

    Args:
        threshold: the reward that the moving mean has to exceed.
        expected: labels that should have runs; those without are named.
        nospeed: why no speed may be claimed for any run, as of a machine that others used too.

    Raises:
        Refused: the runs have no step in common.
    """
    labels = tuple(dict.fromkeys(run.label for run in several))
    ordered = [run for label in labels for run in several if run.label == label]
    common = sorted(set.intersection(*(set(run.steps) for run in ordered)))
    if not common:
        spans = ", ".join(f"{run.label}={run.name} has {span(run.steps)}" for run in ordered)
        raise Refused(f"the runs have no step in common: {spans}")
    entries = []
    for name, run in zip(ids(ordered), ordered, strict=True):
        shared = {step: run.steps[step] for step in common}
        taken = measures.outcomes(shared)
        passed, collapsed = measures.passed(run.steps, threshold), measures.collapsed(run.steps)
        entries.append(Entry(name, run, shared, taken, passed, collapsed, sources.departure(run)))
    by_label = {label: [entry for entry in entries if entry.run.label == label] for label in labels}
    spreads = {
        label: {of.name: spread(members, [entry.outcomes[of.name] for entry in members]) for of in OUTCOMES}
        for label, members in by_label.items()
    }
    departures = {
        label: next((f"{entry.id}: {entry.departure}" for entry in members if entry.departure), "")
        for label, members in by_label.items()
    }
    unclaimed = {label: departure or nospeed for label, departure in departures.items()}
    without = tuple(label for label in dict.fromkeys(expected) if label not in labels)
    return Report(
        title=title,
        threshold=threshold,
        labels=labels,
        without=without,
        entries=tuple(entries),
        common=tuple(common),
        notes=tuple(notes(entries, by_label, common, without, nospeed)),
        spreads=spreads,
        departures=departures,
        nospeed=nospeed,
        unclaimed=unclaimed,
        verdicts=tuple(measures.verdicts(spreads, unclaimed)),
        differs=differences(entries),
    )


def ids(ordered: list[Run]) -> list[str]:
    """A name for each run, none twice."""
    names, seen = [], Counter()
    for run in ordered:
        seen[run.label] += 1
        name = f"{run.label}-{seen[run.label]}" if run.seed is None else f"{run.label}-seed{run.seed}"
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return names


def spread(members: Sequence[Entry], values: Sequence[float | None]) -> Spread:
    """The values of some runs, None of one that has none."""
    found = [(entry.run.seed, value) for entry, value in zip(members, values, strict=True) if value is not None]
    seeds = [seed for seed, _ in found]
    different = len(set(seeds) - {None}) + seeds.count(None)
    return Spread(tuple(value for _, value in found), len(members), different)


def seeds(members: Sequence[Entry]) -> int:
    """How many different seeds the runs of a label have."""
    return spread(members, [0.0] * len(members)).seeds


def span(steps: Iterable[int]) -> str:
    """``steps 1 to 32``, and how many there are where some between are missing."""
    found = sorted(steps)
    missing = found[-1] - found[0] + 1 - len(found)
    text = f"steps {found[0]} to {found[-1]}" if len(found) > 1 else f"step {found[0]}"
    return f"{text} ({len(found)} of them)" if missing else text


def notes(
    entries: list[Entry], by_label: dict[str, list[Entry]], common: list[int], without: tuple[str, ...], nospeed: str
) -> list[str]:
    """What a reader must know of the input: what is missing, cut off, doubtful."""
    said = [f"{label} has no run yet: it is not in the tables." for label in without]
    if nospeed:
        said.append(f"No speed is claimed for any run: {nospeed}.")
    if len(entries) == 1:
        said.append("One run only: there is no spread, and nothing to compare it with.")
    lengths = {len(entry.run.steps) for entry in entries}
    if lengths != {len(common)}:
        longer = ", ".join(
            f"{entry.id} {span(entry.run.steps)}" for entry in entries if len(entry.run.steps) > len(common)
        )
        said.append(
            f"The runs have different steps: they are compared on the common ones, {span(common)}. More have {longer}. "
            "Passing and collapse are looked for in all steps of a run."
        )
    if len({entry.run.framework for entry in entries}) > 1:
        said.append(BESIDE)
    if len(common) < measures.WINDOW:
        said.append(f"{len(common)} common steps are fewer than the {measures.WINDOW} of a moving mean.")
    few = [f"{label} ({seeds(of)})" for label, of in by_label.items() if seeds(of) < measures.LEAST_SEEDS]
    if few and len(by_label) > 1:
        said.append(f"No verdict on {', '.join(few)}: {measures.LEAST_SEEDS} different seeds are needed.")
    differing: dict[str, list[str]] = {}
    for label, members in by_label.items():
        twice = [seed for seed, count in Counter(entry.run.seed for entry in members).items() if count > 1]
        if repeated := [str(seed) for seed in twice if seed is not None]:
            which = f"{label} has several runs of seed {', '.join(repeated)}"
            said.append(f"{which}: each counts in means, as one seed for verdicts.")
        if inside := differences(members):
            differing.setdefault(", ".join(list(inside)[:4]) + ", …" * (len(inside) > 4), []).append(label)
    for keys, of in differing.items():
        said.append(f"Within {', '.join(of)} the runs differ in more than their seed: {keys}.")
    below = [label for label, members in by_label.items() if any(is_noise(entry) for entry in members)]
    if below:
        said.append(
            f"Of {', '.join(below)} a mean or median of k3 is not above {measures.K3_NOISE:g}: that is the rounding of "
            "verl's estimate, which may even come out negative. It is not compared."
        )
    for entry in entries:
        run = entry.run
        if run.finished is False:
            said.append(f"{entry.id} is not finished: {len(run.steps)} of {run.run['steps']} steps.")
        if entry.departure:
            said.append(f"{entry.id}: {entry.departure}; no speed is claimed for it.")
        said += [f"{entry.id}: {note}." for note in run.notes]
    return said


def is_noise(entry: Entry) -> bool:
    found = [(of, entry.outcomes[of.name]) for of in OUTCOMES if of.noise]
    return any(value is not None and value <= of.noise for of, value in found)


def differences(entries: Sequence[Entry]) -> dict[str, dict[str, str | None]]:
    """Of the recorded configurations the keys in which they differ; by run's id the value, None where it has none.

    Those of verl are compared with one another and those of OAT: no key of one is one of the other's.
    """
    found = {}
    for framework in dict.fromkeys(entry.run.framework for entry in entries):
        alike = [entry for entry in entries if entry.run.config and entry.run.framework == framework]
        if len({entry.run.config_hash for entry in alike}) < 2:
            continue  # a kept run has a part of its configuration alone, and the hash of all of it
        configs = {entry.id: entry.run.config for entry in alike}
        keys = dict.fromkeys(key for config in configs.values() for key in config)
        rows = {
            key: {name: json.dumps(config[key]) if key in config else None for name, config in configs.items()}
            for key in keys
        }
        found |= {key: values for key, values in rows.items() if len(set(values.values())) > 1}
    return found


# Writing


def write(
    pairs: Sequence[tuple[str, Path]],
    out: Path,
    threshold: float = THRESHOLD,
    title: str = "Runs compared",
    expected: Sequence[str] = (),
    nospeed: str = "",
) -> Report:
    """Read the runs, of each its label and its folder or file, and replace the report in ``out``.

    Args:
        expected: labels that should have runs, in the order in which they are shown.
        nospeed: why no speed may be claimed for any run.

    Raises:
        Refused: a run cannot be used, there is none, or ``out`` holds something else or cannot be written to; nothing
            is changed then.
    """
    if not pairs:
        raise Refused("RUNS: there is no run to report on")
    if out.exists() and not out.is_dir() or out.is_dir() and any(out.iterdir()) and not (out / SETTINGS).exists():
        raise Refused(f"OUT={out}: is not empty and holds no report; choose another folder")
    check_room(out)
    places = list(expected)
    several = sorted(
        sources.read_all(list(pairs)),
        key=lambda run: places.index(run.label) if run.label in places else len(places),
    )
    report = build(several, threshold, title, expected, nospeed)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        new = Path(scratch, "new")
        new.mkdir()
        for what, of in (("tables", write_tables), ("figures", write_figures), ("runs", write_runs)):
            print(f"writing {what}", flush=True)
            of(report, new)
        (new / "index.html").write_text(page(report))
        if out.exists():
            os.replace(out, Path(scratch, "old"))
        os.replace(new, out)
    return report


def write_runs(report: Report, out: Path) -> None:
    """The runs, cut down to what a report reads, and in ``report.json`` how the report was asked for."""
    for entry in report.entries:
        folder = out / "runs" / entry.id
        folder.mkdir(parents=True)
        lines = [
            json.dumps({"step": step, "data": {k: None if math.isnan(v) else v for k, v in data.items()}})
            for step, data in sorted(entry.run.steps.items())
        ]
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        for name, content in (("run.json", entry.run.run), ("summary.json", entry.run.summary)):
            if content:
                write_json(folder / name, content)
        config = {key: value for key, value in entry.run.config.items() if key in report.differs}
        write_json(folder / RECORD, sources.record(entry.run) | {"config": config})
    settings = {
        "title": report.title,
        "threshold": report.threshold,
        "nospeed": report.nospeed,
        "labels": [*report.labels, *report.without],
        "runs": [[entry.run.label, f"runs/{entry.id}"] for entry in report.entries],
    }
    write_json(out / SETTINGS, settings)


def again(folder: Path, out: Path) -> Report:
    """The report in a folder once more, from the runs that it keeps."""
    settings = json.loads((folder / SETTINGS).read_text())
    pairs = [(label, folder / run) for label, run in settings["runs"]]
    return write(pairs, out, settings["threshold"], settings["title"], settings["labels"], settings["nospeed"])


# Tables


def mean_and_spread(of: Outcome, spread: Spread) -> str:
    """``0.960 ± 0.003``, and of how many runs where some have no value."""
    if not spread.values:
        return NONE
    text = format(spread.mean, of.form) if of.form else measures.written(spread.mean)
    if spread.std is not None:
        text += f" ± {format(spread.std, of.form) if of.form else measures.written(spread.std, 2)}"
    return text if len(spread.values) == spread.of else f"{text} ({len(spread.values)} of {spread.of})"


def at_step(entries: list[Entry], attribute: str) -> str:
    """``at 20 ± 2`` where it happened in all runs, else in how many of them and where."""
    found = [step for entry in entries if (step := getattr(entry, attribute)) is not None]
    if not found:
        return "never"
    if len(found) < len(entries):
        return f"{len(found)} of {len(entries)}, at {', '.join(map(str, found))}"
    return f"at {fmean(found):.3g}" + (f" ± {stdev(found):.2g}" if len(found) > 1 else "")


def present(report: Report) -> list[Outcome]:
    """The outcomes that any run has."""
    return [of for of in OUTCOMES if any(report.spreads[label][of.name].values for label in report.labels)]


def cell(text: str, unclaimed: str = "") -> dict[str, str]:
    return {"text": text, "unclaimed": unclaimed}


def label_rows(report: Report) -> list[tuple[str, list[dict[str, str]]]]:
    """By line of the table its name and for each label the text and, where it is no claim, why."""
    members = [report.of(label) for label in report.labels]
    rows = [
        ("runs", [cell(str(len(of))) for of in members]),
        (f"passes {report.threshold:g}", [cell(at_step(of, "passed")) for of in members]),
        ("collapses", [cell(at_step(of, "collapsed")) for of in members]),
    ]
    for of in present(report):
        cells = []
        for label in report.labels:
            text = mean_and_spread(of, report.spreads[label][of.name])
            why = report.unclaimed[label] if of.speed and text != NONE else ""
            cells.append(cell(text, f"not claimed: {why}" if why else ""))
        rows.append((of.title, cells))
    return rows


def run_rows(report: Report) -> tuple[list[str], list[list]]:
    """The names of the columns and a line a run, every number as it is."""
    having = present(report)
    names = ["run", "label", "seed", "name", "source", "steps", "common_steps", "passed_at", "collapsed_at"]
    names += [of.name for of in having] + ["wall_s", "peak_memory_gib", "not_claimed"]
    lines = []
    for entry in report.entries:
        run = entry.run
        lines.append(
            [entry.id, run.label, run.seed, run.name, run.source, len(run.steps), len(report.common)]
            + [entry.passed, entry.collapsed, *(entry.outcomes[of.name] for of in having)]
            + [run.summary.get("wall_s"), run.summary.get("peak_memory_gib"), entry.departure or report.nospeed]
        )
    return names, lines


def write_csv(file: Path, names: Sequence[str], lines: Iterable[Sequence]) -> None:
    with file.open("w", newline="") as content:
        writer = csv.writer(content, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(lines)


def write_tables(report: Report, out: Path) -> None:
    lines = []
    for label in report.labels:
        members = report.of(label)
        reached = {name: [getattr(entry, name) for entry in members] for name in ("passed", "collapsed")}
        spreads = {name: spread(members, steps) for name, steps in reached.items()}
        spreads |= {of.name: report.spreads[label][of.name] for of in present(report)}
        speed = {of.name for of in OUTCOMES if of.speed}
        for name, of in spreads.items():
            bounds = (min(of.values), max(of.values)) if of.values else (None, None)
            why = report.unclaimed[label] if name in speed else ""
            lines.append([label, name, of.of, len(of.values), of.mean, of.std, *bounds, why])
    write_csv(out / "table.csv", ["label", "outcome", "runs", "n", "mean", "std", "min", "max", "not_claimed"], lines)
    write_csv(out / "runs.csv", *run_rows(report))
    fields = ("outcome", "first", "second", "effect", "low", "high", "holds", "text")
    write_csv(out / "verdicts.csv", fields, [[getattr(found, name) for name in fields] for found in report.verdicts])
    (out / "table.md").write_text(markdown(report))


def markdown(report: Report) -> str:
    """The tables as Markdown."""
    lines = [f"# {report.title}", "", summary(report), ""]
    lines += [f"- {note}" for note in report.notes]
    lines += [""] * bool(report.notes)
    lines += [f"| | {' | '.join(report.labels)} |", "|---" * (1 + len(report.labels)) + "|"]
    for name, cells in label_rows(report):
        texts = [f"~~{of['text']}~~ {of['unclaimed']}" if of["unclaimed"] else of["text"] for of in cells]
        lines.append(f"| {name} | {' | '.join(texts)} |")
    lines += ["", METHOD.format(**method(report)), ""]
    if judged(report):
        lines += ["| outcome | | verdict |", "|---|---|---|"]
        for row in verdict_rows(report):
            lines += [f"| {row.title} | {each.first}, {each.second} | {each.text} |" for each in row.verdicts if each]
        lines += [""]
    return "\n".join(lines)


def on_screen(report: Report) -> str:
    """The table by label, what the input lacks, and what separates the labels."""
    rows = [("", list(map(cell, report.labels))), *label_rows(report)]
    texts = [[name, *(f"({of['text']})" if of["unclaimed"] else of["text"] for of in cells)] for name, cells in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ["  " + "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)) for row in texts]
    titles = {of.name: of.title for of in OUTCOMES}
    held = [found for found in report.verdicts if found.holds]
    lines += ["", *(f"  {note}" for note in report.notes)]
    lines += ["", *(f"  {titles[found.outcome]}: {found.first}, {found.second}: {found.text}" for found in held)]
    return "\n".join(line.rstrip() for line in lines)


METHOD = (
    "Mean ± sample standard deviation over the seeds. There is a verdict where Welch's interval at {level} (95 % over "
    "the {pairs} of an outcome together, Bonferroni) leaves out equality, with at least {seeds} seeds on each side. "
    "Mismatch and speed are compared by the ratio of geometric means, the others by difference. Outcomes are not "
    "corrected for one another."
)


def method(report: Report) -> dict[str, str]:
    pairs = max(len(report.labels) * (len(report.labels) - 1) // 2, 1)
    return {
        "level": f"{100 * (1 - measures.ERROR / pairs):.3g} %",
        "pairs": "one pair" if pairs == 1 else f"{pairs} pairs",
        "seeds": str(measures.LEAST_SEEDS),
    }


def summary(report: Report) -> str:
    """One line on what was compared."""
    counts = ", ".join(f"{label} ({len(report.of(label))})" for label in report.labels)
    return f"{len(report.entries)} run{'s' * (len(report.entries) > 1)}: {counts}; {span(report.common)}."


# Figures


def colours(labels: Sequence[str]) -> dict[str, str]:
    others = iter(OTHERS * len(labels))
    return {label: COLOURS.get(label) or next(others) for label in labels}


def short(label: str) -> str:
    return label if len(label) <= LABEL else f"{label[: LABEL - 1]}…"


def centre(values: list[float], scale: str) -> tuple[float, float, float]:
    """The mean and one standard deviation below and above; on a log scale the geometric ones."""
    if scale == "linear":
        middle, wide = fmean(values), stdev(values) if len(values) > 1 else 0.0
        return middle, middle - wide, middle + wide
    logs = [math.log(value) for value in values]
    middle, wide = fmean(logs), stdev(logs) if len(logs) > 1 else 0.0
    return math.exp(middle), math.exp(middle - wide), math.exp(middle + wide)


def write_figures(report: Report, out: Path) -> None:
    """Each series over the steps, and the outcomes of each run, as SVG and PNG; the same runs give the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {
        "svg.hashsalt": "report",
        "svg.fonttype": "none",  # text stays text: half the size
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e7e7e7",
        "axes.axisbelow": True,
        "axes.edgecolor": "#888888",
        "legend.frameon": False,
    }
    (out / "figures").mkdir()
    with matplotlib.rc_context(style):
        for of in drawn(report):
            figure = Figure(figsize=(5.6, 3.1), layout="constrained")
            draw(report, of, figure.add_subplot())
            save(figure, out / "figures" / of.name)
        figure = Figure(figsize=(9.6, 2.9), layout="constrained")
        draw_outcomes(report, figure)
        save(figure, out / "figures" / "outcomes")


def save(figure, stem: Path) -> None:
    """As SVG and PNG, small enough to commit: coordinates to a hundredth of a point, 256 colours."""
    from PIL import Image

    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None})
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), written.getvalue())
    stem.with_suffix(".svg").write_text(text)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=120)
    image = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(stem.with_suffix(".png"), optimize=True)


def drawn(report: Report) -> list[Series]:
    """The series of which there is anything to draw; of counts those that are not 0 throughout."""
    lines = {of: [line for entry in report.entries for line in curve(entry.run.steps, of).values()] for of in SERIES}
    return [of for of, values in lines.items() if (any(values) if of.counted else values)]


def curve(steps: Steps, of: Series) -> dict[int, float]:
    """What is drawn of a run: its finite values, above 0 on a log scale; counts summed up."""
    found, total = {}, 0.0
    for step in sorted(steps):
        value = steps[step].get(of.metric, math.nan)
        if math.isfinite(value) and (of.scale == "linear" or value > 0):
            total = total + value if of.counted else value
            found[step] = total
    return found


def draw(report: Report, of: Series, axis) -> None:
    """A series: a thin line a run, a thick one for the mean over a label's seeds, a band of one standard deviation."""
    if of.scale != "linear":
        axis.set_yscale("log", base=2 if of.scale == "log2" else 10)
    few = {"marker": "."} if of.metric == measures.ACCURACY else {}  # evaluations, of which one alone has no line
    for label, colour in colours(report.labels).items():
        members = report.of(label)
        for entry in members:
            line = curve(entry.run.steps, of)
            alpha = 0.4 if len(members) > 1 else 1
            axis.plot(list(line), list(line.values()), color=colour, linewidth=0.7, alpha=alpha, **few)
        shared = [curve(entry.shared, of) for entry in members]
        steps = [step for step in report.common if all(step in line for line in shared)]
        if steps and len(members) > 1:
            centres = [centre([line[step] for line in shared], of.scale) for step in steps]
            middle, low, high = zip(*centres, strict=True)
            if not of.counted:
                axis.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
            axis.plot(steps, middle, color=colour, linewidth=1.8, **few)
        axis.plot([], [], color=colour, linewidth=2.4, label=short(label))
    if of.metric == REWARD:
        axis.axhline(report.threshold, color="#888888", linewidth=0.9, linestyle=(0, (4, 3)))
    if of.metric == LOSS_SCALE:
        for entry in report.entries:
            skips = [step for step, data in entry.run.steps.items() if data.get(SKIPPED, 0) > 0]
            line = curve(entry.run.steps, of)
            at = [step for step in skips if step in line]
            axis.plot(at, [line[step] for step in at], "x", color="#B00020", markersize=5)
    apart(axis)
    axis.set_xlabel("step")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=8, borderaxespad=0.2, handlelength=1.4)


def apart(axis) -> None:
    """Give an axis on which all values are about equal room around them, or rounding would look like a curve."""
    low, high = axis.dataLim.intervaly
    if axis.get_yscale() == "log":
        low = axis.dataLim.minposy
    if high - low > 1e-3 * max(abs(low), abs(high)):
        return
    axis.set_autoscaley_on(False)
    if axis.get_yscale() == "log":
        axis.set_ylim(low / 2, high * 2)
    else:
        axis.set_ylim(low - 0.05 * abs(low) - 0.5, high + 0.05 * abs(high) + 0.5)


def draw_outcomes(report: Report, figure) -> None:
    """The outcomes that matter most: a dot a run, a bar for the mean."""
    wanted = ("reward_last", "k3_mean", "probs_diff_mean", "throughput_median")
    chosen = [of for of in present(report) if of.name in wanted]
    for of, axis in zip(chosen, figure.subplots(1, len(chosen), squeeze=False)[0], strict=True):
        several = [value for label in report.labels for value in report.spreads[label][of.name].values]
        if of.scale == "log" and not of.speed and max(several) > 0:
            axis.set_yscale("log")
        for place, (label, colour) in enumerate(colours(report.labels).items()):
            values = report.spreads[label][of.name].values
            hollow = of.speed and report.unclaimed[label]
            offsets = [place + 0.08 * (index - (len(values) - 1) / 2) for index in range(len(values))]
            axis.plot(offsets, values, "o", color=colour, markersize=5, markerfacecolor="none" if hollow else colour)
            if len(values) > 1:
                middle = centre(list(values), of.scale if min(values) > 0 else "linear")[0]
                axis.plot([place - 0.25, place + 0.25], [middle, middle], color=colour, linewidth=1.6)
        apart(axis)
        axis.set_title(of.title, fontsize=9)
        axis.set_xticks(range(len(report.labels)), list(map(short, report.labels)), rotation=20, ha="right", fontsize=8)
        axis.set_xlim(-0.6, len(report.labels) - 0.4)
        axis.grid(axis="x", visible=False)


# The page


def page(report: Report) -> str:
    """``index.html``: it asks for nothing but files of its own folder."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["number"] = number
    environment.filters["written"] = lambda value, digits=3: NONE if value is None else measures.written(value, digits)
    return environment.get_template(TEMPLATE).render(
        report=report,
        summary=summary(report),
        colours=colours(report.labels),
        rows=label_rows(report),
        figures=drawn(report),
        verdicts=verdict_rows(report),
        judged=judged(report),
        differs=by_label(report),
        method=METHOD.format(**method(report)),
        window=measures.WINDOW,
        common=span(report.common),
        provenance={entry.id: provenance(entry) for entry in report.entries},
        state=state,
        command=command(report),
    )


def judged(report: Report) -> list[tuple[str, str]]:
    """The pairs of labels that both have seeds enough for a verdict."""
    enough = [label for label in report.labels if seeds(report.of(label)) >= measures.LEAST_SEEDS]
    return list(combinations(enough, 2))


@dataclass(frozen=True)
class Row:
    """The verdicts on an outcome, one a pair of ``judged``; None where one of the two logs no such metric."""

    title: str
    verdicts: tuple[Verdict | None, ...]

    @property
    def separates(self) -> bool:
        return any(each.holds for each in self.verdicts if each)


def verdict_rows(report: Report) -> list[Row]:
    rows = []
    for of in OUTCOMES:
        found = {(each.first, each.second): each for each in report.verdicts if each.outcome == of.name}
        verdicts = tuple(found.get(pair) for pair in judged(report))
        rows += [Row(of.title, verdicts)] * any(verdicts)
    return rows


def by_label(report: Report) -> dict[str, list[str]]:
    """By key of the configuration in which runs differ its values of each label."""
    rows = {}
    for key, values in report.differs.items():
        of = [[values[entry.id] for entry in report.of(label) if entry.id in values] for label in report.labels]
        texts = [", ".join(dict.fromkeys(NONE if value is None else value for value in held)) for held in of]
        rows[key] = [text or NONE for text in texts]  # the other framework has no such key
    return rows


def state(entry: Entry) -> str:
    run = entry.run
    if run.finished is None:
        return f"{len(run.steps)} steps"
    return f"{len(run.steps)} of {run.run['steps']} steps" if not run.finished else f"all {len(run.steps)} steps"


def provenance(entry: Entry) -> dict[str, str]:
    """Where a run is from, as far as it is recorded."""
    run = entry.run
    asked = {name: value for name, value in run.asked.items() if name not in ("PRECISION", "SEED")}
    facts = {
        "from": f"{run.source}: {run.name}",
        "regime named": run.regime or "none",
        "asked": " ".join(f"{name}={value}" for name, value in asked.items()),
        "config": run.config_hash or "not recorded",
        run.framework: stamp_text(run),
    }
    for role, of in run.effective.items():
        told = of if isinstance(of, dict) else {"its workers differ": json.dumps(of)}
        facts[f"{role}, as reported"] = ", ".join(f"{name} {value}" for name, value in told.items())
    if not run.effective:
        facts["effective dtypes"] = "unknown"
    versions = run.summary.get("versions", {})
    facts["versions"] = ", ".join(f"{name} {value}" for name, value in versions.items()) or "not recorded"
    return {name: text for name, text in facts.items() if text}


def stamp_text(run: Run) -> str:
    if isinstance(run.stamp, dict):
        return f"{run.stamp['release']}, stack {run.stamp['stack']}"
    return "its workers report different stamps" if run.stamp else "not recorded"


def command(report: Report) -> str:
    """What makes the report again from its own folder."""
    words = []
    for label in report.labels:
        names = [entry.id for entry in report.of(label)]
        by_seed = all(name.startswith(f"{label}-seed") for name in names)
        words += [f"{label}=runs/{label}-seed*"] if by_seed else [f"{label}=runs/{name}" for name in names]
    more = "" if report.threshold == THRESHOLD else f" THRESHOLD={report.threshold:g}"
    return f'make compare RUNS="{" ".join(words)}"{more} OUT=again'
