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
"""The loss scaler and the accounting of its steps, without FSDP."""

import warnings

import pytest
import torch

from verl.utils.precision import (
    GradScalerConfig,
    LossScaleError,
    LossScaler,
    StepAccounting,
    load_scaler_state,
    requests_precision,
    save_after_storm,
)

INF, NAN = float("inf"), float("nan")


def scaler_after(config: GradScalerConfig, gradients: list[float]) -> LossScaler:
    """A scaler after one step for each gradient."""
    scaler, weight = LossScaler(config, device="cpu"), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for gradient in gradients:
        scaler.scale(weight.sum()).backward()
        weight.grad.fill_(gradient)
        scaler.clip_and_step(optimizer, torch.nn.ParameterList([weight]), max_norm=1.0)
        optimizer.zero_grad()
    return scaler


def test_the_scale_grows_backs_off_and_has_a_floor():
    config = GradScalerConfig(init_scale=8.0, growth_interval=2, min_scale=2.0)
    assert scaler_after(config, [1.0, 1.0]).get_scale() == 16.0
    assert scaler_after(config, [1.0, INF, 1.0]).get_scale() == 4.0
    floored = scaler_after(config, [NAN] * 5)
    assert (floored.get_scale(), floored.consecutive_skips, floored.skipped) == (2.0, 5, True)
    recovered = scaler_after(config, [NAN] * 5 + [1.0])
    assert (recovered.consecutive_skips, recovered.skipped) == (0, False)


def test_a_half_precision_loss_is_scaled_in_fp32():
    loss = torch.tensor(2.0, dtype=torch.float16)
    assert LossScaler(GradScalerConfig(), device="cpu").scale(loss).item() == 131072.0


@pytest.mark.parametrize("fused", [False, True])
def test_one_pass_takes_the_step_of_unscale_clip_step(fused):
    def weights(one_pass: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=fused)
        scaler = LossScaler(GradScalerConfig(init_scale=1024.0), device="cpu")
        for step in range(5):  # some are clipped
            loss = module(torch.ones(2, 8)).square().sum() * 10.0 ** (-step)
            if one_pass:
                scaler.scale(loss).backward()
                scaler.clip_and_step(optimizer, module, max_norm=1.0)
            else:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in module.parameters()]

    for scaled, plain in zip(weights(True), weights(False), strict=True):
        torch.testing.assert_close(scaled, plain, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_changes_nothing(fused):
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters(), fused=fused)
    scaler = LossScaler(GradScalerConfig(init_scale=4.0), device="cpu")

    def step(added: float) -> list[torch.Tensor]:
        scaler.scale(module(torch.ones(2)).sum()).backward()
        module.weight.grad[0, 0] += added
        scaler.clip_and_step(optimizer, module, max_norm=1.0)
        optimizer.zero_grad()
        state = optimizer.state[module.weight]
        return [t.clone() for t in (module.weight, module.bias, *(state[k] for k in ("step", "exp_avg", "exp_avg_sq")))]

    before, skipped = step(0.0), step(INF)
    assert scaler.skipped and scaler.get_scale() == 2.0
    assert all(torch.equal(a, b) for a, b in zip(before, skipped, strict=True))
    assert not torch.equal(before[0], step(0.0)[0])


