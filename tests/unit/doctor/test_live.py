"""``doctor --live`` on recorded answers and on a real engine; tests/e2e/test_resume.py queries a running job."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from verl_precision.commands import doctor
from verl_precision.doctor.live import ACTOR, actor_models, diagnose_live, model_dtypes
from verl_precision.errors import Refused

HOPS = ("actor.compute", "actor.autocast", "wire", "rollout.weights")


def actor(rank: int = 0, dtype: str = "float16", stack: str | None = "abc", **other) -> dict:
    dtypes = {"role": "actor", "master": "float32", "compute": dtype, "autocast": dtype, "scaler": None}
    return dtypes | {"rank": rank, "verl": "0.9.1", "stack": stack} | other


def rollout(dtype: str = "float16") -> dict:
    return {"role": "rollout", "weights": dtype, "kv_cache": dtype, "rank": 0, "verl": "0.9.1", "stack": "abc"}


def config(dtype: str = "bfloat16", verdict: str = "agree", **other: str | None) -> dict:
    hops = dict.fromkeys(HOPS, dtype) | other
    return {"hops": hops, "verdict": verdict}


def diagnosed(*models: dict, silent: tuple[str, ...] = (), static: dict | None = None) -> dict:
    return diagnose_live(list(models), list(silent), HOPS, static)


def test_ranks_with_different_dtypes_are_named():
    diagnosis = diagnosed(actor(0), actor(1), rollout())
    assert (diagnosis["verdict"], diagnosis["findings"]) == ("agree", [])
    assert diagnosis["hops"]["actor.compute"] == "float16" and diagnosis["hops"]["wire"] is None
    assert diagnosis["verl"] == [{"release": "0.9.1", "stack": "abc"}]
    diagnosis = diagnosed(actor(0), actor(1), actor(2, dtype="bfloat16", stack=None), rollout())
    assert diagnosis["verdict"] == "differ"
    assert diagnosis["hops"]["actor.compute"] == "float16 (ranks 0, 1); bfloat16 (ranks 2)"
    assert diagnosis["findings"][0]["key"] == "verl" and "stack None (ranks 2)" in diagnosis["findings"][0]["value"]


def test_actor_that_is_not_fsdps_is_reported():
    megatron = model_dtypes("actor", SimpleNamespace(module=[torch.nn.Linear(2, 2)]))
    diagnosis = diagnosed(megatron | {"rank": 0, "verl": "0.9.1", "stack": "abc"}, rollout())
    assert diagnosis["hops"]["actor.compute"] == "unknown: SimpleNamespace is not FSDP's"


def test_dtype_that_differs_from_the_config_is_a_finding():
    diagnosis = diagnosed(actor(dtype="bfloat16"), rollout("bfloat16"), static=config("float16"))
    assert diagnosis["verdict"] == "differ"
    assert [each["key"] for each in diagnosis["findings"]] == ["actor.compute", "actor.autocast", "rollout.weights"]
    assert diagnosis["findings"][0]["effect"] == "in the workers, float16 by this config"
    no_server = config("float16", **{"rollout.weights": None})
    (found,) = diagnosed(actor(), rollout(), static=no_server)["findings"]
    assert found["effect"] == "in the workers, None by this config"
    for verdict in ("asked", "differ"):  # a difference of the config itself
        static = config(verdict=verdict, **{"rollout.weights": "float16"})
        assert diagnosed(actor(dtype="bfloat16"), rollout(), static=static)["verdict"] == verdict


def test_quantized_server_is_compared_with_the_config():
    server = rollout("bfloat16") | {"weights": "fp8", "logits": "bfloat16", "kv_cache": "fp8"}
    asked = config(verdict="asked", **dict.fromkeys(("rollout.weights", "rollout.kv_cache"), "float8_e4m3fn"))
    diagnosis = diagnosed(actor(dtype="bfloat16"), server, static=asked)
    assert (diagnosis["verdict"], diagnosis["findings"]) == ("asked", [])
    assert "asked: 2 models of the running job" in doctor.live_text(diagnosis)


def test_missing_answer_makes_the_verdict_unknown():
    assert diagnosed(actor(), rollout(), silent=("aWorkerDict_0:1",))["verdict"] == "unknown"
    assert "vLLM" in diagnosed(actor())["sentence"]
    assert diagnosed(actor(autocast=None), rollout())["verdict"] == "unknown"


def test_fixed_autocast_is_that_of_the_config():
    diagnosis = diagnosed(actor(dtype="bfloat16", autocast=None), rollout("bfloat16"), static=config())
    assert (diagnosis["verdict"], diagnosis["hops"]["actor.autocast"]) == ("agree", None)
    other = diagnosed(actor(dtype="float16", autocast=None), rollout("bfloat16"), static=config())
    assert other["verdict"] == "unknown", "the job runs another config"


def test_workers_and_servers_of_verl_are_recognized_by_name():
    names = ["k2SxYfWorkerDict_0:0", "actor_rollout_refActorRolloutRefWorker_1:7", "abcCriticWorker_0:3"]
    others = ["agent_loop_worker_0", "TransferQueueController", "register_center", "WorkerDict"]
    assert [name for name in [*names, "vllm_server_0_0", *others] if ACTOR.search(name)] == [*names, "vllm_server_0_0"]


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_dtypes_of_an_engine(one_rank):
    module = torch.nn.Linear(4, 4)
    fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32))
    optimizer = torch.optim.AdamW(module.parameters())
    scaler = ShardedGradScaler("cpu", init_scale=8.0, growth_interval=3)
    engine = SimpleNamespace(module=module, optimizer=optimizer, scaler=scaler, _autocast_dtype=torch.float16)
    assert model_dtypes("actor", engine)["optimizer"] is None, "no step was taken"
    module(torch.ones(1, 4, dtype=torch.float16)).sum().backward()
    optimizer.step()
    dtypes = model_dtypes("actor", engine)
    expected = {"master": "float32", "compute": "float16", "reduce": "float32", "autocast": "float16"}
    assert dtypes.items() >= (expected | {"optimizer": "float32"}).items()
    assert [dtypes["scaler"][key] for key in ("scale", "growth_interval", "min_scale")] == [8.0, 3, None]

    patched = SimpleNamespace(module=module, optimizer=optimizer, precision=SimpleNamespace(compute=torch.bfloat16))
    assert model_dtypes("actor", patched)["autocast"] == "bfloat16", "of a patched legacy worker"
    patched._autocast_dtype = torch.float32
    assert model_dtypes("actor", patched)["autocast"] == "float32", "of a patched engine, requested or not"


def test_models_of_each_kind_of_actor(one_rank):
    module = fully_shard(torch.nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32))
    legacy = SimpleNamespace(actor_module=module, actor_optimizer=None, param_dtype=torch.float16)
    engine = SimpleNamespace(module=module, optimizer=None)
    reward = SimpleNamespace(reward_module=torch.nn.Linear(4, 4).half())
    workers = {"actor_rollout": SimpleNamespace(actor=legacy, ref_policy=legacy), "rm": reward}
    workers["critic"] = SimpleNamespace(engine=engine)
    colocated = actor_models(SimpleNamespace(worker_dict=workers))
    assert {each["role"] for each in colocated} == {"actor", "ref", "critic", "reward_model"} and len(colocated) == 4
    assert {each["compute"] for each in colocated} == {"float16"} and colocated[0]["autocast"] == "float16"
    newer = SimpleNamespace(actor=SimpleNamespace(engine=engine), ref=SimpleNamespace(engine=engine))
    assert {each["role"]: each["compute"] for each in actor_models(newer)} == {"actor": "float16", "ref": "float16"}
    for cache, expected in (("auto", "float16"), ("fp8", "fp8")):
        config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float16, quantization=None))
        config.cache_config = SimpleNamespace(cache_dtype=cache)
        (server,) = actor_models(SimpleNamespace(engine=SimpleNamespace(vllm_config=config)))
        assert (server["role"], server["weights"], server["kv_cache"]) == ("rollout", "float16", expected)
        assert {"rank", "verl", "stack"} <= server.keys()


def test_unreachable_cluster_and_config_that_no_job_can_run_are_refused(trees, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(Refused, match=r"^--live: RAY_ADDRESS=127.0.0.1:1: no Ray cluster answers there \([^\n]*$"):
        doctor.main(["--live"])
    with pytest.raises(Refused, match="^--live: no job can run this config: Could not override 'actor_rollout_ref.act"):
        doctor.main(["--live", "--verl", str(trees["pristine"]), "actor_rollout_ref.actor.dtype=float16"])
