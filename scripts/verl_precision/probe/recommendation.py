"""Choose a regime and its settings from the numbers of a preflight and a probe.

A 16-bit regime is chosen if it is the only one that runs, or if its k3 interval ends below those of the others. What
the numbers do not decide is listed with the command that measures it.
"""

import shlex
from collections.abc import Mapping
from dataclasses import astuple
from typing import NamedTuple

from verl_precision.facts.regime import named_dtypes
from verl_precision.facts.vllm_float16 import ROLLOUT_DTYPE
from verl_precision.format import significant
from verl_precision.probe.fp16_range import HEADROOM, LARGEST
from verl_precision.probe.mismatch import EXTRAPOLATION, LEAST_PROMPTS, answer_k3
from verl_precision.sequence_weights import UNTRUNCATED, prediction
from verl_precision.spelling import spelled
from verl_precision.words import options


class Recommendation(NamedTuple):
    answers: dict[str, str]  # sentences by their subject, each with the numbers behind it
    unknown: list[str]  # what the numbers do not decide, each with what to measure
    overrides: list[str] | None  # of verl's main_ppo; None if no regime is recommended


def by_regime(rows: list[dict]) -> dict[str, dict]:
    return {row["regime"]: row for row in rows}


def choose(rows: Mapping[str, dict]) -> tuple[str | None, str]:
    """Return the 16-bit regime with the smallest k3, None if the rows do not decide, and the reason."""
    order = sorted((name for name in rows if name != "fp32"), key=lambda name: rows[name]["k3"].value)
    if not order:
        return None, "no 16-bit regime was measured"
    best, *others = order
    values = "k3 " + ", ".join(f"{rows[name]['k3'].text('.2g')} in {name}" for name in order)
    if not others:
        return best, f"{best} is the only 16-bit regime that was measured: {values}"
    if (prompts := rows[best]["prompts"]) < LEAST_PROMPTS:
        return None, f"not decided from {prompts} prompts, at least {LEAST_PROMPTS} are needed: {values}"
    close = [name for name in others if rows[name]["k3"].low <= rows[best]["k3"].high]
    if close:
        return None, f"not decided between {' and '.join([best, *close])}, whose k3 overlap: {values}"
    return best, f"{best} mismatches least: {values}"


def weights_outlook(row: dict, length: int) -> str:
    """Return whether untruncated weights of sequences of ``length`` tokens hold, and their T·k3."""
    total = answer_k3(row, length)
    value, low, high = (significant(each, 2) for each in astuple(total))
    k3 = f"T·k3 {value} ({low}–{high}) nats"
    return f"{prediction(total.low, total.high)} at {length} tokens in {row['regime']}: {k3}"


def recommend(preflight: dict, probe: dict, length: int, words: dict[str, str]) -> Recommendation:
    """Recommend a regime, a first loss scale, modules to keep in fp32, and whether sequence weights will hold.

    Args:
        preflight, probe: what ``preflight.examine`` and ``probe.measure`` return.
        length: tokens of a response in the run.
        words: variables of the command that measured.
    """
    findings, rollout = preflight["findings"], preflight["rollout"]
    excluded = exclusions(preflight, probe["rows"])
    rows = by_regime([row for row in probe["rows"] if row["regime"] not in excluded])
    chosen, reason = choose(rows)
    answers = {"regime": "; ".join([reason, *(f"{name} {why}" for name, why in excluded.items())])}
    overrides = None if chosen is None else [f"+precision={chosen}"]
    if chosen in (None, "fp16"):
        answers["first loss scale"] = findings["first loss scale"]
    if chosen == "fp16":
        overrides += preflight["overrides"]
    answers["range of fp16"] = f"{findings['verdict']}; the largest activation is {findings['largest activation']}"
    if rollout.supported is False:
        answers["rollout"] = rollout.reason
    if in_fp16 := overrides_with_fp32_rollout(preflight):
        answers["fp16 in the trainer"] = (
            f"{shlex.join(in_fp16)}: twice the rollout's memory, and a mismatch that was not measured; the first step "
            "of a run reports it as rollout_corr/k3_kl"
        )
    unknown = []
    if rows and chosen is None:
        prompts = max(LEAST_PROMPTS, *(row["prompts"] for row in rows.values()))
        unknown.append(f"the regime: {repeat(words, ROWS=4 * prompts)}")
    if chosen:
        answers["sequence weights"], doubts = sequence_weights(rows[chosen], length, probe["positions"], words)
        unknown += doubts
    return Recommendation(answers, unknown + other_doubts(preflight, probe, chosen, words), overrides)


