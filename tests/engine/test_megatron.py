"""Megatron's loss scaler gets its settings, and verl's own methods for step, LR and loss handle skips and masks."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from precision import GradScalerConfig, LossScaleError, StepAccounting, megatron_scaler, requests_precision
from support.methods import function


def of_engine(tree: Path, name: str, **names: Any):
    """Return a method of ``MegatronEngine``."""
    file = tree / "verl/workers/engine/megatron/transformer_impl.py"
    names |= {"torch": torch, "requests_precision": requests_precision}
    return function(file, f"MegatronEngine.{name}", **names)


class Optimizer:
    """A stub of Megatron's optimizer that takes or skips steps as given by ``taken``."""

    def __init__(self, taken: list[bool]):
        self.taken, self.scale = taken, 1024.0

    def step(self):
        taken = self.taken.pop(0)
        self.scale /= 1 if taken else 2
        return taken, 0.5 if taken else None, None

    def get_loss_scale(self):
        return torch.tensor([self.scale])


@pytest.fixture
def engine(trees, monkeypatch):
    """``engine(tree, *taken, dtype="float16")``: an engine whose optimizer takes or skips steps as ``taken`` gives."""

    def of(tree: str, *taken: bool, dtype: str = "float16"):
        names = {name: of_engine(trees[tree], name) for name in ("optimizer_step", "lr_scheduler_step")}
        names["optimizer_zero_grad"] = lambda self: self.cleared.append(True)
        made = type("Engine", (StepAccounting,), names)()
        made.optimizer, made.param_dtype, made.cleared, made.lr = Optimizer([*taken]), getattr(torch, dtype), [], 0
        scaler = GradScalerConfig(max_consecutive_skips=2 if dtype == "float16" else 32)
        made.engine_config = SimpleNamespace(dtype=dtype, grad_scaler=scaler)
        made.lr_scheduler = SimpleNamespace(step=lambda n: setattr(made, "lr", made.lr + n))
        return made

    optimizer = ModuleType("verl.utils.megatron.optimizer")  # imports Megatron
    optimizer.get_megatron_last_lr = lambda optimizer: None
    for module in (*map(ModuleType, ("verl", "verl.utils", "verl.utils.megatron")), optimizer):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return of


def test_overflow_is_skipped_reported_and_keeps_the_learning_rate(engine):
    made = engine("patched", True, False, True, False, False)
    updates = []
    for _ in range(3):
        norm = made.optimizer_step()
        made.lr_scheduler_step()
        updates.append((norm, made.lr, dict(made.update_metrics())))
    assert updates == [
        (0.5, 1, {"skipped_steps": 0.0, "loss_scale": 1024.0}),
        (None, 1, {"skipped_steps": 1.0, "loss_scale": 512.0}),
        (0.5, 2, {"skipped_steps": 0.0, "loss_scale": 512.0}),
    ]
    assert made.cleared == [True]
    assert made.optimizer_step() is None
    with pytest.raises(LossScaleError, match="2 optimizer steps in a row overflowed .*, loss scale 128"):
        made.optimizer_step()


def test_upstream_ends_with_the_first_overflow(engine):
    with pytest.raises(NotImplementedError):
        engine("pristine", False).optimizer_step()


def test_without_a_request_a_step_is_upstreams(engine):
    for tree in ("patched", "pristine"):
        made = engine(tree, True, False, dtype="bfloat16")
        assert made.optimizer_step() == 0.5
        made.lr_scheduler_step()
        assert made.lr == 1 and made.update_metrics() == {}
        with pytest.raises(NotImplementedError):
            made.optimizer_step()


def test_a_roles_dtype_alone_requests_the_account_of_a_step(engine):
    made = engine("patched", False, dtype="bfloat16")
    made.engine_config.precision_requested = True
    assert made.optimizer_step() is None
    made.lr_scheduler_step()
    assert made.lr == 0 and made.cleared == [True] and made.update_metrics() == {"skipped_steps": 1.0}


def test_megatron_gets_its_settings_and_refuses_others():
    config = GradScalerConfig(init_scale=1024.0, min_scale=2.0, growth_interval=7)
    given = {"initial_loss_scale": 1024.0, "min_loss_scale": 2.0, "loss_scale_window": 7, "hysteresis": 1}
    assert megatron_scaler(config) == given
    for key, value in (("growth_factor", 4.0), ("backoff_factor", 0.25)):
        with pytest.raises(ValueError, match=f"grad_scaler.{key}={value}: Megatron's loss scaler supports only"):
            megatron_scaler(GradScalerConfig(**{key: value}))


def test_fp16_optimizer_gets_the_settings_of_the_scaler(trees):
    """Upstream starts at 32768."""
    names = {"torch": torch, "OptimizerConfig": dict, "_MUON_ALGORITHMS": (), "print_rank_0": print}
    names |= {"GradScalerConfig": GradScalerConfig, "megatron_scaler": megatron_scaler}
    adam = dict.fromkeys(("lr", "min_lr", "clip_grad", "weight_decay"), 0.0) | {"optimizer": "adam"}
    path = ("verl/utils/megatron/optimizer.py", "init_megatron_optim_config")
    scales = {}
    for tree, settings in (("patched", {"grad_scaler": GradScalerConfig(init_scale=1024.0)}), ("pristine", {})):
        configure = function(trees[tree] / path[0], path[1], **names)
        scales[tree] = configure(OmegaConf.create(adam), fp16=True, **settings)["initial_loss_scale"]
    assert scales == {"patched": 1024.0, "pristine": 32768}


class DivisorIsKnownError(Exception):
    """Ends the method under test where it has counted the tokens."""


def divisor_is_known():
    raise DivisorIsKnownError


@pytest.mark.parametrize(("mask", "divisors"), [([1, 1, 0], (2, 2)), ([0, 0, 0], (1, 0))])
def test_loss_of_an_all_masked_batch_is_not_divided_by_zero(trees, one_rank, mask, divisors):
    """Upstream divides by 0."""
    data = {"loss_mask": torch.tensor(mask)}
    tu = SimpleNamespace(
        get_non_tensor_data=lambda data, key, default: default,
        assign_non_tensor=lambda data, **values: data.update(values),
    )
    engine = SimpleNamespace(
        engine_config=SimpleNamespace(context_parallel_size=1, dynamic_context_parallel=False),
        model_config=None,
        get_data_parallel_group=lambda: None,
        get_data_parallel_size=divisor_is_known,
    )
    names = {"tu": tu, "get_device_id": lambda: "cpu", "_check_dcp_unsupported_features": lambda *_, **__: None}
    for tree, divisor in zip(("patched", "pristine"), divisors, strict=True):
        with pytest.raises(DivisorIsKnownError):
            of_engine(trees[tree], "forward_backward_batch", **names)(engine, data, None)
        assert data["batch_num_tokens"] == divisor
