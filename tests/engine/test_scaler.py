"""The loss scaler on one rank, compared with torch's; with several ranks its storm names the first bad gradient."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from precision import GradScalerConfig, LossScaleError, LossScaler, first_nonfinite_gradient, load_scaler_state
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.usefixtures("one_rank")  # torch's unscale_ reduces over a process group
INF, NAN = float("inf"), float("nan")


def in_one_pass(scaler, optimizer, module):
    scaler.clip_and_step(optimizer, module, max_norm=1.0)


def in_torchs_sequence(scaler, optimizer, module):
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def without_unscaling(scaler, optimizer, module):
    scaler.step(optimizer)
    scaler.update()


def scaler_of(**settings) -> LossScaler:
    return LossScaler(GradScalerConfig(**settings), torch.get_default_device().type)


def after(scaler, gradients: list[float], take=in_one_pass):
    """Return the scaler after one step per gradient."""
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
    settings = {"init_scale": 8.0, "growth_interval": 2, "min_scale": 2.0}
    assert after(scaler_of(**settings), [1.0, 1.0], take).get_scale() == 16.0
    assert after(scaler_of(**settings), [1.0, INF, 1.0], take).get_scale() == 4.0
    floored = after(scaler_of(**settings), [NAN] * 5, take)
    assert (floored.get_scale(), floored.consecutive_skips, floored.skipped) == (2.0, 5, True)
    recovered = after(floored, [1.0], take)
    assert (recovered.consecutive_skips, recovered.skipped) == (0, False)


def test_the_scale_stays_within_fp32():
    largest = torch.finfo(torch.float32).max
    assert after(scaler_of(init_scale=largest / 2, growth_interval=1), [0.0, 0.0, 0.0]).get_scale() == largest


def test_torchs_scale_falls_to_zero():
    """This is why LossScaler has a floor: at a scale of 0, 1/scale is inf and every further step is skipped."""
    assert after(torch.amp.GradScaler("cpu"), [INF] * 200, in_torchs_sequence).get_scale() == 0.0


def steps(take, fused: bool) -> list[torch.Tensor]:
    """Return the weights after five steps, some of them with clipped gradients."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=fused)
    scaler = scaler_of(init_scale=1024.0, growth_interval=2)
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
    scaler, norms = scaler_of(init_scale=8.0, growth_interval=1), []
    for _ in range(3):
        scaler.scale(module(torch.full((1,), 3.0)).sum()).backward()
        norms.append(scaler.clip_and_step(optimizer, module, max_norm=1.0))
        optimizer.zero_grad()
    assert norms == [3.0, 3.0, 3.0] and scaler.get_scale() == 64.0


@pytest.mark.parametrize("fused", [False, True])
def test_a_rank_without_gradients_steps_too(fused):
    """FSDP1 may leave a rank with only padding; it must still step, or the others wait for it."""
    module, scaler = torch.nn.Linear(2, 2), scaler_of()
    scaler.scale(torch.zeros(()))
    optimizer = torch.optim.AdamW(module.parameters(), fused=fused)
    assert scaler.clip_and_step(optimizer, module, max_norm=1.0) == 0.0 and not scaler.skipped


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("take", [in_one_pass, in_torchs_sequence, without_unscaling])
def test_a_skipped_step_changes_nothing(fused, take, monkeypatch):
    """As of two ranks that overflow alike: torch adds up found_inf, and its fused optimizers skip at exactly 1."""
    module, scaler = torch.nn.Linear(2, 2), scaler_of(init_scale=4.0)
    optimizer = torch.optim.AdamW(module.parameters(), fused=fused)

    def sum_of_two(tensor, **kwargs):
        tensor.mul_(2)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(torch.distributed, "all_reduce", sum_of_two)

    def step(gradient: float):
        scaler.scale(module(torch.ones(2)).sum()).backward()
        module.weight.grad[0, 0] += gradient
        take(scaler, optimizer, module)
        optimizer.zero_grad()
        state = optimizer.state[module.weight]
        return [t.clone() for t in (module.weight, module.bias, *(state[k] for k in ("step", "exp_avg", "exp_avg_sq")))]

    before, skipped = step(0.0), step(INF)
    assert scaler.skipped and scaler.get_scale() == 2.0
    assert all(torch.equal(a, b) for a, b in zip(before, skipped, strict=True))
    assert not torch.equal(before[0], step(0.0)[0]) and not scaler.skipped


