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
"""How an engine's precision is resolved from its config, and what is refused."""

from types import SimpleNamespace

import pytest
import torch

from verl.utils.precision import UNREQUESTED, Precision, apply_engine_dtype, to_dtype


def engine_config(**overrides) -> SimpleNamespace:
    defaults = dict(dtype=None, mixed_precision=None, model_dtype="fp32", forward_only=False, strategy="fsdp")
    return SimpleNamespace(**{**defaults, **overrides})


@pytest.mark.parametrize(
    ("config", "compute", "reduce", "base"),
    [
        ({"dtype": "float16"}, torch.float16, torch.float32, torch.float32),
        ({"dtype": "fp32"}, torch.float32, torch.float32, torch.float32),
        ({"dtype": "fp16", "model_dtype": 32}, torch.float16, torch.float32, torch.float32),
        ({"dtype": "float16", "model_dtype": None}, torch.float16, torch.float32, torch.float32),
        (
            {"dtype": "float16", "forward_only": True, "model_dtype": None},
            torch.float16,
            torch.float32,
            torch.float16,
        ),
        ({"mixed_precision": {"param_dtype": "fp16"}}, torch.float16, torch.float32, torch.float32),
        (
            {"dtype": "float16", "mixed_precision": {"reduce_dtype": "bf16"}},
            torch.float16,
            torch.bfloat16,
            torch.float32,
        ),
    ],
)
def test_one_resolver_for_every_hop(config, compute, reduce, base):
    resolved = Precision.resolve(engine_config(**config))
    assert (resolved.compute, resolved.reduce, resolved.base) == (compute, reduce, base)
    assert resolved.requested


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"dtype": "bf16"},
        {"mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "bf16"}},
        {"model_dtype": "bf16"},
        {"model_dtype": "int8"},
        {"strategy": "torchtitan", "mixed_precision": True},
    ],
)
def test_what_requests_nothing_is_left_as_it_is(config):
    engine = engine_config(**config)
    apply_engine_dtype(engine)
    assert engine == engine_config(**config) and Precision.resolve(engine) is UNREQUESTED


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"dtype": "banana"}, "dtype=banana is not a dtype to compute in"),
        ({"dtype": "float16", "mixed_precision": {"param_dtype": "fp8"}}, "mixed_precision.param_dtype=fp8"),
        ({"dtype": "float16", "mixed_precision": {"reduce_dtype": "half"}}, "mixed_precision.reduce_dtype=half"),
        ({"dtype": "float16", "model_dtype": "int8"}, "model_dtype=int8"),
        ({"dtype": "float16", "model_dtype": "bf16"}, "model_dtype=bf16 with dtype=float16"),
        ({"dtype": "float32", "mixed_precision": {"param_dtype": "fp16"}}, "contradict each other"),
        ({"dtype": "float16", "strategy": "fsdp_turbo"}, "strategy=fsdp_turbo"),
    ],
)
def test_refused_in_one_line_that_names_key_and_value(config, named):
    with pytest.raises(ValueError) as refusal:
        Precision.resolve(engine_config(**config))
    assert named in str(refusal.value) and "\n" not in str(refusal.value)


def test_fp16_masters_turn_to_nan():
    """Why fp16 master weights are refused: eps and small second moments are 0 in fp16, and 0/0 is NaN."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter((torch.randn(1000) * 0.02).half())
    optimizer = torch.optim.AdamW([weight], lr=1e-6, fused=False)
    for _ in range(20):
        weight.grad = (torch.randn(1000) * 1e-4).half()
        optimizer.step()
    assert weight.isnan().float().mean() > 0.5


@pytest.mark.parametrize("strategy", ["torchtitan", "veomni", "automodel", "fsdp_turbo"])
def test_engines_that_autocast_to_bfloat16_take_nothing_else(strategy):
    apply_engine_dtype(engine_config(strategy=strategy))
    with pytest.raises(ValueError, match=f"dtype=float16 is not what strategy={strategy} trains in"):
        apply_engine_dtype(engine_config(strategy=strategy, dtype="float16"))


def test_names_of_dtypes():
    assert [to_dtype(name, "key") for name in ("fp16", "float16", 16)] == [torch.float16] * 3
    with pytest.raises(ValueError, match="key=half is not a dtype"):
        to_dtype("half", "key")
