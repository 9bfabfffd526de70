"""verl's own validation of a job before it starts: refusals in one line, on the platform of the job."""

import importlib.metadata
import sys
from dataclasses import replace

import pytest

from lib.errors import Refused
from lib.run.job import CPU_PLATFORM, MODULES, compose, parse_job
from lib.run.validation import platform_variables, refusal, validate


@pytest.mark.parametrize(
    "words, args, reason",
    [
        ([], "actor_rollout_ref.actor.ppo_mini_batch_size=64", "train_batch_size (32) must be >="),
        ([], "trainer.n_gpus_per_node=3", "real_train_batch_size (256) must be divisible by"),  # an assertion of verl
        ([], "actor_rollout_ref.actor.fsdp_config.model_dtype=float16", "model_dtype=float16 with dtype=float16 makes"),
        (["RECIPE=flowrl"], "actor_rollout_ref.actor.flowrl.beta=0", "actor_rollout_ref.actor.flowrl.beta=0: must be"),
        (["RECIPE=flowrl_paper"], "actor_rollout_ref.actor.use_kl_loss=false", "actor_rollout_ref.actor.use_kl_loss="),
        (["RECIPE=flowrl"], "actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.actor.strategy=megatron: "),
        ([], "actor_rollout_ref.actor.strategy=megatron", "Key 'megatron' is not in struct"),
    ],
)
def test_settings_that_verl_or_a_recipe_refuses_are_refused_in_one_line(words, args, reason, tmp_path):
    good = parse_job(["DEVICE=cpu", *words])
    assert refusal(compose(good, tmp_path)) is None
    job = parse_job(["DEVICE=cpu", *words, f"ARGS={args}"])
    message = refusal(compose(job, tmp_path))
    assert message.startswith(reason) and "\n" not in message


def test_lora_is_validated_on_the_platform_of_the_job(tmp_path):
    """verl imports vLLM to check a LoRA's rank, and finds its CPU build only on the CPU platform."""
    loaded = sys.modules.keys() & {"recipes.cpu.platform", "vllm"}
    good, bad = (parse_job(["DEVICE=cpu", f"ARGS=actor_rollout_ref.model.lora_rank={rank}"]) for rank in (8, 513))
    validate(good, compose(good, tmp_path))
    bad = replace(bad, device="cuda")  # submitted to a cluster whose GPUs this machine may lack
    with pytest.raises(Refused, match="^ARGS=.*=513: lora_rank must be less than or equal to 512, but got 513$"):
        validate(bad, compose(bad, tmp_path))
    assert sys.modules.keys() & {"recipes.cpu.platform", "vllm"} == loaded, "this process must be unchanged"


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ("trainer.save_freq=1 trainer.n_gpu=2 trainer.test_freq=5", "ARGS=trainer.n_gpu=2: Could not override"),
        (
            "data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=16 trainer.save_freq=1",
            "ARGS=actor_rollout_ref.actor.ppo_mini_batch_size=16: train_batch_size (8) must be >=",
        ),
    ],
)
def test_refusal_names_only_the_word_at_fault(args, word, tmp_path):
    job = parse_job(["DEVICE=cpu", f"ARGS={args}"])
    with pytest.raises(Refused) as refusal:
        validate(job, compose(job, tmp_path))
    assert str(refusal.value).startswith(word) and "save_freq" not in str(refusal.value)


def test_job_for_gpu_nodes_is_validated_without_the_cpu_platform(monkeypatch):
    """A head node without a GPU has the CUDA set: the CPU platform fits neither its torch nor its vLLM."""
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [])
    job = replace(parse_job(["DEVICE=cpu"]), device="cuda")
    assert platform_variables(job) == {}
    assert platform_variables(replace(job, recipe="flowrl")) == {MODULES: "recipes.flowrl.trainer"}
    assert platform_variables(replace(job, device="cpu")) == CPU_PLATFORM
