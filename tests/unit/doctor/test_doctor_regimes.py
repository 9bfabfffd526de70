"""The doctor's diagnoses of regimes, roles, config groups, other engines and unknown keys."""

import json
from pathlib import Path

import pytest
from support.diagnoses import ALL, ENGINE, NEWEST, ROLLOUT, A, B, C, Case, Examine, effects, mends, of_cases

from lib.doctor.dtype_rules import KEEP, SKIP
from lib.errors import Refused
from lib.paths import CONFIGS

NEW, LAST_LEGACY = [NEWEST], B[-1:]
LORA = "{actor}.use_kl_loss=true {ref}.fsdp_config.dtype=float16 ++actor_rollout_ref.model."
ENGINES = ("kimi_ckpt_engine", "mooncake")
SENDS = "{{rollout}}.checkpoint_engine.backend={} {{engine}}.dtype=float16 {{rollout}}.dtype={}"

# fmt: off
REGIMES = (
    *(Case(regime, NEW, "patched", f"+precision={regime}",
           f"actor.autocast={trainer} actor.logits={trainer} rollout.weights={rollout}", verdict)
      for regime, trainer, rollout, verdict in (
          ("fp16", "float16", "float16", "agree"), ("bf16", "bfloat16", "bfloat16", "agree"),
          ("fp32", "float32", "float32", "agree"), ("bf16_train_fp16_infer", "bfloat16", "float16", "asked"))),
    Case("a later key wins", NEW, "patched", "+precision=fp16 {rollout}.dtype=bfloat16",
         "actor.compute=float16 rollout.weights=bfloat16", "asked"),
    Case("contradiction", NEW, "patched", "{actor}.dtype=bfloat16 {engine}.dtype=float16",
         refused="ValueError: dtype=bfloat16 and fsdp_config.dtype=float16 contradict each other*"),
    Case("critic's contradiction", NEW, "patched", "critic.dtype=bfloat16 critic.fsdp.dtype=float16",
         refused="ValueError: dtype=bfloat16 and fsdp.dtype=float16 contradict each other*"),
    Case("head in fp32", NEW, "patched", "+precision=fp16 {engine}.keep_fp32_modules=[lm_head]",
         "actor.compute=float16 actor.logits=float32"),
    Case("head that is no list", NEW, "patched", "{engine}.keep_fp32_modules=lm_head",
         refused="*keep_fp32_modules=lm_head must be a list of module names*"),
)

ROLES = (
    Case("PPO", NEW, "unpatched", "", "critic.compute=bfloat16 ref.compute=None reward_model.compute=None"),
    Case("KL in the reward", NEW, "unpatched", "algorithm.use_kl_in_reward=true",
         "ref.compute=bfloat16 critic.compute=bfloat16"),
    Case("KL in the loss", NEW, "unpatched", "{actor}.use_kl_loss=true",
         "ref.compute=bfloat16 critic.compute=bfloat16"),
    Case("no critic", NEW, "unpatched", "critic.enable=false", "critic.compute=None"),
    Case("critic of GRPO", NEW, "unpatched", "algorithm.adv_estimator=grpo critic.enable=true",
         "critic.compute=bfloat16"),
    # The ref is the actor without its adapters, so its own dtype is ignored.
    *(Case(f"adapter by {word}", NEW, "unpatched", LORA + word, "ref.compute=bfloat16", "agree", effect={})
      for word in ("lora_rank=4", "lora_adapter_path=/adapter", "lora.rank=4")),
)

ROLLOUTS = (
    Case("unknown dtype", NEW, "unpatched", "{rollout}.dtype=banana", "rollout.weights=unknown", "unknown",
         effect={"{rollout}.dtype": "*does not check it*"}),
    Case("unknown dtype", NEW, "patched", "{rollout}.dtype=banana", refused="*dtype=banana is unknown to the rollout*"),
    Case("quantized", NEW, "patched", "+precision=fp16 {rollout}.name=vllm {rollout}.quantization=fp8",
         "rollout.weights=float8_e4m3fn rollout.logits=float16", "asked",
         effect={"{rollout}.quantization": "*quantized weights*"}),
    Case("KV cache", NEW, "patched",
         "+precision=fp16 {rollout}.name=vllm +{rollout}.engine_kwargs.vllm.kv_cache_dtype=fp8",
         "rollout.weights=float16 rollout.kv_cache=float8_e4m3fn", "asked",
         effect={"{rollout}.engine_kwargs.vllm.kv_cache_dtype": "*rounds keys and values*"}),
    *(Case(f"KV cache, {mode}", A[:1], "unpatched",
           f"{{rollout}}.mode={mode} +{{rollout}}.engine_kwargs.vllm.kv_cache_dtype=fp8", f"rollout.kv_cache={cache}")
      for mode, cache in (("sync", "float8_e4m3fn"), ("async", "bfloat16"))),  # that server does not read the key
    *(Case(f"{engine}, unpatched", NEW, "unpatched", SENDS.format(engine, "float16"), "wire=bfloat16")
      for engine in ENGINES),
    *(Case(engine, NEW, "patched", SENDS.format(engine, "float16"), "wire=float16", "agree") for engine in ENGINES),
    *(Case(f"{engine}, its own key", NEW, "patched",
           f"{SENDS.format(engine, 'float16')} "
           f"+{{rollout}}.checkpoint_engine.engine_kwargs.{engine}.rollout_dtype=bfloat16", "wire=bfloat16", "differ")
      for engine in ENGINES),
    *(Case(f"{engine}, its default", NEW, "patched", SENDS.format(engine, "auto"), "wire=bfloat16")
      for engine in ENGINES),
)

