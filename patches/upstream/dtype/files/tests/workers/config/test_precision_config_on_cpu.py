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

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import verl
from verl.utils.config import validate_config
from verl.workers.config import FSDPEngineConfig, McoreEngineConfig, RolloutConfig


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dtype": "banana"}, "dtype=banana is not a dtype to compute in: choose float16"),
        ({"mixed_precision": {"param_dtype": "banana"}}, "mixed_precision.param_dtype=banana"),
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


def test_megatron():
    assert McoreEngineConfig(dtype="fp16").dtype == "float16"
    with pytest.raises(ValueError, match="dtype=banana"):
        McoreEngineConfig(dtype="banana")


def test_rollout():
    assert RolloutConfig(name="vllm", dtype="half").dtype == "half"
    with pytest.raises(ValueError, match="dtype=fp61 is unknown to the rollout"):
        RolloutConfig(name="vllm", dtype="fp61")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("actor_rollout_ref.rollout.dtype=fp61", "dtype=fp61 is unknown to the rollout"),
        ("actor_rollout_ref.ref.fsdp_config.dtype=banana", "dtype=banana is not a dtype"),
    ],
)
def test_the_driver_builds_what_the_workers_would_build_late(override, named):
    given = [
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.name=vllm",
    ]
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        good, bad = (compose("ppo_trainer", overrides=overrides) for overrides in (given, [*given, override]))
    validate_config(good, use_reference_policy=True, use_critic=False)
    with pytest.raises(Exception, match=named):
        validate_config(bad, use_reference_policy=True, use_critic=False)
