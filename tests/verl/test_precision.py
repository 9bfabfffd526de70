"""The precision module by itself: it needs torch alone."""

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import precision
import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from transformers import Qwen2Config, Qwen2ForCausalLM


def make_group(folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)


@pytest.fixture(autouse=True, scope="module")
def one_rank(tmp_path_factory):
    make_group(tmp_path_factory.mktemp("store"))
    yield
    dist.destroy_process_group()


@pytest.fixture
def no_group(tmp_path):
    """As in a process that trains alone."""
    dist.destroy_process_group()
    yield
    make_group(tmp_path)


def engine_config(**overrides) -> SimpleNamespace:
    defaults = {
        "dtype": None,
        "mixed_precision": None,
        "model_dtype": "fp32",
        "forward_only": False,
        "strategy": "fsdp",
    }
    return SimpleNamespace(**defaults | overrides)


def test_the_module_imports_nothing_of_verl():
    source = Path(precision.__file__).read_text()
    imported = {line.split()[1].split(".")[0] for line in source.splitlines() if line.startswith(("import ", "from "))}
    assert imported - set(sys.stdlib_module_names) == {"torch"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ("bfloat16", "float32", "float32", False)),
        ({"dtype": "float16"}, ("float16", "float32", "float32", True)),
        ({"dtype": "float16", "forward_only": True}, ("float16", "float32", "float32", False)),
        ({"dtype": "float16", "forward_only": True, "model_dtype": None}, ("float16", "float32", "float16", False)),
        ({"dtype": "float16", "model_dtype": None}, ("float16", "float32", "float32", True)),
        ({"dtype": "fp32"}, ("float32", "float32", "float32", False)),
        ({"dtype": "fp16", "model_dtype": 32}, ("float16", "float32", "float32", True)),
        ({"mixed_precision": {"param_dtype": "fp16"}}, ("float16", "float32", "float32", True)),
        ({"dtype": "float16", "mixed_precision": {"reduce_dtype": "bf16"}}, ("float16", "bfloat16", "float32", True)),
    ],
)
def test_resolve(config, expected):
    names = precision.Precision.resolve(engine_config(**config)).names()
    assert (names["compute"], names["reduce"], names["master"], names["loss_scaling"]) == expected


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"mixed_precision": {"param_dtype": "fp8"}}, "mixed_precision.param_dtype=fp8"),
        ({"mixed_precision": {"reduce_dtype": "half"}}, "mixed_precision.reduce_dtype=half"),
        ({"model_dtype": "int8"}, "model_dtype=int8"),
        ({"dtype": "float16", "model_dtype": "bf16"}, "model_dtype=bf16 with dtype=float16"),
        ({"dtype": "float32", "mixed_precision": {"param_dtype": "fp16"}}, "contradict"),
        ({"dtype": "float16", "strategy": "fsdp_turbo"}, "strategy=fsdp_turbo"),
    ],
)
def test_resolve_refuses_in_one_line(config, named):
    with pytest.raises(ValueError) as refusal:
        precision.Precision.resolve(engine_config(**config))
    assert named in str(refusal.value) and "\n" not in str(refusal.value)


def in_one_pass(scaler, optimizer, module):
    scaler.clip_and_step(optimizer, module, max_norm=1.0)


def in_torchs_sequence(scaler, optimizer, module):
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def scaler_after(config, gradients: list[float], take=in_one_pass) -> precision.LossScaler:
    """A scaler after one step for each gradient."""
    scaler = precision.LossScaler(config, device="cpu")
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
    config = precision.GradScalerConfig(init_scale=8.0, growth_interval=2, min_scale=2.0)
    assert scaler_after(config, [1.0, 1.0], take).get_scale() == 16.0
    assert scaler_after(config, [1.0, float("inf"), 1.0], take).get_scale() == 4.0
    floored = scaler_after(config, [float("nan")] * 5, take)
    assert (floored.get_scale(), floored.consecutive_skips, floored.skipped) == (2.0, 5, True)
    recovered = scaler_after(config, [float("nan")] * 5 + [1.0], take)
    assert (recovered.consecutive_skips, recovered.skipped) == (0, False)


