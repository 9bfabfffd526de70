"""The behaviours that the conformance suite tests on every release: the outcome on a patched and on an unpatched tree,
and the releases that cannot have it, with the reason.

The texts are outcomes of ``cases.py``, word for word. ``UPSTREAM`` is a prediction: an unpatched release that does
anything else, better or worse, fails a test.
"""

from support.conformance import IDENTICAL, REFERENCE, Behaviour
from verl_releases import LEGACY, RELEASES, A, B, C, having


def not_in(key: str) -> str:
    return f"ConfigCompositionException: Could not override '{key}'."


FP16 = "linear float16, autocast float16, weight float16"
BF16 = "linear bfloat16, autocast bfloat16, weight bfloat16"
TRAINED = "masters float32, Adam float32"
SKIPS = "skipped, scale times 0.5, skipped, scale times 0.5, next step taken"
NO_SCALER = "skipped, no scale, skipped, no scale, next step taken"
COUNTED = "taken: skipped_steps 0, loss_scale 1024, grad_norm finite; skipped: skipped_steps 1, loss_scale 512"
UNCOUNTED = "taken: grad_norm finite; skipped: grad_norm NOT FINITE"
HELD = "1 of 2 skipped: moves on, 2 of 2 skipped: held"
MOVES = "1 of 2 skipped: moves on, 2 of 2 skipped: moves on"
STORM = "LossScaleError in step 3, scale 2, names the gradient and its rank"
SAVED = "state comes back, scale comes back, same next step, an older checkpoint warns"
LOST = "state comes back, scale 512 resumes at 1024, ANOTHER NEXT STEP, an older checkpoint gives no warning"
UNSCALED = "state comes back, no scale, same next step, an older checkpoint gives no warning"
ACTOR = "actor_rollout_ref.actor"
TAKES = "takes an unknown dtype{0}, keys that contradict{0}, fp16 masters, an unknown rollout dtype"

DTYPE = "one key for fp16 at every hop, fp32 masters: actor, ref, critic"
SPELLING = "FlowRL's spelling of its two branches sets the same keys"
OVERFLOW = "an inf or NaN of one rank skips the step on all, and halves the scale"
KEYS = "the loss scaler's settings are keys"
METRICS = "`skipped_steps` and `loss_scale` in the metrics, `grad_norm` finite or absent"
RATE = "LR held where every step of an update was skipped"
ENDS = "a storm of overflows ends the run, naming the gradient"
CHECKPOINT = "the loss scale in the checkpoint, an older one warns"
WIRE = "weights leave for an fp16 rollout without passing through bf16"

HF = "the hf rollout samples in `rollout.dtype`"
HF16 = "linear float16, autocast float16"
HAS_HF = having("hf_rollout")
NO_HF = {
    "upstream's HFRollout lacks methods of its base class: no instance of it can be made": having(
        "legacy_workers", without=["hf_rollout"]
    ),
    "upstream removed the hf rollout": C,
}
NO_MANAGER = {"its manager of weights imports a vLLM that has no build for a CPU": having("sharding_manager")}
BYPASSED, NOT_BYPASSED = having("bypass_mode"), having(without=["bypass_mode"])
NO_KEPT = {"modules are kept in fp32 on the model engine": LEGACY}
OWN_REWARD, OWN_SFT = having("reward_worker"), having("sft_trainer")
REWARD_SERVED, ENGINE_SFT = having(without=["reward_worker"]), having(without=["sft_trainer"])
ON_ENGINE = "reward models are servers of the rollout's kind, SFT's step is the engine's"
NO_ACCUMULATION = tuple(name for name in RELEASES if name != "0.9.1")
NO_ENGINE_BESIDE = tuple(name for name in RELEASES if name not in having("legacy_workers", "engine_policy"))
# Weights that a release's default workers send in bfloat16.
ROUNDED = having("bfloat16_wire", without=["legacy_workers"])

