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
"""``+precision=NAME``: the dtypes of every role at once, in every trainer that takes the group."""

import importlib
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from transformers import Qwen2Config

import verl
from verl.utils.config import omega_conf_to_dataclass

CONFIG = Path(verl.__file__).parent / "trainer/config"
OVERLAYS = {
    "fp16": ("float16", "float16"),
    "bf16": ("bfloat16", "bfloat16"),
    "bf16_train_fp16_infer": ("bfloat16", "float16"),
    "fp32": ("float32", "float32"),
}


def dtypes(trainer: str, *overrides: str) -> dict:
    """The value of each role's key."""
    with initialize_config_dir(str(CONFIG), version_base=None):
        config = compose(trainer, overrides=list(overrides))
    role = config.actor_rollout_ref
    return {
        "actor": role.actor.dtype,
        "ref": role.ref.dtype,
        "rollout": role.rollout.dtype,
        "critic": config.critic.dtype,
    }


def test_every_overlay_is_tested():
    assert {path.stem for path in (CONFIG / "precision").glob("*.yaml")} == set(OVERLAYS)


@pytest.mark.parametrize("engine", ["dp", "megatron"])
@pytest.mark.parametrize("name", OVERLAYS)
def test_one_word_sets_every_role(name, engine):
    trains, rolls_out = OVERLAYS[name]
    expected = {"actor": trains, "ref": trains, "rollout": rolls_out, "critic": trains}
    assert dtypes("ppo_trainer", f"+precision={name}", f"model_engine={engine}") == expected


def test_a_later_key_wins():
    overridden = dtypes("ppo_trainer", "+precision=fp16", "actor_rollout_ref.rollout.dtype=bfloat16")
    assert (overridden["actor"], overridden["rollout"]) == ("float16", "bfloat16")


def test_a_misspelt_overlay_is_refused_with_the_names_that_there_are():
    with pytest.raises(Exception, match="bf16_train_fp16_infer"):
        dtypes("ppo_trainer", "+precision=fp61")


@pytest.mark.parametrize("name", OVERLAYS)
def test_sft_takes_the_same_words(name):
    with initialize_config_dir(str(CONFIG), version_base=None):
        config = compose("sft_trainer_engine", overrides=[f"+precision={name}"])
        assert config.dtype == OVERLAYS[name][0]


def test_sft_without_one_computes_in_bfloat16():
    with initialize_config_dir(str(CONFIG), version_base=None):
        config = compose("sft_trainer_engine")
    assert config.dtype is None and omega_conf_to_dataclass(config.engine).dtype == "bfloat16"


@pytest.mark.parametrize("trainer", ["sft_trainer", "sft_trainer_ray"])
def test_sft_refuses_an_engine_that_says_otherwise(trainer, tmp_path):
    Qwen2Config(num_hidden_layers=1, architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    made = object.__new__(importlib.import_module(f"verl.trainer.{trainer}").SFTTrainer)
    overrides = ["+precision=fp16", "engine.dtype=float32", f"model.path={tmp_path}", "++model.load_tokenizer=false"]
    with initialize_config_dir(str(CONFIG), version_base=None):
        made.config = compose("sft_trainer_engine", overrides=overrides)
    with pytest.raises(ValueError, match="dtype=float16 and engine.dtype=float32 contradict each other"):
        made._build_config()
