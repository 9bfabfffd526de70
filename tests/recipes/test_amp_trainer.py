"""The trainer: what it updates, what it skips, what it says about itself, and what its checkpoints bring back."""

import math
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten

from recipes.amp.trainer import CheckpointError, FP16Trainer, FP16TrainingConfig, MultiplicationDtypes
from verl.utils.precision import LossScaleError

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "amp.md"
INF, NAN = float("inf"), float("nan")


def network(seed: int = 0, hidden: int = 16) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 1))


def batches(count: int, seed: int = 1) -> list[torch.Tensor]:
    return list(torch.randn(count, 8, 6, generator=torch.Generator().manual_seed(seed)))


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch).squeeze(-1) - batch.sum(-1)).square().mean()


def trainer(
    model: torch.nn.Module | None = None,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    lr: float = 1e-2,
    **config: Any,
) -> FP16Trainer:
    """One that computes in 16 bits on the CPU, from a scale at which these losses do not overflow."""
    model = network() if model is None else model
    chosen = {"on_cpu": True, "loss_scale": 1024.0} | config
    return FP16Trainer(model, make(model.parameters(), lr=lr), FP16TrainingConfig(**chosen))


def of_kind(kind: str) -> Callable[..., torch.optim.Optimizer]:
    return lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, **{kind: True} if kind != "loop" else {})


KINDS = ("loop", "foreach", "fused")


def everything(of: FP16Trainer) -> dict[str, Any]:
    """All that a checkpoint would bring back, copied."""
    counters = {name: getattr(of, name) for name in ("training_steps", "overflow_steps", "consecutive_skips")}
    state = {"model": of.module.state_dict(), "optimizer": of.optimizer.state_dict(), "counters": counters}
    state["scaler"] = of.scaler.state_dict() if of.scaler is not None else None
    return torch.utils._pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, state)


def same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    (leaves, tree), (others, other_tree) = tree_flatten(one), tree_flatten(other)
    equal = lambda a, b: torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    return tree == other_tree and all(equal(a, b) for a, b in zip(leaves, others, strict=True))


# The config


def test_the_defaults_are_those_that_were_asked_for():
    config = FP16TrainingConfig()
    assert (config.enabled, config.dtype, config.loss_scale, config.growth_factor) == (True, "float16", 65536.0, 2.0)
    assert (config.backoff_factor, config.growth_interval) == (0.5, 2000)


@pytest.mark.parametrize(
    "key, value",
    [
        ("enabled", "no"),
        ("on_cpu", 1),
        ("dtype", "float8"),
        ("dtype", None),
        ("loss_scale", 0.0),
        ("loss_scale", -1.0),
        ("loss_scale", NAN),
        ("loss_scale", INF),
        ("loss_scale", "65536"),
        ("growth_factor", 1.0),
        ("growth_factor", NAN),
        ("backoff_factor", 1.0),
        ("backoff_factor", 0.0),
        ("backoff_factor", NAN),
        ("growth_interval", 0),
        ("growth_interval", 10.0),
        ("min_scale", 0.0),
        ("min_scale", 131072.0),
        ("min_scale", NAN),
        ("max_consecutive_skips", 0),
        ("max_grad_norm", 0.0),
        ("max_grad_norm", NAN),
        ("max_grad_norm", "1"),
        ("max_grad_norm", True),
        ("accumulation_steps", 0),
        ("accumulation_steps", 2.0),
        ("accumulation_steps", True),
    ],
)
def test_a_config_that_cannot_work_is_refused_by_its_key(key, value):
    with pytest.raises(ValueError) as refused:
        FP16TrainingConfig(**{key: value})
    assert str(refused.value).startswith(f"{key}=") and "\n" not in str(refused.value)
    assert "must be" in str(refused.value) or "choose" in str(refused.value)


# Steps


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_step_trains_and_says_in_what(dtype):
    trained, batch = trainer(dtype=dtype, lr=3e-2), batches(1)[0]
    assert trained.get_stats()["effective_dtype"] is None  # nothing was seen yet
    losses = [trained.training_step(batch, loss_of) for _ in range(60)]
    assert losses[-1] < 0.1 * losses[0]
    assert losses[0].dtype == torch.float32 and losses[0].ndim == 0 and not losses[0].requires_grad
    stats = trained.get_stats()
    assert (stats["training_steps"], stats["overflow_steps"], stats["overflow_rate"]) == (60, 0, 0.0)
    assert stats["effective_dtype"] == stats["requested_dtype"] == dtype
    assert stats["effective_dtype_share"] == {dtype: 1.0}
    assert stats["loss_scaling"] == (dtype == "float16")
    assert stats["current_scale"] == (1024.0 if dtype == "float16" else 1.0)
    assert all(parameter.dtype == torch.float32 for parameter in trained.module.parameters())