# Cases without a precision key by the row of the matrix, each with the releases that cannot have it.
INERT: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    "metrics, weights, Adam, LR, output, over overflows and masked batches": {
        **dict.fromkeys(("inert_actor", "inert_critic", "inert_ref"), {}),
        "inert_accumulation": {"which gradients it reduces is not a key": NO_ACCUMULATION},
        "inert_engine": {"its workers are the model engine's, or it has none for the actor": NO_ENGINE_BESIDE},
        "inert_reward_model": {ON_ENGINE: REWARD_SERVED},
        "inert_sft": {ON_ENGINE: ENGINE_SFT},
        "inert_engine_sft": {"SFT has its own trainer": OWN_SFT},
        **dict.fromkeys(("inert_fp32_actor", "inert_fp32_critic", "inert_fp32_ref"), {}),
        "inert_listed": NO_KEPT,
    },
    "LoRA": {"inert_lora_fp32": {}, "inert_lora_bf16": {}, "inert_lora_critic": {}},
    "files of a checkpoint, what is resumed and refused, exports, merged models": {
        "inert_checkpoint_actor": {},
        "inert_checkpoint_critic": {},
    },
    "weights for the rollout, of adapters, too": {"inert_wire": NO_MANAGER},
    "configuration, refusals of the driver": {"inert_config": {}, "inert_driver": {}},
    "the trainer's advantages, log-probabilities and metrics": {"inert_trainer": {}},
    "attention of a value head": {"inert_attention": {}},
    "what the hf rollout samples": {"inert_hf_rollout": NO_HF},
}

