"""Checkpoint engines and exports get the rollout's dtype, and an adapter its tensors."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from precision import check_adapter, set_wire_dtype, wire_kwargs
from support.methods import function


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
