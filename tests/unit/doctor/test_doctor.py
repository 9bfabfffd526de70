"""The doctor's diagnoses of each release, patched and not; no worker runs here."""

import pytest
from support.diagnoses import (
    ACTOR,
    ENGINE,
    NEWEST,
    REF,
    RELEASES,
    ROLLOUT,
    SOME,
    A,
    B,
    C,
    Examine,
    dtypes,
    effects,
    having,
    mends,
    rounds_weights,
)

from lib.doctor import dtype_rules
from lib.doctor.resolver import UPSTREAM_SCALER
from lib.patches.stack import load_stack

# --- each release -------------------------------------------------------------------------------------------------

DEFAULT = {
    "actor.master": "float32",
    "actor.compute": "bfloat16",
    "actor.autocast": "bfloat16",
    "actor.reduce": "float32",
    "actor.optimizer": "float32",
    "actor.logits": "bfloat16",
    "wire": "float32",
    "rollout.weights": "bfloat16",
    "rollout.kv_cache": "bfloat16",
    "rollout.logits": "bfloat16",
    "ref.compute": None,
    "ref.autocast": None,
    "critic.master": "float32",
    "critic.compute": "bfloat16",
    "critic.autocast": "bfloat16",
    "critic.reduce": "float32",
    "reward_model.compute": None,
    "hf_export": "bfloat16",
}


@pytest.mark.parametrize("state", ["unpatched", "patched"])
@pytest.mark.parametrize("release", RELEASES)
def test_defaults_agree_in_bfloat16(release: str, state: str, examine: Examine):
    diagnosis = examine(release, state)
    expected = DEFAULT | ({"wire": "bfloat16"} if state == "unpatched" and rounds_weights(release) else {})
    assert {name: hop.effective_dtype for name, hop in diagnosis.hops.items()} == expected
    assert diagnosis.json()["verl"] == {
        "release": release,
        "state": state,
        "stack": load_stack(RELEASES[release]).id if state == "patched" else None,
        "nearest": None,
    }
    assert (diagnosis.verdict, diagnosis.findings, diagnosis.scaler) == ("agree", (), {"actor": None, "critic": None})