def test_the_scale_stays_within_fp32():
    largest = torch.finfo(torch.float32).max
    config = precision.GradScalerConfig(init_scale=largest / 2, growth_interval=1)
    assert scaler_after(config, [0.0, 0.0, 0.0]).get_scale() == largest


def steps(take, fused: bool, scale: float = 1024.0) -> list[torch.Tensor]:
    """The weights after five steps with gradients that are clipped in some of them."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=fused)
    scaler = precision.LossScaler(precision.GradScalerConfig(init_scale=scale, growth_interval=2), device="cpu")
    for step in range(5):
        scaler.scale(module(torch.ones(2, 8)).square().sum() * 10.0 ** (-step)).backward()
        take(scaler, optimizer, module)
        optimizer.zero_grad()
    return [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("fused", [False, True])
def test_one_pass_is_torchs_sequence(fused):
    for one, two in zip(steps(in_one_pass, fused), steps(in_torchs_sequence, fused), strict=True):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-7)


def test_the_norm_is_of_the_gradients_whatever_the_scale():
    module = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(module.parameters())
    config = precision.GradScalerConfig(init_scale=8.0, growth_interval=1)
    scaler, norms = precision.LossScaler(config, device="cpu"), []
    for _ in range(3):
        scaler.scale(module(torch.full((1,), 3.0)).sum()).backward()
        norms.append(scaler.clip_and_step(optimizer, module, max_norm=1.0))
        optimizer.zero_grad()
    assert norms == [3.0, 3.0, 3.0] and scaler.get_scale() == 64.0


@pytest.mark.parametrize("fused", [False, True])
def test_a_rank_without_gradients_takes_its_step(fused):
    """FSDP1 may leave a rank with padding alone; it has to come through, or the others wait for it."""
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters(), fused=fused)
    scaler = precision.LossScaler(precision.GradScalerConfig(), device="cpu")
    scaler.scale(torch.zeros(()))
    assert scaler.clip_and_step(optimizer, module, max_norm=1.0) == 0.0 and not scaler.skipped


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("take", [in_one_pass, in_torchs_sequence])
def test_a_skipped_step_changes_nothing(fused, take):
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters(), fused=fused)
    scaler = precision.LossScaler(precision.GradScalerConfig(init_scale=4.0), device="cpu")

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


def test_torch_has_no_floor():
    """Why there is one: torch's scale runs down to 0, where 1/scale is inf and every step is skipped for good."""
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
    scaler = precision.LossScaler(precision.GradScalerConfig(), device="cpu")
    loss = torch.tensor(2.0, dtype=torch.float16)
    assert scaler.scale(loss).item() == 131072.0
    upstream = torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler(device="cpu")
    assert upstream.scale(loss).isinf()


def test_the_state_round_trips():
    config = precision.GradScalerConfig(init_scale=1024.0, growth_interval=100)
    used = scaler_after(config, [1.0, float("inf"), 1.0, 1.0])
    state = used.state_dict()
    assert state == {"scale": 512.0, "_growth_tracker": 2, "consecutive_skips": 0}
    for fresh in (precision.LossScaler(config, device="cpu"), scaler_after(config, [float("inf")])):
        fresh.load_state_dict(state)
        assert fresh.state_dict() == state
    resumed = precision.LossScaler(precision.GradScalerConfig(growth_interval=3), device="cpu")
    resumed.load_state_dict(state)
    assert resumed.get_growth_interval() == 3, "settings come from the config, not from the checkpoint"


