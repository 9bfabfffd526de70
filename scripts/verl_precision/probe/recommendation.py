"""Recommend a regime and its settings from the numbers of a preflight and a probe.

A regime is recommended if its k3 interval ends below those of all others that run, or if no other 16-bit regime runs.
What the numbers do not decide is listed with the command that measures it.
"""

import shlex
from dataclasses import dataclass

from verl_precision.format import significant
from verl_precision.probe.fp16_range import HEADROOM, LARGEST
from verl_precision.probe.mismatch import EXTRAPOLATION, LEAST_PROMPTS, Estimate, answer_k3, interval, measured_length
from verl_precision.sequence_weights import UNTRUNCATED, prediction
from verl_precision.spelling import spelled

ROLLOUT_DTYPE = "actor_rollout_ref.rollout.dtype"


@dataclass(frozen=True)
class Recommendation:
    """A recommendation.

    Args:
        answers: sentences by their subject, each with the numbers that it follows from.
        unknown: what cannot be told, each with what to measure.
        overrides: of verl's ``main_ppo``; None if no regime is recommended.
    """

    answers: dict[str, str]
    unknown: list[str]
    overrides: list[str] | None


def recommend(preflight: dict, probe: dict, length: int, words: dict[str, str]) -> Recommendation:
    """Recommend a regime, a first loss scale, modules to keep in fp32, and whether sequence weights will hold.

    Args:
        preflight: ``fp16_report.numbers`` of the model.
        probe: the probe's JSON report.
        length: tokens of a response in the run.
        words: variables of the command that measured, by name.
    """
    excluded = exclusions(preflight, probe)
    measured = {row["regime"]: row for row in probe["rows"] if row["regime"] not in excluded}
    half = {name: row for name, row in measured.items() if name != "fp32"}
    chosen, why, unknown = choose(half, words, probe["settings"]["ROWS"])
    answers = {"regime": "; ".join([why, *(f"{name} {reason}" for name, reason in excluded.items())])}
    overrides = None if chosen is None else [f"+precision={chosen}"]
    if chosen == "fp16":
        overrides += preflight["overrides"]
    answers["first loss scale"] = loss_scale(preflight, chosen)
    answers["modules in fp32"] = modules(preflight)
    if preflight["rollout"]["supported"] is False:
        answers["rollout"] = preflight["rollout"]["reason"]
    if in_fp16 := overrides_with_fp32_rollout(preflight):
        answers["fp16 in the trainer"] = (
            f"{shlex.join(in_fp16)}: twice the rollout's memory, and a mismatch that was not measured; the first step "
            "of a run reports it as rollout_corr/k3_kl"
        )
    if chosen:
        answers["sequence weights"], doubts = weights(half[chosen], chosen, length, probe["positions"], words)
        unknown += doubts
    return Recommendation(answers, unknown + other_doubts(preflight, probe, chosen, words), overrides)


def repeat(words: dict[str, str], **more: object) -> str:
    """Return the command line that measures again with more or other variables."""
    command = shlex.join(["make", "recommend", *(f"{name}={value}" for name, value in (words | more).items())])
    return spelled(command)


def exclusions(preflight: dict, probe: dict) -> dict[str, str]:
    """Return the regimes that do not run, and why not."""
    excluded = {}
    for row in probe["rows"]:
        if "overflow" in row:
            excluded[row["regime"]] = f"overflows: {row['overflow']}"
    # vLLM keeps routers alone in fp32, which have no names of their own: they are linear layers with a row per expert.
    no_fp16 = {
        "needs modules in fp32, which a rollout in float16 does not have": preflight["keep"],
        "does not fit": preflight["misfit"],
        "has a rollout in float16, which vLLM refuses": preflight["rollout"]["supported"] is False,
    }
    for reason, applies in no_fp16.items():
        if applies:
            excluded |= {name: excluded.get(name, reason) for name in ("fp16", "bf16_train_fp16_infer")}
    return excluded


def overrides_with_fp32_rollout(preflight: dict) -> list[str]:
    """Return the overrides that train in fp16 where a rollout in float16 does not run; none where it does."""
    if preflight["misfit"] or not preflight["keep"] and preflight["rollout"]["supported"] is not False:
        return []
    words = [word for word in preflight["overrides"] if not word.startswith(f"{ROLLOUT_DTYPE}=")]
    return ["+precision=fp16", *words, f"{ROLLOUT_DTYPE}=float32"]


