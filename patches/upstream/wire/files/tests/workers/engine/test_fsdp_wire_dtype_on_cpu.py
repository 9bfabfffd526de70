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
"""The dtypes in which weights leave an FSDP2 engine: on the way to the rollout, in the HF export, from the merger."""

import json

import pytest
import torch
from gloo_engine import make_worker, run_on_gloo


def dtypes(tensors) -> set[torch.dtype]:
    return {entry[1].dtype for entry in tensors}


def receiver() -> torch.dtype:
    """What verl's own rollout side passes to a checkpoint engine where ``rollout.dtype`` is float16."""
    from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWorker, ColocatedCheckpointEngine
    from verl.workers.config import CheckpointEngineConfig, RolloutConfig

    @CheckpointEngineRegistry.register("on_cpu")
    class OnCPU(ColocatedCheckpointEngine):
        """Takes ``rollout_dtype`` as the kimi, mooncake and delta engines do, whose transports need a GPU."""

        def __init__(self, rollout_dtype: torch.dtype = torch.bfloat16, **kwargs):
            super().__init__(**kwargs)
            self.rollout_dtype = rollout_dtype

    config = RolloutConfig(
        name="vllm", dtype="float16", checkpoint_engine=CheckpointEngineConfig(backend="on_cpu", engine_kwargs={})
    )
    return CheckpointEngineWorker(config, None, server_adapter=object()).checkpoint_engine.rollout_dtype


def delta() -> set[torch.dtype]:
    return dtypes(make_worker(dtype="float16").engine.get_per_tensor_param_shard()[0])


def export() -> dict:
    """Export a model whose weights fp16 represents and bf16 does not: what do HF export and model merger keep?"""
    from safetensors.torch import load_file

    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    contents = ["model", "optimizer", "extra", "hf_model"]
    worker = make_worker(checkpoint={"save_contents": contents, "load_contents": contents}, dtype="float16")
    with torch.no_grad():
        for parameter in worker.engine.module.parameters():
            parameter.copy_(parameter.half().float())
    weights = {name: tensor.clone() for name, tensor in worker.engine.get_per_tensor_param()[0]}
    worker.engine.save_checkpoint("checkpoint", global_step=1)

    with open("checkpoint/huggingface/config.json") as file:
        exported = json.load(file)
    FSDPModelMerger(
        ModelMergerConfig(
            operation="merge",
            backend="fsdp",
            local_dir="checkpoint",
            target_dir="merged",
            hf_model_config_path="checkpoint/huggingface",
        )
    ).merge_and_save()
    merged = load_file("merged/model.safetensors")
    return {
        "config.json": exported.get("dtype") or exported.get("torch_dtype"),
        "merged": {tensor.dtype for tensor in merged.values()},
        "lossless": all(torch.equal(merged[name].float(), weight) for name, weight in weights.items()),
    }


def each_by_itself() -> dict:
    """Every case, so that one that raises does not hide the others."""
    outcomes = {}
    for case in (receiver, delta, export):
        try:
            outcomes[case.__name__] = case()
        except Exception as error:
            outcomes[case.__name__] = f"{type(error).__name__}: {error}"
    return outcomes


@pytest.fixture(scope="module")
def outcomes() -> dict:
    (outcome,) = run_on_gloo(each_by_itself, ranks=1)
    return outcome


def test_the_rollout_side_is_told_the_rollouts_dtype(outcomes):
    assert outcomes["receiver"] == torch.float16


def test_delta_shards_travel_in_the_training_dtype_until_told_otherwise(outcomes):
    assert outcomes["delta"] == {torch.float16}


def test_an_export_names_the_training_dtype_and_the_merger_casts_to_it(outcomes):
    assert outcomes["export"] == {"config.json": "float16", "merged": {torch.float16}, "lossless": True}