MEGATRON = "algorithm.adv_estimator=grpo {rollout}.name=vllm"
FP16_MEGATRON = f"{MEGATRON} {{actor}}.megatron.dtype=float16 {{actor}}.megatron.use_mbridge="
UNIMPLEMENTED = {"{actor}.megatron.dtype": "*NotImplementedError*"}
MEGATRON_RULES = (
    Case("defaults", ALL, "unpatched", MEGATRON,
         "actor.compute=bfloat16 actor.autocast=unknown actor.master=unknown", "agree"),
    Case("fp16", B, "unpatched", f"{FP16_MEGATRON}true", "actor.compute=float16", "differ", effect=UNIMPLEMENTED),
    Case("fp16", C, "unpatched", f"{FP16_MEGATRON}true", "actor.compute=float16", "differ", effect=UNIMPLEMENTED,
         mend={"{actor}.megatron.dtype": f"*{SKIP}*"}),
    Case("fp16 without bridge", B, "unpatched", f"{FP16_MEGATRON}false",
         refused="AssertionError: fp16 mode requires use_mbridge to be True"),
)

OTHERS = (
    Case("engine without rules", NEW, "unpatched", "model_engine=veomni {rollout}.name=vllm",
         "actor.compute=unknown", "unknown"),
    Case("engine without rules", NEW, "patched", "model_engine=veomni +precision=fp16",
         refused="*dtype=float16 is not what strategy=veomni trains in*"),
    Case("unknown key", NEW, "patched", "{actor}.precision_of_weights=float16", "actor.compute=None wire=None",
         refused="Could not override '{actor}.precision_of_weights'."),
    Case("key of another family", LAST_LEGACY, "patched", "critic.fsdp.dtype=float16", refused="Could not override*",
         mend={"critic.fsdp.dtype": "critic.model.fsdp_config.dtype=float16"}),
    Case("misspelt key", NEW, "unpatched", "actor_rollout_ref.rolout.dtype=float16", refused="Could not override*",
         mend={"actor_rollout_ref.rolout.dtype": "the nearest key is {rollout}.dtype"}),
    Case("unknown regime", NEW, "patched", "+precision=fp17",
         refused="In 'ppo_trainer': Could not find 'precision/fp17'; there are "
                 "bf16, bf16_train_fp16_infer, fp16, fp32"),
    Case("misspelt group", NEW, "patched", "+precison=fp16", "", "ignored", mend={"precison": "+precision=fp16"}),
)
# fmt: on


@of_cases(*REGIMES, *ROLES, *ROLLOUTS, *OTHERS)
def test_diagnosis(case: Case, release: str, state: str, examine: Examine):
    case.check(release, state, examine)


@of_cases(*MEGATRON_RULES)
def test_megatron_computes_in_its_own_dtype_key(case: Case, release: str, state: str, examine: Examine):
    case.check(release, state, lambda *words: examine(*words, config_name="ppo_megatron_trainer"))


def test_requests_are_reported(examine: Examine):
    key = f"{ROLLOUT}.dtype"
    diagnosis = examine(NEWEST, "patched", "+precision=fp16", f"{key}=bfloat16")
    assert diagnosis.hops["rollout.weights"].requested == {key: "bfloat16"} and diagnosis.sound
    assert not examine(NEWEST, "unpatched", f"{key}=float16").sound


@pytest.mark.parametrize(
    ("dtype", "effective", "verdict"), [("bfloat16", "bfloat16", "agree"), ("float32", "unknown", "unknown")]
)
def test_auto_resolves_to_the_models_dtype(dtype, effective, verdict, examine: Examine, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": dtype}))
    diagnosis = examine(NEWEST, "patched", f"{ROLLOUT}.dtype=auto", f"actor_rollout_ref.model.path={tmp_path}")
    assert (diagnosis.hops["rollout.weights"].effective_dtype, diagnosis.verdict) == (effective, verdict)
    assert verdict == "agree" or "config.json" in effects(diagnosis)[f"{ROLLOUT}.dtype"]


def test_groups_of_this_repository(examine: Examine, tmp_path: Path):
    """They are on the search path by default; a search path in the overrides replaces the default."""
    words = ["+experiment=sanity_cpu", "+algo=grpo", "+device=cpu", "+precision=fp16"]
    diagnosis = examine(NEWEST, "patched", *words)
    assert diagnosis.verdict == "agree" and diagnosis.hops["critic.compute"].effective_dtype is None  # grpo
    ours = f"hydra.searchpath=['file://{CONFIGS}']"
    assert examine(NEWEST, "patched", *words, ours).json() == diagnosis.json()
    elsewhere = effects(examine(NEWEST, "patched", *words, f"hydra.searchpath=['file://{tmp_path}']"))
    assert elsewhere["experiment"] == f"is a key that nothing reads in verl {NEWEST}" and "precision" not in elsewhere
    assert examine(NEWEST, "patched", *words, "+recipe=flowrl").verdict == "agree"
    unpatched = examine(NEWEST, "unpatched", ours, "+precision=fp16")  # composes, but its dataclasses lack the keys
    assert unpatched.refused == "TypeError: FSDPActorConfig.__init__() got an unexpected keyword argument 'dtype'"


@pytest.mark.parametrize("release", [B[-1], NEWEST])
def test_legacy_workers_are_not_advised_a_patch_that_they_lack(release: str, examine: Examine):
    advice = mends(examine(release, "unpatched", f"{ENGINE}.keep_fp32_modules=[lm_head]")).values()
    assert any(KEEP in each for each in advice) == (release in C)


def test_word_that_is_no_override_is_refused(examine: Examine):
    with pytest.raises(Refused, match="ARGS"):
        examine(NEWEST, "patched", "no override")
