"""verl's FSDP engine on one rank of a device: its fp16 against fp32, and its faults.

``make verify-gpu`` runs this file with ``--device cuda`` and the installed verl; elsewhere it runs on a CPU.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl_precision.facts.gpus import find_gpus
from verl_precision.run.machine import flash_attention_missing, oldest

CASES = (
    *("dtype_per_hop", "agreement", "faults_actor", "faults_actor_fused", "faults_critic", "storm"),
    *("scales_of_two_roles", "cost_of_a_step", "sft_checkpoints", "keep_fp32"),
)
FLASH = "faults_flash_attention"  # last, since a kernel that fails ends the process
pytestmark = pytest.mark.slow  # on a CPU it repeats the other files
SCRIPT = Path(__file__).with_name("engine_cases.py")


@pytest.fixture(scope="module", params=["fsdp", "fsdp2"])
def outcomes(request, pytestconfig, environment, tiny_model, tmp_path_factory) -> dict:
    """The outcomes of the cases by name; those that an error prevented are missing, and ``log`` has the error."""
    if pytestconfig.getoption("device") == "cpu":
        run_ranks = request.getfixturevalue("run_ranks")  # starts the server from which it forks
        return run_ranks("patched", SCRIPT, request.param, *CASES, ranks=1)[0]
    # A GPU cannot be used in a fork of a process that has loaded its driver.
    out = tmp_path_factory.mktemp(request.param)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=1"]
    cases = [*CASES, *([] if flash_attention_missing(oldest(find_gpus())) else [FLASH])]
    with (out / "log").open("w") as log:
        command = [sys.executable, *launcher, SCRIPT, request.param, tiny_model, out, *cases]
        subprocess.run(command, env=environment("patched"), stdout=log, stderr=subprocess.STDOUT)
    results = out / "rank_0.json"
    return {"log": (out / "log").read_text()} | (json.loads(results.read_text()) if results.exists() else {})


def of(outcomes: dict, case: str) -> dict:
    """Return the outcome of a case, which must have completed."""
    assert case in outcomes, outcomes["log"][-4000:]
    return outcomes[case]


def test_every_hop_computes_in_fp16(outcomes):
    hops = of(outcomes, "dtype_per_hop")
    assert hops["linear"] == ["float16"] * 3 and hops["autocast"] == "float16" and hops["scaler"]
    assert {hops[name] for name in ("master", "buffer", "adam")} == {"float32"}


def test_fp16_is_nearer_to_fp32_than_bf16(outcomes, record_property):
    """At least 3 times nearer; its 3 further bits of mantissa predict 8."""
    errors = of(outcomes, "agreement")
    record_property("errors", json.dumps(errors))
    for of_what in ("log_probs", "gradients"):
        fp16, bf16 = (errors[dtype][of_what] for dtype in ("float16", "bfloat16"))
        assert 0 < fp16 < bf16 / 3 and fp16 < 5e-3, errors


@pytest.mark.parametrize("case", ["faults_actor", "faults_actor_fused", "faults_critic", FLASH])
def test_overflow_skips_the_step_to_the_bit(outcomes, case, pytestconfig):
    on_cpu = pytestconfig.getoption("device") == "cpu"
    if case == FLASH and (why := "no GPU" if on_cpu else flash_attention_missing(oldest(find_gpus()))):
        pytest.skip(why)
    for number, (name, fault) in enumerate(of(outcomes, case).items(), start=1):
        assert fault["unchanged"] and fault["gradients_cleared"] and fault["lr_unchanged"], name
        assert fault["scale_factor"] == 0.5 and fault["moves_on"] and fault["next_step"], name
        skipped = {"grad_norm": None, "skipped_steps": 1.0, "loss_scale": 1024.0 / 2**number}
        assert fault["metrics"] == skipped, name


def test_storm_stops_at_the_floor_and_names_the_gradient(outcomes):
    storm = of(outcomes, "storm")
    assert storm["type"] == "LossScaleError" and "in the shard of rank 0" in storm["error"]
    assert storm["scales"] == [4.0, 2.0, 2.0] and storm["skips"] == [1.0] * 3


def test_scale_and_state_are_those_of_the_checkpoint(outcomes):
    assert of(outcomes, "scales_of_two_roles") == {"actor": 1024.0, "critic": 4096.0}
    assert of(outcomes, "sft_checkpoints") == {"resumed": 3, "data": True, "resumed_of_torn": 2, "state": True}


def test_step_takes_one_device_read(outcomes):
    cost = of(outcomes, "cost_of_a_step")
    assert cost["fp16"]["host_reads"] == cost["fp16_fused"]["host_reads"] == 1


def test_modules_kept_in_fp32_do_not_overflow(outcomes):
    kept = of(outcomes, "keep_fp32")
    assert kept["float16"]["skipped"] == 1 and kept["kept"]["skipped"] == 0
    assert max(kept["update_error"].values()) < 0.02
