"""What ``doctor --live`` makes of workers' answers, and a real engine's; asking is tests/e2e/test_make_run.py's."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from lib.doctor.live import Answers, is_verls, model, report

DOCTOR = Path(__file__).resolve().parents[2] / "scripts/doctor.py"
HOPS = ("actor.compute", "actor.autocast", "wire", "rollout.weights")


def actor(rank: int = 0, dtype: str = "float16", stack: str | None = "abc", **other) -> dict:
    held = {"role": "actor", "master": "float32", "compute": dtype, "autocast": dtype, "scaler": None}
    return held | {"rank": rank, "verl": "0.9.1", "stack": stack} | other


def rollout(dtype: str = "float16", **other) -> dict:
    return {"role": "rollout", "weights": dtype, "kv_cache": dtype, "rank": 0, "verl": "0.9.1", "stack": "abc"} | other


def told(*parts: dict, silent: tuple[str, ...] = (), static: dict | None = None) -> dict:
    return report(Answers(list(parts), list(silent)), HOPS, static)


def test_workers_of_one_dtype_agree():
    found = told(actor(0), actor(1), rollout())
    assert (found["verdict"], found["findings"]) == ("agree", [])
    assert found["hops"]["actor.compute"] == "float16" and found["hops"]["wire"] is None
    assert found["verl"] == [{"release": "0.9.1", "stack": "abc"}]


def test_a_rank_with_another_dtype_is_named():
    found = told(actor(0), actor(1), actor(2, dtype="bfloat16", stack=None), rollout())
    assert found["verdict"] == "differ"
    assert found["hops"]["actor.compute"] == "float16 (ranks 0, 1); bfloat16 (ranks 2)"
    assert found["findings"][0]["key"] == "verl" and "stack None (ranks 2)" in found["findings"][0]["value"]


@pytest.mark.parametrize(("verdict", "expected"), [("asked", "asked"), ("differ", "differ")])
def test_a_difference_is_asked_for_where_the_config_asks_for_it(verdict, expected):
    static = {"hops": dict.fromkeys(HOPS, "bfloat16") | {"rollout.weights": "float16"}, "verdict": verdict}
    assert told(actor(dtype="bfloat16"), rollout(), static=static)["verdict"] == expected


def test_workers_that_hold_another_dtype_than_the_config_makes_are_a_finding():
    static = {"hops": dict.fromkeys(HOPS, "float16"), "verdict": "agree"}
    found = told(actor(dtype="bfloat16"), rollout("bfloat16"), static=static)
    assert found["verdict"] == "differ"
    assert [each["key"] for each in found["findings"]] == ["actor.compute", "actor.autocast", "rollout.weights"]
    assert found["findings"][0]["effect"] == "the workers hold bfloat16, this config makes float16"


def test_what_is_not_heard_is_no_agreement():
    assert told(actor(), rollout(), silent=("aWorkerDict_0:1",))["verdict"] == "unknown"
    assert "vLLM" in told(actor())["sentence"]
    assert told(actor(autocast=None), rollout())["verdict"] == "unknown"


def test_an_autocast_that_is_written_into_the_code_is_the_configs():
    static = {"hops": dict.fromkeys(HOPS, "bfloat16"), "verdict": "agree"}
    found = told(actor(dtype="bfloat16", autocast=None), rollout("bfloat16"), static=static)
    assert (found["verdict"], found["hops"]["actor.autocast"]) == ("agree", None)


@pytest.mark.parametrize(
    "name",
    ["k2SxYfWorkerDict_0:0", "actor_rollout_refActorRolloutRefWorker_1:7", "abcCriticWorker_0:3", "vllm_server_0_0"],
)
def test_verls_workers_and_servers_are_known_by_name(name):
    assert is_verls(name)


@pytest.mark.parametrize("name", ["agent_loop_worker_0", "TransferQueueController", "register_center", "WorkerDict"])
def test_other_actors_are_left_alone(name):
    assert not is_verls(name)


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_an_engine_tells_what_it_holds(one_rank):
    module = torch.nn.Linear(4, 4)
    fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32))
    optimizer = torch.optim.AdamW(module.parameters())
    scaler = ShardedGradScaler("cpu", init_scale=8.0, growth_interval=3)
    engine = SimpleNamespace(module=module, optimizer=optimizer, scaler=scaler, _autocast_dtype=torch.float16)
    assert model("actor", engine)["optimizer"] is None, "no step was taken"
    module(torch.ones(1, 4, dtype=torch.float16)).sum().backward()
    optimizer.step()
    held = model("actor", engine)
    assert [held[key] for key in ("master", "compute", "reduce", "autocast", "optimizer")] == [
        *("float32", "float16", "float32", "float16", "float32")
    ]
    assert (held["scaler"]["scale"], held["scaler"]["growth_interval"], held["scaler"]["min_scale"]) == (8.0, 3, None)


def test_no_cluster_is_one_line():
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    done = subprocess.run([sys.executable, DOCTOR, "--live"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("doctor: --live: RAY_ADDRESS=127.0.0.1:1: no Ray cluster answers there (")
    assert done.stderr.count("\n") == 1 and not done.stdout
