"""The configurations for which the doctor is compared with real workers: regimes, and users' mistakes."""

from dataclasses import dataclass

from verl_releases import ENTRIES, RELEASES, C, having

ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))
FSDP = "fsdp_config"


@dataclass(frozen=True)
class Given:
    """Overrides as a user types them.

    Args:
        overrides: ``{critic}`` is replaced by the prefix of the critic engine's keys in the release.
        roles: the roles whose workers are built, those that the overrides affect.
        releases: the releases that it is tested on.
        more: further observations of the actor: its save (``saved``).
    """

    overrides: str
    roles: tuple[str, ...] = ("actor", "critic")
    releases: tuple[str, ...] = RELEASES
    more: tuple[str, ...] = ()

    def words(self, release: str) -> list[str]:
        critic = "critic.model.fsdp_config" if ENTRIES[release].has("legacy_workers") else "critic.fsdp"
        return self.overrides.format(critic=critic).split()


ALL = ("actor", "ref", "critic")
ALONE = ("actor",)
SAVING = f"{ACTOR}.strategy=fsdp2 {ACTOR}.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
MERGED_LORA = "actor_rollout_ref.model.lora_rank=4 ++actor_rollout_ref.model.lora.merge=true"
MODEL_ENGINE = "trainer.use_legacy_worker_impl=disable"
KEYED = having("engine_dtype")
# Releases where only the critic supports the model engine; releases where every role does, but not on a CPU.
CRITIC_ENGINE, ROLES_ENGINE = having("engine_critic_fails"), having("legacy_workers", "engine_policy")

