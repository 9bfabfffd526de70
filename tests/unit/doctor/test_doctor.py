"""The doctor's diagnoses of each release, patched and not; no worker runs here."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lib.doctor import dtype_rules
from lib.doctor.diagnosis import Diagnosis, diagnose
from lib.doctor.resolver import UPSTREAM_SCALER
from lib.doctor.tree import identify_tree
from lib.errors import Refused
from lib.patches.apply import apply
from lib.patches.releases import load_releases
from lib.patches.stack import load_stack
from lib.patches.wheels import unpacked_wheel
from lib.paths import CONFIGS

RELEASES = load_releases()
ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))
ENGINE = f"{ACTOR}.fsdp_config"
# By family: legacy workers, legacy workers with an actor in fp16, the model engine.
A, B, C = ([name for name in RELEASES if RELEASES[name].family == family] for family in "ABC")
# The first and the last of the legacy families and of the model engine; tests/conformance/verl runs the workers of all.
SOME = (A[0], A[-1], B[-1], C[0], C[-1])
NEWEST = C[-1]
Examine = Callable[..., Diagnosis]


@pytest.fixture(scope="session")
def examine(tmp_path_factory: pytest.TempPathFactory) -> Examine:
    """``examine(release, "patched" | "unpatched", *overrides)``: the diagnosis; each tree is created once."""
    made = {}

    def of(release: str, state: str, *overrides: str, config_name: str = "ppo_trainer") -> Diagnosis:
        if (release, state) not in made:
            root = unpacked_wheel(release, tmp_path_factory.mktemp(f"{release}-{state}"))
            if state == "patched":
                apply(root)
            made[release, state] = identify_tree(root)
        return diagnose(made[release, state], list(overrides), config_name)

    return of


def having(feature: str) -> list[str]:
    return [name for name, release in RELEASES.items() if release.has(feature)]


def rounds_weights(release: str) -> bool:
    """Return whether the wire of the release's default workers casts the weights to bfloat16."""
    return RELEASES[release].has("bfloat16_wire") and not RELEASES[release].has("legacy_workers")


def dtypes(diagnosis: Diagnosis, *names: str) -> list[str | None]:
    return [diagnosis.hops[name].effective_dtype for name in names]


def effects(diagnosis: Diagnosis) -> dict[str, str]:
    """Return the effect of each finding by its key."""
    return {finding.key: finding.effect for finding in diagnosis.findings}


def mends(diagnosis: Diagnosis) -> dict[str, str]:
    return {finding.key: finding.mend for finding in diagnosis.findings}


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
        "stack": load_stack(load_releases()[release]).id if state == "patched" else None,
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