@pytest.mark.parametrize("state", [{}, {"scale": 1.0}, {"scale": 1.0, "growth_factor": 2.0}])
def test_a_state_of_another_shape_is_refused(state):
    with pytest.raises(ValueError, match="expected .*_growth_tracker"):
        precision.LossScaler(precision.GradScalerConfig(), device="cpu").load_state_dict(state)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scale", float("nan")),
        ("scale", float("inf")),
        ("scale", 1e39),
        ("scale", 0.0),
        ("scale", "1024"),
        ("_growth_tracker", -1),
    ],
)
def test_a_state_that_cannot_be_right_is_refused(key, value):
    scaler = precision.LossScaler(precision.GradScalerConfig(), device="cpu")
    with pytest.raises(ValueError, match="loss scaler state has .*expected"):
        scaler.load_state_dict({**scaler.state_dict(), key: value})
    assert scaler.get_scale() == 65536.0


def test_a_shorter_growth_interval_holds_after_a_resume():
    used = scaler_after(precision.GradScalerConfig(growth_interval=100), [1.0] * 5)
    resumed = precision.LossScaler(precision.GradScalerConfig(growth_interval=3), device="cpu")
    resumed.load_state_dict(used.state_dict())
    resumed.update()
    assert resumed.get_scale() == 2 * used.get_scale()


def test_a_resume_in_another_regime_warns():
    scaler = precision.LossScaler(precision.GradScalerConfig(), device="cpu")
    with pytest.warns(UserWarning, match="extra.pt holds no loss scale: starting at 65536"):
        precision.load_scaler_state(scaler, None, "extra.pt")
    with pytest.warns(UserWarning, match="which this run does not use"):
        precision.load_scaler_state(None, scaler.state_dict(), "extra.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        precision.load_scaler_state(scaler, scaler.state_dict(), "extra.pt")
        precision.load_scaler_state(None, None, "extra.pt")


def test_a_device_without_scaling_is_refused():
    if torch.cuda.is_available():
        pytest.skip("torch scales on this machine's GPU")
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="device cuda"):
        precision.LossScaler(precision.GradScalerConfig(), device="cuda")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"init_scale": 1e39}, "grad_scaler.init_scale=1e+39 must be positive and at most 3.4e+38, fp32's largest"),
        ({"min_scale": 1e-39}, "grad_scaler.min_scale=1e-39 must be at least 1.18e-38, fp32's least"),
        ({"init_scale": 4.0, "min_scale": 8.0}, "grad_scaler.min_scale=8.0 must be .* at most init_scale=4.0"),
        ({"init_scale": float("nan")}, "grad_scaler.init_scale=nan"),
        ({"growth_factor": 1 + 1e-9}, "grad_scaler.growth_factor=1.000000001 must be above 1"),
        ({"growth_factor": 1e39}, "grad_scaler.growth_factor=1e.39 must be above 1 .and finite. in fp32"),
        ({"backoff_factor": 1 - 1e-9}, "grad_scaler.backoff_factor=0.999999999 must be between 0 and 1"),
    ],
)
def test_settings_that_cannot_work_together_are_refused(settings, named):
    with pytest.raises(ValueError, match=named.replace("+", "[+]")):
        precision.GradScalerConfig(**settings)


def test_why_these_settings_cannot_work():
    """Held by torch alone: the scale stays where growth or backoff round away, and is 0 or inf beyond fp32."""
    for gradient, factors in ((1.0, {"growth_factor": 1 + 1e-9}), (float("inf"), {"backoff_factor": 1 - 1e-9})):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1, **factors)
        weight = torch.nn.Parameter(torch.zeros(1))
        weight.grad = torch.full((1,), gradient)
        scaler.scale(weight.sum())
        scaler.step(torch.optim.SGD([weight], lr=1.0))
        scaler.update()
        assert scaler.get_scale() == 8.0
    assert torch.tensor(1e39).float().isinf() and (1 / torch.tensor(1e-39).float()).isinf()


@pytest.mark.parametrize("settings", [{"init_scale": 3.4e38}, {"init_scale": 1.2e-38, "min_scale": 1.2e-38}])
def test_the_outermost_scales_still_scale_and_unscale(settings):
    config = precision.GradScalerConfig(**settings)
    scaler = precision.LossScaler(config, device="cpu")
    loss = torch.ones((), requires_grad=True)
    scaled = scaler.scale(loss)
    assert (scaled / scaler.get_scale()).item() == 1.0 and scaled.isfinite()


