"""Compare trainer and rollout, and the trainer with itself, in every variant of a probe; summarize the findings."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verl_precision.files import read_jsonl
from verl_precision.probe.mismatch import LEAST, Answer, measure, verdict
from verl_precision.probe.options import ProbeOptions
from verl_precision.probe.rebatching import Rebatching
from verl_precision.probe.variants import Variant, is_plain


@dataclass(frozen=True)
class Comparison:
    """The mismatch of a variant: the result of ``mismatch.measure``, or ``{"overflow": text}``."""

    variant: Variant | Rebatching
    mismatch: dict

    @property
    def overflow(self) -> str | None:
        return self.mismatch.get("overflow")


def columns(lines: tuple[dict, dict]) -> list[list]:
    """Return log-probabilities, and experts if both lines have them, of each answer by the trainer and the rollout."""
    names = [name for name in ("log_probs", "experts") if all(name in line for line in lines)]
    return [line[name] for name in names for line in lines]


def compare(variants: Sequence[Variant | Rebatching], work: Path) -> list[Comparison]:
    """Measure the mismatch of each variant from the prompts that both trainer and rollout have completed.

    The trainer with other micro-batches is compared with itself as if that were the rollout. Variants with fewer than
    two such prompts, which have no spread, are left out.
    """
    comparisons = []
    for variant in variants:
        scored, rolled_out = map(read_jsonl, variant.files(work))
        overflows = [line["overflow"] for line in rolled_out + scored if "overflow" in line]
        if overflows:
            comparisons.append(Comparison(variant, {"overflow": overflows[0]}))
            continue
        answers = [
            Answer(prompt, *map(np.array, answer))
            for prompt, lines in enumerate(zip(scored, rolled_out, strict=False))
            for answer in zip(*columns(lines), strict=True)
        ]
        if len(scored) >= 2:
            comparisons.append(Comparison(variant, measure(answers)))
    return comparisons


def summarize(
    options: ProbeOptions, comparisons: list[Comparison], positions: int, attention: str, exact: str | None
) -> dict[str, str]:
    """Return the findings by name, the verdict first.

    Args:
        positions: of the model.
        attention: transformers' name of the trainer's.
        exact: the 16-bit dtype that represents every weight exactly, if there is one.
    """
    plain = {each.variant.regime: each.mismatch for each in comparisons if is_plain(each.variant, options)}
    findings = {"verdict": verdict(plain)}
    if (options.wire[0], options.head[0]) != ("fp32", "none"):
        findings["verdict"] += f" (weights sent as {options.wire[0]}, fp32 head: {options.head[0]})"
    measured = [each for each in comparisons if not each.overflow]
    if measured:
        findings |= sample_findings(options, measured, positions)
    if options.batch:
        findings["micro-batches"] = (
            f"packed rows are kept apart by {attention} attention, from their positions; flash attention, which verl "
            "packs for by default, needs CUDA and was not run"
        )
    if exact:
        findings["masters"] = (
            f"every weight of the checkpoint is exact in {exact}: the rounding of a wire of {exact} shows only once "
            "training has moved the weights"
        )
    return findings


def sample_findings(options: ProbeOptions, measured: list[Comparison], positions: int) -> dict[str, str]:
    """Return the findings on the size of the sample and on the extrapolation to longer responses."""
    results = [each.mismatch for each in measured]
    least, most = (pick(result["prompts"] for result in results) for pick in (min, max))
    block = min(result["block"] for result in results)
    findings = {
        "measured": f"{least if least == most else f'{least} to {most}'} of {options.rows} prompts, {options.samples} "
        f"answers to each of {results[0]['tokens'] / results[0]['sequences']:.1f} tokens on average, at temperature "
        f"{options.temperature:g}; {options.backend} on {options.device}",
        "extrapolated": f"ESS/N and sequences clipped at lengths that fewer than {LEAST} answers have (the longest has "
        f"{max(result['longest'] for result in results)} tokens): from the variance of sums of {block} tokens, "
        "assuming the same growth in longer sums; the band is the sampling error of that variance alone. "
        f"The model has {positions} positions",
    }
    growing = [each.variant.label for each in measured if each.mismatch["growth"].low > 1]
    if growing:
        findings["not independent"] = (
            f"sums of {block} tokens vary more than independent terms would in {'; '.join(growing)}: "
            "longer ones may do so even more, and ESS/N be lower than extrapolated"
        )
    return findings
