"""The doctor: its table against the wheels, and what it says of each release, patched and not. No worker runs here."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lib.doctor import dtype_rules as hops
from lib.doctor.diagnosis import Diagnosis, diagnose
from lib.doctor.resolver import UPSTREAM_SCALER
from lib.doctor.tree import look_at
from lib.errors import Refused
from lib.patches.apply import apply
from lib.patches.releases import VERL, load_releases
from lib.patches.stack import load_stack
from lib.patches.wheels import unpacked_wheel
from lib.paths import CONFIGS, REPO

RELEASES = list(load_releases())
ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))
ENGINE = f"{ACTOR}.fsdp_config"
A, B, C = hops.A, hops.B, hops.C
# One of each kind of worker, for what tests/releases sees of the workers of all.
SOME = ("0.4.1", "0.6.0", "0.7.1", "0.8.0", "0.9.1")
Examine = Callable[..., Diagnosis]


@pytest.fixture(scope="session")
def examine(tmp_path_factory: pytest.TempPathFactory) -> Examine:
    """``examine(release, "patched" | "unpatched", *overrides)``; a tree is made once."""
    made = {}

    def of(release: str, state: str, *overrides: str, config_name: str = "ppo_trainer") -> Diagnosis:
        if (release, state) not in made:
            root = unpacked_wheel(release, tmp_path_factory.mktemp(f"{release}-{state}"))
            if state == "patched":
                apply(root)
            made[release, state] = look_at(root)
        return diagnose(made[release, state], list(overrides), config_name)

    return of


def held(found: Diagnosis, *names: str) -> list[str | None]:
    return [found.hops[name].holds for name in names]


def effects(found: Diagnosis) -> dict[str, str]:
    """What each finding says, by its key."""
    return {finding.key: finding.effect for finding in found.findings}


def mends(found: Diagnosis) -> dict[str, str]:
    return {finding.key: finding.mend for finding in found.findings}


# --- the table ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", RELEASES)
def test_a_rule_is_the_line_of_the_wheel_that_it_names(release: str, examine: Examine):
    root = examine(release, "unpatched").tree.root
    wrong = []
    for rule in hops.RULES:
        if release in rule.lines:
            line = (root / "verl" / rule.path).read_text().splitlines()[rule.lines[release] - 1]
            if rule.text not in line:
                wrong.append(f"{rule.path}:{rule.lines[release]} is {line.strip()!r}, not {rule.text!r}")
    assert not wrong


def test_a_rules_patch_is_in_the_series_of_its_releases():
    for name, release in load_releases().items():
        series = {patch.name.removesuffix(".patch") for patch in load_stack(release).patches}
        named = {rule.mend for rule in hops.RULES if name in rule.lines and rule.mend}
        assert named <= series, f"verl {name} has no {named - series}"


@pytest.mark.parametrize("release", RELEASES)
def test_no_two_rules_decide_a_hop(release: str):
    seen = [
        (rule.hop.format(role=role), rule.by) for rule in hops.RULES if release in rule.lines for role in rule.roles
    ]
    assert len(seen) == len(set(seen))


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
def test_verls_default(release: str, state: str, examine: Examine):
    found = examine(release, state)
    expected = DEFAULT | ({"wire": "bfloat16"} if (release, state) == ("0.8.0", "unpatched") else {})
    assert {name: hop.holds for name, hop in found.hops.items()} == expected
    assert found.json()["verl"] == {
        "release": release,
        "state": state,
        "stack": load_stack(load_releases()[release]).id if state == "patched" else None,
        "nearest": None,
    }
    assert (found.verdict, found.findings, found.scaler) == ("agree", (), {"actor": None, "critic": None})


@pytest.mark.parametrize("release", RELEASES)
def test_one_key_on_a_patched_tree(release: str, examine: Examine):
    found = examine(release, "patched", "+precision=fp16", f"{ACTOR}.use_kl_loss=true")
    roles = [f"{role}.{what}" for role in ("actor", "ref", "critic") for what in ("compute", "autocast")]
    assert set(held(found, *roles, "actor.logits", "rollout.weights", "rollout.kv_cache", "hf_export")) == {"float16"}
    assert set(held(found, "actor.master", "actor.optimizer", "actor.reduce", "wire", "critic.master")) == {"float32"}
    assert found.verdict == "agree" and not found.findings
    settings = {"init_scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 400}
    settings |= {"min_scale": 1.0, "max_consecutive_skips": 32, "saved": True, "reported": True}
    assert found.scaler == {"actor": settings, "critic": settings}


@pytest.mark.parametrize("release", RELEASES)
def test_one_key_on_an_unpatched_tree_is_a_word_that_nothing_reads(release: str, examine: Examine):
    found = examine(release, "unpatched", "+precision=fp16")
    assert held(found, "actor.compute", "rollout.weights") == ["bfloat16", "bfloat16"]
    assert found.sentence.endswith("both compute in bfloat16. Not as asked for: precision=fp16.")
    assert "nothing reads" in effects(found)["precision"] and hops.KEYS in mends(found)["precision"]
    assert found.verdict == "ignored" and not found.sound


@pytest.mark.parametrize("release", RELEASES)
def test_the_engines_own_key(release: str, examine: Examine):
    patched = examine(release, "patched", f"{ENGINE}.dtype=float16", f"{ROLLOUT}.dtype=float16")
    assert held(patched, "actor.compute", "actor.autocast", "critic.compute") == ["float16"] * 3
    assert patched.verdict == "agree" and patched.scaler["actor"]["saved"]

    found = examine(release, "unpatched", f"{ENGINE}.dtype=float16", f"{ROLLOUT}.dtype=float16")
    if release in A:  # has no such key
        assert found.refused == f"Could not override '{ENGINE}.dtype'." and found.verdict == "refused"
        assert hops.KEYS in mends(found)[f"{ENGINE}.dtype"]
    elif release in B:  # the actor reads it, the critic has its own, which nothing reads
        assert held(found, "actor.compute", "actor.autocast", "critic.compute") == ["float16", "float16", "bfloat16"]
        assert found.verdict == "agree" and found.scaler == {"actor": UPSTREAM_SCALER, "critic": None}
        assert "neither saves" in effects(found)[f"{ENGINE}.grad_scaler"]
        assert effects(found)[f"{ENGINE}.dtype"] == "does not reach the critic, which trains in bfloat16"
    else:
        assert found.verdict == "differ" and found.scaler["actor"] is None
        assert "the trainer was asked for float16" in found.sentence
        text = effects(found)[f"{ENGINE}.dtype"]
        assert text == f"is ignored by verl {release}: trains in bfloat16"
        assert hops.COMPUTE in mends(found)[f"{ENGINE}.dtype"]


@pytest.mark.parametrize("release", ["0.6.1", "0.7.1", "0.8.0", "0.9.1"])
def test_an_unknown_dtype(release: str, examine: Examine):
    patched = examine(release, "patched", f"{ENGINE}.dtype=banana")
    assert "dtype=banana is not a dtype to compute in" in patched.refused and patched.verdict == "refused"
    found = examine(release, "unpatched", f"{ENGINE}.dtype=banana")
    if release in B:
        assert found.refused == "RuntimeError: unexpected precision: banana"
    else:
        assert effects(found)[f"{ENGINE}.dtype"] == f"is ignored by verl {release}: trains in bfloat16"
        assert not found.refused


@pytest.mark.parametrize("release", SOME)
def test_fsdps_own_key_reaches_one_half_before_0_8(release: str, examine: Examine):
    word = f"{ENGINE}.mixed_precision.param_dtype"
    found = examine(release, "unpatched", f"+{word}=fp16", f"{ROLLOUT}.dtype=float16")
    compute, autocast = held(found, "actor.compute", "actor.autocast")
    assert compute == "float16" and autocast == ("float16" if release in C else "bfloat16")
    if release in C:
        assert found.verdict == ("differ" if release == "0.8.0" else "agree")  # 0.8.0's weights travel in bf16
        assert found.scaler["actor"] == UPSTREAM_SCALER
    else:
        assert found.verdict == "differ" and found.scaler["actor"] is None
        said = [finding.effect for finding in found.findings if finding.key == word]
        assert any("reaches one half" in text for text in said) and any(
            "without a loss scaler" in text for text in said
        )
    assert examine(release, "patched", f"+{word}=fp16", f"{ROLLOUT}.dtype=float16").verdict == "agree"


@pytest.mark.parametrize("release", B)
def test_reduce_dtype_alone_turns_the_weights_back_to_bf16(release: str, examine: Examine):
    """``mixed_precision`` is set then, and what it lacks has a default of its own, whatever ``dtype`` says."""
    found = examine(release, "unpatched", f"{ENGINE}.dtype=float16", f"+{ENGINE}.mixed_precision.reduce_dtype=fp16")
    assert held(found, "actor.compute", "actor.autocast", "actor.reduce") == ["bfloat16", "float16", "float16"]
    assert "sums the actor's gradients" in effects(found)[f"{ENGINE}.mixed_precision.reduce_dtype"]
    assert found.verdict == "differ"


@pytest.mark.parametrize("release", SOME)
def test_the_critics_own_key(release: str, examine: Examine):
    engine = "critic.fsdp" if release in C else "critic.model.fsdp_config"
    plus = "++" if release in A else ""
    found = examine(release, "unpatched", f"{plus}{engine}.dtype=float16")
    if release == "0.6.0":
        assert found.refused == "TypeError: FSDPEngineConfig.__init__() got an unexpected keyword argument 'dtype'"
        return
    assert effects(found)[f"{engine}.dtype"] == f"is ignored by verl {release}: trains in bfloat16"
    assert found.verdict == "ignored" and "both compute in bfloat16. Not as asked for: critic." in found.sentence
    patched = examine(release, "patched", f"{engine}.dtype=float16")
    assert held(patched, "actor.compute", "critic.compute") == ["bfloat16", "float16"]


@pytest.mark.parametrize("release", ["0.4.1", "0.7.1"])
def test_half_of_what_was_asked_of_the_critic(release: str, examine: Examine):
    word = "critic.model.fsdp_config.mixed_precision.param_dtype"
    found = examine(release, "unpatched", f"+{word}=fp16")
    assert held(found, "critic.compute", "critic.autocast") == ["float16", "bfloat16"]
    assert found.verdict == "ignored" and "reaches one half" in effects(found)[word] + str(found.findings)


@pytest.mark.parametrize("release", SOME)
def test_the_roles_own_keys(release: str, examine: Examine):
    """FlowRL's spelling: a patched verl knows it, upstream's does not."""
    words = [f"{ACTOR}.dtype=float16", f"{ROLLOUT}.dtype=float16"]
    assert examine(release, "patched", *words).verdict == "agree"
    found = examine(release, "unpatched", *words)
    assert found.refused == f"Could not override '{ACTOR}.dtype'."
    assert mends(found)[f"{ACTOR}.dtype"] == f"{hops.KEYS}: make apply-patches VERL={found.tree.root}"
    forced = examine(release, "unpatched", f"+{words[0]}", words[1])
    if release in A[:2]:  # plain dictionaries take anything
        assert effects(forced)[f"{ACTOR}.dtype"] == f"is ignored by verl {release}: trains in bfloat16"
    else:
        assert "got an unexpected keyword argument 'dtype'" in forced.refused
    alone = examine(release, "patched", words[0])
    assert alone.verdict == "differ" and "nobody asked for" in alone.sentence


@pytest.mark.parametrize("release", SOME)
def test_the_rollout_alone(release: str, examine: Examine):
    for state in ("unpatched", "patched"):
        found = examine(release, state, f"{ROLLOUT}.dtype=float16")
        assert held(found, "actor.logits", "rollout.weights", "rollout.kv_cache") == ["bfloat16", "float16", "float16"]
        assert found.verdict == "differ"
        assert examine(release, state, f"{ROLLOUT}.dtype=half").hops["rollout.weights"].holds == "float16"


@pytest.mark.parametrize("release", SOME)
def test_masters(release: str, examine: Examine):
    key = f"{ENGINE}.model_dtype"
    for state in ("unpatched", "patched"):
        found = examine(release, state, f"++{key}=bf16")
        assert held(found, "actor.master", "actor.optimizer", "wire") == ["bfloat16"] * 3
        assert "updates below 1/256" in effects(found)[key] and mends(found)[key] == f"{key}=fp32"
        assert found.verdict == "agree"
    refused = examine(release, "patched", "+precision=fp16", f"++{key}=fp16").refused
    assert "model_dtype=fp16 with dtype=float16 makes the optimizer's weights half precision" in refused
    assert "AdamW turns them to NaN" in effects(examine(release, "unpatched", f"++{key}=fp16"))[key]


@pytest.mark.parametrize("release", SOME)
def test_the_loss_scalers_keys(release: str, examine: Examine):
    key = f"{ENGINE}.grad_scaler.init_scale"
    found = examine(release, "patched", "+precision=fp16", f"{key}=1024")
    assert found.scaler["actor"]["init_scale"] == 1024 and found.scaler["critic"]["init_scale"] == 65536
    refused = examine(release, "patched", f"{ENGINE}.grad_scaler.growth_factor=0.5").refused
    assert "grad_scaler.growth_factor=0.5 must be above 1" in refused
    assert hops.SCALER in mends(examine(release, "unpatched", f"{key}=1024"))[key]
    forced = examine(release, "unpatched", f"+{key}=1024")
    if release in A[:2]:
        assert effects(forced)[key] == f"is ignored by verl {release}: the loss is not scaled"
    else:
        assert (
            forced.refused == "TypeError: FSDPEngineConfig.__init__() got an unexpected keyword argument 'grad_scaler'"
        )


@pytest.mark.parametrize("release", ["0.7.0", "0.9.1"])
def test_a_ref_that_differs(release: str, examine: Examine):
    key = f"{REF}.fsdp_config.dtype"
    patched = examine(release, "patched", f"{ACTOR}.use_kl_loss=true", f"{key}=float16")
    assert held(patched, "actor.compute", "ref.compute") == ["bfloat16", "float16"]
    assert "their KL is not that of the policies" in effects(patched)[key]
    found = examine(release, "unpatched", f"{ACTOR}.use_kl_loss=true", f"{key}=float16")
    assert found.hops["ref.compute"].holds == ("float16" if release in B else "bfloat16")
    assert key in effects(found)
    assert examine(release, "patched", f"{key}=float16").hops["ref.compute"].holds is None  # not used


@pytest.mark.parametrize("release", [*A[1:], *B])
def test_the_model_engine_of_the_legacy_releases(release: str, examine: Examine):
    off = "trainer.use_legacy_worker_impl=disable"
    found = examine(release, "patched", "+precision=fp16", off)
    assert "trainer.use_legacy_worker_impl=disable trains in on this release" in found.refused
    grpo = ["algorithm.adv_estimator=grpo", off]
    assert examine(release, "patched", *grpo).verdict == "agree"
    if release in ("0.6.0", "0.6.1"):
        assert "no attribute 'hf_config'" in examine(release, "unpatched", off).refused
    if release in B:
        found = examine(release, "unpatched", *grpo, f"{ENGINE}.dtype=float16", f"{ROLLOUT}.dtype=float16")
        ignored = release != "0.6.1"  # whose actor stays a legacy worker
        assert found.hops["actor.compute"].holds == ("bfloat16" if ignored else "float16")
        assert found.verdict == ("differ" if ignored else "agree")
        assert found.hops["wire"].holds == ("bfloat16" if release == "0.7.1" else "float32")


def test_the_hf_rollout(examine: Examine):
    for release in A[:2]:
        words = [f"{ROLLOUT}.name=hf", f"{ROLLOUT}.dtype=float16"]
        found = examine(release, "unpatched", *words)
        assert held(found, "wire", "rollout.weights", "rollout.logits") == [None, "float32", "bfloat16"]
        assert (
            effects(found)[f"{ROLLOUT}.dtype"] == f"is ignored by the hf rollout of verl {release}: samples in bfloat16"
        )
        assert found.verdict == "ignored" and "both compute in bfloat16" in found.sentence
        patched = examine(release, "patched", *words, "+precision=fp16")
        assert held(patched, "rollout.weights", "rollout.logits") == ["float32", "float16"]
        assert patched.verdict == "agree"
        sharded = examine(release, "patched", *words, f"{ACTOR}.strategy=fsdp2")
        assert "name=hf, whose weights FSDP2 rounds to the actor's bfloat16" in sharded.refused
    for release in (*A[2:], *B, *C):
        assert "Rollout hf with mode" in examine(release, "unpatched", f"{ROLLOUT}.name=hf").refused


def test_the_wire_of_0_8_0(examine: Examine):
    words = [f"+{ENGINE}.mixed_precision.param_dtype=fp16", f"{ROLLOUT}.dtype=float16"]
    found = examine("0.8.0", "unpatched", *words)
    assert found.hops["wire"].holds == "bfloat16" and found.verdict == "differ"
    assert found.hops["wire"].because == "workers/engine/fsdp/transformer_impl.py:841"
    assert hops.SEND in mends(found)[f"{ROLLOUT}.dtype"]
    assert examine("0.8.0", "patched", *words).hops["wire"].holds == "float32"


@pytest.mark.parametrize("release", C)
def test_merged_adapters(release: str, examine: Examine):
    words = ["actor_rollout_ref.model.lora_rank=4", "++actor_rollout_ref.model.lora.merge=true"]
    assert examine(release, "unpatched", *words).hops["wire"].holds == "bfloat16"
    assert examine(release, "patched", *words).hops["wire"].holds == "float32"


@pytest.mark.parametrize("release", [*A, "0.6.1", "0.7.0"])
def test_the_reward_models_worker(release: str, examine: Examine):
    words = ["reward_model.enable=true", "reward_model.dtype=float16"]
    words += ["reward_model.use_reward_loop=false"] if release == "0.7.0" else []
    assert examine(release, "patched", *words).hops["reward_model.compute"].holds == "float16"
    forced = [words[0], f"+{words[1]}", *words[2:]]
    found = examine(release, "unpatched", *forced)
    assert found.refused or effects(found)["reward_model.dtype"] == f"is ignored by verl {release}: scores in bfloat16"


def test_the_reward_models_server(examine: Examine):
    word = "reward_model.dtype=float16"
    found = examine("0.7.0", "patched", "reward_model.enable=true", "reward_model.rollout.name=vllm", word)
    assert found.hops["reward_model.compute"].holds == "bfloat16" and found.verdict == "ignored"
    assert mends(found)["reward_model.dtype"] == "reward_model.rollout.dtype=float16"
    for release in ("0.7.1", *C):
        word = "reward.reward_model.rollout.dtype=float16"
        found = examine(release, "unpatched", "reward.reward_model.enable=true", word)
        assert found.hops["reward_model.compute"].holds == "float16"


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
    found = examine("0.9.1", "patched", f"+precision={regime}")
    assert held(found, "actor.autocast", "actor.logits", "rollout.weights") == [trainer, trainer, rollout]
    assert found.verdict == verdict and found.sound


def test_a_later_key_wins_over_the_overlay(examine: Examine):
    found = examine("0.9.1", "patched", "+precision=fp16", f"{ROLLOUT}.dtype=bfloat16")
    assert held(found, "actor.compute", "rollout.weights") == ["float16", "bfloat16"]
    assert found.verdict == "asked"
    assert found.hops["rollout.weights"].asked == {f"{ROLLOUT}.dtype": "bfloat16"}


def test_keys_that_contradict(examine: Examine):
    found = examine("0.9.1", "patched", f"{ACTOR}.dtype=bfloat16", f"{ENGINE}.dtype=float16")
    assert found.refused.startswith("ValueError: dtype=bfloat16 and fsdp_config.dtype=float16 contradict each other")
    word = f"+{ENGINE}.mixed_precision.param_dtype=bf16"
    assert "contradict" in examine("0.9.1", "patched", f"{ENGINE}.dtype=float16", word).refused
    assert "contradict" in examine("0.7.0", "patched", f"{ENGINE}.dtype=float16", word).refused
    apart = examine("0.7.0", "unpatched", f"{ENGINE}.dtype=float16", word)
    assert held(apart, "actor.compute", "actor.autocast", "actor.logits") == ["bfloat16", "float16", "float16"]
    assert apart.verdict == "differ" and apart.scaler["actor"]


def test_a_rollout_in_no_dtype(examine: Examine):
    found = examine("0.9.1", "unpatched", f"{ROLLOUT}.dtype=banana")
    assert found.hops["rollout.weights"].holds == "unknown" and found.verdict == "unknown"
    assert set(effects(found)) == {f"{ROLLOUT}.dtype"} and "does not check it" in effects(found)[f"{ROLLOUT}.dtype"]
    assert "dtype=banana is unknown to the rollout" in examine("0.9.1", "patched", f"{ROLLOUT}.dtype=banana").refused


def test_a_rollout_that_quantizes(examine: Examine):
    found = examine("0.9.1", "patched", "+precision=fp16", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.quantization=fp8")
    assert held(found, "rollout.weights", "rollout.logits") == ["float8_e4m3fn", "float16"]
    assert found.verdict == "asked" and "quantized weights" in effects(found)[f"{ROLLOUT}.quantization"]
    cache = f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype=fp8"
    found = examine("0.9.1", "patched", "+precision=fp16", f"{ROLLOUT}.name=vllm", cache)
    assert held(found, "rollout.weights", "rollout.kv_cache") == ["float16", "float8_e4m3fn"]
    assert found.verdict == "asked"


def test_a_rollout_that_takes_the_models_dtype(examine: Examine, tmp_path: Path):
    words = [f"{ROLLOUT}.dtype=auto", f"actor_rollout_ref.model.path={tmp_path}"]
    for said, holds in (("bfloat16", "bfloat16"), ("float32", "unknown")):
        (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": said}))
        found = examine("0.9.1", "patched", *words)
        assert found.hops["rollout.weights"].holds == holds
        assert found.verdict == ("agree" if holds == said else "unknown")
    assert "config.json" in effects(found)[f"{ROLLOUT}.dtype"]


def test_modules_kept_in_fp32(examine: Examine):
    found = examine("0.9.1", "patched", "+precision=fp16", f"{ENGINE}.keep_fp32_modules=[lm_head]")
    assert held(found, "actor.compute", "actor.logits") == ["float16", "float32"]


def test_this_repositorys_groups(examine: Examine, tmp_path: Path):
    """They are found without being told where; a search path that is given is used as it is."""
    words = ["+experiment=sanity_cpu", "+algo=grpo", "+device=cpu", "+precision=fp16"]
    found = examine("0.9.1", "patched", *words)
    assert found.verdict == "agree" and found.hops["critic.compute"].holds is None  # grpo
    assert examine("0.9.1", "patched", *words, f"hydra.searchpath=['file://{CONFIGS}']").json() == found.json()
    elsewhere = effects(examine("0.9.1", "patched", *words, f"hydra.searchpath=['file://{tmp_path}']"))
    assert elsewhere["experiment"] == "is a word that nothing reads in verl 0.9.1" and "precision" not in elsewhere
    assert examine("0.9.1", "patched", *words, "+recipe=flowrl").verdict == "agree"


def test_our_overlays_on_an_unpatched_tree(examine: Examine):
    """Brought by the search path they are found, and the release's dataclasses refuse their keys."""
    found = examine("0.9.1", "unpatched", f"hydra.searchpath=['file://{CONFIGS}']", "+precision=fp16")
    assert found.refused == "TypeError: FSDPActorConfig.__init__() got an unexpected keyword argument 'dtype'"


