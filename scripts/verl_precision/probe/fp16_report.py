"""Report the fp16 assessment of a model as text, tables and a figure."""

import csv
import io
import math
import textwrap
from pathlib import Path
from typing import Any

import torch

from verl_precision.facts.vllm_float16 import Float16Support
from verl_precision.probe.fp16_range import (
    BINS,
    FLUSH_EXPONENT,
    HEADROOM,
    LARGEST,
    LOWEST_EXPONENT,
    Fp16Assessment,
    ModuleRange,
    flushed_share,
    overrides,
    verdict,
)

WORST = 12  # rows of the table on the screen


def conclusions(
    ranges: dict[str, ModuleRange], assessment: Fp16Assessment, rollout: Float16Support, listed: dict[str, Any]
) -> tuple[dict[str, str], list[str]]:
    """Return the findings by name, and the Hydra overrides of verl for the trainer and for vLLM as its rollout.

    Args:
        listed: ``KeptModules.names()`` of what the model's class lists for float16.
    """
    named = findings(ranges, assessment) | of_the_class(listed)
    if not rollout.supported:
        unknown = "not known whether vLLM runs it in float16: " if rollout.supported is None else ""
        named = {"verdict": named.pop("verdict"), "rollout": unknown + rollout.reason} | named
    return named, overrides(assessment, bf16_rollout=rollout.supported is False)


def numbers(ranges: dict[str, ModuleRange], assessment: Fp16Assessment, rollout: Float16Support) -> dict:
    """Return what a recommendation follows from, in the types of JSON.

    Returns:
        ``misfit`` (the verdict, if no list of modules helps, else None); ``keep``, of each module in fp32 the largest
        value in it; ``activation`` and ``gradient``, the largest and its module; ``scale``; ``flushed``, the shares of
        gradients at this scale by kind; ``rollout``, whether vLLM runs the model in float16, and why; ``overrides``.
    """
    inside = lambda outer: [each for name, each in ranges.items() if name == outer or name.startswith(f"{outer}.")]
    name, record = max(ranges.items(), key=lambda item: item[1].activation)
    return {
        "misfit": verdict(ranges, assessment) if assessment.misfit else None,
        "keep": {kept: max(max(each.activation, each.weight) for each in inside(kept)) for kept in assessment.keep},
        "activation": [record.activation, name],
        "gradient": list(assessment.gradient),
        "scale": assessment.scale,
        "flushed": {
            kind: flushed_share(counts, assessment.log2_scale) for kind, counts in gradient_counts(assessment).items()
        },
        "rollout": {"supported": rollout.supported, "reason": rollout.reason},
        "overrides": overrides(assessment),
    }


def markdown(
    title: str,
    named: dict[str, str],
    words: list[str],
    ranges: dict[str, ModuleRange],
    assessment: Fp16Assessment,
) -> str:
    """Return the report: a title, the findings, the overrides ``words`` and a table of all modules."""
    header = columns(assessment)
    head = [title, "", *(f"- {name}: {text}" for name, text in named.items()), "", "```", *words, "```", ""]
    body = [header, ["---"] * len(header), *(cells(row, assessment) for row in rows(ranges, assessment))]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in body), ""])


def table_csv(ranges: dict[str, ModuleRange], assessment: Fp16Assessment) -> str:
    """Return the table of all modules as CSV."""
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows([columns(assessment), *rows(ranges, assessment)])
    return written.getvalue()


def show(ranges: dict[str, ModuleRange], assessment: Fp16Assessment, named: dict[str, str]) -> None:
    """Print the modules with the largest activations, and the findings."""
    shown = [columns(assessment), *(cells(row, assessment) for row in rows(ranges, assessment)[:WORST])]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    print()
    for name, *texts in shown:
        print(f"  {name:<{widths[0]}}", *(f"{text:>{width}}" for text, width in zip(texts, widths[1:], strict=True)))
    print()
    for name, text in named.items():
        print(f"  {name:<20} {text}")


def columns(assessment: Fp16Assessment) -> list[str]:
    """Return the headings of the table."""
    gradients = ["output gradient", "weight gradient"]
    return ["module", "activation", "of 65504", *gradients, "flushed at 1", f"flushed at 2^{assessment.log2_scale}"]


def rows(ranges: dict[str, ModuleRange], assessment: Fp16Assessment) -> list[list]:
    """Return a row of values per module, largest activations first; shares are of both kinds of gradients."""
    ordered = sorted(ranges.items(), key=lambda item: item[1].activation, reverse=True)
    return [
        [
            name,
            record.activation,
            record.activation / LARGEST,
            record.output_gradient,
            record.weight_gradient,
            *(
                flushed_share(record.output_gradient_counts + record.weight_gradient_counts, log2)
                for log2 in (0, assessment.log2_scale)
            ),
        ]
        for name, record in ordered
    ]