def test_backward_and_step_takes_a_loss_of_ones_own():
    trained, batch = trainer(), batches(1)[0]
    before = everything(trained)
    with trained.autocast():
        loss = loss_of(trained.model, batch)
    assert trained.backward_and_step(loss) is True
    assert not same(before["model"], everything(trained)["model"])
    assert all(parameter.grad is None for parameter in trained.module.parameters())


def test_the_scale_grows_after_so_many_clean_updates():
    trained = trainer(growth_interval=3)
    for batch in batches(7):
        trained.training_step(batch, loss_of)
    assert trained.get_stats()["current_scale"] == 4096.0


def plain_update(
    model: torch.nn.Module, batch: torch.Tensor, dtype: torch.dtype, max_norm: float
) -> tuple[float, list[torch.Tensor]]:
    """torch alone, without a scale: the norm before clipping, and the weights after a step of SGD at lr=1."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = loss_of(model, batch)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return norm.item(), [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("max_norm", [0.25, INF])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_an_update_is_that_of_one_large_batch_in_fp32(dtype, parts, max_norm):
    small = batches(parts)
    trained = trainer(make=torch.optim.SGD, lr=1.0, dtype=dtype, accumulation_steps=parts, max_grad_norm=max_norm)
    seen = []
    trained.optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.append(torch.nn.utils.get_total_norm(p.grad for p in trained.module.parameters()))
    )
    for batch in small:
        trained.training_step(batch, loss_of)
    found = list(trained.module.parameters())

    norm, expected = plain_update(network(), torch.cat(small), torch.float32, max_norm)
    assert trained.grad_norm == pytest.approx(norm, rel=2e-2) and norm > 0.5
    assert len(seen) == 1  # one step, of gradients that are unscaled and clipped once
    assert seen[0].item() == pytest.approx(min(norm, max_norm), rel=2e-2)
    moved = [new - old for new, old in zip(found, network().parameters(), strict=True)]
    wanted = [new - old for new, old in zip(expected, network().parameters(), strict=True)]
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6}[dtype] * min(norm, max_norm)
    for one, other in zip(moved, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=tolerance)


def test_a_scale_changes_no_update():
    """A power of two is exact in fp16: what remains are the gradients of the same fp16 arithmetic."""
    trained = trainer(make=torch.optim.SGD, lr=1.0, max_grad_norm=0.25)
    trained.training_step(batches(1)[0], loss_of)
    _, expected = plain_update(network(), batches(1)[0], torch.float16, 0.25)
    for one, other in zip(trained.module.parameters(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(
    "loss, said",
    [
        (lambda model, batch: model(batch).square(), r"shape \(8, 1\) is not a scalar tensor"),
        (lambda model, batch: model(batch).square().mean().reshape(1), r"shape \(1,\) is not a scalar tensor"),
        (lambda model, batch: 0.5, "loss 0.5 is not a scalar tensor"),
        (lambda model, batch: model(batch).detach().mean(), "loss has no gradient"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_refused(loss, said):
    trained = trainer()
    before = everything(trained)
    with pytest.raises(ValueError, match=said):
        trained.training_step(batches(1)[0], loss)
    assert same(before, everything(trained))


# Overflow


@pytest.mark.parametrize("value", [INF, NAN])
@pytest.mark.parametrize("bad", [0, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_changes_nothing_and_later_updates_recover(kind, bad, value):
    """In the first, a middle or the last of four micro-batches."""
    trained = trainer(make=of_kind(kind), accumulation_steps=4)
    clean = batches(8)
    for batch in clean[:4]:
        trained.training_step(batch, loss_of)
    before = everything(trained)
    assert before["optimizer"]["state"]  # Adam's moments are there
    answers = []
    for place, batch in enumerate(clean[4:]):
        with trained.autocast():
            loss = loss_of(trained.model, batch)
        answers.append(trained.backward_and_step(loss * value if place == bad else loss))
    assert answers == [True, True, True, False] and trained.skipped
    after = everything(trained)
    assert same(before["model"], after["model"]) and same(before["optimizer"], after["optimizer"])
    assert all(parameter.grad is None for parameter in trained.module.parameters())
    stats = trained.get_stats()
    assert (stats["training_steps"], stats["overflow_steps"], stats["overflow_rate"]) == (2, 1, 0.5)
    assert (stats["consecutive_skips"], stats["current_scale"], stats["grad_norm"]) == (1, 512.0, None)

    for batch in clean[4:]:
        trained.training_step(batch, loss_of)
    never = trainer(make=of_kind(kind), accumulation_steps=4)
    for batch in clean:
        never.training_step(batch, loss_of)
    assert not trained.skipped and trained.consecutive_skips == 0
    for one, other in zip(trained.module.parameters(), never.module.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_without_a_scale_gradients_that_are_not_finite_are_skipped_too(dtype):
    trained, batch = trainer(dtype=dtype), batches(1)[0]
    trained.training_step(batch, loss_of)
    before = everything(trained)
    trained.training_step(batch * INF, loss_of)
    after = everything(trained)
    assert trained.skipped and trained.overflow_steps == 1 and trained.get_stats()["current_scale"] == 1.0
    assert same(before["model"], after["model"]) and same(before["optimizer"], after["optimizer"])
    trained.training_step(batch, loss_of)
    assert not trained.skipped


def test_a_scale_that_is_too_large_falls_until_it_fits():
    trained, batch = trainer(loss_scale=2.0**24, lr=3e-2), batches(1)[0]
    first = trained.training_step(batch, loss_of)
    assert trained.skipped and same(trained.module.state_dict(), network().state_dict())
    losses = [trained.training_step(batch, loss_of) for _ in range(60)]
    stats = trained.get_stats()
    assert stats["current_scale"] == 2.0 ** (24 - stats["overflow_steps"]) and 1 < stats["overflow_steps"] < 20
    assert not trained.skipped and losses[-1] < 0.1 * first


@pytest.mark.parametrize("kind", KINDS)
def test_a_storm_is_an_error_and_its_last_skip_is_counted(kind, tmp_path):
    trained, batch = trainer(make=of_kind(kind), max_consecutive_skips=3), batches(1)[0]
    trained.training_step(batch, loss_of)
    before = everything(trained)
    with pytest.raises(LossScaleError, match="3 optimizer steps in a row .*first non-finite gradient: 0.weight"):
        for _ in range(10):
            trained.training_step(batch * INF, loss_of)
    stats = trained.get_stats()
    assert (stats["training_steps"], stats["overflow_steps"], stats["consecutive_skips"]) == (4, 3, 3)
    assert all(parameter.grad is None for parameter in trained.module.parameters())
    assert same(before["model"], everything(trained)["model"])

    trained.save_checkpoint(tmp_path / "storm.pt")
    resumed = trainer(make=of_kind(kind), max_consecutive_skips=3, loss_scale=2048.0)
    with pytest.warns(UserWarning, match="no loss scale: starting at 2048"):  # no scale worked: none is taken up
        resumed.load_checkpoint(tmp_path / "storm.pt")
    assert resumed.consecutive_skips == 0 and resumed.training_steps == 4
    resumed.training_step(batch, loss_of)
    assert not resumed.skipped


def test_a_storm_without_a_scale_is_an_error_too():
    trained, batch = trainer(dtype="bfloat16", max_consecutive_skips=2), batches(1)[0]
    with pytest.raises(FloatingPointError, match=r"2 updates in a row .* bfloat16 \(max_consecutive_skips\).*0.weight"):
        for _ in range(10):
            trained.training_step(batch * INF, loss_of)
    assert (trained.training_steps, trained.overflow_steps, trained.consecutive_skips) == (2, 2, 2)
    assert all(parameter.grad is None for parameter in trained.module.parameters())


# What it can train, and what it falls back to


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_without_a_gpu_it_trains_in_fp32_and_says_so(dtype):
    with pytest.warns(UserWarning, match=f"training in float32, not {dtype}"):
        trained = trainer(dtype=dtype, on_cpu=False)
    trained.training_step(batches(1)[0], loss_of)
    stats = trained.get_stats()
    assert stats["effective_dtype"] == "float32" and stats["requested_dtype"] == dtype
    assert "on the CPU" in stats["fallback"] and not stats["loss_scaling"] and stats["device"] == "cpu"
    assert not trained.skipped


@pytest.mark.parametrize("config", [{"on_cpu": True}, {"enabled": False}, {"dtype": "float32"}])
def test_what_was_asked_for_needs_no_warning(config):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained = trainer(**{"on_cpu": False} | config)
    trained.training_step(batches(1)[0], loss_of)
    stats = trained.get_stats()
    assert stats["fallback"] is None and stats["effective_dtype"] == stats["requested_dtype"]


@pytest.mark.parametrize("config", [{}, {"dtype": "bfloat16"}, {"enabled": False}, {"on_cpu": False}])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_refused(dtype, config):
    with pytest.raises(ValueError, match=r"0.weight is b?float16: the optimizer's weights .* must be float32"):
        trainer(model=network().to(dtype), **config)


def test_model_and_optimizer_train_the_same_parameters():
    model, other = network(), network(1)
    with pytest.raises(ValueError, match="not the model's"):
        FP16Trainer(model, torch.optim.SGD(other.parameters(), lr=0.1), FP16TrainingConfig(on_cpu=True))
    head = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with pytest.raises(ValueError, match="0.weight requires a gradient and is not in the optimizer"):
        FP16Trainer(model, head, FP16TrainingConfig(on_cpu=True))
    model[0].requires_grad_(False)
    trained = FP16Trainer(model, head, FP16TrainingConfig(on_cpu=True, loss_scale=1024.0))
    trained.training_step(batches(1)[0], loss_of)
    assert torch.equal(model[0].weight, network()[0].weight) and not torch.equal(model[2].weight, network()[2].weight)


def test_every_parameter_group_is_clipped_by_one_norm():
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 1.0}, {"params": model[2].parameters(), "lr": 0.5}]
    trained = FP16Trainer(model, torch.optim.SGD(groups), FP16TrainingConfig(enabled=False, max_grad_norm=0.25))
    trained.training_step(batches(1)[0], loss_of)
    _, expected = plain_update(network(), batches(1)[0], torch.float32, 0.25)
    torch.testing.assert_close(model[0].weight, expected[0])
    torch.testing.assert_close(model[2].weight, (network()[2].weight + expected[2]) / 2)


def test_casting_the_model_is_refused_with_a_scaler():
    with pytest.raises(ValueError, match="optimizer's masters, in float16 small updates are lost"):
        trainer().cast_model_to_fp16()


def test_a_model_without_a_scaler_is_cast_for_inference_alone(tmp_path):
    trained = trainer(enabled=False)
    trained.training_step(batches(1)[0], loss_of)
    cast = trained.cast_model_to_fp16()
    assert cast is trained.module and all(parameter.dtype == torch.float16 for parameter in cast.parameters())
    assert cast(batches(1)[0].half()).dtype == torch.float16
    with pytest.raises(ValueError, match="cast to float16 for inference"):
        trained.backward_and_step(torch.ones((), requires_grad=True))
    with pytest.raises(ValueError, match="cast to float16 for inference"):
        trained.save_checkpoint(tmp_path / "cast.pt")
    assert not list(tmp_path.iterdir())


# What the multiplications were done in


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
def test_recurrent_layers_are_counted(kind):
    """Two products a step, of the input and of the state, for each of the gates."""
    layer, gates = kind(4, 8, batch_first=True), {torch.nn.LSTM: 4, torch.nn.GRU: 3}[kind]
    with MultiplicationDtypes() as seen:
        layer(torch.randn(2, 5, 4))
    assert seen.flops == {"float32": 2 * 2 * 5 * gates * 8 * (4 + 8)}


def test_cudnns_recurrent_layers_are_counted_too():
    """On a GPU a GRU is one operation of cuDNN's; tensors without data are enough to count it."""
    shapes = [(5, 2, 4), (24, 4), (24, 8), (24,), (24,), (1, 2, 8)]  # input, weights and biases, state
    given, *weights, state = (torch.empty(shape, dtype=torch.float16, device="meta") for shape in shapes)
    gru, hidden, layers = 3, 8, 1
    flags = (False, 0.0, True, False, [], None)
    with MultiplicationDtypes() as seen:
        torch.ops.aten._cudnn_rnn(given, weights, 4, None, state, None, gru, hidden, 0, layers, *flags)
    assert seen.flops == {"float16": 2 * 2 * 5 * 3 * 8 * (4 + 8)}