@pytest.mark.parametrize("release", SOME)
def test_megatron(release: str, examine: Examine):
    words = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.name=vllm"]
    found = examine(release, "unpatched", *words, config_name="ppo_megatron_trainer")
    assert held(found, "actor.compute", "actor.autocast", "actor.master") == ["bfloat16", "unknown", "unknown"]
    assert found.verdict == "agree"
    if release not in A:
        key = f"{ACTOR}.megatron.dtype"
        words += [f"{key}=float16", f"{ACTOR}.megatron.use_mbridge=true"]
        found = examine(release, "unpatched", *words, config_name="ppo_megatron_trainer")
        assert found.hops["actor.compute"].holds == "float16" and found.verdict == "differ"
        assert "NotImplementedError" in effects(found)[key]
        assert (hops.SKIP in mends(found)[key]) == (release in C)
    if release in B:
        words[-1] = words[-1].replace("true", "false")
        found = examine(release, "unpatched", *words, config_name="ppo_megatron_trainer")
        assert found.refused == "AssertionError: fp16 mode requires use_mbridge to be True"


def test_an_engine_that_nobody_looked_at(examine: Examine):
    found = examine("0.9.1", "unpatched", "model_engine=veomni", f"{ROLLOUT}.name=vllm")
    assert found.hops["actor.compute"].holds == "unknown" and found.verdict == "unknown" and not found.sound
    patched = examine("0.9.1", "patched", "model_engine=veomni", "+precision=fp16")
    assert "dtype=float16 is not what strategy=veomni trains in" in patched.refused


