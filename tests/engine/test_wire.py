"""Checkpoint engines and exports get the rollout's dtype, and an adapter its tensors."""

import asyncio
import logging
from types import SimpleNamespace

import pytest
import torch
from lora_sync import check_adapter
from precision import dtype_name, fp32_parameters, set_wire_dtype, wire_kwargs
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
        (AcceptsDtype, {}, "auto", {}),
        (AcceptsDtype, {"rollout_dtype": "bfloat16"}, "float16", {"rollout_dtype": torch.bfloat16}),
        (IgnoresDtype, {"rollout_dtype": "float16"}, "float16", {"rollout_dtype": torch.float16}),
    ],
)
def test_a_checkpoint_engine_gets_a_torch_dtype(engine, engine_kwargs, rollout_dtype, expected):
    assert wire_kwargs(engine, engine_kwargs, rollout_dtype) == expected


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


def test_vllm_reports_the_dtypes_of_the_weights_that_arrive_and_of_its_own(tmp_path, pytestconfig):
    """In 0.8.0; the newest release's report is of trained jobs, tests/e2e."""
    tree, reports = patched_tree("0.8.0", tmp_path, pytestconfig.getoption("verl_tree")), []
    names = {"report": lambda **fields: reports.append(fields), "dtype_name": dtype_name, "logger": logging.getLogger()}
    names |= {"fp32_parameters": fp32_parameters, "is_fp8_model": lambda config: False}
    update = function(
        tree / "verl/workers/rollout/vllm_rollout/utils.py", "vLLMColocateWorkerExtension._update_weights", **names
    )
    runner = SimpleNamespace(model=torch.nn.Linear(1, 1, dtype=torch.float16), kv_cache_dtype=torch.float8_e5m2)
    runner.vllm_config = None
    worker = SimpleNamespace(rank=0, model_runner=runner, _precision_reported=False, _iter_all_models=list)
    for _ in range(2):
        update(worker, [("weight", torch.ones(1, dtype=torch.bfloat16))], None, False)
    (report,) = reports
    assert (report["wire"], report["rollout"], report["kv_cache"]) == ("bfloat16", "float16", "float8_e5m2")
