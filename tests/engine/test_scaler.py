"""The loss scaler on one rank: scale, skips, settings and state, compared with torch's."""

import warnings

import pytest
import torch
from precision import GradScalerConfig, LossScaler, load_scaler_state

pytestmark = pytest.mark.usefixtures("one_rank")  # torch's unscale_ reduces over a process group


def in_one_pass(scaler, optimizer, module):
    scaler.clip_and_step(optimizer, module, max_norm=1.0)


def in_torchs_sequence(scaler, optimizer, module):
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def scaler_after(config, gradients: list[float], take=in_one_pass) -> LossScaler:
    """Return a scaler after one step per gradient."""
    scaler = LossScaler(config, device="cpu")
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for gradient in gradients:
        scaler.scale(weight.sum()).backward()
        weight.grad.fill_(gradient)
        take(scaler, optimizer, torch.nn.ParameterList([weight]))
        optimizer.zero_grad()
    return scaler


@pytest.mark.parametrize("take", [in_one_pass, in_torchs_sequence])
def test_the_scale_grows_backs_off_and_has_a_floor(take):
    config = GradScalerConfig(init_scale=8.0, growth_interval=2, min_scale=2.0)
    assert scaler_after(config, [1.0, 1.0], take).get_scale() == 16.0
    assert scaler_after(config, [1.0, float("inf"), 1.0], take).get_scale() == 4.0
    floored = scaler_after(config, [float("nan")] * 5, take)
    assert (floored.get_scale(), floored.consecutive_skips, floored.skipped) == (2.0, 5, True)
    recovered = scaler_after(config, [float("nan")] * 5 + [1.0], take)
    assert (recovered.consecutive_skips, recovered.skipped) == (0, False)


def test_the_scale_stays_within_fp32():
    largest = torch.finfo(torch.float32).max
    config = GradScalerConfig(init_scale=largest / 2, growth_interval=1)
    assert scaler_after(config, [0.0, 0.0, 0.0]).get_scale() == largest


def steps(take, fused: bool, scale: float = 1024.0) -> list[torch.Tensor]:
    """Return the weights after five steps, some of them with clipped gradients."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=fused)
    scaler = LossScaler(GradScalerConfig(init_scale=scale, growth_interval=2), device="cpu")
    for step in range(5):
        scaler.scale(module(torch.ones(2, 8)).square().sum() * 10.0 ** (-step)).backward()
        take(scaler, optimizer, module)
        optimizer.zero_grad()
    return [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("fused", [False, True])
def test_one_pass_equals_torchs_sequence(fused):
    for one, two in zip(steps(in_one_pass, fused), steps(in_torchs_sequence, fused), strict=True):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-7)


def test_the_norm_does_not_depend_on_the_scale():
    module = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(module.parameters())
    config = GradScalerConfig(init_scale=8.0, growth_interval=1)
    scaler, norms = LossScaler(config, device="cpu"), []
    for _ in range(3):
        scaler.scale(module(torch.full((1,), 3.0)).sum()).backward()
        norms.append(scaler.clip_and_step(optimizer, module, max_norm=1.0))
        optimizer.zero_grad()
    assert norms == [3.0, 3.0, 3.0] and scaler.get_scale() == 64.0


@pytest.mark.parametrize("fused", [False, True])
def test_a_rank_without_gradients_steps_too(fused):
    """FSDP1 may leave a rank with padding alone; it must still step, or the others wait for it."""
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters(), fused=fused)
    scaler = LossScaler(GradScalerConfig(), device="cpu")
    scaler.scale(torch.zeros(()))
    assert scaler.clip_and_step(optimizer, module, max_norm=1.0) == 0.0 and not scaler.skipped


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("take", [in_one_pass, in_torchs_sequence])
def test_a_skipped_step_changes_nothing(fused, take):
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters(), fused=fused)
    scaler = LossScaler(GradScalerConfig(init_scale=4.0), device="cpu")

    def step(gradient: float):
        scaler.scale(module(torch.ones(2)).sum()).backward()
        module.weight.grad[0, 0] += gradient
        take(scaler, optimizer, module)
        optimizer.zero_grad()
        state = optimizer.state[module.weight]
        return [t.clone() for t in (module.weight, module.bias, *(state[k] for k in ("step", "exp_avg", "exp_avg_sq")))]

    before, skipped = step(0.0), step(float("inf"))
    assert scaler.skipped and scaler.get_scale() == 2.0
    assert all(torch.equal(a, b) for a, b in zip(before, skipped, strict=True))
    after = step(0.0)
    assert not scaler.skipped and not torch.equal(before[0], after[0])


def test_torchs_scale_falls_to_zero():
    """This is why LossScaler has a floor: at a scale of 0, 1/scale is inf and every further step is skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for _ in range(200):
        scaler.scale(weight.sum()).backward()
        weight.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 0.0


def test_a_half_precision_loss_is_scaled_in_fp32():
    scaler = LossScaler(GradScalerConfig(), device="cpu")
    loss = torch.tensor(2.0, dtype=torch.float16)
    assert scaler.scale(loss).item() == 131072.0
    upstream = torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler(device="cpu")
    assert upstream.scale(loss).isinf()