@pytest.mark.parametrize("release", RELEASES)
def test_patched_tree_computes_in_fp16_by_one_key(release: str, examine: Examine):
    diagnosis = examine(release, "patched", "+precision=fp16", f"{ACTOR}.use_kl_loss=true")
    roles = [f"{role}.{what}" for role in ("actor", "ref", "critic") for what in ("compute", "autocast")]
    assert set(dtypes(diagnosis, *roles, "actor.logits", "rollout.weights", "rollout.kv_cache", "hf_export")) == {
        "float16"
    }
    assert set(dtypes(diagnosis, "actor.master", "actor.optimizer", "actor.reduce", "wire", "critic.master")) == {
        "float32"
    }
    assert diagnosis.verdict == "agree" and not diagnosis.findings
    settings = {"init_scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 400}
    settings |= {"min_scale": 1.0, "max_consecutive_skips": 32, "saved": True, "reported": True}
    assert diagnosis.scaler == {"actor": settings, "critic": settings}


@pytest.mark.parametrize("release", RELEASES)
def test_unpatched_tree_ignores_precision_key(release: str, examine: Examine):
    diagnosis = examine(release, "unpatched", "+precision=fp16")
    assert dtypes(diagnosis, "actor.compute", "rollout.weights") == ["bfloat16", "bfloat16"]
    assert diagnosis.sentence.endswith("both compute in bfloat16. Not as requested: precision=fp16.")
    assert "nothing reads" in effects(diagnosis)["precision"] and dtype_rules.KEYS in mends(diagnosis)["precision"]
    assert diagnosis.verdict == "ignored" and not diagnosis.sound


@pytest.mark.parametrize("release", RELEASES)
def test_engine_dtype_key(release: str, examine: Examine):
    patched = examine(release, "patched", f"{ENGINE}.dtype=float16", f"{ROLLOUT}.dtype=float16")
    assert dtypes(patched, "actor.compute", "actor.autocast", "critic.compute") == ["float16"] * 3
    assert patched.verdict == "agree" and patched.scaler["actor"]["saved"]

    diagnosis = examine(release, "unpatched", f"{ENGINE}.dtype=float16", f"{ROLLOUT}.dtype=float16")
    if release in A:  # has no such key
        assert diagnosis.refused == f"Could not override '{ENGINE}.dtype'." and diagnosis.verdict == "refused"
        assert dtype_rules.KEYS in mends(diagnosis)[f"{ENGINE}.dtype"]
    elif release in B:  # the actor reads it; the critic's own key is never read
        assert dtypes(diagnosis, "actor.compute", "actor.autocast", "critic.compute") == [
            "float16",
            "float16",
            "bfloat16",
        ]
        assert diagnosis.verdict == "agree" and diagnosis.scaler == {"actor": UPSTREAM_SCALER, "critic": None}
        assert "neither saves" in effects(diagnosis)[f"{ENGINE}.grad_scaler"]
        assert effects(diagnosis)[f"{ENGINE}.dtype"] == "does not reach the critic, which trains in bfloat16"
    else:
        assert diagnosis.verdict == "differ" and diagnosis.scaler["actor"] is None
        assert "float16 was requested for the trainer" in diagnosis.sentence
        text = effects(diagnosis)[f"{ENGINE}.dtype"]
        assert text == f"is ignored by verl {release}: trains in bfloat16"
        assert dtype_rules.COMPUTE in mends(diagnosis)[f"{ENGINE}.dtype"]


@pytest.mark.parametrize("release", [B[0], B[-1], C[0], C[-1]])
def test_unknown_engine_dtype_is_refused_or_ignored(release: str, examine: Examine):
    patched = examine(release, "patched", f"{ENGINE}.dtype=banana")
    assert "dtype=banana is not a dtype to compute in" in patched.refused and patched.verdict == "refused"
    diagnosis = examine(release, "unpatched", f"{ENGINE}.dtype=banana")
    if release in B:
        assert diagnosis.refused == "RuntimeError: unexpected precision: banana"
    else:
        assert effects(diagnosis)[f"{ENGINE}.dtype"] == f"is ignored by verl {release}: trains in bfloat16"
        assert not diagnosis.refused


@pytest.mark.parametrize("release", SOME)
def test_param_dtype_reaches_one_half_of_legacy_workers(release: str, examine: Examine):
    word = f"{ENGINE}.mixed_precision.param_dtype"
    diagnosis = examine(release, "unpatched", f"+{word}=fp16", f"{ROLLOUT}.dtype=float16")
    compute, autocast = dtypes(diagnosis, "actor.compute", "actor.autocast")
    assert compute == "float16" and autocast == ("float16" if release in C else "bfloat16")
    assert dtypes(diagnosis, "actor.reduce") == ["float32"], "the default of a mixed_precision without it"
    mapping = f"++{ENGINE}.mixed_precision={{param_dtype:fp16}}"
    assert examine(release, "unpatched", mapping, f"{ROLLOUT}.dtype=float16").json() == diagnosis.json()
    if release in C:
        assert diagnosis.verdict == ("differ" if rounds_weights(release) else "agree")
        assert diagnosis.scaler["actor"] == UPSTREAM_SCALER
        assert "makes bfloat16 of a model trained in float16" in effects(diagnosis)["hf_export"]
    else:
        assert diagnosis.verdict == "differ" and diagnosis.scaler["actor"] is None
        texts = " ".join(finding.effect for finding in diagnosis.findings if finding.key == word)
        assert "reaches only one half" in texts and "without a loss scaler" in texts
    assert examine(release, "patched", f"+{word}=fp16", f"{ROLLOUT}.dtype=float16").verdict == "agree"


@pytest.mark.parametrize("release", B)
def test_reduce_dtype_alone_turns_the_weights_back_to_bf16(release: str, examine: Examine):
    """Keys missing from an explicit ``mixed_precision`` have defaults of their own, whatever ``dtype`` is."""
    diagnosis = examine(release, "unpatched", f"{ENGINE}.dtype=float16", f"+{ENGINE}.mixed_precision.reduce_dtype=fp16")
    assert dtypes(diagnosis, "actor.compute", "actor.autocast", "actor.reduce") == [
        "bfloat16",
        "float16",
        "float16",
    ]
    assert "sums the actor's gradients" in effects(diagnosis)[f"{ENGINE}.mixed_precision.reduce_dtype"]
    assert diagnosis.verdict == "differ"


@pytest.mark.parametrize("release", SOME)
def test_critic_engine_dtype_reaches_only_patched_critics(release: str, examine: Examine):
    engine = "critic.fsdp" if release in C else "critic.model.fsdp_config"
    plus = "++" if release in A else ""
    diagnosis = examine(release, "unpatched", f"{plus}{engine}.dtype=float16")
    if release in A and RELEASES[release].has("validate_config"):  # its FSDP config is a dataclass without dtype
        assert diagnosis.refused == "TypeError: FSDPEngineConfig.__init__() got an unexpected keyword argument 'dtype'"
        return
    assert effects(diagnosis)[f"{engine}.dtype"] == f"is ignored by verl {release}: trains in bfloat16"
    assert (
        diagnosis.verdict == "ignored" and "both compute in bfloat16. Not as requested: critic." in diagnosis.sentence
    )
    patched = examine(release, "patched", f"{engine}.dtype=float16")
    assert dtypes(patched, "actor.compute", "critic.compute") == ["bfloat16", "float16"]


@pytest.mark.parametrize("release", [A[0], B[-1]])
def test_critic_param_dtype_reaches_one_half_of_legacy_workers(release: str, examine: Examine):
    word = "critic.model.fsdp_config.mixed_precision.param_dtype"
    diagnosis = examine(release, "unpatched", f"+{word}=fp16")
    assert dtypes(diagnosis, "critic.compute", "critic.autocast") == ["float16", "bfloat16"]
    texts = " ".join(finding.effect for finding in diagnosis.findings if finding.key == word)
    assert "reaches only one half" in texts and "puts the critic into fp16 without a loss scaler" in texts
    assert diagnosis.verdict == "ignored"


@pytest.mark.parametrize("release", SOME)
def test_role_dtype_keys_exist_only_on_patched_trees(release: str, examine: Examine):
    """FlowRL's spelling: keys of a patched verl, none of upstream's."""
    words = [f"{ACTOR}.dtype=float16", f"{ROLLOUT}.dtype=float16"]
    assert examine(release, "patched", *words).verdict == "agree"
    diagnosis = examine(release, "unpatched", *words)
    assert diagnosis.refused == f"Could not override '{ACTOR}.dtype'."
    assert mends(diagnosis)[f"{ACTOR}.dtype"] == f"{dtype_rules.KEYS}: make apply-patches VERL={diagnosis.tree.root}"
    forced = examine(release, "unpatched", f"+{words[0]}", words[1])
    if release in A[:2]:  # plain dictionaries accept any key
        assert effects(forced)[f"{ACTOR}.dtype"] == f"is ignored by verl {release}: trains in bfloat16"
    else:
        assert "got an unexpected keyword argument 'dtype'" in forced.refused
    alone = examine(release, "patched", words[0])
    assert alone.verdict == "differ" and "nobody requested" in alone.sentence


@pytest.mark.parametrize("release", SOME)
def test_rollout_dtype_alone_differs(release: str, examine: Examine):
    for state in ("unpatched", "patched"):
        diagnosis = examine(release, state, f"{ROLLOUT}.dtype=float16")
        assert dtypes(diagnosis, "actor.logits", "rollout.weights", "rollout.kv_cache") == [
            "bfloat16",
            "float16",
            "float16",
        ]
        assert diagnosis.verdict == "differ"
        assert examine(release, state, f"{ROLLOUT}.dtype=half").hops["rollout.weights"].effective_dtype == "float16"


@pytest.mark.parametrize("release", SOME)
def test_masters_in_16_bits_are_a_finding(release: str, examine: Examine):
    key = f"{ENGINE}.model_dtype"
    for state in ("unpatched", "patched"):
        diagnosis = examine(release, state, f"++{key}=bf16")
        assert dtypes(diagnosis, "actor.master", "actor.optimizer", "wire") == ["bfloat16"] * 3
        assert "updates below 1/256" in effects(diagnosis)[key] and mends(diagnosis)[key] == f"{key}=fp32"
        assert diagnosis.verdict == "agree"
        whole = examine(release, state, f"++{key}=bf16", f"{ROLLOUT}.dtype=float16")
        assert f"{ROLLOUT}.dtype" not in effects(whole), "a wire in the masters' dtype rounds nothing"
        of_critic = f"{'critic.fsdp' if release in C else 'critic.model.fsdp_config'}.model_dtype"
        assert "updates below 1/256" in effects(examine(release, state, f"++{of_critic}=bf16"))[of_critic]
    refused = examine(release, "patched", "+precision=fp16", f"++{key}=fp16").refused
    assert "model_dtype=fp16 with dtype=float16 makes the optimizer's weights half precision" in refused
    assert "AdamW turns them to NaN" in effects(examine(release, "unpatched", f"++{key}=fp16"))[key]


@pytest.mark.parametrize("release", SOME)
def test_grad_scaler_keys(release: str, examine: Examine):
    key = f"{ENGINE}.grad_scaler.init_scale"
    diagnosis = examine(release, "patched", "+precision=fp16", f"{key}=1024")
    assert diagnosis.scaler["actor"]["init_scale"] == 1024 and diagnosis.scaler["critic"]["init_scale"] == 65536
    refused = examine(release, "patched", f"{ENGINE}.grad_scaler.growth_factor=0.5").refused
    assert "grad_scaler.growth_factor=0.5 must be above 1" in refused
    assert dtype_rules.SCALER in mends(examine(release, "unpatched", f"{key}=1024"))[key]
    forced = examine(release, "unpatched", f"+{key}=1024")
    if release in A[:2]:
        assert effects(forced)[key] == f"is ignored by verl {release}: the loss is not scaled"
    else:
        assert (
            forced.refused == "TypeError: FSDPEngineConfig.__init__() got an unexpected keyword argument 'grad_scaler'"
        )


@pytest.mark.parametrize("release", [B[1], NEWEST])
def test_ref_in_another_dtype_is_a_finding(release: str, examine: Examine):
    key = f"{REF}.fsdp_config.dtype"
    patched = examine(release, "patched", f"{ACTOR}.use_kl_loss=true", f"{key}=float16")
    assert dtypes(patched, "actor.compute", "ref.compute") == ["bfloat16", "float16"]
    assert "their KL is not that of the policies" in effects(patched)[key]
    diagnosis = examine(release, "unpatched", f"{ACTOR}.use_kl_loss=true", f"{key}=float16")
    assert diagnosis.hops["ref.compute"].effective_dtype == ("float16" if release in B else "bfloat16")
    assert key in effects(diagnosis)
    assert examine(release, "patched", f"{key}=float16").hops["ref.compute"].effective_dtype is None  # not used


@pytest.mark.parametrize(
    ("words", "used", "unused"),
    [
        ((), ["critic"], ["ref", "reward_model"]),
        (("algorithm.use_kl_in_reward=true",), ["ref", "critic"], []),
        ((f"{ACTOR}.use_kl_loss=true",), ["ref", "critic"], []),
        (("critic.enable=false",), [], ["critic"]),
        (("algorithm.adv_estimator=grpo", "critic.enable=true"), ["critic"], []),
    ],
)
def test_roles_of_an_algorithm(words: tuple[str, ...], used: list[str], unused: list[str], examine: Examine):
    diagnosis = examine(NEWEST, "unpatched", *words)
    assert dtypes(diagnosis, *(f"{role}.compute" for role in used)) == ["bfloat16"] * len(used)
    assert dtypes(diagnosis, *(f"{role}.compute" for role in unused)) == [None] * len(unused)


@pytest.mark.parametrize("word", ["lora_rank=4", "lora_adapter_path=/adapter", "lora.rank=4"])
def test_ref_of_an_adapter_is_the_actor(word: str, examine: Examine):
    words = [f"{ACTOR}.use_kl_loss=true", f"{REF}.fsdp_config.dtype=float16", f"++actor_rollout_ref.model.{word}"]
    diagnosis = examine(NEWEST, "unpatched", *words)
    assert diagnosis.hops["ref.compute"].reason == "the actor without its adapters"
    assert diagnosis.verdict == "agree" and not diagnosis.findings


@pytest.mark.parametrize("release", [*A[1:], *B])
def test_model_engine_of_legacy_releases(release: str, examine: Examine):
    off = "trainer.use_legacy_worker_impl=disable"
    diagnosis = examine(release, "patched", "+precision=fp16", off)
    assert "trainer.use_legacy_worker_impl=disable trains in on this release" in diagnosis.refused
    grpo = ["algorithm.adv_estimator=grpo", off]
    assert examine(release, "patched", *grpo).verdict == "agree"
    if RELEASES[release].has("engine_critic_fails"):
        assert "no attribute 'hf_config'" in examine(release, "unpatched", off).refused
    if release in B:
        diagnosis = examine(release, "unpatched", *grpo, f"{ENGINE}.dtype=float16", f"{ROLLOUT}.dtype=float16")
        ignored = RELEASES[release].has("engine_policy")  # else the actor stays a legacy worker
        assert diagnosis.hops["actor.compute"].effective_dtype == ("bfloat16" if ignored else "float16")
        assert diagnosis.verdict == ("differ" if ignored else "agree")
        assert diagnosis.hops["wire"].effective_dtype == (
            "bfloat16" if RELEASES[release].has("bfloat16_wire") else "float32"
        )


@pytest.mark.parametrize("release", having("hf_rollout"))
def test_hf_rollout_computes_in_bfloat16_unless_patched(release: str, examine: Examine):
    words = [f"{ROLLOUT}.name=hf", f"{ROLLOUT}.dtype=float16"]
    diagnosis = examine(release, "unpatched", *words)
    assert dtypes(diagnosis, "wire", "rollout.weights", "rollout.logits") == [None, "float32", "bfloat16"]
    effect = f"is ignored by the hf rollout of verl {release}: samples in bfloat16"
    assert effects(diagnosis)[f"{ROLLOUT}.dtype"] == effect
    assert diagnosis.verdict == "ignored" and "both compute in bfloat16" in diagnosis.sentence
    patched = examine(release, "patched", *words, "+precision=fp16")
    assert dtypes(patched, "rollout.weights", "rollout.logits") == ["float32", "float16"]
    assert patched.verdict == "agree"
    sharded = examine(release, "patched", *words, f"{ACTOR}.strategy=fsdp2")
    assert "name=hf, whose weights FSDP2 rounds to the actor's bfloat16" in sharded.refused


@pytest.mark.parametrize("release", [name for name in RELEASES if name not in having("hf_rollout")])
def test_hf_rollout_is_refused_where_upstream_has_none(release: str, examine: Examine):
    assert "Rollout hf with mode" in examine(release, "unpatched", f"{ROLLOUT}.name=hf").refused


@pytest.mark.parametrize("release", list(filter(rounds_weights, RELEASES)))
def test_sharded_weights_pass_through_bfloat16(release: str, examine: Examine):
    words = [f"+{ENGINE}.mixed_precision.param_dtype=fp16", f"{ROLLOUT}.dtype=float16"]
    diagnosis = examine(release, "unpatched", *words)
    wire = diagnosis.hops["wire"]
    assert wire.effective_dtype == "bfloat16" and diagnosis.verdict == "differ"
    assert wire.reason.startswith("workers/engine/fsdp/transformer_impl.py:")
    assert dtype_rules.SEND in mends(diagnosis)[f"{ROLLOUT}.dtype"]
    assert examine(release, "patched", *words).hops["wire"].effective_dtype == "float32"


@pytest.mark.parametrize("release", C)
def test_merged_adapters_pass_through_bfloat16(release: str, examine: Examine):
    for rank in ("lora_rank", "lora.rank"):
        words = [f"++actor_rollout_ref.model.{rank}=4", "++actor_rollout_ref.model.lora.merge=true"]
        assert examine(release, "unpatched", *words).hops["wire"].effective_dtype == "bfloat16"
        assert examine(release, "patched", *words).hops["wire"].effective_dtype == "float32"


@pytest.mark.parametrize(
    ("words", "wire"),
    [
        (("trainer.n_gpus_per_node=1",), "float32"),  # FSDP1 on one worker sends whole tensors
        (("trainer.n_gpus_per_node=1", "trainer.nnodes=2"), "bfloat16"),
        (("trainer.n_gpus_per_node=1", f"{ACTOR}.strategy=fsdp2"), "bfloat16"),
        (("trainer.n_gpus_per_node=2",), "bfloat16"),
    ],
)
def test_only_sharded_weights_pass_through_bfloat16(words: tuple[str, ...], wire: str, examine: Examine):
    release = next(filter(rounds_weights, RELEASES))
    assert examine(release, "unpatched", *words).hops["wire"].effective_dtype == wire


@pytest.mark.parametrize("backend", ["kimi_ckpt_engine", "mooncake"])
def test_checkpoint_engine_sends_in_the_rollouts_dtype_if_patched(backend: str, examine: Examine):
    engine = f"{ROLLOUT}.checkpoint_engine"
    words = [f"{engine}.backend={backend}", f"{ACTOR}.fsdp_config.dtype=float16", f"{ROLLOUT}.dtype=float16"]
    assert examine(NEWEST, "unpatched", *words).hops["wire"].effective_dtype == "bfloat16"
    diagnosis = examine(NEWEST, "patched", *words)
    assert diagnosis.hops["wire"].effective_dtype == "float16" and diagnosis.verdict == "agree"
    own = examine(NEWEST, "patched", *words, f"+{engine}.engine_kwargs.{backend}.rollout_dtype=bfloat16")
    assert own.hops["wire"].effective_dtype == "bfloat16" and own.verdict == "differ"
    auto = examine(NEWEST, "patched", *words[:2], f"{ROLLOUT}.dtype=auto")
    assert auto.hops["wire"].effective_dtype == "bfloat16", "the engine's own default"


@pytest.mark.parametrize("release", having("reward_worker"))
def test_reward_model_worker(release: str, examine: Examine):
    words = ["reward_model.enable=true", "reward_model.dtype=float16"]
    words += ["reward_model.use_reward_loop=false"] if RELEASES[release].has("reward_loop") else []
    assert examine(release, "patched", *words).hops["reward_model.compute"].effective_dtype == "float16"
    forced = [words[0], f"+{words[1]}", *words[2:]]
    diagnosis = examine(release, "unpatched", *forced)
    assert (
        diagnosis.refused
        or effects(diagnosis)["reward_model.dtype"] == f"is ignored by verl {release}: scores in bfloat16"
    )


@pytest.mark.parametrize("release", having("reward_loop"))
def test_reward_loop_serves_the_reward_model(release: str, examine: Examine):
    word = "reward_model.dtype=float16"
    diagnosis = examine(release, "patched", "reward_model.enable=true", "reward_model.rollout.name=vllm", word)
    assert diagnosis.hops["reward_model.compute"].effective_dtype == "bfloat16" and diagnosis.verdict == "ignored"
    assert mends(diagnosis)["reward_model.dtype"] == "reward_model.rollout.dtype=float16"


@pytest.mark.parametrize("release", [name for name in RELEASES if name not in having("reward_worker")])
def test_reward_model_is_a_server_where_it_has_no_worker(release: str, examine: Examine):
    words = ["reward.reward_model.enable=true", "reward.reward_model.rollout.dtype=float16"]
    assert examine(release, "unpatched", *words).hops["reward_model.compute"].effective_dtype == "float16"