@pytest.mark.parametrize("fused", [False, True])
def test_torchs_own_sequence_works_too(tmp_path, fused):
    """Fused optimizers want found_inf in shape () and as a flag; torch's scaler sums it over ranks, in shape (1,)."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        scaler, module = LossScaler(GradScalerConfig(init_scale=4.0), device="cpu"), torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(module.parameters(), fused=fused)
        before = module.weight.detach().clone()
        for loss, skipped, scale in ((INF, True, 2.0), (1.0, False, 2.0)):
            scaler.scale(module(torch.ones(2)).sum() * loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert (scaler.skipped, scaler.get_scale()) == (skipped, scale)
            assert torch.equal(before, module.weight) == skipped
    finally:
        torch.distributed.destroy_process_group()


def test_the_state_round_trips_and_settings_come_from_the_config():
    config = GradScalerConfig(init_scale=1024.0, growth_interval=100)
    state = scaler_after(config, [1.0, INF, 1.0, 1.0]).state_dict()
    assert state == {"scale": 512.0, "_growth_tracker": 2, "consecutive_skips": 0}
    resumed = LossScaler(GradScalerConfig(growth_interval=3), device="cpu")
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state and resumed.get_growth_interval() == 3


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"scale": 1.0},
        {"scale": NAN, "_growth_tracker": 0, "consecutive_skips": 0},
        {"scale": 1e39, "_growth_tracker": 0, "consecutive_skips": 0},
        {"scale": 1.0, "_growth_tracker": -1, "consecutive_skips": 0},
    ],
)
def test_a_state_that_cannot_be_right_is_refused(state):
    scaler = LossScaler(GradScalerConfig(), device="cpu")
    with pytest.raises(ValueError, match="extra.pt: loss scaler state has .*expected"):
        load_scaler_state(scaler, state, "extra.pt")
    assert scaler.get_scale() == 65536.0


def test_a_resume_in_another_dtype_warns_once():
    scaler = LossScaler(GradScalerConfig(), device="cpu")
    with pytest.warns(UserWarning, match="extra.pt contains no loss scale: starting at 65536"):
        load_scaler_state(scaler, None, "extra.pt")
    with pytest.warns(UserWarning, match="which this run does not use"):
        load_scaler_state(None, scaler.state_dict(), "extra.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_scaler_state(scaler, scaler.state_dict(), "extra.pt")
        load_scaler_state(None, None, "extra.pt")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"init_scale": -1}, "grad_scaler.init_scale=-1 must be positive"),
        ({"init_scale": 1e39}, "fp32's largest"),
        ({"init_scale": "high"}, "grad_scaler.init_scale=high must be a number"),
        ({"min_scale": 8.0, "init_scale": 4.0}, "at most init_scale=4.0"),
        ({"growth_factor": 1.0}, "grad_scaler.growth_factor=1.0 must be above 1"),
        ({"growth_factor": 1 + 1e-9}, "above 1 .and finite. in fp32"),
        ({"backoff_factor": 1.0}, "grad_scaler.backoff_factor=1.0 must be between 0 and 1"),
        ({"growth_interval": 2.5}, "grad_scaler.growth_interval=2.5 must be a whole number"),
        ({"max_consecutive_skips": 0}, "grad_scaler.max_consecutive_skips=0 must be at least 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        GradScalerConfig(**settings)


def test_a_setting_requests_a_precision():
    assert requests_precision({"grad_scaler": GradScalerConfig(init_scale=8.0)})
    assert requests_precision({"grad_scaler": {"init_scale": 8.0}})
    assert not requests_precision({"grad_scaler": GradScalerConfig()}) and not requests_precision({})


@pytest.mark.parametrize("fused", [False, True])
def test_a_storm_ends_with_the_first_nonfinite_gradient(fused):
    module = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.AdamW(module.parameters(), fused=fused)
    scaler = LossScaler(GradScalerConfig(init_scale=8.0, max_consecutive_skips=2), "cpu")
    with pytest.raises(LossScaleError, match="2 optimizer steps in a row .*, loss scale 4, .*: weight in the shard"):
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(module(torch.ones(1, 2)).sum() * INF).backward()
            scaler.clip_and_step(optimizer, module, 1.0)
    assert scaler.state_dict() is None, "no scale worked: who resumes from here starts at init_scale"


def test_a_storm_is_saved_and_raised():
    saved = []
    with pytest.raises(LossScaleError), save_after_storm(lambda: saved.append("storm")):
        raise LossScaleError
    with pytest.raises(ValueError), save_after_storm(lambda: saved.append("another error")):
        raise ValueError
    assert saved == ["storm"]


class Engine(StepAccounting):
    cleared = 0

    def optimizer_zero_grad(self):
        self.cleared += 1


def test_an_update_counts_its_skips_and_holds_the_schedule_where_no_step_was_taken():
    engine, scaler = Engine(), LossScaler(GradScalerConfig(), device="cpu")
    assert engine.account_step(torch.tensor(INF), scaler) is None, "one inf would be the mean of the whole step"
    assert engine.cleared == 1
    assert not engine.close_update()
    assert engine.update_metrics() == {"skipped_steps": 1.0, "loss_scale": 65536.0}

    assert engine.account_step(torch.tensor(0.5), scaler) == 0.5
    assert engine.account_step(torch.tensor(NAN), scaler) is None
    assert engine.close_update() and engine.update_metrics()["skipped_steps"] == 1.0


def test_without_loss_scaling_there_is_no_scale_to_report():
    engine = Engine()
    engine.account_step(torch.tensor(0.5), None)
    assert engine.close_update() and engine.update_metrics() == {"skipped_steps": 0.0}


def test_an_engine_that_accounts_for_no_step_goes_on_as_before():  # as each does without a request
    engine = Engine()
    assert engine.close_update() and engine.update_metrics() == {}
