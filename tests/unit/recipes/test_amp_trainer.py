"""The trainer: updates, skips, and the reported dtype."""

import itertools
import math
import re
import warnings
from dataclasses import fields

import pytest
import torch
from amp_trainer_cases import ADAMW_KINDS, DTYPES, INF, batches, loss_of, network, same_bits, snapshot, train, trainer

from recipes.amp.multiplication_dtypes import MultiplicationDtypes
from recipes.amp.trainer import FP16Trainer, FP16TrainingConfig
from verl.utils.precision import LossScaleError
from verl_precision.paths import REPO

GUIDE = REPO / "docs/how-to/amp.md"
INVALID = {
    "enabled": ["no"],
    "dtype": ["float8", None],
    "loss_scale": [0.0, INF, "65536"],  # growth_factor and the like are checked likewise, by the scaler's config
    "max_grad_norm": [math.nan, "1", True],
    "accumulation_steps": [0, 2.0, True],
}


@pytest.mark.parametrize("key, value", [(key, value) for key, values in INVALID.items() for value in values])
def test_invalid_config_value_is_refused_by_key(key, value):
    with pytest.raises(ValueError) as refused:
        FP16TrainingConfig(**{key: value})
    assert str(refused.value).startswith(f"{key}=") and "\n" not in str(refused.value)
    assert "must be" in str(refused.value) or "choose" in str(refused.value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_step_trains_and_reports_effective_dtype(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained = trainer(dtype=dtype, on_cpu=dtype != "float32", lr=3e-2, growth_interval=20)
    assert trained.get_stats()["effective_dtype"] is None  # no forward has run yet
    losses = [trained.training_step(batches(1)[0], loss_of) for _ in range(60)]
    assert losses[-1] < 0.1 * losses[0] and losses[0].dtype == torch.float32 and not losses[0].requires_grad
    stats = trained.get_stats()
    assert (stats["training_steps"], stats["overflow_steps"], stats["overflow_rate"]) == (60, 0, 0.0)
    assert stats["effective_dtype"] == stats["requested_dtype"] == dtype and stats["fallback"] is None
    assert stats["effective_dtype_share"] == {dtype: 1.0} and stats["loss_scaling"] == (dtype == "float16")
    assert stats["current_scale"] == (8192.0 if dtype == "float16" else 1.0)  # it has grown three times
    assert all(parameter.dtype == torch.float32 for parameter in trained.module.parameters())
    with trained.autocast():
        assert torch._C._len_torch_dispatch_stack() == 0, "only the first region is observed"


@pytest.mark.parametrize("max_norm", [0.25, INF])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulated_update_equals_one_large_batch_in_fp32(dtype, parts, max_norm):
    trained = trainer(make=torch.optim.SGD, lr=1.0, dtype=dtype, accumulation_steps=parts, max_grad_norm=max_norm)
    train(trained, batches(parts))
    plain = network()
    loss_of(plain, torch.cat(batches(parts))).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm).item()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    assert trained.grad_norm == pytest.approx(norm, rel=2e-2) and norm > 0.5
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6}[dtype] * min(norm, max_norm)
    for one, other in zip(trained.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("value", [INF, math.nan])
@pytest.mark.parametrize("bad", [0, 3])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype, kind", [*itertools.product(("float16", "bfloat16"), ADAMW_KINDS), ("float32", "loop")])
def test_overflow_leaves_state_unchanged_and_training_recovers(dtype, kind, device, bad, value):
    """In the first or the last of four micro-batches, whose losses the caller computes."""
    settings = {"dtype": dtype, "accumulation_steps": 4, "on_cpu": device == "cpu"}
    trained, answers = trainer(network().to(device), kind, **settings), []
    clean = [batch.to(device) for batch in batches(4)]
    train(trained, clean)
    before = snapshot(trained)
    for place, batch in enumerate(clean):
        with trained.autocast():
            loss = loss_of(trained.model, batch)
        answers.append(trained.backward_and_step(loss * value if place == bad else loss))
    assert answers == [True, True, True, False] and trained.skipped
    assert same_bits(before["trained"], snapshot(trained)["trained"])
    assert all(parameter.grad is None for parameter in trained.module.parameters())
    stats = trained.get_stats()
    assert (stats["training_steps"], stats["overflow_steps"], stats["overflow_rate"]) == (2, 1, 0.5)
    assert (stats["consecutive_skips"], stats["grad_norm"]) == (1, None)
    assert (stats["effective_dtype"], stats["device"]) == (dtype, device)
    assert stats["current_scale"] == (512.0 if dtype == "float16" else 1.0)
    train(trained, clean)
    assert not trained.skipped and trained.consecutive_skips == 0


@pytest.mark.parametrize("kind", ADAMW_KINDS)
def test_consecutive_overflows_raise_and_the_last_skip_is_counted(kind, tmp_path):
    trained, batch = trainer(make=kind, max_consecutive_skips=3), batches(1)[0]
    train(trained, [batch])
    before = snapshot(trained)
    with pytest.raises(LossScaleError, match="3 optimizer steps in a row .*first non-finite gradient: 0.weight"):
        train(trained, [batch * INF] * 10)
    stats = trained.get_stats()
    assert (stats["training_steps"], stats["overflow_steps"], stats["consecutive_skips"]) == (4, 3, 3)
    assert all(parameter.grad is None for parameter in trained.module.parameters())
    assert same_bits(before["trained"], snapshot(trained)["trained"])

    trained.save_checkpoint(tmp_path / "storm.pt")
    resumed = trainer(make=kind, max_consecutive_skips=3, loss_scale=2048.0)
    with pytest.warns(UserWarning, match="no loss scale: starting at 2048"):  # no scale worked, so none is restored
        resumed.load_checkpoint(tmp_path / "storm.pt")
    assert resumed.consecutive_skips == 0 and resumed.training_steps == 4
    train(resumed, [batch])
    assert not resumed.skipped


def test_consecutive_nonfinite_updates_raise_without_a_scaler():
    trained = trainer(dtype="bfloat16", max_consecutive_skips=2)
    with pytest.raises(FloatingPointError, match=r"2 updates in a row .* bfloat16, first.*0.weight"):
        train(trained, [batches(1)[0] * INF] * 10)
    assert (trained.training_steps, trained.overflow_steps, trained.consecutive_skips) == (2, 2, 2)
    assert all(parameter.grad is None for parameter in trained.module.parameters())


def test_parameters_of_model_and_optimizer_must_be_float32_and_match():
    for enabled in (True, False):
        with pytest.raises(ValueError, match=r"0.weight is float16: the optimizer's weights must be float32"):
            trainer(model=network().half(), enabled=enabled)
    model, other, config = network(), network(1), FP16TrainingConfig(on_cpu=True, loss_scale=1024.0)
    with pytest.raises(ValueError, match="not the model's"):
        FP16Trainer(model, torch.optim.SGD(other.parameters(), lr=0.1), config)
    head = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with pytest.raises(ValueError, match="0.weight requires a gradient and is not in the optimizer"):
        FP16Trainer(model, head, config)
    model[0].requires_grad_(False)
    train(FP16Trainer(model, head, config), batches(1))
    assert torch.equal(model[0].weight, network()[0].weight) and not torch.equal(model[2].weight, network()[2].weight)


def test_recurrent_layers_are_counted_and_shares_weighted_by_operations():
    """Two products a step, of the input and of the state, for each of the gates."""
    for kind, gates in ((torch.nn.LSTM, 4), (torch.nn.GRU, 3)):
        with MultiplicationDtypes() as counted:
            kind(4, 8, batch_first=True)(torch.randn(2, 5, 4))
        assert counted.flops == {"float32": 2 * 2 * 5 * gates * 8 * (4 + 8)}
    # On a GPU a GRU is one operation of cuDNN's; meta tensors suffice to count it.
    shapes = [(5, 2, 4), (24, 4), (24, 8), (24,), (24,), (1, 2, 8)]  # input, weights and biases, state
    given, *weights, state = (torch.empty(shape, dtype=torch.float16, device="meta") for shape in shapes)
    gru, hidden, layers = 3, 8, 1
    with MultiplicationDtypes() as counted:
        torch.ops.aten._cudnn_rnn(
            given, weights, 4, None, state, None, gru, hidden, 0, layers, False, 0.0, True, False, [], None
        )
    assert counted.flops == {"float16": 2 * 2 * 5 * 3 * 8 * (4 + 8)}
    linear = torch.nn.Linear(4, 4)
    with MultiplicationDtypes() as counted:
        linear(torch.ones(1, 4))
        with torch.autocast("cpu", torch.bfloat16):
            linear(torch.ones(3, 4))
    assert counted.shares() == {"bfloat16": 0.75, "float32": 0.25}


def test_quick_start_of_the_guide_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    with pytest.warns(UserWarning, match="on the CPU: training in float32"):
        exec(re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[1], names)
    stats = names["trainer"].get_stats()
    assert (stats["training_steps"], stats["effective_dtype"], stats["requested_dtype"]) == (10, "float32", "float16")
    assert "on the CPU" in stats["fallback"] and not stats["loss_scaling"] and (tmp_path / "model.pt").exists()


def test_guide_lists_every_setting_default_and_statistic():
    guide = GUIDE.read_text()
    for field in fields(FP16TrainingConfig):
        (row,) = (row for row in guide.splitlines() if re.match(rf"\| [^|]*`{field.name}`[^|]* \| [^|]+ \|", row))
        assert f"{field.default:g}" in row if isinstance(field.default, float) else str(field.default) in row
    assert all(f"`{name}`" in guide for name in trainer().get_stats())