def storm_of(*gradients: torch.Tensor) -> str:
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return precision.first_nonfinite_gradient((f"layer{i}", p) for i, p in enumerate(parameters))


def test_the_first_nonfinite_gradient_is_described():
    inf, nan = float("inf"), float("nan")
    found = storm_of(torch.ones(2), torch.tensor([1.0, -3e4, inf, nan]), torch.tensor([nan]))
    assert found == "layer1 in the shard of rank 0, 2 of 4 elements, the largest other 3e+04 (scaled)"
    assert storm_of(torch.tensor([nan])) == "layer0 in the shard of rank 0, 1 of 1 elements, no other"
    assert storm_of(torch.zeros(0), torch.tensor([inf, 0.0])).startswith("layer1")
    assert storm_of(torch.full((2,), 3e38)) == "none, but their norm leaves fp32"


@pytest.mark.parametrize("fused", [False, True])
def test_a_storm_without_a_process_group_is_described_too(no_group, fused):
    assert storm_of(torch.ones(2), torch.tensor([float("nan")])).startswith("layer1 in the shard of rank 0, 1 of 1")
    module = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.AdamW(module.parameters(), fused=fused)
    scaler = precision.LossScaler(precision.GradScalerConfig(init_scale=8.0, max_consecutive_skips=2), "cpu")
    with pytest.raises(precision.LossScaleError, match="2 optimizer steps in a row .*, loss scale 4, .*: weight in"):
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(module(torch.ones(1, 2)).sum() * float("inf")).backward()
            scaler.clip_and_step(optimizer, module, 1.0)
    assert scaler.consecutive_skips == 2


def test_a_storm_is_saved_and_raised():
    saved = []
    with pytest.raises(precision.LossScaleError, match="the storm"):
        with precision.save_after_storm(lambda: saved.append("storm")):
            raise precision.LossScaleError("the storm")
    with pytest.raises(ValueError), precision.save_after_storm(lambda: saved.append("no storm")):
        raise ValueError
    with precision.save_after_storm(lambda: saved.append("no error")):
        pass
    assert saved == ["storm"]


def test_a_checkpoint_that_fails_does_not_hide_the_storm():
    def save():
        raise OSError("disk full")

    with pytest.raises(precision.LossScaleError, match="the storm") as storm, precision.save_after_storm(save):
        raise precision.LossScaleError("the storm")
    assert "disk full" in str(storm.value.__cause__)


def test_a_storm_of_a_ray_worker_is_known_as_one():
    """Ray raises an error of its own, which is also the worker's."""
    from ray.exceptions import RayTaskError

    error = RayTaskError("update_actor", "the traceback", precision.LossScaleError("the storm"))
    saved = []
    with pytest.raises(precision.LossScaleError), precision.save_after_storm(lambda: saved.append(1)):
        raise error.as_instanceof_cause()
    assert saved == [1]


class ReportedEngine(precision.StepAccounting):
    """An engine whose optimizer skips by itself, as Megatron's does."""

    cleared = 0

    def optimizer_zero_grad(self):
        self.cleared += 1


def test_a_skip_that_an_optimizer_reports():
    engine, config = ReportedEngine(), precision.GradScalerConfig(max_consecutive_skips=2)
    assert engine.account_reported_step(False, None, 512.0, config) is None
    assert engine.cleared == 1 and not engine.close_update(), "the learning rate advances"
    assert engine.update_metrics() == {"skipped_steps": 1.0, "loss_scale": 512.0}

    assert engine.account_reported_step(True, 0.5, 512.0, config) == 0.5
    assert engine.account_reported_step(False, None, 256.0, config) is None
    assert engine.close_update() and engine.update_metrics() == {"skipped_steps": 1.0, "loss_scale": 256.0}

    with pytest.raises(precision.LossScaleError, match="2 optimizer steps in a row overflowed .*, loss scale 128"):
        engine.account_reported_step(False, None, 128.0, config)