def test_unscaling_before_the_first_loss_is_refused():
    with pytest.raises(AssertionError, match="_scale is None"):
        scaler_of().unscale_(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))


def test_gradients_on_another_device_than_the_scale_are_not_unscaled():
    """As of parameters offloaded to the CPU: torch copies the scale there and reads it before it has arrived."""
    scaler, weight = scaler_of(), torch.nn.Parameter(torch.zeros(1, device="meta"))
    scaler.scale(torch.zeros(()))
    weight.grad = torch.ones(1, device="meta")
    with pytest.raises(ValueError, match="gradients on meta, loss scale on c[a-z]+: call clip_and_step instead"):
        scaler.unscale_(torch.optim.SGD([weight]))


def test_a_half_precision_loss_is_scaled_in_fp32():
    loss = torch.tensor(2.0, dtype=torch.float16)
    assert scaler_of().scale(loss).item() == 131072.0
    upstream = torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler(device="cpu")
    assert upstream.scale(loss).isinf()


def test_the_state_round_trips():
    settings = {"init_scale": 1024.0, "growth_interval": 100}
    state = after(scaler_of(**settings), [1.0, INF, 1.0, 1.0]).state_dict()
    assert state == {"scale": 512.0, "_growth_tracker": 2, "consecutive_skips": 0}
    for fresh in (scaler_of(**settings), after(scaler_of(**settings), [INF])):
        fresh.load_state_dict(state)
        assert fresh.state_dict() == state
    resumed = scaler_of(growth_interval=2)
    resumed.load_state_dict(state)
    assert resumed.get_growth_interval() == 2, "settings come from the config, not from the checkpoint"
    resumed.update()
    assert resumed.get_scale() == 1024.0, "a shorter interval is over at once"


VALID = {"scale": 1024.0, "_growth_tracker": 0, "consecutive_skips": 0}


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"scale": 1.0}, "keys .*, expected .*_growth_tracker"),
        (VALID | {"growth_factor": 2.0}, "keys .*, expected .*_growth_tracker"),
        (VALID | {"scale": NAN}, "scale=nan, expected"),
        (VALID | {"scale": 1e39}, "scale=1e.39, expected"),
        (VALID | {"scale": 0.0}, "scale=0.0, expected"),
        (VALID | {"scale": "1024"}, "scale=1024, expected"),
        (VALID | {"_growth_tracker": -1}, "counts .*, expected"),
    ],
)
def test_state_of_another_shape_or_out_of_range_is_refused(state, named):
    scaler = scaler_of()
    with pytest.raises(ValueError, match=f"loss scaler state has {named}"):
        scaler.load_state_dict(state)
    assert scaler.get_scale() == 65536.0


def test_a_resume_in_another_regime_warns():
    scaler = scaler_of()
    with pytest.warns(UserWarning, match="extra.pt contains no loss scale: starting at 65536"):
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


class Saturating(TorchDispatchMode):
    """Compute as a device that saturates: an operation whose result is fp16 gives 65504 for inf and 0 for NaN.

    Args:
        only: the operations that do, default all.
    """

    def __init__(self, *only: str):
        super().__init__()
        self.only = only

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if getattr(result, "dtype", None) == torch.float16 and (not self.only or func.__name__ in self.only):
            result.nan_to_num_(0.0, *(sign * torch.finfo(torch.float16).max for sign in (1, -1)))
        return result