def repeat(words: dict[str, str], **more: object) -> str:
    """Return the command line that measures again with more or other variables."""
    command = shlex.join(["make", "recommend", *(f"{name}={value}" for name, value in (words | more).items())])
    return spelled(command)


def exclusions(preflight: dict, rows: list[dict]) -> dict[str, str]:
    """Return the regimes that do not run, and why not."""
    excluded = {row["regime"]: f"overflows: {row['overflow']}" for row in rows if "overflow" in row}
    # vLLM keeps only routers and, from 0.28 on, the head in fp32.
    no_fp16 = {
        "needs modules in fp32, which a rollout in float16 does not have": preflight["keep"],
        "does not fit": preflight["misfit"],
        "has a rollout in float16, which vLLM refuses": preflight["rollout"].supported is False,
    }
    in_fp16 = [name for name in options("precision") if "float16" in named_dtypes(name).values()]
    for reason, applies in no_fp16.items():
        if applies:
            excluded |= {name: excluded.get(name, reason) for name in in_fp16}
    return excluded


def overrides_with_fp32_rollout(preflight: dict) -> list[str]:
    """Return the overrides that train in fp16 where a rollout in float16 does not run; none where it does."""
    words = preflight["overrides"]
    return ["+precision=fp16", *words] if f"{ROLLOUT_DTYPE}=float32" in words else []


def sequence_weights(row: dict, length: int, positions: int, words: dict[str, str]) -> tuple[str, list[str]]:
    """Return the sentence on sequence weights over ``length`` tokens of a response, and what to measure for it."""
    how, doubts = f"measured at up to {row['block']} tokens", []
    if length > row["block"]:
        how += f" and widened by a factor of {EXTRAPOLATION} at each end"
        action = f"{repeat(words, TOKENS=length)}, and DATA whose answers are that long"
        if length > positions:
            action = f"the model has {positions} positions; set LENGTH to what your run has"
        doubts.append(f"sequence weights at {length} tokens: {action}")
    sentence = (
        f"{weights_outlook(row, length)}, {how}; a model learned with untruncated weights up to "
        f"{UNTRUNCATED.learned:g} nats and collapsed from {UNTRUNCATED.collapsed:g} nats on"
    )
    if row["growth"].low > 1:
        sentence += f"; sums of {row['block']} tokens vary more than independent ones: fewer, if that goes on"
    return sentence, doubts


def other_doubts(preflight: dict, probe: dict, regime: str | None, words: dict[str, str]) -> list[str]:
    """Return what the backend, the device and the margin of the activations leave open, and what to measure."""
    settings, doubts = probe["settings"], []
    if settings["BACKEND"] == "hf":
        doubts.append(
            "the mismatch with vLLM: hf runs the trainer's model code on both sides, so its k3 is too small: "
            f"{repeat(words, BACKEND='vllm')}"
        )
    if settings["DEVICE"] == "cpu":
        doubts.append(f"the kernels of a GPU; on one: {repeat(words, BACKEND='vllm', DEVICE='cuda')}")
    fits = not preflight["misfit"] and not preflight["keep"]
    if fits and any("overflow" in row for row in probe["rows"]):
        more = repeat(words, ROWS=4 * settings["ROWS"])
        doubts.append(f"where fp16 overflows: the preflight, of other answers, found it to fit: {more}")
    activation, where = preflight["activation"]
    if regime == "fp16" and activation * HEADROOM > LARGEST:
        doubts.append(
            f"whether {where} stays within fp16 as the weights change, {LARGEST / activation:.2g} times below 65504: "
            f"{repeat(words, MODEL='CHECKPOINT')}, after some steps"
        )
    return doubts
