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
"""An overflow under Megatron: the step that its optimizer skips is reported, and does not end the run."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.optimizer import OptimizerConfig  # noqa: E402

from verl.utils.megatron import optimizer  # noqa: E402
from verl.utils.precision import GradScalerConfig, LossScaleError  # noqa: E402
from verl.workers.config import McoreOptimizerConfig  # noqa: E402
from verl.workers.engine.megatron.transformer_impl import MegatronEngine  # noqa: E402


class Optimizer:
    """Answers as Megatron's does, ``(False, None, None)`` after an overflow; takes the steps that it is told to."""

    def __init__(self, taken: list[bool]):
        self.taken, self.scale, self.cleared, self.param_groups = taken, 1024.0, 0, [{"lr": 0.0}]

    def step(self):
        taken = self.taken.pop(0)
        self.scale /= 1 if taken else 2
        return taken, 0.5 if taken else None, None

    def zero_grad(self):
        self.cleared += 1

    def get_loss_scale(self):
        return torch.tensor([self.scale])


def make_engine(taken: list[bool]) -> MegatronEngine:
    """An engine whose optimizer takes or skips its steps as told; its schedule adds 1 to the learning rate."""
    engine = object.__new__(MegatronEngine)
    engine.optimizer, engine.module, engine.param_dtype = Optimizer(taken), [], torch.float16

    def advance(steps: int) -> None:
        engine.optimizer.param_groups[0]["lr"] += steps

    engine.lr_scheduler = SimpleNamespace(step=advance)
    engine.engine_config = SimpleNamespace(dtype="float16", grad_scaler=GradScalerConfig(max_consecutive_skips=2))
    return engine


def test_an_overflow_is_skipped_reported_and_holds_the_learning_rate():
    engine, seen = make_engine([True, False, True]), []
    for _ in range(3):
        norm = engine.optimizer_step()
        lr = engine.lr_scheduler_step()
        seen.append((norm, lr, dict(engine.update_metrics())))
    assert seen == [
        (0.5, 1.0, {"skipped_steps": 0.0, "loss_scale": 1024.0}),
        (None, 1.0, {"skipped_steps": 1.0, "loss_scale": 512.0}),
        (0.5, 2.0, {"skipped_steps": 0.0, "loss_scale": 512.0}),
    ]
    assert engine.optimizer.cleared == 1


def test_a_storm_of_overflows_ends_the_run():
    engine = make_engine([False, False])
    assert engine.optimizer_step() is None
    with pytest.raises(LossScaleError, match="2 optimizer steps in a row overflowed .*, loss scale 256"):
        engine.optimizer_step()


def test_megatrons_optimizer_config_gets_the_settings(monkeypatch):
    given = {}
    # its own checks want Transformer Engine in fp16
    monkeypatch.setattr(optimizer, "OptimizerConfig", lambda **settings: given.update(settings))
    optimizer.init_megatron_optim_config(
        McoreOptimizerConfig(lr=1e-6),
        fp16=True,
        grad_scaler=GradScalerConfig(init_scale=1024.0, min_scale=2.0, growth_interval=7),
    )
    assert (given["initial_loss_scale"], given["min_loss_scale"], given["loss_scale_window"]) == (1024.0, 2.0, 7)
    assert given["hysteresis"] == 1, "2, Megatron's own, keeps the scale after the first overflow"
    assert given.keys() <= {field.name for field in dataclasses.fields(OptimizerConfig)}
