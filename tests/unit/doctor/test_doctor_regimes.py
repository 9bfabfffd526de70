"""The doctor's diagnoses of regimes, config groups, other engines and unknown keys."""

import json
from pathlib import Path

import pytest
from support.diagnoses import ACTOR, ENGINE, NEWEST, ROLLOUT, SOME, A, B, C, Examine, dtypes, effects, mends

from lib.doctor import dtype_rules
from lib.errors import Refused
from lib.paths import CONFIGS

# --- regimes, groups, other engines ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("regime", "trainer", "rollout", "verdict"),
    [
        ("fp16", "float16", "float16", "agree"),
        ("bf16", "bfloat16", "bfloat16", "agree"),
        ("fp32", "float32", "float32", "agree"),
        ("bf16_train_fp16_infer", "bfloat16", "float16", "asked"),
    ],
)
def test_regimes(regime: str, trainer: str, rollout: str, verdict: str, examine: Examine):
    diagnosis = examine(NEWEST, "patched", f"+precision={regime}")
    assert dtypes(diagnosis, "actor.autocast", "actor.logits", "rollout.weights") == [
        trainer,
        trainer,
        rollout,
    ]
    assert diagnosis.verdict == verdict and diagnosis.sound


def test_a_later_key_wins_over_the_overlay(examine: Examine):
    diagnosis = examine(NEWEST, "patched", "+precision=fp16", f"{ROLLOUT}.dtype=bfloat16")
    assert dtypes(diagnosis, "actor.compute", "rollout.weights") == ["float16", "bfloat16"]
    assert diagnosis.verdict == "asked"
    assert diagnosis.hops["rollout.weights"].requested == {f"{ROLLOUT}.dtype": "bfloat16"}


def test_contradicting_keys_are_refused(examine: Examine):
    diagnosis = examine(NEWEST, "patched", f"{ACTOR}.dtype=bfloat16", f"{ENGINE}.dtype=float16")
    assert diagnosis.refused.startswith(
        "ValueError: dtype=bfloat16 and fsdp_config.dtype=float16 contradict each other"
    )
    of_critic = examine(NEWEST, "patched", "critic.dtype=bfloat16", "critic.fsdp.dtype=float16")
    assert of_critic.refused.startswith("ValueError: dtype=bfloat16 and fsdp.dtype=float16 contradict each other")
    word = f"+{ENGINE}.mixed_precision.param_dtype=bf16"
    assert "contradict" in examine(NEWEST, "patched", f"{ENGINE}.dtype=float16", word).refused
    assert "contradict" in examine(B[-1], "patched", f"{ENGINE}.dtype=float16", word).refused
    apart = examine(B[-1], "unpatched", f"{ENGINE}.dtype=float16", word)
    assert dtypes(apart, "actor.compute", "actor.autocast", "actor.logits") == [
        "bfloat16",
        "float16",
        "float16",
    ]
    assert apart.verdict == "differ" and apart.scaler["actor"]


def test_rollout_in_an_unknown_dtype(examine: Examine):
    diagnosis = examine(NEWEST, "unpatched", f"{ROLLOUT}.dtype=banana")
    assert diagnosis.hops["rollout.weights"].effective_dtype == "unknown" and diagnosis.verdict == "unknown"
    assert (
        set(effects(diagnosis)) == {f"{ROLLOUT}.dtype"}
        and "does not check it" in effects(diagnosis)[f"{ROLLOUT}.dtype"]
    )
    assert "dtype=banana is unknown to the rollout" in examine(NEWEST, "patched", f"{ROLLOUT}.dtype=banana").refused