# --- foreign trees, bad input, the command --------------------------------------------------------------------------


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """0.9.1 with a change in one file that a stack hooks and rules name, and one in another that no rule names."""
    root = unpacked_wheel("0.9.1", tmp_path / "foreign")
    for path in ("workers/engine/fsdp/transformer_impl.py", "workers/config/actor.py"):
        file = root / "verl" / path
        file.write_text(file.read_text() + "\n# of another commit\n")
    return root


def test_a_foreign_verl(foreign: Path):
    found = diagnose(look_at(foreign), [f"{ROLLOUT}.dtype=float16"])
    assert found.json()["verl"] == {"release": None, "state": "foreign", "stack": None, "nearest": "0.9.1"}
    assert held(found, "actor.compute", "wire", "critic.master") == ["unknown"] * 3  # their file is another
    assert held(found, "rollout.weights", "hf_export") == ["float16", "bfloat16"]  # their files are 0.9.1's
    assert found.verdict == "unknown" and not found.sound
    assert "transformer_impl.py" in effects(found)["verl"] and "make drift" in mends(found)["verl"]


def test_patches_on_a_foreign_verl(trees: dict[str, Path], tmp_path: Path):
    """As port leaves a tree: no record, one hooked file merged into what changed, the others as patches make them."""
    root = Path(shutil.copytree(trees["patched"], tmp_path / "ported"))
    shutil.rmtree(root / VERL.bookkeeping)
    (root / VERL.stamp).unlink()
    manager = root / "verl/utils/checkpoint/fsdp_checkpoint_manager.py"
    manager.write_text(manager.read_text() + "\n# of another commit\n")
    found = diagnose(look_at(root), ["+precision=fp16"])
    assert found.json()["verl"] == {"release": None, "state": "foreign", "stack": None, "nearest": "0.9.1"}
    assert held(found, "actor.compute", "rollout.weights", "hf_export") == ["float16", "float16", "unknown"]
    assert found.verdict == "agree"


