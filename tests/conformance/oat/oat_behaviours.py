"""The behaviours that the conformance suite tests on every release of OAT, the outcomes of unpatched releases, and the
behaviours that could not be tested.

The texts are outcomes of ``oat_cases.py``, word for word. ``upstream`` is a prediction: an unpatched release that does
anything else, better or worse, fails a test.
"""

from support.conformance import IDENTICAL, REFERENCE, Behaviour

from verl_precision.patch.releases import OAT, load_releases

ENTRIES = load_releases(framework=OAT)
RELEASES = tuple(ENTRIES)
# Without fp16, and with it.
OLD, NEW = (tuple(name for name in RELEASES if ENTRIES[name].family == family) for family in "AB")
# Of the old ones, those without the actor's log-probabilities in the learner and those with them.
BARE = tuple(name for name in OLD if not ENTRIES[name].has("importance_sampling"))
TIS = tuple(name for name in OLD if ENTRIES[name].has("importance_sampling"))


def no(option: str) -> str:
    return f"Unparsed: no --{option}"


def role_dtypes(dtype: str, rollout: str) -> str:
    return f"actor {dtype}, ref {dtype}, critic {dtype}, rollout {rollout}, masters float32"


def without_fp16(instead: str) -> dict[str, tuple[str, ...]]:
    """Predict a refused option on releases without fp16, and ``instead`` on those with it."""
    return {no("fp16"): OLD, instead: NEW}


def from_upstream(row: str, outcome: str) -> Behaviour:
    """Return a behaviour that unpatched releases with fp16 have, too."""
    return Behaviour(row, outcome, without_fp16(outcome))


def without(option: str) -> dict[str, tuple[str, ...]]:
    return {no(option): RELEASES}


def refused(release: str) -> str:
    """Predict how an unpatched release handles bad input; it lacks nearly all of the keys."""
    keys = ("initial_scale_power", "loss_scale", "min_loss_scale")
    unknown = {"both": "fp16"} if release in OLD else {}
    unknown |= {"precision and fp16": "precision", "precision and bf16": "precision"}
    unknown |= {key: "fp16" if release in OLD else key for key in keys}
    facts = [f"{what}: no --{key}" for what, key in unknown.items()]
    facts += ["takes fp32 with flash attention", "rollout_rs without threshold: no --rollout_rs"]
    return "; ".join(facts + ([] if release in BARE else ["two weights: no --rollout_is"]))


KEY = "`--precision`, or OAT's `--no-bf16 --fp16`, sets actor, critic, ref, DeepSpeed and vLLM's dtype"
REFUSES = "contradictions are refused in one line that names keys and values"
SCALER = "the loss scaler's settings are arguments, and the first updates are taken"
OVERFLOW = "an inf or NaN of one rank skips the step on all, halves the scale and keeps the LR: actor, critic"
METRICS = "`loss_scale`, `skipped_steps` and `overflow` in the metrics, of the critic too"
NORM = "`policy_grad_norm` in fp16 is unscaled, and finite or absent"
ENDS = "a storm of overflows ends the run, under ZeRO-1 to 3"
CHECKPOINT = "the loss scale goes on from the checkpoint, by the new run's settings"
WIRE = "weights arrive at vLLM's workers in its dtype: fp16, fp32, bf16 to fp16"
MISMATCH = "the mismatch of actor and learner in the metrics"
HEAD = "the fused head gives fp32 log-probabilities"
BESIDE = "trains beside a reference model, by `--beta` and by `--kl_penalty_coef`"
BATCH = "the fused head trains with more than one answer a device"
PG = "`--reinforce_update` trains, with and without a sequence's weight"
WEIGHTS = "weights by token or sequence, truncated or masked; none on top of `tis_c`; without them upstream's loss"
FILES = "`metrics.jsonl` in the run's folder, and `args.json` with what the engines have"
BITS = "bf16 as upstream, bitwise, where the fused head is off: losses, weights, Adam, of actor and critic"
GPU = "on a GPU: vLLM's CUDA kernels, flash attention, FusedAdam, nccl"

BY_HAND = "loss as by hand, gradient as by hand"
NORMS = "taken: as in fp32, skipped: absent, taken again: finite"
CLOSE = "beta trains, kl_penalty_coef trains"
MISMATCHES = ("rollout_probs_diff_mean", "rollout_probs_diff_max", "rollout_k3_kl")
KL = ("kl_sample_train_v1", "kl_sample_train_v2")


def reported(what: dict[str, tuple[str, ...]]) -> str:
    return ", ".join(f"{key} {text}" for text, keys in what.items() for key in keys)