def test_a_step_without_loss_scaling_that_an_optimizer_reports():
    engine, config = ReportedEngine(), precision.GradScalerConfig()
    assert engine.account_reported_step(True, torch.tensor(0.5), None, config) == 0.5
    assert engine.account_reported_step(True, float("nan"), None, config) is None, "one NaN would be the step's mean"
    assert engine.close_update() and engine.update_metrics() == {"skipped_steps": 0.0}


def test_megatrons_scaler_takes_the_settings_it_knows():
    config = precision.GradScalerConfig(init_scale=1024.0, min_scale=2.0, growth_interval=7)
    assert precision.megatron_scaler(config) == {
        "initial_loss_scale": 1024.0,
        "min_loss_scale": 2.0,
        "loss_scale_window": 7,
        "hysteresis": 1,
    }
    for key, value in (("growth_factor", 4.0), ("backoff_factor", 0.25)):
        with pytest.raises(ValueError, match=f"grad_scaler.{key}={value}: Megatron's loss scaler knows"):
            precision.megatron_scaler(precision.GradScalerConfig(**{key: value}))


def test_rewards_that_are_not_finite_are_named():
    rewards = torch.zeros(5, 3)
    precision.check_rewards(rewards, {})
    rewards[1, 2], rewards[4, 0] = float("nan"), float("-inf")
    labels = {"uid": list("abcde"), "data_source": ["sum"] * 5, "other": [0] * 5}
    with pytest.raises(ValueError) as refusal:
        precision.check_rewards(rewards, labels)
    assert str(refusal.value).startswith("2 of 5 rewards are not finite") and "\n" not in str(refusal.value)
    assert str(refusal.value).endswith("row 1, data_source=sum, uid=b; row 4, data_source=sum, uid=e")
    rewards[:] = float("nan")
    with pytest.raises(ValueError, match="5 of 5 .* row 0; row 1; row 2 …"):
        precision.check_rewards(rewards, {})


class Takes:
    def __init__(self, bucket_size, rollout_dtype=torch.bfloat16):
        pass


class HandsOn(Takes):
    def __init__(self, *args, **kwargs):
        pass


class DoesNot(Takes):
    def __init__(self, bucket_size):
        pass


@pytest.mark.parametrize(
    ("engine", "engine_kwargs", "rollout_dtype", "expected"),
    [
        (Takes, {}, "float16", {"rollout_dtype": torch.float16}),
        (Takes, {}, "half", {"rollout_dtype": torch.float16}),
        (HandsOn, {"a": 1}, "float32", {"a": 1, "rollout_dtype": torch.float32}),
        (DoesNot, {"a": 1}, "float16", {"a": 1}),
        (Takes, {}, "auto", {}),
        (Takes, {"rollout_dtype": "bfloat16"}, "float16", {"rollout_dtype": torch.bfloat16}),
        (DoesNot, {"rollout_dtype": "float16"}, "float16", {"rollout_dtype": torch.float16}),
    ],
)
def test_a_checkpoint_engine_gets_a_dtype_it_can_cast_to(engine, engine_kwargs, rollout_dtype, expected):
    assert precision.wire_kwargs(engine, engine_kwargs, rollout_dtype) == expected


def test_an_engine_that_exports_bfloat16_alone_is_refused():
    engine = SimpleNamespace(wire_dtype=torch.bfloat16)
    precision.set_wire_dtype(engine, torch.float16)
    assert engine.wire_dtype == torch.float16
    precision.set_wire_dtype(object(), torch.bfloat16)
    with pytest.raises(ValueError, match="rollout.dtype=float16 with checkpoint_engine.backend=delta_sharded"):
        precision.set_wire_dtype(object(), torch.float16)


def test_an_engine_that_accounts_for_no_step_reports_none():
    engine = precision.StepAccounting()
    assert engine.close_update() and engine.update_metrics() == {}


