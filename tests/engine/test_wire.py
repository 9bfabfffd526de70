"""Checkpoint engines and exports get the rollout's dtype, and an adapter its tensors."""

import asyncio
import json
import logging
from types import SimpleNamespace

import pytest
import torch
from lora_sync import check_adapter
from precision import report_kwargs, report_rollout, set_wire_dtype, wire_kwargs
from precision.vllm_fp32 import head_dtype
from support.methods import function
from support.trees import patched_tree


class AcceptsDtype:
    def __init__(self, bucket_size, rollout_dtype=torch.bfloat16):
        pass


class ForwardsArguments(AcceptsDtype):
    def __init__(self, *args, **kwargs):
        pass


class IgnoresDtype(AcceptsDtype):
    def __init__(self, bucket_size):
        pass


@pytest.mark.parametrize(
    ("engine", "engine_kwargs", "rollout_dtype", "expected"),
    [
        (AcceptsDtype, {}, "float16", {"rollout_dtype": torch.float16}),
        (AcceptsDtype, {}, "half", {"rollout_dtype": torch.float16}),
        (ForwardsArguments, {"a": 1}, "float32", {"a": 1, "rollout_dtype": torch.float32}),
        (IgnoresDtype, {"a": 1}, "float16", {"a": 1}),
        *((AcceptsDtype, {"a": 1}, dtype, {"a": 1}) for dtype in ("auto", "bfloat16", "fp8")),
        *(
            (AcceptsDtype, {"rollout_dtype": "half"}, dtype, {"rollout_dtype": "half"})
            for dtype in ("auto", "bfloat16")
        ),
        (AcceptsDtype, {"rollout_dtype": "bfloat16"}, "float16", {"rollout_dtype": torch.bfloat16}),
        (IgnoresDtype, {"rollout_dtype": "float16"}, "float16", {"rollout_dtype": torch.float16}),
    ],
)
def test_a_checkpoint_engine_gets_a_torch_dtype(engine, engine_kwargs, rollout_dtype, expected):
    given = dict(engine_kwargs)
    registry = SimpleNamespace(get={"own": engine}.__getitem__)
    assert wire_kwargs(registry, "own", given, rollout_dtype) == expected and given == engine_kwargs


def test_an_unknown_checkpoint_engine_is_left_to_upstream_without_a_request():
    assert wire_kwargs(SimpleNamespace(get={}.__getitem__), "nccl", {"a": 1}, "bfloat16") == {"a": 1}


def test_an_engine_that_exports_only_bfloat16_is_refused():
    engine = SimpleNamespace(wire_dtype=torch.bfloat16)
    set_wire_dtype(engine, torch.float16)
    assert engine.wire_dtype == torch.float16
    set_wire_dtype(object(), torch.bfloat16)
    with pytest.raises(ValueError, match="rollout.dtype=float16 with checkpoint_engine.backend=delta_sharded"):
        set_wire_dtype(object(), torch.float16)


def test_an_empty_adapter_is_refused():
    """As peft 0.21.2 returns it for a nested FSDP1 model; upstream sends it, and vLLM's worker dies."""
    with pytest.raises(ValueError, match="returned an empty adapter.*install peft"):
        check_adapter({})


@pytest.mark.parametrize(("tree", "sent"), [("patched", torch.float16), ("pristine", torch.bfloat16)])
def test_the_delta_engine_exports_in_the_rollouts_dtype(trees, tree, sent):
    file = trees[tree] / "verl/checkpoint_engine/delta_checkpoint_engine.py"
    send = function(file, "DeltaShardedCheckpointEngine.send_weights", torch=torch, set_wire_dtype=set_wire_dtype)
    engine = SimpleNamespace(
        wire_dtype=torch.bfloat16, get_per_tensor_param=lambda: (None, None), prime_delta_snapshots=lambda: None
    )
    sender = SimpleNamespace(rank=0, rollout_dtype=torch.float16, _shard_seeded=False)
    sender._send_full_seed = lambda weights, step: engine.wire_dtype
    assert asyncio.run(send(sender, engine)) == sent


REPORTED = [
    ({"dtype": "bfloat16"}, False),
    *(({"dtype": dtype, "report_dtypes": None}, False) for dtype in ("auto", "fp8")),
    ({"dtype": "float16"}, True),
    ({"dtype": "float16", "report_dtypes": False}, False),
    ({"dtype": "bfloat16", "report_dtypes": "bfloat16"}, True),  # the actor's dtype, which it is until set
    ({"dtype": "bfloat16", "report_dtypes": True}, True),
]


@pytest.mark.parametrize(("rollout", "reported"), REPORTED, ids=str)
def test_a_rollout_reports_its_dtypes_where_they_are_requested(rollout, reported):
    assert report_kwargs(rollout) == ({"report_dtypes": True} if reported else {})


def test_vllm_reports_once_the_dtypes_of_the_weights_that_arrive_and_of_its_own(tmp_path, pytestconfig, capsys):
    """In 0.8.0; the newest release's report is of trained jobs, tests/e2e."""
    tree = patched_tree("0.8.0", tmp_path, pytestconfig.getoption("verl_tree"))
    file = tree / "verl/workers/rollout/vllm_rollout/utils.py"
    names = {"report_rollout": report_rollout, "logger": logging.getLogger(), "is_fp8_model": lambda config: False}
    update = function(file, "vLLMColocateWorkerExtension._update_weights", **names)
    runner = SimpleNamespace(model=torch.nn.Linear(1, 1, dtype=torch.float16), kv_cache_dtype=torch.float8_e5m2)
    model_config = SimpleNamespace(dtype=torch.float16, head_dtype=torch.float32)
    runner.vllm_config = SimpleNamespace(model_config=model_config)
    worker = SimpleNamespace(rank=0, model_runner=runner, _iter_all_models=list)
    reports = []
    for asked in (False, True, False):  # update_weights_from_ipc asks anew before each sync; report_rollout ends it
        worker._report_dtypes = asked
        for _ in range(2):
            update(worker, [("weight", torch.ones(1, dtype=torch.bfloat16))], None, False)
        reports.append(capsys.readouterr().out.splitlines())
    assert [len(lines) for lines in reports] == [0, 1, 0] and worker._dtypes_reported
    report = json.loads(reports[1][0].removeprefix("[verl-precision] "))
    assert (report["wire"], report["rollout"], report["kv_cache"]) == ("bfloat16", "float16", "float8_e5m2")
    assert report["head"] == "float32" and head_dtype(SimpleNamespace(dtype=torch.float16)) == {}