BEHAVIOURS = {
    "dtype_fp16": from_upstream(KEY, role_dtypes("float16", "float16")),
    "dtype_bf16": Behaviour(KEY, role_dtypes("bfloat16", "bfloat16"), {role_dtypes("bfloat16", "bfloat16"): RELEASES}),
    "dtype_fp32": Behaviour(
        KEY,
        role_dtypes("float32", "float32"),
        {role_dtypes("float32", "bfloat16"): OLD, role_dtypes("float32", "float32"): NEW},
    ),
    "dtype_bf16_train_fp16_infer": Behaviour(KEY, role_dtypes("bfloat16", "float16"), without("precision")),
    "one_key": Behaviour(KEY, "fp16 as the pair, bf16 as the pair, fp32 as the pair", without("precision")),
    "refusals": Behaviour(REFUSES, "refuses all", {refused(group[0]): group for group in (BARE, TIS, NEW)}),
    "first_updates": Behaviour(
        SCALER,
        "scale starts at 2**16, 0 of 4 skipped, the weights move",
        without_fp16("scale starts at 2**32, 4 of 4 skipped, THE WEIGHTS STAY"),
    ),
    "scaler_keys": Behaviour(
        SCALER,
        "actor 4096, 7, 3, 1, 4; critic 4096, 7, 3, 1, 4; fixed 128, not dynamic",
        {no("fp16"): OLD, no("consecutive_hysteresis"): NEW},
    ),
    "overflow_actor": from_upstream(OVERFLOW, "taken x1, skipped x0.5, taken x1, taken x1, skipped x0.5, taken x1"),
    "overflow_critic": from_upstream(OVERFLOW, "taken x1, taken x1, taken x1, skipped x0.5, taken x1, taken x1"),
    "learning_rate": from_upstream(OVERFLOW, "actor held, critic held"),
    "scaler_metrics": Behaviour(
        METRICS,
        "actor 1024/0/0, 512/1/1, 512/0/0, 512/0/0, 256/1/1, 256/0/0; "
        "critic 1024/0/0, 1024/0/0, 1024/0/0, 512/1/1, 512/0/0, 512/0/0",
        without_fp16("actor -/-/-, -/-/-, -/-/-, -/-/-, -/-/-, -/-/-; critic -/-/-, -/-/-, -/-/-, -/-/-, -/-/-, -/-/-"),
    ),
    "gradient_norm": Behaviour(
        NORM,
        NORMS,
        without_fp16("taken: 1024 TIMES, skipped: NOT FINITE, taken again: NOT FINITE"),
    ),
    "gradient_norm_zero_0": Behaviour(NORM, NORMS, {no("fp16"): OLD, no("initial_scale_power"): NEW}),
    "gradient_norm_zero_1": Behaviour(NORM, NORMS, {no("fp16"): OLD, no("initial_scale_power"): NEW}),
    "storm": from_upstream(
        ENDS, "ends in update 3: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."
    ),
    "checkpoint": from_upstream(CHECKPOINT, "state comes back, scale comes back, same next step"),
    "resumed": Behaviour(
        CHECKPOINT, "scale 1024, window 7, least 4", {no("fp16"): OLD, no("initial_scale_power"): NEW}
    ),
    "wire_fp16": from_upstream(WIRE, "float16, exactly"),
    "wire_fp32": Behaviour(
        WIRE,
        "float32, exactly",
        {"AssertionError: mismatch dtype: src torch.float32, dst torch.bfloat16": OLD, "float32, exactly": NEW},
    ),
    "wire_bf16_train_fp16_infer": Behaviour(WIRE, "float16, exactly", without("precision")),
    "mismatch": Behaviour(
        MISMATCH,
        reported({"as by hand": (*MISMATCHES, *KL)}),
        {
            reported({"absent": (*MISMATCHES, *KL)}): OLD,
            reported({"absent": MISMATCHES, "as by hand": KL}): NEW,
        },
    ),
    "head_bf16": Behaviour(
        HEAD,
        "log-probs fp32, entropy fp32",
        {"log-probs ROUNDED to bfloat16, entropy ROUNDED to bfloat16": RELEASES},
    ),
    "head_fp16": Behaviour(
        HEAD,
        "log-probs fp32, entropy fp32",
        without_fp16("log-probs ROUNDED to float16, entropy ROUNDED to float16"),
    ),
    "reference_bf16": Behaviour(BESIDE, CLOSE, {CLOSE: RELEASES}),
    "reference_fp16": Behaviour(BESIDE, CLOSE, without_fp16("beta DOES NOT TRAIN, kl_penalty_coef DOES NOT TRAIN")),
    "head_batch": Behaviour(
        BATCH, "as without it", {"AttributeError: 'NoneType' object has no attribute 'view'": RELEASES}
    ),
    "reinforce": Behaviour(PG, BY_HAND, {BY_HAND: OLD, "ZeroDivisionError: division by zero": NEW}),
    "weights_reinforce": Behaviour(PG, BY_HAND, without("rollout_is")),
    "weights_none": Behaviour(WEIGHTS, BY_HAND, {BY_HAND: RELEASES}),
    "weights_tis_c": Behaviour(
        WEIGHTS, BY_HAND, {BY_HAND: (*TIS, *NEW)}, {"upstream has no `tis_c` yet: `rollout_is` is there": BARE}
    ),
    "weights_token": Behaviour(WEIGHTS, BY_HAND, without("rollout_is")),
    "weights_sequence": Behaviour(WEIGHTS, BY_HAND, without("rollout_is")),
    "weights_masked": Behaviour(WEIGHTS, BY_HAND, without("rollout_is")),
    "files": Behaviour(
        FILES,
        "metrics.jsonl of steps 1, 2, 2, with pg_loss, args.json of fp32, actor in float32, stamped",
        {"nothing": RELEASES},
    ),
    "reports_zero_2": Behaviour(
        FILES,
        "actor zero2, float16, float32; critic zero2, float16, float32; ref zero0, float16",
        without_fp16("nothing"),
    ),
    "reports_zero_3": Behaviour(FILES, "actor zero3, float16, float32; ref zero3, float16", without_fp16("nothing")),
    "bf16": Behaviour(BITS, IDENTICAL, {REFERENCE: RELEASES}),
}

# Rows of the matrix that could not be tested here, with the reason.
NOT_RUN = {GPU: "there was no GPU with OAT's CUDA dependencies"}