CONFIGS = {
    "nothing": Given("", ALL),
    # Regimes; an unpatched tree has no such group, so the key is an unused string.
    "fp16": Given("+precision=fp16", ALL),
    "bf16": Given("+precision=bf16", ALL),
    "bf16_train_fp16_infer": Given("+precision=bf16_train_fp16_infer", ALL),
    "fp32": Given("+precision=fp32", ALL),
    "fp16_but_the_rollout": Given(f"+precision=fp16 {ROLLOUT}.dtype=bfloat16", ()),
    # Upstream's own spellings.
    "engine_dtype": Given(f"{ACTOR}.{FSDP}.dtype=float16", ALL),
    "engine_dtypes": Given(
        f"{ACTOR}.{FSDP}.dtype=float16 {REF}.{FSDP}.dtype=float16 {{critic}}.dtype=float16 {ROLLOUT}.dtype=float16",
        ALL,
        KEYED,
    ),
    "engine_dtype_banana": Given(f"++{ACTOR}.{FSDP}.dtype=banana", ALONE),
    "param_dtype": Given(f"+{ACTOR}.{FSDP}.mixed_precision.param_dtype=fp16", ALL),
    "param_dtype_fp32": Given(f"+{ACTOR}.{FSDP}.mixed_precision.param_dtype=fp32", ALONE),
    "param_dtypes": Given(
        f"+{ACTOR}.{FSDP}.mixed_precision.param_dtype=fp16 +{REF}.{FSDP}.mixed_precision.param_dtype=fp16"
        f" +{{critic}}.mixed_precision.param_dtype=fp16 {ROLLOUT}.dtype=float16",
        ALL,
    ),
    "param_dtype_against_dtype": Given(
        f"{ACTOR}.{FSDP}.dtype=float16 +{ACTOR}.{FSDP}.mixed_precision.param_dtype=bf16", ALONE, KEYED
    ),
    "reduce_dtype": Given(f"+{ACTOR}.{FSDP}.mixed_precision.reduce_dtype=fp16", ALONE),
    # FlowRL's spelling, in full and in part.
    "role_dtypes": Given(f"{ACTOR}.dtype=float16 {REF}.dtype=float16 {ROLLOUT}.dtype=float16", ALL),
    "role_dtype_alone": Given(f"{ACTOR}.dtype=float16", ALONE),
    "role_against_engine": Given(f"++{ACTOR}.dtype=bfloat16 ++{ACTOR}.{FSDP}.dtype=float16", ALONE),
    "role_over_engine": Given(
        f"{ACTOR}.dtype=float16 {ACTOR}.{FSDP}.dtype=bfloat16 {ROLLOUT}.dtype=float16", ALL, KEYED
    ),
    "ref_differs": Given(f"{REF}.{FSDP}.dtype=float16", ("ref",), KEYED),
    "ref_role_differs": Given(f"+precision=fp16 {REF}.dtype=bfloat16", ("actor", "ref")),
    "critic_engine_alone": Given("{critic}.dtype=float16", ("critic",)),
    # Masters.
    "fp16_masters_in_fp16": Given(f"+precision=fp16 ++{ACTOR}.{FSDP}.model_dtype=fp16", ALONE),
    "bf16_masters": Given(f"++{ACTOR}.{FSDP}.model_dtype=bf16 ++{{critic}}.model_dtype=bf16"),
    # Merged: the driver looks for a server where adapters are sent.
    "lora_base_in_fp16": Given(f"+precision=fp16 ++{ACTOR}.{FSDP}.model_dtype=fp16 {MERGED_LORA}", ALONE, C),
    "lora_base_in_bf16": Given(f"++{ACTOR}.{FSDP}.model_dtype=bf16 {MERGED_LORA}", ALONE, C),
    "lora_base_in_requested_bf16": Given(
        f"{ACTOR}.dtype=bfloat16 ++{ACTOR}.{FSDP}.model_dtype=bf16 {MERGED_LORA}", ALONE, C
    ),
    # The rollout.
    "rollout_alone": Given(f"{ROLLOUT}.dtype=float16", ALONE),
    "rollout_alone_fsdp2": Given(f"{ROLLOUT}.dtype=float16 {ACTOR}.strategy=fsdp2", ALONE),  # 0.8.0's wire
    "rollout_auto": Given(f"{ROLLOUT}.dtype=auto", ()),
    "rollout_banana": Given(f"{ROLLOUT}.dtype=banana", ()),
    # The loss scaler.
    "grad_scaler": Given(f"+precision=fp16 {ACTOR}.{FSDP}.grad_scaler.init_scale=1024", ALONE),
    "grad_scaler_forced": Given(f"++{ACTOR}.{FSDP}.grad_scaler.init_scale=1024", ALONE),
    "grad_scaler_bad": Given(f"+precision=fp16 ++{ACTOR}.{FSDP}.grad_scaler.growth_factor=0.5", ALONE),
    # Other workers.
    "model_engine": Given(MODEL_ENGINE, ALL, CRITIC_ENGINE),
    "model_engine_in_the_driver": Given(MODEL_ENGINE, (), ROLES_ENGINE),
    "model_engine_in_fp16": Given(f"+precision=fp16 {MODEL_ENGINE}", ALL, CRITIC_ENGINE),
    "model_engine_in_fp16_in_the_driver": Given(f"+precision=fp16 {MODEL_ENGINE}", (), ROLES_ENGINE),
    "model_engine_dtypes": Given(
        f"{MODEL_ENGINE} {ACTOR}.{FSDP}.dtype=float16 {{critic}}.dtype=float16",
        ALL,
        having("engine_critic_fails", "engine_dtype"),
    ),
    "reward_model": Given("+precision=fp16", ("reward_model",), having("reward_worker")),
    "reward_model_alone": Given("reward_model.dtype=float16", ("reward_model",), having("reward_worker")),
    "merged_lora_alone": Given(f"{ACTOR}.strategy=fsdp2 {MERGED_LORA}", ALONE, C),
    "merged_lora": Given(f"+precision=fp16 {ACTOR}.strategy=fsdp2 {MERGED_LORA}", ALONE, C),
    "keep_fp32_modules": Given(f"+precision=fp16 {ACTOR}.{FSDP}.keep_fp32_modules=[lm_head]", ALONE, C),
    # Legacy workers do not read it; the model engine does.
    "full_determinism": Given(
        f"{ACTOR}.{FSDP}.full_determinism=true {{critic}}.full_determinism=true", ("actor", "critic"), ROLES_ENGINE + C
    ),
    # Checkpoints and exports.
    "export_alone": Given(SAVING, ALONE, more=("saved",)),
    "export": Given(f"+precision=fp16 {SAVING}", ALONE, more=("saved",)),
    "export_in_their_own_fp16": Given(
        f"{ACTOR}.{FSDP}.dtype=float16 +{ACTOR}.{FSDP}.mixed_precision.param_dtype=fp16 {SAVING}",
        ALONE,
        KEYED,
        ("saved",),
    ),
    "unknown_key": Given(f"{ACTOR}.precision_of_weights=float16", ()),
}

# What each configuration of `make test` covers. The others are slow: other spellings and other roles of the same rules.
COVERS = {
    "nothing": "the default of every hop",
    "fp16": "the overlay, which sets every key: each hop that a patch changed",
    "engine_dtypes": "dtype, of the three engines",
    "engine_dtype_banana": "a dtype that no worker reads",
    "param_dtypes": "mixed_precision.param_dtype, of the three engines",
    "reduce_dtype": "mixed_precision.reduce_dtype",
    "role_against_engine": "keys that contradict",
    "role_over_engine": "a role's dtype, which wins",
    "fp16_masters_in_fp16": "masters that a driver refuses",
    "bf16_masters": "model_dtype",
    "lora_base_in_fp16": "the frozen base under LoRA adapters",
    "rollout_alone_fsdp2": "the wire of shards to an fp16 rollout",
    "rollout_auto": "the rollout's own spellings",
    "grad_scaler": "the loss scaler's settings",
    "model_engine": "the model engine under legacy workers: the critic's",
    "model_engine_in_fp16": "its refusal of fp16",
    "model_engine_in_the_driver": "the same where every role has it",
    "reward_model": "the reward model's autocast",
    "merged_lora": "the wire of merged adapters",
    "keep_fp32_modules": "modules outside the autocast",
    "full_determinism": "deterministic algorithms, on or off",
    "export": "the HF export and the saved scaler",
}
