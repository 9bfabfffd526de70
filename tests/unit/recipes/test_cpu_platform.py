"""verl without a GPU: each adaptation, in a process that loads it as verl's workers do."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.waiting import TIMEOUT_S

from recipes.cpu.host import wrap_attribute
from verl_precision.paths import REPO
from verl_precision.run.job import CPU_PLATFORM

pytestmark = pytest.mark.subprocess
SCRIPT = Path(__file__).with_name("cpu_platform_cases.py")
SHARED = ("fsdp1", "autocast", "experts")  # fsdp1 first: it forks


def outcomes(*names: str, **variables: str) -> dict:
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, SCRIPT, *names]
    done = subprocess.run(command, env=environment, cwd=REPO, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def adapted() -> dict:
    """The outcomes in a process that loads the platform by verl's own hook."""
    return outcomes(*SHARED, "selected", "pinned", "attention", "products", "repeats", "adapter", **CPU_PLATFORM)


@pytest.fixture(scope="module")
def plain() -> dict:
    """The outcomes without the platform, in which the adaptations are needed."""
    return outcomes(*SHARED)


def test_verl_selects_the_cpu_and_what_it_asks_of_a_gpu_works(adapted):
    """FSDP pins what it offloads, and verl builds a critic with its default attention."""
    assert adapted["selected"] == ["cpu", "cpu", "cpu:0", "gloo", "cpu"]
    assert (adapted["pinned"], adapted["attention"]) == (1.0, "sdpa")


def test_hf_rollout_repeats_prompts_unless_the_trainer_has(adapted):
    assert adapted["repeats"] == {"0.4.1": 4, "0.5.0": 1}


def test_autocast_rounds_where_cudas_does(adapted, plain):
    dtypes, unadapted = adapted["autocast"], plain["autocast"]
    assert dtypes == dict.fromkeys(dtypes, "torch.float32") | {"product": "torch.float16"}
    halves = {name for name, dtype in unadapted.items() if dtype == "torch.float16"}
    assert halves > {"product"}, "torch's own CPU autocast leaves some of them in half precision"


def test_fp16_products_are_fp32_products_rounded_to_fp16(adapted):
    assert adapted["products"] == dict.fromkeys(("linear", "matmul", "rollout", "bias"), True)


def test_two_ranks_synchronise_fsdp1_over_gloo(adapted, plain):
    assert adapted["fsdp1"] == "synchronised"
    assert "cpu:gloo" in plain["fsdp1"], "torch refuses the backend's name"


def test_missing_attribute_is_named():
    with pytest.raises(ImportError, match="^recipes.cpu: vllm has no gone, which recipes.cpu adapts"):
        wrap_attribute(SimpleNamespace(__name__="vllm"), "gone", lambda old: old)


def test_experts_compute_with_the_last_loaded_weights(adapted, plain):
    assert adapted["experts"] < 2e-3, "fp16's rounding"
    assert plain["experts"] > 0.5, "vLLM reads them as packed"


def test_names_of_an_adapters_layers_are_renamed_but_not_stacked(adapted):
    """vLLM 0.29 renamed the method that returns the table without the stacked layers."""
    assert adapted["adapter"] == ["language_model.layers.0.self_attn.q_proj"]