def test_a_device_that_saturates_hides_an_overflow_and_is_refused():
    """Without the check a step of 65504 instead of inf would be taken."""
    scaler, weight = scaler_of(), torch.nn.Parameter(torch.zeros(1, dtype=torch.float16))
    with Saturating():
        scaler.scale(weight.float() * 65504).backward()
    assert weight.grad.isfinite().all(), "the overflow shows nowhere"
    for only in ((), ("mul.Tensor",), ("mm.default",), ("_to_copy.default",)):
        with Saturating(*only), pytest.raises(ValueError, match="a .* gives 65504, not inf; .*INF_NAN"):
            scaler_of()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"init_scale": 1e39}, "grad_scaler.init_scale=1e+39 must be positive and at most 3.4e+38, fp32's largest"),
        ({"init_scale": NAN}, "grad_scaler.init_scale=nan"),
        ({"init_scale": "high"}, "grad_scaler.init_scale=high must be a number"),
        ({"min_scale": 1e-39}, "grad_scaler.min_scale=1e-39 must be at least 1.18e-38, fp32's least"),
        ({"init_scale": 4.0, "min_scale": 8.0}, "grad_scaler.min_scale=8.0 must be .* at most init_scale=4.0"),
        ({"growth_interval": 2.5}, "grad_scaler.growth_interval=2.5 must be a whole number"),
        ({"growth_interval": 0}, "grad_scaler.growth_interval=0"),
        ({"max_consecutive_skips": 0}, "grad_scaler.max_consecutive_skips=0"),
        ({"growth_factor": 1 + 1e-9}, "grad_scaler.growth_factor=1.000000001 must be above 1"),
        ({"growth_factor": 1e39}, "grad_scaler.growth_factor=1e+39 must be above 1 .and finite. in fp32"),
        ({"backoff_factor": 1 - 1e-9}, "grad_scaler.backoff_factor=0.999999999 must be between 0 and 1"),
    ],
)
def test_settings_out_of_fp32s_range_are_refused(settings, named):
    with pytest.raises(ValueError, match=named.replace("+", "[+]")):
        GradScalerConfig(**settings)


def storm_of(*gradients: torch.Tensor) -> str:
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return first_nonfinite_gradient((f"layer{i}", p) for i, p in enumerate(parameters))


def test_the_first_nonfinite_gradient_is_described():
    found = storm_of(torch.ones(2), torch.tensor([1.0, -3e4, INF, NAN]), torch.tensor([NAN]))
    assert found == "layer1 in the shard of rank 0, 2 of 4 elements, the largest other 3e+04 (scaled)"
    assert storm_of(torch.tensor([NAN])) == "layer0 in the shard of rank 0, 1 of 1 elements, none finite"
    assert storm_of(torch.zeros(0), torch.tensor([INF, 0.0])).startswith("layer1")
    assert storm_of(torch.full((2,), 3e38)) == "none, but their norm leaves fp32"


def test_the_first_gradient_of_all_ranks_is_described(monkeypatch):
    """By its place in the model, not by its rank or its name."""
    others = [(1, 0, "zero in the shard of rank 1"), None, (3, 0, "a in the shard of rank 3")]

    def gather(into: list, own: tuple) -> None:
        into[:] = [own, *others]

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    inf = torch.tensor([INF])
    assert storm_of(torch.ones(1), torch.ones(1), inf) == "zero in the shard of rank 1"
    assert storm_of(inf, inf).startswith("layer0 in the shard of rank 0")
    assert storm_of(torch.ones(1)) == "zero in the shard of rank 1"


def test_a_storm_without_a_process_group_leaves_no_scale_to_resume_from(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    scaler = scaler_of(init_scale=8.0, max_consecutive_skips=2)
    with pytest.raises(LossScaleError, match="2 optimizer steps in a row .*, loss scale 4, .*: 0 in the shard of rank"):
        after(scaler, [INF] * 3)
    assert scaler.consecutive_skips == 2 and scaler.state_dict() is None