def cells(row: list, assessment: Fp16Assessment) -> list[str]:
    """Return a row of ``rows`` as text, with modules to keep marked."""
    name, activation, of_largest, *gradients, at_1, at_scale = row
    mark = " (keep)" if name in assessment.keep else ""
    return [name + mark, f"{activation:.3g}", f"{of_largest:.2g}", *(f"{g:.2g}" for g in gradients)] + [
        "-" if math.isnan(share) else f"{share:.2%}" for share in (at_1, at_scale)
    ]


def findings(ranges: dict[str, ModuleRange], assessment: Fp16Assessment) -> dict[str, str]:
    """Return the findings about the model by name."""
    name, record = max(ranges.items(), key=lambda item: item[1].activation)
    gradient, where = assessment.gradient
    scales = (0, assessment.log2_scale)
    shares = {
        kind: [flushed_share(counts, log2) for log2 in scales] for kind, counts in gradient_counts(assessment).items()
    }
    return {
        "verdict": verdict(ranges, assessment),
        "largest activation": f"{record.activation:.4g} at {name}; fp16's largest is {LARGEST:g}",
        "largest gradient": f"{gradient:.3g} at {where}, at loss scale 1",
        "first loss scale": f"2^{assessment.log2_scale} = {assessment.scale:g}: the largest power of two that leaves "
        f"that gradient a factor {HEADROOM} below {LARGEST:g}",
        **{
            f"flushed, {kind}": f"{at_1:.2%} of non-zero gradients at scale 1, {at_scale:.2%} at {assessment.scale:g}"
            for kind, (at_1, at_scale) in shares.items()
        },
    }


def of_the_class(listed: dict[str, Any]) -> dict[str, str]:
    """Return the findings about what the model's class lists for float16; empty if it lists nothing."""
    named = {}
    if kept := listed.get("keep_fp32"):
        named["in fp32 by the model's class"] = (
            f"{', '.join(kept)}: the trainer follows the class (verl 0.8.0 on); vLLM has its own choice "
            "for each model, and follows keep_fp32_modules for routers alone"
        )
    if declined := listed.get("not_kept_fp32"):
        named["listed by the class, not in fp32"] = "; ".join(f"{name}: {why}" for name, why in declined.items())
    return named


def gradient_counts(assessment: Fp16Assessment) -> dict[str, torch.Tensor]:
    """Return the counts of gradients in fp16 by kind, ``(BINS,)`` each."""
    return {"weights": assessment.weights, "activations": assessment.activations}


def plot(ranges: dict[str, ModuleRange], assessment: Fp16Assessment, title: str, file: Path) -> None:
    """Draw the largest activation of each module, and the distribution of gradients over fp16's range."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    place = {name: index for index, name in enumerate(ranges)}
    parts = {
        "residual stream (blocks)": [name for name in ranges if ranges[name].block],
        "leaf modules": [name for name in ranges if ranges[name].leaf],
    }
    for label, names in parts.items():
        names = [name for name in names if ranges[name].activation]
        left.plot([place[n] for n in names], [ranges[n].activation for n in names], "o", markersize=4, label=label)
    left.axhline(LARGEST, color="tab:red", label="65504")
    worst, activation, *_ = rows(ranges, assessment)[0]
    left.set(title=f"largest |activation|: {activation:.3g} at {worst}")
    left.set(yscale="log", xlabel="module, in the model's order")
    left.legend(fontsize=8)

    edges = torch.arange(BINS + 1) + LOWEST_EXPONENT - 1
    for kind, counts in gradient_counts(assessment).items():
        right.stairs(counts / counts.sum(), edges, label=f"gradients of {kind}")
    for log2_scale, color in ((0, "tab:red"), (assessment.log2_scale, "tab:green")):
        label = f"fp16's range at loss scale 2^{log2_scale}"
        right.axvspan(
            FLUSH_EXPONENT - log2_scale, math.log2(LARGEST) - log2_scale, color=color, alpha=0.12, label=label
        )
    smallest = edges[:-1][(assessment.weights + assessment.activations) > 0].min().item()
    right.set_xlim(
        max(min(smallest, FLUSH_EXPONENT - assessment.log2_scale), -60) - 2, 18 - min(assessment.log2_scale, 0)
    )
    right.set(xlabel="log2 |gradient|", title="share of the non-zero gradients, a power of two a bin")
    right.legend(fontsize=8)
    figure.suptitle(textwrap.fill(f"{title}: {verdict(ranges, assessment)}", 160), fontsize=10)
    figure.savefig(file, dpi=120)
    plt.close(figure)