@pytest.mark.parametrize("strategy", ["torchtitan", "veomni", "automodel", "fsdp_turbo"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_engines_that_train_in_bfloat16_alone(strategy, dtype):
    assert precision.check_engine_dtype(None, strategy) == "bfloat16"
    with pytest.raises(ValueError, match=f"dtype={dtype} is not what strategy={strategy} trains in"):
        precision.check_engine_dtype(dtype, strategy)


@pytest.mark.parametrize(
    "fsdp_config, trained, expected",
    [
        ({}, True, ("bfloat16", "float32", "float32", False)),
        ({}, False, ("bfloat16", "float32", "bfloat16", False)),
        ({"dtype": None, "model_dtype": "fp32"}, False, ("bfloat16", "float32", "float32", False)),
        ({"dtype": "float16"}, True, ("float16", "float32", "float32", True)),
        ({"dtype": "float16"}, False, ("float16", "float32", "float16", False)),
        (
            {"mixed_precision": {"param_dtype": "fp16", "reduce_dtype": "bf16"}},
            True,
            ("float16", "bfloat16", "float32", True),
        ),
    ],
)
def test_a_worker_may_lack_any_key(fsdp_config, trained, expected):
    for config in (fsdp_config, OmegaConf.create(fsdp_config)):
        names = precision.Precision.of_worker(config, trained).names()
        assert (names["compute"], names["reduce"], names["master"], names["loss_scaling"]) == expected


@pytest.mark.parametrize(
    "grad_scaler, init_scale",
    [
        (None, 65536.0),
        ({"init_scale": 4.0}, 4.0),
        ({"_target_": "verl.utils.precision.GradScalerConfig", "init_scale": 4.0}, 4.0),
        (precision.GradScalerConfig(init_scale=4.0), 4.0),
    ],
)
def test_a_worker_has_a_scaler_where_it_trains_in_fp16(grad_scaler, init_scale):
    config = {"dtype": "float16", "grad_scaler": grad_scaler}

    def scaler(dtype, trained):
        return precision.worker_scaler(config, precision.Precision.of_worker({"dtype": dtype}, trained), "cpu")

    assert scaler("float16", trained=True).get_scale() == init_scale
    assert scaler("float16", trained=False) is None
    assert scaler("bfloat16", trained=True) is None


def test_no_autocast_in_fp32():
    product = torch.ones(2, 2).matmul
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        with warnings.catch_warnings(action="error"):  # torch warns of a dtype that it cannot cast to
            with precision.Precision.of_worker({"dtype": dtype}, trained=True).autocast("cpu"):
                assert product(torch.ones(2, 2)).dtype == dtype


def ppo_config(*overrides: str) -> DictConfig:
    """What verl up to 0.7.1 composes, as far as dtypes go."""
    follows = "${oc.select:actor_rollout_ref.actor.fsdp_config.dtype,null}"
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {
                "actor": {
                    "strategy": "fsdp",
                    "dtype": None,
                    "fsdp_config": {"dtype": "${oc.select:..dtype,bfloat16}", "grad_scaler": {"init_scale": 1.0}},
                },
                "ref": {
                    "strategy": "${actor_rollout_ref.actor.strategy}",
                    "dtype": follows,
                    "fsdp_config": {"dtype": "${oc.select:..dtype,bfloat16}"},
                },
                "rollout": {"name": "vllm", "dtype": "bfloat16"},
            },
            "critic": {
                "strategy": "fsdp2",
                "dtype": follows,
                "model": {"fsdp_config": {"dtype": "${oc.select:...dtype,bfloat16}"}},
            },
            "reward_model": {"model": {"path": None}},  # without a strategy: no worker of this release
            "trainer": {"use_legacy_worker_impl": "auto"},
        }
    )
    for override in overrides:
        key, value = override.split("=")
        OmegaConf.update(config, key, value)
    OmegaConf.set_struct(config, True)
    return config


