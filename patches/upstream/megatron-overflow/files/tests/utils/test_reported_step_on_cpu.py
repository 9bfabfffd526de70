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
"""Steps of an optimizer that has its own loss scaler, as Megatron's has, and what that scaler is given."""

import pytest
import torch

from verl.utils.precision import GradScalerConfig, LossScaleError, StepAccounting, megatron_scaler


class Engine(StepAccounting):
    cleared = 0

    def optimizer_zero_grad(self):
        self.cleared += 1


def test_a_skip_is_counted_and_so_many_in_a_row_end_the_run():
    engine, config = Engine(), GradScalerConfig(max_consecutive_skips=2)
    assert engine.account_reported_step(False, None, 512.0, config) is None
    assert engine.cleared == 1 and not engine.close_update()
    assert engine.update_metrics() == {"skipped_steps": 1.0, "loss_scale": 512.0}

    assert engine.account_reported_step(True, 0.5, 512.0, config) == 0.5
    assert engine.account_reported_step(False, None, 256.0, config) is None
    assert engine.close_update() and engine.update_metrics() == {"skipped_steps": 1.0, "loss_scale": 256.0}

    with pytest.raises(LossScaleError, match="2 optimizer steps in a row overflowed .*, loss scale 128"):
        engine.account_reported_step(False, None, 128.0, config)


def test_without_loss_scaling():
    engine, config = Engine(), GradScalerConfig()
    assert engine.account_reported_step(True, torch.tensor(0.5), None, config) == 0.5
    assert engine.account_reported_step(True, float("nan"), None, config) is None
    assert engine.close_update() and engine.update_metrics() == {"skipped_steps": 0.0}


def test_megatrons_scaler_takes_the_settings_that_it_knows():
    assert megatron_scaler(GradScalerConfig(init_scale=1024.0, min_scale=2.0, growth_interval=7)) == {
        "initial_loss_scale": 1024.0,
        "min_loss_scale": 2.0,
        "loss_scale_window": 7,
        "hysteresis": 1,
    }


@pytest.mark.parametrize("setting", [{"growth_factor": 4.0}, {"backoff_factor": 0.25}])
def test_a_factor_that_megatron_fixes_is_refused_when_the_config_is_built(setting):
    from verl.workers.config import McoreEngineConfig

    ((key, value),) = setting.items()
    with pytest.raises(ValueError, match=f"grad_scaler.{key}={value}: Megatron's loss scaler supports only"):
        McoreEngineConfig(grad_scaler=GradScalerConfig(**setting))
