"""verl's own validation of a job before it starts: refusals in one line, on the platform of the job."""

import importlib.metadata
import sys
from dataclasses import replace

import pytest

from lib.errors import Refused
from lib.run.job import CPU_PLATFORM, MODULES, compose, parse_job
from lib.run.validation import platform_variables, refusal, validate

ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    "words, args, reason",
    [
        ([], f"{ACTOR}.ppo_mini_batch_size=64", "train_batch_size (32) must be >="),
        ([], "trainer.n_gpus_per_node=3", "real_train_batch_size (256) must be divisible by"),  # an assertion of verl
        ([], f"{ACTOR}.fsdp_config.model_dtype=float16", "model_dtype=float16 with dtype=float16 makes"),
        ([], f"{ACTOR}.strategy=megatron", "Key 'megatron' is not in struct"),
        (["RECIPE=flowrl"], f"{ACTOR}.flowrl.beta=0", f"{ACTOR}.flowrl.beta=0: must be"),
        (["RECIPE=flowrl"], f"{ACTOR}.strategy=megatron", f"{ACTOR}.strategy=megatron: "),
        (["RECIPE=flowrl_paper"], f"{ACTOR}.use_kl_loss=false", f"{ACTOR}.use_kl_loss="),
    ],
)
def test_settings_that_verl_or_a_recipe_refuses_are_refused_in_one_line(words, args, reason, tmp_path):
    good = parse_job(["DEVICE=cpu", *words])
    assert refusal(compose(good, tmp_path)) is None
    message = refusal(compose(replace(good, args=(args,)), tmp_path))
    assert message.startswith(reason) and "\n" not in message


@pytest.mark.subprocess
def test_lora_is_validated_on_the_platform_of_the_job(tmp_path):
    """verl imports vLLM to check a LoRA's rank, and finds its CPU build only on the CPU platform."""
    loaded = sys.modules.keys() & {"recipes.cpu.platform", "vllm"}
    # submitted to a cluster whose GPUs this machine may lack
    job = replace(parse_job(["DEVICE=cpu", "ARGS=actor_rollout_ref.model.lora_rank=513"]), device="cuda")
    with pytest.raises(Refused, match="^ARGS=.*=513: lora_rank must be less than or equal to 512, but got 513$"):
        validate(job, compose(job, tmp_path))
    assert sys.modules.keys() & {"recipes.cpu.platform", "vllm"} == loaded, "this process must be unchanged"


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ("trainer.save_freq=1 trainer.n_gpu=2 trainer.test_freq=5", "ARGS=trainer.n_gpu=2: Could not override"),
        (
            f"data.train_batch_size=8 {ACTOR}.ppo_mini_batch_size=16 trainer.save_freq=1",
            f"ARGS={ACTOR}.ppo_mini_batch_size=16: train_batch_size (8) must be >=",
        ),
    ],
)
def test_refusal_names_only_the_word_at_fault(args, word, tmp_path):
    job = parse_job(["DEVICE=cpu", f"ARGS={args}"])
    with pytest.raises(Refused) as refused:
        validate(job, compose(job, tmp_path), here=True)
    assert str(refused.value).startswith(word) and "save_freq" not in str(refused.value)


def test_job_for_gpu_nodes_is_validated_without_the_cpu_platform(monkeypatch):
    """A head node without a GPU has the CUDA set: the CPU platform fits neither its torch nor its vLLM."""
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [])
    job = replace(parse_job(["DEVICE=cpu"]), device="cuda")
    assert platform_variables(job) == {}
    assert platform_variables(replace(job, recipe="flowrl")) == {MODULES: "recipes.flowrl.trainer"}
    assert platform_variables(replace(job, device="cpu")) == CPU_PLATFORM