def test_a_release_with_another_file_beside_the_hooks(tmp_path: Path):
    """A file that no patch hooks differs: the release is known, and what that file decides is not."""
    root = unpacked_wheel("0.9.1", tmp_path)
    server = root / "verl/workers/rollout/vllm_rollout/vllm_async_server.py"
    server.write_text(server.read_text().replace('"dtype": self.config.dtype,', '"dtype": "bfloat16",'))
    found = diagnose(look_at(root), [f"{ROLLOUT}.name=vllm"])
    assert found.json()["verl"]["state"] == "unpatched"
    assert held(found, "rollout.weights", "actor.compute") == ["unknown", "bfloat16"]


def doctor(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, REPO / "scripts/doctor.py", *words],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_the_command(trees: dict[str, Path]):
    found = doctor("--verl", str(trees["pristine"]), f"{ENGINE}.dtype=float16", f"{ROLLOUT}.dtype=float16", "--json")
    printed = json.loads(found.stdout)
    assert found.returncode == 1 and found.stderr == "" and printed["verdict"] == "differ"
    assert set(printed) == {"verl", "hops", "scaler", "findings", "refused", "verdict", "sentence"}
    assert set(printed["findings"][0]) == {"key", "value", "effect", "mend"}

    found = doctor("--verl", str(trees["pristine"]), f"{ROLLOUT}.dtype=float16")
    lines = found.stdout.splitlines()
    assert found.returncode == 1
    assert lines[0].startswith("verl 0.9.1, unpatched")
    assert ["actor.compute", "-", "bfloat16", "workers/engine/fsdp/transformer_impl.py:397"] in map(str.split, lines)
    assert ["rollout.weights", "float16", "float16"] in [line.split()[:3] for line in lines]
    assert lines[-1].startswith("differ: ") and "nobody asked for" in lines[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--verl", "/tmp"], "contains no verl/__init__.py"),
        (["--verl", "/nowhere"], "is not a folder"),
        (["actor.dtype"], "ARGS"),
        (["--args", "a='b"], "No closing quotation"),
        (["--misspelt"], "unrecognized arguments: --misspelt"),
        (["--config-name", "nothing"], "has no nothing.yaml"),
    ],
)
def test_bad_input_ends_in_one_line(words: list[str], said: str, trees: dict[str, Path]):
    given = words if "--verl" in words else ["--verl", str(trees["pristine"]), *words]
    found = doctor(*given)
    assert found.returncode == 1 and found.stdout == ""
    assert len(found.stderr.splitlines()) == 1 and found.stderr.startswith("doctor: ") and said in found.stderr