ACTOR, ROLLOUT, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "critic.model.fsdp_config"


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (f"{ACTOR}.dtype=float16", "actor_rollout_ref.rollout.dtype=float16"),
        (f"{ACTOR}.dtype=float16", "critic.dtype=float32", "actor_rollout_ref.ref.dtype=bf16"),
        (f"{ACTOR}.fsdp_config.dtype=float16",),
        ("trainer.use_legacy_worker_impl=disable", f"{ACTOR}.dtype=bfloat16"),
        (f"{ACTOR}.strategy=megatron",),
        (f"{ROLLOUT}.dtype=half",),
        (f"{ROLLOUT}.name=hf", f"{ROLLOUT}.dtype=float16", f"{ACTOR}.dtype=float16", f"{ACTOR}.strategy=fsdp2"),
        (f"{ROLLOUT}.name=hf", f"{ROLLOUT}.dtype=float16", f"{ACTOR}.strategy=fsdp"),
        ("critic.strategy=megatron", "critic.megatron.dtype=float16"),  # upstream's own
    ],
)
def test_a_config_that_workers_can_compute_in_passes(overrides):
    precision.check_workers(ppo_config(*overrides))


@pytest.mark.parametrize(
    "overrides, said",
    [
        ([f"{ACTOR}.dtype=banana"], f"{ACTOR}.fsdp_config.dtype=banana is not a dtype to compute in: choose float16"),
        (["critic.dtype=banana"], f"{CRITIC}.dtype=banana is not a dtype to compute in: choose float16"),
        (
            [f"{ACTOR}.dtype=bfloat16", f"{ACTOR}.fsdp_config.dtype=float16"],
            f"{ACTOR}.dtype=bfloat16 and fsdp_config.dtype=float16 contradict each other",
        ),
        (
            ["critic.dtype=float16", f"{CRITIC}.dtype=bfloat16"],
            "critic.dtype=float16 and model.fsdp_config.dtype=bfloat16 contradict each other",
        ),
        (
            [f"{ACTOR}.dtype=float16", f"{ACTOR}.fsdp_config.model_dtype=fp16"],
            f"{ACTOR}.fsdp_config.model_dtype=fp16 with dtype=float16 makes the optimizer's weights half precision",
        ),
        ([f"{ACTOR}.fsdp_config.grad_scaler.init_scale=x"], f"{ACTOR}.fsdp_config.grad_scaler.init_scale=x must be a"),
        ([f"{ROLLOUT}.dtype=fp8"], f"{ROLLOUT}.dtype=fp8 is unknown to the rollout"),
        ([f"{ROLLOUT}.name=hf", f"{ROLLOUT}.dtype=half"], f"{ROLLOUT}.dtype=half is not a dtype to compute in"),
        (
            ["trainer.use_legacy_worker_impl=disable", "critic.dtype=float16"],
            "critic.dtype=float16 is not what trainer.use_legacy_worker_impl=disable trains in on this release",
        ),
        (
            [f"{ACTOR}.strategy=megatron", f"{ACTOR}.dtype=float16"],
            f"{ACTOR}.dtype=float16 does not reach strategy=megatron on this release",
        ),
        (
            [f"{ROLLOUT}.name=hf", f"{ROLLOUT}.dtype=float16", f"{ACTOR}.strategy=fsdp2"],
            f"{ROLLOUT}.dtype=float16 with name=hf, whose weights FSDP2 rounds to the actor's bfloat16 before: set",
        ),
    ],
)
def test_a_config_that_workers_cannot_compute_in_is_refused_in_one_line(overrides, said):
    with pytest.raises(ValueError) as error:
        precision.check_workers(ppo_config(*overrides))
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


FSDP_ENGINE = {"strategy": "fsdp", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    "config",
    [
        {"engine": FSDP_ENGINE | {"dtype": "float16"}},
        {"engine": FSDP_ENGINE | {"mixed_precision": {"param_dtype": "fp16"}}},
        {"engine": FSDP_ENGINE, "actor_rollout_ref": {"actor": {"dtype": "float16"}}},  # +precision=fp16
        {"engine": {"dtype": "bfloat16"}, "actor_rollout_ref": {"actor": {"dtype": "float16"}}},  # Megatron
    ],
)
def test_sft_on_a_model_engine_without_loss_scaling_is_refused(config):
    for passes in (FSDP_ENGINE, {"dtype": "float16"}):  # the second is Megatron's, upstream's own
        precision.check_sft(OmegaConf.create({"engine": passes}))
    with pytest.raises(ValueError, match="^engine.dtype=float16 is not what SFT on the model engine trains in"):
        precision.check_sft(OmegaConf.create(config))


