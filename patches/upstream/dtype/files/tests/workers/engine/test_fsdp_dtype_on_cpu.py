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
"""Which dtype the FSDP engine computes in: seen where the products are computed, not read from a config."""

import pytest
import torch
from gloo_engine import batch, make_worker, run_on_gloo, train

ASKED = {
    "dtype": ({"dtype": "float16"}, torch.float16),
    "dtype, short name": ({"dtype": "fp16"}, torch.float16),
    "param_dtype": ({"mixed_precision": {"param_dtype": "fp16"}}, torch.float16),
    "dtype=float32": ({"dtype": "float32"}, torch.float32),
    "nothing": ({}, torch.bfloat16),
}


def computed_in(worker) -> list[torch.dtype]:
    """A list that gets the dtype of each product of the first layer's MLP."""
    seen: list[torch.dtype] = []
    for name, module in worker.engine.module.named_modules():
        if name.endswith("layers.0.mlp.up_proj"):
            module.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    return seen


def trained() -> dict[str, tuple]:
    outcomes = {}
    for name, (engine, _) in ASKED.items():
        worker = make_worker(**engine)
        seen = computed_in(worker)
        train(worker)
        adam = next(iter(worker.engine.optimizer.state.values()))
        masters = next(worker.engine.module.parameters()).dtype
        outcomes[name] = (set(seen), masters, adam["exp_avg"].dtype)
    return outcomes


def forward_only() -> set[torch.dtype]:
    from verl.utils import tensordict_utils as tu

    worker = make_worker(dtype="float16", forward_only=True)
    seen, data = computed_in(worker), batch()
    tu.assign_non_tensor(data, compute_loss=False)
    worker.infer_batch(data)
    return set(seen)


def every_case() -> tuple:
    return trained(), forward_only()


@pytest.fixture(scope="module")
def outcomes() -> tuple:
    (outcome,) = run_on_gloo(every_case, ranks=1)
    return outcome


@pytest.mark.parametrize("name", ASKED)
def test_a_trained_model_computes_in_the_configured_dtype_and_keeps_fp32_masters(outcomes, name):
    computed, masters, adam = outcomes[0][name]
    assert computed == {ASKED[name][1]}
    assert (masters, adam) == (torch.float32, torch.float32)


def test_a_forward_only_model_computes_in_the_configured_dtype(outcomes):
    assert outcomes[1] == {torch.float16}
