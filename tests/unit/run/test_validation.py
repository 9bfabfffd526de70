"""verl's own validation of a job before it starts: refusals in one line, on the platform of the job."""

import importlib.metadata
import sys
from dataclasses import replace

import pytest

from verl_precision.errors import Refused
from verl_precision.run.job import CPU_PLATFORM, MODULES, compose, parse_job
from verl_precision.run.validation import platform_variables, refusal, validate

pytestmark = pytest.mark.subprocess  # they import verl
ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    "recipe, args, reason",
    [
        ("", f"{ACTOR}.ppo_mini_batch_size=64", "train_batch_size (32) must be >="),
        ("", "trainer.n_gpus_per_node=3", "real_train_batch_size (256) must be divisible by"),  # an assertion of verl
        ("", f"{ACTOR}.fsdp_config.model_dtype=float16", "model_dtype=float16 with dtype=float16 makes"),
        ("", f"{ACTOR}.strategy=megatron", "Key 'megatron' is not in struct"),
        ("flowrl", f"{ACTOR}.flowrl.beta=0", f"{ACTOR}.flowrl.beta=0: must be"),
    ],
)
def test_settings_that_verl_or_a_recipe_refuses_are_refused_in_one_line(recipe, args, reason, tmp_path):
    message = refusal(compose(parse_job(["DEVICE=cpu", f"RECIPE={recipe}", f"ARGS={args}"]), tmp_path))
    assert message.startswith(reason) and "\n" not in message


@pytest.mark.slow
def test_lora_is_validated_on_the_platform_of_the_job(tmp_path):
    """verl imports vLLM to check a LoRA's rank, and finds its CPU build only on the CPU platform."""
    loaded = sys.modules.keys() & {"recipes.cpu.platform", "vllm"}
    # submitted to a cluster whose GPUs this machine may lack
    job = replace(parse_job(["DEVICE=cpu", "ARGS=actor_rollout_ref.model.lora_rank=513"]), device="cuda")
    with pytest.raises(Refused, match="^ARGS=.*=513: lora_rank must be less than or equal to 512, but got 513$"):
        validate(job, compose(job, tmp_path))
    assert sys.modules.keys() & {"recipes.cpu.platform", "vllm"} == loaded, "this process must be unchanged"


def test_job_for_gpu_nodes_is_validated_without_the_cpu_platform(monkeypatch):
    """A head node without a GPU has the CUDA set: the CPU platform fits neither its torch nor its vLLM."""
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [])
    job = replace(parse_job(["DEVICE=cpu"]), device="cuda")
    assert platform_variables(job) == {}
    assert platform_variables(replace(job, recipe="flowrl")) == {MODULES: "recipes.flowrl.trainer"}
    assert platform_variables(replace(job, device="cpu")) == CPU_PLATFORM