def test_the_state_round_trips():
    config = GradScalerConfig(init_scale=1024.0, growth_interval=100)
    used = scaler_after(config, [1.0, float("inf"), 1.0, 1.0])
    state = used.state_dict()
    assert state == {"scale": 512.0, "_growth_tracker": 2, "consecutive_skips": 0}
    for fresh in (LossScaler(config, device="cpu"), scaler_after(config, [float("inf")])):
        fresh.load_state_dict(state)
        assert fresh.state_dict() == state
    resumed = LossScaler(GradScalerConfig(growth_interval=3), device="cpu")
    resumed.load_state_dict(state)
    assert resumed.get_growth_interval() == 3, "settings come from the config, not from the checkpoint"


VALID = {"scale": 1024.0, "_growth_tracker": 0, "consecutive_skips": 0}


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({}, "keys .*, expected .*_growth_tracker"),
        ({"scale": 1.0}, "keys .*, expected .*_growth_tracker"),
        ({"scale": 1.0, "growth_factor": 2.0}, "keys .*, expected .*_growth_tracker"),
        (VALID | {"scale": float("nan")}, "scale=nan, expected"),
        (VALID | {"scale": float("inf")}, "scale=inf, expected"),
        (VALID | {"scale": 1e39}, "scale=1e.39, expected"),
        (VALID | {"scale": 0.0}, "scale=0.0, expected"),
        (VALID | {"scale": "1024"}, "scale=1024, expected"),
        (VALID | {"_growth_tracker": -1}, "counts .*, expected"),
    ],
)
def test_state_of_another_shape_or_out_of_range_is_refused(state, named):
    scaler = LossScaler(GradScalerConfig(), device="cpu")
    with pytest.raises(ValueError, match=f"loss scaler state has {named}"):
        scaler.load_state_dict(state)
    assert scaler.get_scale() == 65536.0


def test_a_shorter_growth_interval_applies_after_a_resume():
    used = scaler_after(GradScalerConfig(growth_interval=100), [1.0] * 5)
    resumed = LossScaler(GradScalerConfig(growth_interval=3), device="cpu")
    resumed.load_state_dict(used.state_dict())
    resumed.update()
    assert resumed.get_scale() == 2 * used.get_scale()


def test_a_resume_in_another_regime_warns():
    scaler = LossScaler(GradScalerConfig(), device="cpu")
    with pytest.warns(UserWarning, match="extra.pt holds no loss scale: starting at 65536"):
        load_scaler_state(scaler, None, "extra.pt")
    with pytest.warns(UserWarning, match="which this run does not use"):
        load_scaler_state(None, scaler.state_dict(), "extra.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_scaler_state(scaler, scaler.state_dict(), "extra.pt")
        load_scaler_state(None, None, "extra.pt")


def test_a_device_without_scaling_is_refused():
    if torch.cuda.is_available():
        pytest.skip("torch scales on this machine's GPU")
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="device cuda"):
        LossScaler(GradScalerConfig(), device="cuda")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"init_scale": 1e39}, "grad_scaler.init_scale=1e+39 must be positive and at most 3.4e+38, fp32's largest"),
        ({"min_scale": 1e-39}, "grad_scaler.min_scale=1e-39 must be at least 1.18e-38, fp32's least"),
        ({"init_scale": 4.0, "min_scale": 8.0}, "grad_scaler.min_scale=8.0 must be .* at most init_scale=4.0"),
        ({"min_scale": 1e6}, "grad_scaler.min_scale=1000000.0 must be .* at most init_scale=65536.0"),
        ({"init_scale": float("nan")}, "grad_scaler.init_scale=nan"),
        ({"init_scale": "high"}, "grad_scaler.init_scale=high must be a number"),
        ({"init_scale": -1}, "grad_scaler.init_scale=-1.* must be positive"),
        ({"growth_interval": 2.5}, "grad_scaler.growth_interval=2.5 must be a whole number"),
        ({"growth_interval": 0}, "grad_scaler.growth_interval=0"),
        ({"max_consecutive_skips": 0}, "grad_scaler.max_consecutive_skips=0"),
        ({"growth_factor": 1}, "grad_scaler.growth_factor=1.* must be above 1"),
        ({"backoff_factor": 1}, "grad_scaler.backoff_factor=1.* must be between 0 and 1"),
        ({"growth_factor": 1 + 1e-9}, "grad_scaler.growth_factor=1.000000001 must be above 1"),
        ({"growth_factor": 1e39}, "grad_scaler.growth_factor=1e.39 must be above 1 .and finite. in fp32"),
        ({"backoff_factor": 1 - 1e-9}, "grad_scaler.backoff_factor=0.999999999 must be between 0 and 1"),
    ],
)
def test_settings_out_of_fp32s_range_are_refused(settings, named):
    with pytest.raises(ValueError, match=named.replace("+", "[+]")):
        GradScalerConfig(**settings)


@pytest.mark.parametrize("settings", [{"init_scale": 3.4e38}, {"init_scale": 1.2e-38, "min_scale": 1.2e-38}])
def test_scaling_by_the_largest_and_smallest_scale_is_invertible(settings):
    config = GradScalerConfig(**settings)
    scaler = LossScaler(config, device="cpu")
    loss = torch.ones((), requires_grad=True)
    scaled = scaler.scale(loss)
    assert (scaled / scaler.get_scale()).item() == 1.0 and scaled.isfinite()
