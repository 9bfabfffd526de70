"""What the doctor knows, asked before a run starts: batch sizes, strategies, rollouts and models of verl 0.9.1."""

import json
from functools import cache
from pathlib import Path

import pytest

from verl_precision.doctor.diagnosis import diagnose
from verl_precision.doctor.job_refusal import ask_doctor, examined
from verl_precision.doctor.refusals import (
    missing_kv_heads,
    mixtral_weights,
)
from verl_precision.errors import Refused
from verl_precision.facts.packages import installed_verl
from verl_precision.run.job import parse_job

SITE = installed_verl().parent
ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))
MODEL = "actor_rollout_ref.model.path"
MICRO = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
LOGS = "log_prob_micro_batch_size_per_gpu"
UNEVEN = "verl ends with `data size must be divisible by force_group_size * micro_batch_size_per_gpu`"
WITH_REF = f"{ACTOR}.use_kl_loss=true {REF}.{LOGS}"


def asked(args: str, *words: str) -> str | None:
    try:
        ask_doctor(parse_job(["DEVICE=cpu", f"ARGS={args}", *words]), Path("/no/such/run"))
    except Refused as refusal:
        assert "\n" not in str(refusal)
        return str(refusal)
    return None


@pytest.mark.subprocess  # a diagnosis a case
@pytest.mark.parametrize(
    ("args", "refusal"),
    [
        (
            "trainer.n_gpus_per_node=4",
            f"{MICRO}=128 does not divide the 64 answers of each of the 4 workers "
            f"(256 in all): {UNEVEN}; give ARGS={MICRO}=64, or another divisor of 64",
        ),
        (f"trainer.n_gpus_per_node=2 {ROLLOUT}.{LOGS}=96", f"{ROLLOUT}.{LOGS}=96 does not divide the 128 answers"),
        (f"{WITH_REF}=96", f"{REF}.{LOGS}=96 does not divide the 256 answers of each of the 1 workers"),
        ("trainer.n_gpus_per_node=3", f"{ACTOR}.ppo_mini_batch_size=32 times {ROLLOUT}.n=8"),
        (f"{ROLLOUT}.log_prob_use_dynamic_bsz=true", f"{ROLLOUT}.log_prob_use_dynamic_bsz=True "),
        (f"{ROLLOUT}.name=hf", f"{ROLLOUT}.name=hf is no rollout of verl 0.9.1; give ARGS={ROLLOUT}.name=vllm, "),
        (
            f"{ACTOR}.strategy=fsdp3",
            f"{ACTOR}.strategy=fsdp3 is no strategy of verl 0.9.1; give ARGS={ACTOR}.strategy=",
        ),
        (f"{MICRO}=0", f"{MICRO}=0 is no whole number of at least 1"),
        (f"{ACTOR}.ppo_mini_batch_size=abc", f"{ACTOR}.ppo_mini_batch_size=abc is no whole number of at least 1"),
        (f"{ROLLOUT}.n=0", f"{ROLLOUT}.n=0 is no whole number"),
        (
            "data.train_batch_size=null",
            "data.train_batch_size=None is no whole number",
        ),
        # what fits: two workers share a micro-batch each, dynamic batches of tokens, two ranks to a sequence
        ("trainer.n_gpus_per_node=2", None),
        (f"trainer.n_gpus_per_node=4 {ACTOR}.use_dynamic_bsz=true", None),
        (f"trainer.n_gpus_per_node=4 {ACTOR}.ulysses_sequence_parallel_size=2", None),
        (f"algorithm.rollout_correction.bypass_mode=true {ROLLOUT}.{LOGS}=96", None),
        # 48 prompts are filled up to two mini-batches
        (f"data.train_batch_size=48 {ROLLOUT}.{LOGS}=512", None),
    ],
)
def test_job_that_cannot_train_is_refused_by_what_the_doctor_knows(args, refusal):
    answer = asked(args)
    assert answer is None if refusal is None else answer.startswith(refusal)


@pytest.mark.subprocess
def test_strategy_of_a_critic_counts_where_there_is_one():
    assert asked("critic.strategy=fsdp3", "ALGO=ppo").startswith("critic.strategy=fsdp3 is no strategy of verl 0.9.1")
    assert asked("critic.strategy=fsdp3") is None


@pytest.mark.subprocess
def test_model_that_verl_cannot_run_is_refused_by_its_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_head": 12}))
    refusal = asked("", f"MODEL={tmp_path}")
    assert refusal.startswith(f"MODEL={tmp_path} is a gpt2 model, whose config has no num_key_value_heads")


@pytest.mark.subprocess
@pytest.mark.parametrize(("engine", "refused"), [("dp", True), ("megatron", False)])
def test_mixtral_is_refused_where_fsdp_sends_it(engine, refused, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", "num_key_value_heads": 2}))
    path = f"actor_rollout_ref.model.path={tmp_path}"
    findings = diagnose(examined(SITE), [f"model_engine={engine}", path, f"{ROLLOUT}.name=vllm"]).findings
    assert [each.key for each in findings if "is a mixtral model" in each.effect] == [MODEL] * refused


def test_models_are_judged_by_the_installed_sources(tmp_path):
    kv_heads = {"num_key_value_heads": 2}
    for config, ends in (
        ({"model_type": "gpt2"}, True),
        ({"model_type": "opt"}, True),
        ({"model_type": "llama"}, False),  # its class has the number of heads
        ({"model_type": "gpt2"} | kv_heads, False),
        ({"model_type": "of my own"}, False),
        ({}, False),
    ):
        assert bool(missing_kv_heads(config, SITE)) == ends, config
    vllm, mixtral = SITE / "vllm", {"model_type": "mixtral"}
    assert "whose experts transformers 5." in mixtral_weights(mixtral, vllm, SITE)
    assert mixtral_weights({"model_type": "qwen3_moe"}, vllm, SITE) is None
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers/__init__.py").write_text('__version__ = "4.57.1"\n')
    assert mixtral_weights(mixtral, vllm, tmp_path) is None, "before 5 the names are vLLM's"


def test_tree_without_a_wheel_to_compare_it_with_is_not_examined(monkeypatch, capsys):
    def foreign(folder: Path) -> None:
        raise Refused("cannot download the wheel of verl 0.9.1")

    monkeypatch.setattr("verl_precision.doctor.job_refusal.identify_tree", foreign)
    monkeypatch.setattr(
        "verl_precision.doctor.job_refusal.examined", cache(examined.__wrapped__)
    )  # keeps the real result
    assert asked(f"{ROLLOUT}.name=hf") is None and asked("") is None
    assert capsys.readouterr().err == "the doctor cannot examine this verl: cannot download the wheel of verl 0.9.1\n"