def test_quantized_rollout_differs_as_requested(examine: Examine):
    diagnosis = examine(NEWEST, "patched", "+precision=fp16", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.quantization=fp8")
    assert dtypes(diagnosis, "rollout.weights", "rollout.logits") == ["float8_e4m3fn", "float16"]
    assert diagnosis.verdict == "asked" and "quantized weights" in effects(diagnosis)[f"{ROLLOUT}.quantization"]
    cache = f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype=fp8"
    diagnosis = examine(NEWEST, "patched", "+precision=fp16", f"{ROLLOUT}.name=vllm", cache)
    assert dtypes(diagnosis, "rollout.weights", "rollout.kv_cache") == ["float16", "float8_e4m3fn"]
    assert diagnosis.verdict == "asked" and "rounds keys and values" in effects(diagnosis)[cache[1:].partition("=")[0]]


@pytest.mark.parametrize(("mode", "cache"), [("sync", "float8_e4m3fn"), ("async", "bfloat16")])
def test_engine_arguments_that_a_server_does_not_read(mode: str, cache: str, examine: Examine):
    words = [f"{ROLLOUT}.mode={mode}", f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype=fp8"]
    assert examine(A[0], "unpatched", *words).hops["rollout.kv_cache"].effective_dtype == cache


def test_auto_resolves_to_the_models_dtype(examine: Examine, tmp_path: Path):
    words = [f"{ROLLOUT}.dtype=auto", f"actor_rollout_ref.model.path={tmp_path}"]
    for dtype, effective in (("bfloat16", "bfloat16"), ("float32", "unknown")):
        (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": dtype}))
        diagnosis = examine(NEWEST, "patched", *words)
        assert diagnosis.hops["rollout.weights"].effective_dtype == effective
        assert diagnosis.verdict == ("agree" if effective == dtype else "unknown")
    assert "config.json" in effects(diagnosis)[f"{ROLLOUT}.dtype"]


def test_head_kept_in_fp32_returns_fp32_logits(examine: Examine):
    diagnosis = examine(NEWEST, "patched", "+precision=fp16", f"{ENGINE}.keep_fp32_modules=[lm_head]")
    assert dtypes(diagnosis, "actor.compute", "actor.logits") == ["float16", "float32"]
    text = examine(NEWEST, "patched", f"{ENGINE}.keep_fp32_modules=lm_head").refused
    assert "keep_fp32_modules=lm_head must be a list of module names" in text
    for release in (B[-1], NEWEST):
        advice = mends(examine(release, "unpatched", f"{ENGINE}.keep_fp32_modules=[lm_head]")).values()
        assert any(dtype_rules.KEEP in each for each in advice) == (release in C), "legacy workers have no such patch"


def test_groups_of_this_repository(examine: Examine, tmp_path: Path):
    """They are on the search path by default; a search path in the overrides replaces the default."""
    words = ["+experiment=sanity_cpu", "+algo=grpo", "+device=cpu", "+precision=fp16"]
    diagnosis = examine(NEWEST, "patched", *words)
    assert diagnosis.verdict == "agree" and diagnosis.hops["critic.compute"].effective_dtype is None  # grpo
    assert examine(NEWEST, "patched", *words, f"hydra.searchpath=['file://{CONFIGS}']").json() == diagnosis.json()
    elsewhere = effects(examine(NEWEST, "patched", *words, f"hydra.searchpath=['file://{tmp_path}']"))
    assert elsewhere["experiment"] == f"is a key that nothing reads in verl {NEWEST}" and "precision" not in elsewhere
    assert examine(NEWEST, "patched", *words, "+recipe=flowrl").verdict == "agree"


def test_overlays_on_an_unpatched_tree_are_refused(examine: Examine):
    """They compose, but the release's dataclasses refuse their keys."""
    diagnosis = examine(NEWEST, "unpatched", f"hydra.searchpath=['file://{CONFIGS}']", "+precision=fp16")
    assert diagnosis.refused == "TypeError: FSDPActorConfig.__init__() got an unexpected keyword argument 'dtype'"


@pytest.mark.parametrize("release", SOME)
def test_megatron_computes_in_its_own_dtype_key(release: str, examine: Examine):
    words = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.name=vllm"]
    diagnosis = examine(release, "unpatched", *words, config_name="ppo_megatron_trainer")
    assert dtypes(diagnosis, "actor.compute", "actor.autocast", "actor.master") == [
        "bfloat16",
        "unknown",
        "unknown",
    ]
    assert diagnosis.verdict == "agree"
    if release not in A:
        key = f"{ACTOR}.megatron.dtype"
        words += [f"{key}=float16", f"{ACTOR}.megatron.use_mbridge=true"]
        diagnosis = examine(release, "unpatched", *words, config_name="ppo_megatron_trainer")
        assert diagnosis.hops["actor.compute"].effective_dtype == "float16" and diagnosis.verdict == "differ"
        assert "NotImplementedError" in effects(diagnosis)[key]
        assert (dtype_rules.SKIP in mends(diagnosis)[key]) == (release in C)
    if release in B:
        words[-1] = words[-1].replace("true", "false")
        diagnosis = examine(release, "unpatched", *words, config_name="ppo_megatron_trainer")
        assert diagnosis.refused == "AssertionError: fp16 mode requires use_mbridge to be True"


def test_engine_without_rules_is_unknown(examine: Examine):
    diagnosis = examine(NEWEST, "unpatched", "model_engine=veomni", f"{ROLLOUT}.name=vllm")
    assert (
        diagnosis.hops["actor.compute"].effective_dtype == "unknown"
        and diagnosis.verdict == "unknown"
        and not diagnosis.sound
    )
    patched = examine(NEWEST, "patched", "model_engine=veomni", "+precision=fp16")
    assert "dtype=float16 is not what strategy=veomni trains in" in patched.refused


# --- bad keys -----------------------------------------------------------------------------------------------------


def test_unknown_keys_are_refused_with_a_hint(examine: Examine):
    diagnosis = examine(NEWEST, "patched", f"{ACTOR}.precision_of_weights=float16")
    assert diagnosis.refused == f"Could not override '{ACTOR}.precision_of_weights'."
    assert diagnosis.verdict == "refused" and set(dtypes(diagnosis, *diagnosis.hops)) == {None}
    moved = examine(B[-1], "patched", "critic.fsdp.dtype=float16")
    assert mends(moved) == {"critic.fsdp.dtype": "critic.model.fsdp_config.dtype=float16"}
    typo = examine(NEWEST, "unpatched", "actor_rollout_ref.rolout.dtype=float16")
    assert mends(typo) == {"actor_rollout_ref.rolout.dtype": "the nearest key is actor_rollout_ref.rollout.dtype"}
    regime = examine(NEWEST, "patched", "+precision=fp17").refused
    assert (
        regime == "In 'ppo_trainer': Could not find 'precision/fp17'; there are bf16, bf16_train_fp16_infer, fp16, fp32"
    )
    with pytest.raises(Refused, match="ARGS"):
        examine(NEWEST, "patched", "no override")


def test_misspelt_group_is_named(examine: Examine):
    diagnosis = examine(NEWEST, "patched", "+precison=fp16")
    assert mends(diagnosis) == {"precison": "+precision=fp16"} and diagnosis.verdict == "ignored"