BEHAVIOURS = {
    "dtype_actor": Behaviour(
        DTYPE,
        f"{FP16}, log-probs as float16, {TRAINED}, scaler",
        {f"{BF16}, log-probs as bfloat16, {TRAINED}, no scaler": RELEASES},
    ),
    "dtype_ref": Behaviour(
        DTYPE,
        f"{FP16}, log-probs as float16, no scaler",
        {f"{BF16}, log-probs as bfloat16, no scaler": RELEASES},
    ),
    "dtype_critic": Behaviour(DTYPE, f"{FP16}, {TRAINED}, scaler", {f"{BF16}, {TRAINED}, no scaler": RELEASES}),
    "reports": Behaviour(
        "each worker reports its dtypes", "actor float16, ref float16, critic float16", {"nothing": RELEASES}
    ),
    "flowrl_fp16": Behaviour(SPELLING, "as the overlay", {not_in(f"{ACTOR}.dtype"): RELEASES}),
    "flowrl_bf16_train_fp16_infer": Behaviour(SPELLING, "as the overlay", {not_in(f"{ACTOR}.dtype"): RELEASES}),
    "overflow_actor": Behaviour(OVERFLOW, SKIPS, {NO_SCALER: A, SKIPS: B + C}),
    "overflow_critic": Behaviour(OVERFLOW, SKIPS, {NO_SCALER: LEGACY, SKIPS: C}),
    "scaler_keys_actor": Behaviour(
        KEYS,
        "1024, 4096, 4096, 16384, 4096",
        {not_in(f"{ACTOR}.fsdp_config.grad_scaler.init_scale"): RELEASES},
    ),
    "scaler_keys_critic": Behaviour(
        KEYS,
        "1024, 4096, 4096, 16384, 4096",
        {
            not_in("critic.model.fsdp_config.grad_scaler.init_scale"): LEGACY,
            not_in("critic.fsdp.grad_scaler.init_scale"): C,
        },
    ),
    "metrics_actor": Behaviour(METRICS, COUNTED, {UNCOUNTED: RELEASES}),
    "metrics_critic": Behaviour(METRICS, COUNTED, {UNCOUNTED: RELEASES}),
    "learning_rate_actor": Behaviour(RATE, HELD, {MOVES: RELEASES}),
    "learning_rate_critic": Behaviour(RATE, HELD, {MOVES: RELEASES}),
    "storm_actor": Behaviour(ENDS, STORM, {"goes on": RELEASES}),
    "storm_critic": Behaviour(ENDS, STORM, {"goes on": RELEASES}),
    "checkpoint_actor": Behaviour(CHECKPOINT, SAVED, {UNSCALED: A, LOST: B + C}),
    "checkpoint_critic": Behaviour(CHECKPOINT, SAVED, {UNSCALED: LEGACY, LOST: C}),
    "refusals": Behaviour(
        "bad dtypes, contradictions, fp16 masters refused in one line by the driver",
        "refuses all",
        {
            TAKES.format("") + ", fp16 from an hf rollout of bf16": HAS_HF,
            TAKES.format(" (TypeError)"): tuple(name for name in RELEASES if name not in (*HAS_HF, *B)),
            TAKES.format(" (TypeError)") + ", fp16 on the model engine, fp16 in its SFT": B,
        },
    ),
    "nan_reward": Behaviour(
        "a reward that is not finite is refused",
        "1 of 4 rewards are not finite",
        {"trains on 2 rows of NaN": RELEASES},
    ),
    "wire": Behaviour(
        WIRE,
        "float32",
        {
            "float32": tuple(name for name in having(without=["sharding_manager"]) if name not in ROUNDED),
            "bfloat16": ROUNDED,
        },
        NO_MANAGER,
    ),
    "wire_merged_lora": Behaviour(
        WIRE, "float32", {"bfloat16": C}, {"adapters leave by themselves, none are merged": LEGACY}
    ),
    "empty_adapter": Behaviour(
        "a LoRA adapter without tensors is refused",
        "refused",
        {"sent": having(without=["sharding_manager"])},
        NO_MANAGER,
        fixes=True,
    ),
    "hf_rollout_fp16": Behaviour(
        HF, f"fsdp: {HF16}, weight float32; fsdp2: {HF16}, weight float16", {BF16: HAS_HF}, NO_HF
    ),
    # FSDP2 gathers weights in the dtype that it trains in: the driver refuses this one, see `refusals`.
    "hf_rollout_bf16_train_fp16_infer": Behaviour(
        HF, f"fsdp: {HF16}, weight float32; fsdp2: {HF16}, weight bfloat16", {BF16: HAS_HF}, NO_HF
    ),
    "reward_model": Behaviour(
        "the reward model scores in `reward_model.dtype`",
        FP16,
        {BF16: OWN_REWARD},
        {"reward models are servers of the rollout's kind": REWARD_SERVED},
    ),
    "export": Behaviour(
        "HF export and model merger keep fp16",
        "exported as float16 exactly, merged as float16 exactly",
        {"exported as bfloat16 ROUNDED, merged as bfloat16 ROUNDED": RELEASES},
    ),
    "sft": Behaviour(
        "SFT in fp16 by the same key",
        f"{FP16}, scaler",
        {f"{BF16}, no scaler": (*OWN_SFT, *C)},
        {
            "SFT runs on the model engine, which trains only in bf16 there: refused": having(
                "legacy_workers", without=["sft_trainer"]
            )
        },
    ),
    "overflow_sft": Behaviour(
        "SFT: an overflow skips the step, keeps the LR and is counted",
        "skipped, scale 512, LR held, skipped_steps 1.0",
        {"skipped, no scale, LR moves on, skipped_steps None": OWN_SFT},
        {"SFT's step is the engine's, seen as the actor's": ENGINE_SFT},
    ),
    "routers_named": Behaviour(
        "routers named in `keep_fp32_modules` compute in fp32",
        "q_proj float16, gate float32 returns float32",
        {not_in(f"{ACTOR}.fsdp_config.keep_fp32_modules"): C},
        NO_KEPT,
    ),
    "modules_listed": Behaviour(
        "modules that the model's class lists as fp32 compute in it",
        "q_proj float16, input_layernorm float32 returns float16",
        {"q_proj bfloat16, input_layernorm bfloat16 returns bfloat16": C},
        NO_KEPT,
    ),
    "routers_rollout": Behaviour(
        "the rollout's list of routers follows the actor's, their weights leave in fp32",
        "model.layers.*.gate leave as float32",
        {not_in(f"{ACTOR}.fsdp_config.keep_fp32_modules"): C},
        NO_KEPT,
    ),
    "lora_base": Behaviour(
        "LoRA over a frozen base in fp16: fp32 adapters, trained bitwise as over an fp32 base",
        "base float16, adapters float32, Adam float32, base stays, adapters move, as over fp32",
        {
            "base float16, adapters float32, Adam float32, base stays, adapters move, OTHERS THAN OVER FP32": (
                *LEGACY,
                "0.8.0",
            ),
            "base float16, adapters float16, Adam float16, base stays, adapters move, OTHERS THAN OVER FP32": (
                "0.9.0",
                "0.9.1",
            ),
        },
    ),
    "lora_base_sft": Behaviour(
        "LoRA over a frozen base in fp16: fp32 adapters in SFT, too",
        "base float16, adapters float32, Adam float32, base stays, adapters move",
        {
            "base float16, adapters float16, Adam float16, base stays, adapters move": OWN_SFT[1:],
            "base float16, adapters float32, Adam float32, base stays, adapters move": OWN_SFT[:1],
        },
        {ON_ENGINE: ENGINE_SFT},
    ),
    "equal_share": Behaviour("the share of equal log-probabilities in the metrics", "1, 0.5", {"none, none": RELEASES}),
    "bypass_mode": Behaviour(
        "bypass mode measures the mismatch and checks the weight sync by `trainer.mismatch_freq`",
        "step 1: share, k3, weight sync check; step 2: share, k3; step 3: nothing",
        {not_in("trainer.mismatch_freq"): BYPASSED},
        {"its bypass mode is missing, or ends with `Key 'rollout_correction' is not in struct`": NOT_BYPASSED},
    ),
    **{
        case: Behaviour(f"no key set: as upstream, bitwise: {row}", IDENTICAL, {REFERENCE: RELEASES}, absent)
        for row, cases in INERT.items()
        for case, absent in cases.items()
    },
}