def test_overrides_that_do_not_compose(examine: Examine):
    found = examine("0.9.1", "patched", f"{ACTOR}.precision_of_weights=float16")
    assert found.refused == f"Could not override '{ACTOR}.precision_of_weights'."
    assert found.verdict == "refused" and set(held(found, *found.hops)) == {None}
    moved = examine("0.7.1", "patched", "critic.fsdp.dtype=float16")
    assert mends(moved) == {"critic.fsdp.dtype": "critic.model.fsdp_config.dtype=float16"}
    typo = examine("0.9.1", "unpatched", "actor_rollout_ref.rolout.dtype=float16")
    assert mends(typo) == {"actor_rollout_ref.rolout.dtype": "the nearest key is actor_rollout_ref.rollout.dtype"}
    regime = examine("0.9.1", "patched", "+precision=fp17").refused
    assert (
        regime == "In 'ppo_trainer': Could not find 'precision/fp17'; there are bf16, bf16_train_fp16_infer, fp16, fp32"
    )
    with pytest.raises(Refused, match="ARGS"):
        examine("0.9.1", "patched", "no override")


def test_a_misspelt_group(examine: Examine):
    found = examine("0.9.1", "patched", "+precison=fp16")
    assert mends(found) == {"precison": "+precision=fp16"} and found.verdict == "ignored"


@pytest.mark.parametrize("state", ["pristine", "patched"])
def test_nothing_is_changed(state: str, trees: dict[str, Path], tmp_path: Path):
    copy = shutil.copytree(trees[state], tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    before = sorted((str(path), path.stat().st_mtime_ns) for path in copy.rglob("*"))
    assert doctor("--verl", str(copy), "--json").returncode == 0
    assert sorted((str(path), path.stat().st_mtime_ns) for path in copy.rglob("*")) == before
