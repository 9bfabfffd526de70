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
"""Dtypes that no engine computes in are refused when the config is built, before a worker starts."""

import pytest

from verl.workers.config import FSDPEngineConfig, McoreEngineConfig


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dtype": "banana"}, "dtype=banana is not a dtype to compute in: choose float16"),
        ({"dtype": "fp32", "mixed_precision": {"param_dtype": "banana"}}, "mixed_precision.param_dtype=banana"),
        ({"dtype": "float16", "mixed_precision": {"param_dtype": "bf16"}}, "contradict each other"),
        ({"dtype": "float16", "model_dtype": "fp16"}, "set model_dtype=fp32"),
        ({"dtype": "float16", "strategy": "fsdp_turbo"}, "strategy=fsdp_turbo trains in"),
    ],
)
def test_fsdp(settings, named):
    with pytest.raises(ValueError, match=named):
        FSDPEngineConfig(**{"strategy": "fsdp", **settings})


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, "bfloat16"),
        ({"dtype": "fp16"}, "float16"),
        ({"mixed_precision": {"param_dtype": "fp16"}}, "float16"),
        ({"mixed_precision": {"reduce_dtype": "bf16"}}, "bfloat16"),
    ],
)
def test_fsdp_says_what_it_computes_in(settings, dtype):
    assert FSDPEngineConfig(strategy="fsdp2", **settings).dtype == dtype


@pytest.mark.parametrize("settings", [{"dtype": "bf16"}, {"model_dtype": "bf16"}])
def test_what_requests_nothing_is_left_as_it_is(settings):
    ((key, value),) = settings.items()
    assert getattr(FSDPEngineConfig(strategy="fsdp2", **settings), key) == value


def test_megatron():
    assert McoreEngineConfig(dtype="fp16").dtype == "float16"
    with pytest.raises(ValueError, match="dtype=banana"):
        McoreEngineConfig(dtype="banana")
