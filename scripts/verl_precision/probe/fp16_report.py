"""Report the fp16 assessment of a model as findings, a table and a figure."""

import math
import textwrap
from collections.abc import Mapping
from pathlib import Path

import torch

from verl_precision.facts.vllm_float16 import Float16Support
from verl_precision.format import significant
from verl_precision.probe.fp16_range import (
    BINS,
    FLUSH_EXPONENT,
    HEADROOM,
    LARGEST,
    LOWEST_EXPONENT,
    Fp16Assessment,
    flushed_share,
)


def findings(assessment: Fp16Assessment, rollout: Float16Support, listed: Mapping[str, object]) -> dict[str, str]:
    """Return the findings by name, the verdict first.

    Args:
        rollout: whether vLLM runs the model in float16.
        listed: ``KeptModules.names()`` of what the model's class lists for float16.
    """
    found = {"verdict": assessment.verdict()}
    if not rollout.supported:
        unknown = "not known whether vLLM runs it in float16: " if rollout.supported is None else ""
        found["rollout"] = unknown + rollout.reason
    (activation, name), (gradient, where) = assessment.largest_activation, assessment.gradient
    times = significant(LARGEST / activation)
    found["largest activation"] = f"{activation:.4g} at {name}; fp16's largest, 65504, is {times} times as large"
    found["largest gradient"] = f"{gradient:.3g} at {where}, at loss scale 1"
    found["first loss scale"] = (
        f"2^{assessment.log2_scale} = {assessment.scale:g}: the largest power of two that leaves the largest gradient, "
        f"{gradient:.3g} at {where}, a factor of {HEADROOM} below {LARGEST:g}"
    )
    for kind, counts in assessment.counts.items():
        at_1, at_scale = (flushed_share(counts, log2) for log2 in (0, assessment.log2_scale))
        found[f"flushed, {kind}"] = (
            f"{at_1:.2%} of non-zero gradients at scale 1, {at_scale:.2%} at {assessment.scale:g}"
        )
    if kept := listed.get("keep_fp32"):
        found["in fp32 by the model's class"] = (
            f"{', '.join(kept)}: the trainer follows the class (verl 0.8.0 on); vLLM has its own choice "
            "for each model, and follows keep_fp32_modules only for routers"
        )
    if declined := listed.get("not_kept_fp32"):
        found["listed by the class, not in fp32"] = "; ".join(f"{name}: {why}" for name, why in declined.items())
    return found


def table(assessment: Fp16Assessment) -> list[list[str]]:
    """Return the headings and a row per module, largest activations first; shares are of both kinds of gradients."""
    scales = (0, assessment.log2_scale)
    gradients = ["output gradient", "weight gradient", *(f"flushed at 2^{log2}" for log2 in scales)]
    rows = [["module", "activation", "of 65504", *gradients]]
    for name, record in assessment.by_activation():
        counts = record.output_gradients.counts + record.weight_gradients.counts
        cells = [f"{name} (keep)" if name in assessment.keep else name]
        cells += [f"{record.activation:.3g}", f"{record.activation / LARGEST:.2g}"]
        cells += [f"{record.output_gradients.most:.2g}", f"{record.weight_gradients.most:.2g}"]
        cells += [f"{flushed_share(counts, log2):.2%}" if counts.any() else "-" for log2 in scales]
        rows.append(cells)
    return rows


def plot(assessment: Fp16Assessment, title: str, file: Path) -> None:
    """Draw the largest activation of each module, and the distribution of gradients over fp16's range."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    records = [(place, record) for place, record in enumerate(assessment.ranges.values()) if record.activation]
    for kind, text in (("block", "residual stream (blocks)"), ("leaf", "leaf modules")):
        points = [(place, record.activation) for place, record in records if getattr(record, kind)]
        left.plot(*zip(*points, strict=True), "o", markersize=4, label=text)
    left.axhline(LARGEST, color="tab:red", label="65504")
    activation, name = assessment.largest_activation
    left.set(title=f"largest |activation|: {activation:.3g} at {name}")
    left.set(yscale="log", xlabel="module, in the model's order")
    left.legend(fontsize=8)

    edges = torch.arange(BINS + 1) + LOWEST_EXPONENT - 1
    for kind, counts in assessment.counts.items():
        right.stairs(counts / counts.sum(), edges, label=f"gradients of {kind}")
    for log2, color in ((0, "tab:red"), (assessment.log2_scale, "tab:green")):
        span = FLUSH_EXPONENT - log2, math.log2(LARGEST) - log2
        right.axvspan(*span, color=color, alpha=0.12, label=f"fp16's range at loss scale 2^{log2}")
    right.set_xlim(-62, 18 - min(assessment.log2_scale, 0))
    right.set(xlabel="log2 |gradient|", title="share of the non-zero gradients, a power of two a bin")
    right.legend(fontsize=8)
    figure.suptitle(textwrap.fill(f"{title}: {assessment.verdict()}", 160), fontsize=10)
    figure.savefig(file, dpi=120)
    plt.close(figure)