def test_sft_takes_one_of_two_spellings():
    def config(dtype, engine):
        return OmegaConf.create({"dtype": dtype, "model": {"fsdp_config": {"dtype": engine}}})

    for dtype, engine in ((None, "float16"), ("fp16", "float16")):
        assert precision.sft_precision(config(dtype, engine)).loss_scaling
    with pytest.raises(ValueError, match="^dtype=float16 and model.fsdp_config.dtype=bfloat16 contradict each other"):
        precision.sft_precision(config("float16", "bfloat16"))


def test_a_report_is_one_line_of_json_in_one_write(monkeypatch):
    writes = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=writes.append, flush=lambda: None))
    precision.report("actor", 0, compute="float16")
    stamp = Path(precision.__file__).with_name("precision_stamp.json")  # apply writes it beside; --verl-tree has it
    left = stamp.read_text().strip() if stamp.exists() else "null"
    line = f'[verl-precision] {{"role": "actor", "rank": 0, "compute": "float16", "stamp": {left}}}\n'
    assert [text for text in writes if text] == [line]


@pytest.fixture(scope="module")
def small_models() -> dict[str, torch.nn.Module]:
    config = Qwen2Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
    tied = Qwen2Config(**config.to_dict() | {"tie_word_embeddings": True})
    return {"own head": Qwen2ForCausalLM(config), "tied": Qwen2ForCausalLM(tied)}


@pytest.mark.parametrize(
    "model, pattern, said",
    [
        ("own head", "lm_haed", ["lm_haed matches no module of Qwen2ForCausalLM", "near it: lm_head"]),
        ("own head", "model.layers.9.mlp.down", ["model.layers.9.mlp.down matches no", "model.layers.*.mlp.down_proj"]),
        ("own head", "model", ["model cannot be kept in fp32: it holds whole transformer blocks"]),
        ("own head", "model.layers", ["model.layers cannot be kept", "whole transformer blocks"]),
        ("tied", "lm_head", ["it shares a weight with model.embed_tokens"]),
        ("tied", "*embed_tokens", ["it shares a weight with lm_head"]),
    ],
)
def test_what_cannot_be_kept_in_fp32_is_named(small_models, model, pattern, said):
    module = small_models[model]
    with pytest.raises(ValueError) as error:
        precision.keep_in_fp32(module, ["model.layers.0", pattern], torch.float16, "cpu")
    assert str(error.value).startswith("keep_fp32_modules: ") and "\n" not in str(error.value)
    assert all(text in str(error.value) for text in said), error.value
    assert not any("forward" in vars(part) for part in module.modules()), "a refusal changes nothing"


def test_fused_kernels_would_not_call_a_kept_head(small_models):
    with pytest.raises(ValueError, match="lm_head cannot be kept in fp32: fused kernels"):
        precision.keep_in_fp32(small_models["own head"], ["lm_head"], torch.float16, "cpu", fused_head=True)


def test_a_container_is_never_called():
    class Experts(torch.nn.Module):
        _no_split_modules = None

        def __init__(self):
            super().__init__()
            self.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2)])

    with pytest.raises(ValueError, match="experts cannot be kept in fp32: it is a ModuleList, which is never called"):
        precision.keep_in_fp32(Experts(), ["experts"], torch.float16, "cpu")


@pytest.mark.parametrize("value", ["lm_head", [1], None])
def test_keep_fp32_modules_is_a_list_of_names(value):
    with pytest.raises(ValueError, match="keep_fp32_modules=.* must be a list"):
        precision.check_keep_fp32(value, "fsdp")


def test_keep_fp32_modules_is_refused_where_nothing_reads_it():
    precision.check_keep_fp32([], "fsdp_turbo")
    with pytest.raises(ValueError, match="is not read by strategy=fsdp_turbo"):
        precision.check_keep_fp32(["lm_head"], "fsdp_turbo")