def choose(half: dict[str, dict], words: dict[str, str], rows: int) -> tuple[str | None, str, list[str]]:
    """Return the 16-bit regime with the smallest k3 or None, the sentence on it, and what to measure for a choice."""
    estimates = {name: Estimate(**row["k3"]) for name, row in half.items()}
    order = sorted(half, key=lambda name: estimates[name].value)
    if not order:
        return None, "none: no 16-bit regime runs", []
    best, *others = order
    values = ", ".join(f"{name} {interval(estimates[name], '.2g')}" for name in order)
    size = f"{half[best]['sequences']} answers to {half[best]['prompts']} prompts"
    if not others:
        return best, f"{best}, the only 16-bit regime that runs: k3 {values}, {size}", []
    if half[best]["prompts"] < LEAST_PROMPTS:
        doubt = f"the regime, from {half[best]['prompts']} prompts: {repeat(words, ROWS=4 * LEAST_PROMPTS)}"
        return None, f"not decided: k3 {values}, {size}", [doubt]
    close = [name for name in others if estimates[name].low <= estimates[best].high]
    if close:
        doubt = f"the regime, {' or '.join([best, *close])}, since their k3 overlap: {repeat(words, ROWS=4 * rows)}"
        return None, f"not decided: k3 {values}, {size}", [doubt]
    return best, f"{best}, which has the smallest k3: {values}, {size}", []


def loss_scale(preflight: dict, regime: str | None) -> str:
    """Return the sentence on the first loss scale."""
    if regime not in (None, "fp16"):
        return f"none: the trainer of {regime} computes in bf16, which needs no loss scaling"
    if preflight["misfit"]:
        return "none: fp16 does not fit"
    gradient, where = preflight["gradient"]
    shares = ", ".join(f"{share:.2g} of {kind}" for kind, share in preflight["flushed"].items())
    return (
        f"{preflight['scale']:g} in fp16: the largest gradient, {gradient:.3g} at {where}, may grow by a factor of "
        f"{LARGEST / preflight['scale'] / gradient:.3g} before it overflows (at least {HEADROOM}); of the non-zero "
        f"gradients it flushes {shares}. The scaler adapts it"
    )


def modules(preflight: dict) -> str:
    """Return the sentence on the modules to keep in fp32."""
    if preflight["misfit"]:
        return f"none help: fp16 {preflight['misfit']}"
    if preflight["keep"]:
        return "in fp16: " + ", ".join(f"{name} (reaches {value:.3g})" for name, value in preflight["keep"].items())
    activation, where = preflight["activation"]
    return f"none: the largest activation, {activation:.3g} at {where}, is {LARGEST / activation:.3g} times below 65504"


def weights(row: dict, regime: str, length: int, positions: int, words: dict[str, str]) -> tuple[str, list[str]]:
    """Return the sentence on sequence weights over ``length`` tokens of a response, and what to measure for it."""
    measured, doubts = measured_length(row), []
    how = f"measured at up to {measured} tokens"
    if length > measured:
        how += f" and widened by a factor of {EXTRAPOLATION} at each end"
        subject = f"sequence weights at {length} tokens"
        if length > positions:
            doubts.append(f"{subject}: the model has {positions} positions; set LENGTH to what your run has")
        else:
            doubts.append(f"{subject}: {repeat(words, TOKENS=length)}, and DATA whose answers are that long")
    total = answer_k3(Estimate(**row["k3"]), Estimate(**row["rate"]), length, measured)
    numbers = "{} ({}–{})".format(*map(two_digits, (total.value, total.low, total.high)))
    sentence = (
        f"{prediction(total.low, total.high)} at {length} tokens in {regime}: T·k3 {numbers} nats, {how}; a model "
        f"learned with untruncated weights up to {UNTRUNCATED.learned:g} nats and collapsed from "
        f"{UNTRUNCATED.collapsed:g} nats on"
    )
    if total.value:
        tokens = [two_digits(bound * length / total.value) for bound in UNTRUNCATED]
        sentence += f", here {' and '.join(tokens)} tokens"
    if row["growth"]["low"] > 1:
        sentence += f"; sums of {row['block']} tokens vary more than independent ones: fewer, if that goes on"
    return sentence, doubts


def two_digits(value: float) -> str:
    """Format ``value`` rounded to two digits."""
    return significant(float(f"{value:.2g}"), 2)


def other_doubts(preflight: dict, probe: dict, regime: str | None, words: dict[str, str]) -> list[str]:
    """Return what the backend, the device and the margin of the activations leave open, and what to measure."""
    settings, doubts = probe["settings"], []
    if settings["BACKEND"] == "hf":
        doubts.append(
            "the mismatch with vLLM: hf runs the trainer's model code on both sides, so its k3 is too small: "
            f"{repeat(words, BACKEND='vllm')}"
        )
    if settings["DEVICE"] == "cpu":
        doubts.append(
            f"the kernels of a GPU, of which none ran here; on one: {repeat(words, BACKEND='vllm', DEVICE='cuda')}"
        )
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
