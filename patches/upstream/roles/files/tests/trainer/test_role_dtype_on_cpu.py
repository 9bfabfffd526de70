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
"""One dtype key per role: what follows what, and what is refused when the role's config is built."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import open_dict
from transformers import Qwen2Config

import verl
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.precision import check_rollout_dtype, run_requests_precision

ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))
MIXED = f"+{ACTOR}.fsdp_config.mixed_precision.param_dtype"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Only a model's config, which is all that the critic's config reads."""
    folder = tmp_path_factory.mktemp("model")
    Qwen2Config(num_hidden_layers=1, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    return folder


@pytest.fixture
def build(model):
    """``build(overrides)``: the dtype that each role's engine computes in, by the dataclasses that verl builds."""

    def of(overrides: list[str]) -> dict[str, str]:
        given = [
            f"critic.model.path={model}",
            "++critic.model.load_tokenizer=false",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
            "critic.ppo_micro_batch_size_per_gpu=1",
            f"{ROLLOUT}.name=vllm",
        ]
        with initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
            config = compose("ppo_trainer", overrides=[*given, *overrides])
        ref = config.actor_rollout_ref.ref
        with open_dict(ref):  # as ActorRolloutRefWorker does
            for key in [key for key in ref if key.startswith("log_prob_")]:
                ref.pop(key)
            ref.ppo_micro_batch_size_per_gpu = 1
        roles = {"actor": config.actor_rollout_ref.actor, "ref": ref, "critic": config.critic}
        return {name: omega_conf_to_dataclass(role).engine.dtype for name, role in roles.items()}

    return of


def all_in(dtype: str, **others: str) -> dict[str, str]:
    return {**dict.fromkeys(("actor", "ref", "critic"), dtype), **others}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], all_in("bfloat16")),
        ([f"{ACTOR}.dtype=float16"], all_in("float16")),
        ([f"{ACTOR}.dtype=fp16"], all_in("float16")),
        ([f"{ACTOR}.fsdp_config.dtype=float16"], all_in("float16")),
        ([f"{ACTOR}.dtype=float16", f"{ACTOR}.fsdp_config.dtype=bfloat16"], all_in("float16")),
        (
            [f"{ACTOR}.dtype=float16", f"{REF}.dtype=bfloat16", "critic.dtype=float32"],
            {"actor": "float16", "ref": "bfloat16", "critic": "float32"},
        ),
        (["critic.fsdp.dtype=float16"], all_in("bfloat16", critic="float16")),
        ([f"{MIXED}=fp16"], all_in("bfloat16", actor="float16")),
        ([f"{ACTOR}.dtype=float16", "model_engine=megatron"], all_in("float16")),
    ],
)
def test_ref_and_critic_follow_the_actor_unless_told_otherwise(build, overrides, expected):
    assert build(overrides) == expected


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([f"{ACTOR}.dtype=banana"], "dtype=banana"),
        (
            [f"{ACTOR}.dtype=float16", f"{ACTOR}.fsdp_config.dtype=float32"],
            "dtype=float16 and fsdp_config.dtype=float32 contradict",
        ),
        (["critic.dtype=float16", "critic.fsdp.dtype=float32"], "dtype=float16 and fsdp.dtype=float32 contradict"),
        ([f"{ACTOR}.dtype=float16", f"{MIXED}=bf16"], "mixed_precision.param_dtype=bf16 contradict"),
        ([f"{ACTOR}.dtype=float16", "model_engine=torchtitan"], "strategy=torchtitan"),
        ([f"{ACTOR}.dtype=float16", "model_engine=veomni"], "strategy=veomni"),
        ([f"{ACTOR}.dtype=float16", f"{ACTOR}.strategy=fsdp_turbo"], "strategy=fsdp_turbo"),
    ],
)
def test_what_contradicts_or_would_be_ignored_is_refused_by_name(build, overrides, named):
    with pytest.raises(Exception, match=named):
        build(overrides)


@pytest.mark.parametrize(
    ("config", "requested"),
    [
        ({"rollout": {"dtype": "bfloat16"}}, False),
        ({"rollout": {"dtype": "auto"}}, False),
        ({"rollout": {"dtype": "fp61"}}, False),
        ({"rollout": {"dtype": "half"}}, True),
        ({"actor": {"dtype": "bfloat16"}}, True),
        ({"actor": {"dtype": None}}, False),
        ({"ref": {"strategy": "fsdp", "fsdp_config": {"dtype": "float32"}}}, True),
        ({"actor": {"strategy": "megatron", "megatron": {"dtype": "float16"}}}, True),
        ({"actor": {"strategy": "megatron", "megatron": {"dtype": "bfloat16"}}}, False),
    ],
)
def test_a_run_requests_a_precision_by_one_of_its_roles(config, requested):
    assert run_requests_precision({"actor_rollout_ref": {"rollout": {"dtype": "bfloat16"}, **config}}) == requested


def test_the_rollout_has_names_of_its_own():
    for name in ("auto", "half", "bfloat16"):
        check_rollout_dtype(name)
    with pytest.raises(ValueError, match="dtype=fp16 is unknown to the rollout: choose one of auto, half"):
        check_rollout_dtype("fp16")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("actor_rollout_ref.rollout.dtype=fp61", "dtype=fp61 is unknown to the rollout"),
        ("actor_rollout_ref.ref.fsdp_config.dtype=banana", "dtype=banana is not a dtype"),
        ("actor_rollout_ref.ref.dtype=banana", "dtype=banana is not a dtype"),
    ],
)
def test_the_driver_builds_what_the_workers_would_build_late(override, named):
    given = [
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.actor.dtype=bfloat16",
    ]
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        good, bad = (compose("ppo_trainer", overrides=overrides) for overrides in (given, [*given, override]))
    validate_config(good, use_reference_policy=True, use_critic=False)
    with pytest.raises(Exception, match=named):
        validate_config(bad, use_reference_policy=True, use_critic=False)
