# Copyright 2025 Individual Contributor: the verl-precision authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Which dtype a checkpoint engine is told to send weights in."""

from types import SimpleNamespace

import pytest
import torch

from verl.utils.precision import set_wire_dtype, wire_kwargs


class Takes:
    """As the kimi, mooncake and delta engines do."""

    def __init__(self, bucket_size, rollout_dtype=torch.bfloat16):
        pass


class HandsOn(Takes):
    def __init__(self, *args, **kwargs):
        pass


class DoesNot(Takes):
    def __init__(self, bucket_size):
        pass


@pytest.mark.parametrize(
    ("engine", "engine_kwargs", "rollout_dtype", "expected"),
    [
        (Takes, {}, "float16", {"rollout_dtype": torch.float16}),
        (Takes, {}, "half", {"rollout_dtype": torch.float16}),
        (HandsOn, {"a": 1}, "float32", {"a": 1, "rollout_dtype": torch.float32}),
        (DoesNot, {"a": 1}, "float16", {"a": 1}),
        (Takes, {}, "auto", {}),
        # a string, as yaml has it, is no dtype that a tensor can be cast to
        (Takes, {"rollout_dtype": "bfloat16"}, "float16", {"rollout_dtype": torch.bfloat16}),
    ],
)
def test_a_checkpoint_engine_gets_the_rollouts_dtype(engine, engine_kwargs, rollout_dtype, expected):
    registry = SimpleNamespace(get={"own": engine}.__getitem__)
    assert wire_kwargs(registry, "own", engine_kwargs, rollout_dtype) == expected


def test_an_engine_that_exports_bfloat16_alone_is_refused():
    fsdp = SimpleNamespace(wire_dtype=torch.bfloat16)
    set_wire_dtype(fsdp, torch.float16)
    assert fsdp.wire_dtype == torch.float16
    set_wire_dtype(object(), torch.bfloat16)
    with pytest.raises(ValueError, match="rollout.dtype=float16 with checkpoint_engine.backend=delta_sharded"):
        set_wire_dtype(object(), torch.float16)