def test_shares_are_of_the_operations_not_of_the_layers():
    linear = torch.nn.Linear(4, 4)
    with MultiplicationDtypes() as seen:
        linear(torch.ones(1, 4))
        with torch.autocast("cpu", torch.bfloat16):
            linear(torch.ones(3, 4))
    assert seen.shares() == {"bfloat16": 0.75, "float32": 0.25}


def test_a_compiled_model_is_compiled_and_its_checkpoint_is_a_models(tmp_path):
    runs = []

    def backend(graph, inputs):
        def run(*args):
            runs.append("compiled")
            return graph(*args)

        return run

    model = network()
    config = FP16TrainingConfig(on_cpu=True, loss_scale=1024.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trained = FP16Trainer(torch.compile(model, backend=backend), optimizer, config)
    for batch in batches(3):
        trained.training_step(batch, loss_of)
    assert runs == ["compiled"] * 2  # the first forward is run eagerly, to see its dtypes
    assert trained.get_stats()["effective_dtype"] == "float16"
    trained.save_checkpoint(tmp_path / "compiled.pt")
    plain = trainer(network(1))
    plain.load_checkpoint(tmp_path / "compiled.pt")
    assert same(everything(plain), everything(trained))


# Checkpoints


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(dtype, kind, tmp_path):
    """Through an overflow and a scale that grows, on both sides of the checkpoint, which comes right after a skip."""

    def run(on: FP16Trainer, part: list[torch.Tensor]) -> list[float]:
        return [on.training_step(batch, loss_of).item() for batch in part]

    data = batches(16)
    for place in (3, 8, 11):
        data[place] = data[place] * INF
    make = lambda seed: trainer(network(seed), of_kind(kind), dtype=dtype, growth_interval=4)
    straight, first, second = make(0), make(0), make(1)
    losses = run(straight, data)
    part = run(first, data[:9])
    first.save_checkpoint(tmp_path / "half.pt", {"epoch": 9})
    assert second.load_checkpoint(tmp_path / "half.pt") == {"epoch": 9}
    assert same(everything(first), everything(second)) and second.consecutive_skips == 1
    assert np.array_equal(losses, part + run(second, data[9:]), equal_nan=True)
    assert same(everything(straight), everything(second))
    assert straight.overflow_steps == 3
    assert [path.name for path in tmp_path.iterdir()] == ["half.pt"]


def test_a_checkpoint_says_where_it_comes_from(tmp_path):
    trained = trainer()
    trained.training_step(batches(1)[0], loss_of)
    trained.save_checkpoint(tmp_path / "a.pt")
    provenance = torch.load(tmp_path / "a.pt", weights_only=True)["provenance"]
    assert provenance["config"]["dtype"] == "float16" and provenance["torch"] == torch.__version__
    assert provenance["stats"]["effective_dtype"] == "float16"


def test_an_optimizers_implementation_is_the_trainers_own(tmp_path):
    """What a checkpoint of the other kind brings back would not fit the scaler's way of skipping."""
    for one, other in (("fused", "foreach"), ("foreach", "fused")):
        saving, loading = trainer(make=of_kind(one)), trainer(network(1), make=of_kind(other), lr=1.0)
        for batch in batches(2):
            saving.training_step(batch, loss_of)
        saving.save_checkpoint(tmp_path / "a.pt")
        loading.load_checkpoint(tmp_path / "a.pt")
        (group,) = loading.optimizer.param_groups
        assert group[other] and not group[one] and group["lr"] == 1e-2
        loading.training_step(batches(1)[0], loss_of)
        loading.training_step(batches(1)[0] * INF, loss_of)
        assert (loading.training_steps, loading.overflow_steps) == (4, 1)


def test_a_checkpoint_in_the_middle_of_an_accumulation_starts_the_update_anew(tmp_path):
    trained = trainer(accumulation_steps=2)
    data = batches(3)
    trained.save_checkpoint(tmp_path / "a.pt")
    trained.training_step(data[0], loss_of)
    trained.load_checkpoint(tmp_path / "a.pt")
    for batch in data[1:]:
        trained.training_step(batch, loss_of)
    fresh = trainer(accumulation_steps=2)
    for batch in data[1:]:
        fresh.training_step(batch, loss_of)
    assert same(everything(trained), everything(fresh)) and trained.training_steps == 1


def test_a_checkpoint_without_a_loss_scale_warns(tmp_path):
    full, half = trainer(dtype="float32"), trainer(network(1))
    for each in (full, half):
        each.training_step(batches(1)[0], loss_of)
    full.save_checkpoint(tmp_path / "fp32.pt")
    half.save_checkpoint(tmp_path / "fp16.pt")
    with pytest.warns(UserWarning, match="fp32.pt holds no loss scale: starting at 1024"):
        half.load_checkpoint(tmp_path / "fp32.pt")
    assert same(half.module.state_dict(), full.module.state_dict())
    with pytest.warns(UserWarning, match="fp16.pt holds a loss scale, which this run does not use"):
        full.load_checkpoint(tmp_path / "fp16.pt")
    old = torch.load(tmp_path / "fp32.pt", weights_only=True)
    torch.save({key: old[key] for key in ("model", "optimizer")}, tmp_path / "old.pt")  # of another trainer
    with pytest.warns(UserWarning, match="old.pt holds no loss scale"):
        assert half.load_checkpoint(tmp_path / "old.pt") == {}
    assert half.training_steps == 0


def test_extra_comes_back_as_it_was(tmp_path):
    trained = trainer()
    extra = {"rng": torch.get_rng_state(), "epoch": 3, "best": None, "returns": [1.0, (2, "x")], 5: OrderedDict(a=b"b")}
    extra["schedule"] = torch.optim.lr_scheduler.MultiStepLR(trained.optimizer, [1, 2]).state_dict()
    trained.save_checkpoint(tmp_path / "a.pt", extra)
    assert same(trained.load_checkpoint(tmp_path / "a.pt"), extra)


@pytest.mark.parametrize("value, named", [(np.float64(1.0), "numpy.float64"), (Path("x"), "pathlib"), (len, "builtin")])
def test_extra_that_could_not_be_read_back_is_refused(value, named, tmp_path):
    trained = trainer()
    trained.save_checkpoint(tmp_path / "a.pt", {"epoch": 1})
    with pytest.raises(ValueError, match=rf"extra.returns.1 is of {named}"):
        trained.save_checkpoint(tmp_path / "a.pt", {"returns": [1.0, value]})
    assert trained.load_checkpoint(tmp_path / "a.pt") == {"epoch": 1}  # what was there stays
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_what_could_not_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        trainer().save_checkpoint(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def edited(change: Callable[[dict], None]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        change(saved)
        torch.save(saved, path)

    return write


def state_of(saved: dict) -> dict:
    return saved["optimizer"]["state"][0]


REFUSED = {
    **{
        f"{share:.0%} of it": (
            lambda path, share=share: path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)]),
            "truncated, or no checkpoint",
        )
        for share in (0.0, 0.01, 0.5, 0.99)
    },
    "text": (lambda path: path.write_text("epoch,loss\n1,0.5\n"), "truncated, or no checkpoint"),
    "other text": (lambda path: path.write_text("import torch\n"), "truncated, or no checkpoint"),
    "a module": (lambda path: torch.save(network(), path), "truncated, or no checkpoint"),
    "weights alone": (lambda path: torch.save(network().state_dict(), path), "no model or no optimizer"),
    "a number": (lambda path: torch.save(1, path), "no model or no optimizer"),
    "newer": (edited(lambda saved: saved.update(version=2)), "version 2, this trainer reads up to 1"),
    "odd version": (edited(lambda saved: saved.update(version="1.0")), "version 1.0, this trainer"),
    "version 0": (edited(lambda saved: saved.update(version=0)), "version 0, this trainer"),
    **{
        f"{part} that are none": (
            edited(lambda saved, part=part: saved.update({part: None})),
            f"no checkpoint of this trainer: its {part} is NoneType",
        )
        for part in ("optimizer_of", "counters", "extra")
    },
    "another shape": (
        edited(lambda saved: saved["model"].update({"0.weight": torch.ones(3, 6)})),
        r"of another model: 0.weight has shape \(3, 6\), here \(16, 6\)",
    ),
    "a layer more": (
        edited(lambda saved: saved["model"].update({"4.weight": torch.ones(1)})),
        "of another model: 4.weight is in it alone",
    ),
    "a layer less": (edited(lambda saved: saved["model"].pop("2.bias")), "2.bias is in this model alone"),
    "no groups": (edited(lambda saved: saved["optimizer"].pop("param_groups")), "no model or no optimizer"),
    "two groups": (
        edited(lambda saved: saved["optimizer"]["param_groups"].append({"params": [4]})),
        r"of another optimizer: groups of \[4, 1\] parameters, here \[4\]",
    ),
    "another class": (
        edited(lambda saved: saved["optimizer_of"].update({"class": "SGD"})),
        "of another optimizer: SGD, here AdamW",
    ),
    "another order": (
        edited(lambda saved: saved["optimizer_of"]["groups"][0].reverse()),
        "of another optimizer: its parameters are in another order",
    ),
    "other moments": (
        edited(lambda saved: state_of(saved).update(exp_avg=torch.ones(2))),
        r"of another optimizer: exp_avg has shape \(2,\), 0.weight has \(16, 6\)",
    ),
    "torch's scaler": (
        edited(lambda saved: saved.update(grad_scaler=torch.amp.GradScaler("cpu").state_dict())),
        "loss scaler state has keys",
    ),
    "a scaler's list": (edited(lambda saved: saved.update(grad_scaler=[1.0])), "loss scaler state has keys"),
    **{
        f"a scale of {scale}": (
            edited(lambda saved, scale=scale: saved["grad_scaler"].update(scale=scale)),
            "loss scaler state has scale=",
        )
        for scale in (NAN, INF, 0.0, -1.0, 1e-50, 1e39, "1", None)
    },
    "a count of nothing": (
        edited(lambda saved: saved["grad_scaler"].update(_growth_tracker=-1)),
        "loss scaler state has counts",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_checkpoint_that_does_not_fit_is_refused_and_nothing_is_loaded(case, tmp_path):
    write, said = REFUSED[case]
    path = tmp_path / "a.pt"
    saving = trainer()
    saving.training_step(batches(1)[0], loss_of)
    saving.save_checkpoint(path)
    write(path)

    trained = trainer(network(1), accumulation_steps=2)
    for batch in batches(3, seed=2):
        trained.training_step(batch, loss_of)
    before, gradient = everything(trained), trained.module[0].weight.grad.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(CheckpointError, match=said) as refused:
            trained.load_checkpoint(path)
    assert str(refused.value).startswith(f"{path}: ") and "\n" not in str(refused.value)
    assert same(before, everything(trained)) and torch.equal(gradient, trained.module[0].weight.grad)
    trained.training_step(batches(1)[0], loss_of)  # the second half of the update
    assert trained.training_steps == 2


def test_a_checkpoint_that_is_not_there_is_said_to_be_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.pt"):
        trainer().load_checkpoint(tmp_path / "none.pt")


# The guide


def test_the_guides_quick_start_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    with pytest.warns(UserWarning, match="on the CPU: training in float32"):
        exec(re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[1], names)
    assert names["trainer"].training_steps == 10 and (tmp_path / "model.pt").exists()


def test_the_guide_has_every_setting_with_its_default_and_every_statistic():
    guide = GUIDE.read_text()
    for field in fields(FP16TrainingConfig):
        (row,) = (row for row in guide.splitlines() if re.match(rf"\| [^|]*`{field.name}`[^|]* \| [^|]+ \|", row))
        assert f"{field.default:g}" in row if isinstance(field.default, float) else str(field.default) in row
    assert all(f"`{name}`" in guide for name in trainer().get_stats())


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_on_cuda_it_computes_in_16_bits_and_fused_optimizers_skip_on_the_device(dtype, kind):
    data = torch.stack(batches(1)).cuda()[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained = trainer(network().cuda(), of_kind(kind), dtype=dtype, on_cpu=False)
    trained.training_step(data, loss_of)
    before = everything(trained)
    trained.training_step(data * INF, loss_of)
    after, stats = everything(trained), trained.get_stats()
    assert same(before["model"], after["model"]) and same(before["optimizer"], after["optimizer"])
    assert (stats["overflow_steps"], stats["effective_dtype"], stats["device"]) == (1, dtype, "cuda")
    assert math.isfinite(trained.training_step(data, loss_of).item()) and not trained.skipped
