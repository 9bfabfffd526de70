"""Checkpoints of the trainer: a resumed run is the uninterrupted one, and an invalid file is refused whole."""

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from amp_trainer_cases import ADAMW_KINDS, DTYPES, INF, batches, edited, network, same_bits, snapshot, train, trainer

from recipes.amp.checkpoint import InvalidCheckpointError


@pytest.mark.parametrize("kind", ADAMW_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_resumed_run_equals_uninterrupted_run_bit_for_bit(dtype, kind, tmp_path):
    """Through an overflow and a scale that grows, on both sides of the checkpoint, which comes right after a skip."""
    data = batches(16)
    for place in (3, 8, 11):
        data[place] = data[place] * INF
    straight, first, second = (trainer(network(seed), kind, dtype=dtype, growth_interval=4) for seed in (0, 0, 1))
    losses, part = train(straight, data), train(first, data[:9])
    first.save_checkpoint(tmp_path / "half.pt", {"epoch": 9})
    assert second.load_checkpoint(tmp_path / "half.pt") == {"epoch": 9}
    assert same_bits(snapshot(first), snapshot(second)) and second.consecutive_skips == 1
    assert np.array_equal(losses, part + train(second, data[9:]), equal_nan=True)
    assert same_bits(snapshot(straight), snapshot(second)) and straight.overflow_steps == 3
    provenance = torch.load(tmp_path / "half.pt", weights_only=True)["provenance"]
    assert provenance["config"]["dtype"] == provenance["stats"]["effective_dtype"] == dtype


@pytest.mark.parametrize("one, other", [("fused", "foreach"), ("foreach", "fused")])
def test_optimizer_implementation_stays_the_trainers(one, other, tmp_path):
    """The implementation that a checkpoint restores would not fit the scaler's way of skipping."""
    saving, loading = trainer(make=one), trainer(network(1), make=other, lr=1.0)
    train(saving, batches(2))
    saving.save_checkpoint(tmp_path / "a.pt")
    loading.load_checkpoint(tmp_path / "a.pt")
    (group,) = loading.optimizer.param_groups
    assert group[other] and not group[one] and group["lr"] == 1e-2


def test_checkpoint_during_accumulation_restarts_the_update(tmp_path):
    trained, fresh, data = trainer(accumulation_steps=2), trainer(accumulation_steps=2), batches(3)
    trained.save_checkpoint(tmp_path / "a.pt")
    train(trained, data[:1])
    trained.load_checkpoint(tmp_path / "a.pt")
    train(trained, data[1:])
    train(fresh, data[1:])
    assert same_bits(snapshot(trained), snapshot(fresh)) and trained.training_steps == 1


def test_checkpoint_without_loss_scale_loads_with_a_warning(tmp_path):
    full, half = trainer(dtype="float32"), trainer(network(1))
    for each in (full, half):
        train(each, batches(1))
    full.save_checkpoint(tmp_path / "fp32.pt")
    half.save_checkpoint(tmp_path / "fp16.pt")
    with pytest.warns(UserWarning, match="fp32.pt contains no loss scale: starting at 1024"):
        half.load_checkpoint(tmp_path / "fp32.pt")
    assert same_bits(half.module.state_dict(), full.module.state_dict())
    with pytest.warns(UserWarning, match="fp16.pt contains a loss scale, which this run does not use"):
        full.load_checkpoint(tmp_path / "fp16.pt")
    edited(lambda saved: saved.pop("grad_scaler"))(tmp_path / "fp32.pt")
    with pytest.warns(UserWarning, match="fp32.pt contains no loss scale"):
        half.load_checkpoint(tmp_path / "fp32.pt")


def test_checkpoint_of_a_compiled_model_loads_into_a_plain_one(tmp_path):
    runs = []

    def backend(graph, inputs):
        return lambda *given: runs.append("compiled") or graph(*given)

    trained, plain = trainer(torch.compile(network(), backend=backend)), trainer(network(1))
    train(trained, batches(3))
    assert runs == ["compiled"] * 2  # the first forward is run eagerly, to record its dtypes
    assert trained.get_stats()["effective_dtype"] == "float16"
    trained.save_checkpoint(tmp_path / "compiled.pt")
    plain.load_checkpoint(tmp_path / "compiled.pt")
    assert same_bits(snapshot(plain), snapshot(trained))


@pytest.mark.parametrize("value, named", [(np.float64(1.0), "numpy"), (Path("x"), "pathlib")])
def test_extra_that_torch_cannot_load_is_refused(value, named, tmp_path):
    with pytest.raises(ValueError, match=rf"extra contains {named}.*: save tensors and plain Python values"):
        trainer().save_checkpoint(tmp_path / "a.pt", {"returns": [1.0, value]})
    with pytest.raises(ValueError, match=rf"extra contains {named}"):  # as a key
        trainer().save_checkpoint(tmp_path / "a.pt", {"returns": {value: 1.0}})
    assert not list(tmp_path.iterdir())


def test_interrupted_write_keeps_the_older_checkpoint(tmp_path, monkeypatch):
    trained = trainer()
    trained.save_checkpoint(tmp_path / "a.pt", {"epoch": 1})

    def interrupted(saved: dict, file: Path) -> None:
        file.write_bytes(b"half of it")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", interrupted)
        with pytest.raises(OSError, match="disk full"):
            trained.save_checkpoint(tmp_path / "a.pt", {"epoch": 2})
    assert trained.load_checkpoint(tmp_path / "a.pt") == {"epoch": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
    with pytest.raises(FileNotFoundError, match="none.pt"):
        trained.load_checkpoint(tmp_path / "none.pt")


MODEL, OPTIMIZER, NOT_ONE = "of another model: ", "of another optimizer: ", "truncated, or not a checkpoint"
INVALID = [
    (lambda path: path.write_bytes(b""), NOT_ONE),
    (lambda path: path.write_bytes(path.read_bytes()[:-500]), NOT_ONE),
    (lambda path: path.write_text("epoch,loss\n1,0.5\n"), NOT_ONE),
    (lambda path: torch.save(network(), path), NOT_ONE),
    (lambda path: torch.save(network().state_dict(), path), "it must have model, optimizer, "),
    (edited(lambda saved: saved.update(version=2)), "version 2, but this trainer reads 1"),
    (edited(lambda saved: saved.update(version="1.0")), "version 1.0, but this trainer"),
    (edited(lambda saved: saved.update(counters=None)), "not a checkpoint of this trainer: it must have "),
    (
        edited(lambda saved: saved["model"].update({"0.weight": torch.ones(3, 6)})),
        MODEL + r"0.weight has shape \(3, 6\), here \(16, 6\)",
    ),
    (edited(lambda saved: saved["model"].update(more=torch.ones(1))), MODEL + r"more has shape \(1,\), here None"),
    (edited(lambda saved: saved["model"].pop("2.bias")), MODEL + r"2.bias has shape None, here \(1,\)"),
    (edited(lambda saved: saved["optimizer_of"].update({"class": "SGD"})), OPTIMIZER + "SGD, here AdamW"),
    (edited(lambda saved: saved["optimizer_of"]["groups"][0].reverse()), OPTIMIZER + "its parameters are in a diff"),
    (edited(lambda saved: saved["grad_scaler"].update(backoff_factor=0.5)), "loss scaler state has keys"),
    (edited(lambda saved: saved["grad_scaler"].update(scale=math.nan)), "loss scaler state has scale="),
    (edited(lambda saved: saved["grad_scaler"].update(scale=0.0)), "loss scaler state has scale="),
]


@pytest.mark.parametrize("write, message", INVALID)
def test_invalid_checkpoint_is_refused_and_nothing_is_loaded(write, message, tmp_path):
    saving, trained, path = trainer(), trainer(network(1), accumulation_steps=2), tmp_path / "a.pt"
    train(saving, batches(1))
    saving.save_checkpoint(path)
    write(path)
    train(trained, batches(3, seed=2))
    before, gradient = snapshot(trained), trained.module[0].weight.grad.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(InvalidCheckpointError, match=message) as refused:
            trained.load_checkpoint(path)
    assert str(refused.value).startswith(f"{path}: ") and "\n" not in str(refused.value)
    assert same_bits(before, snapshot(trained)) and torch.equal(gradient, trained.module[0].weight.grad)
    train(trained, batches(1))  # the second half of the update
    assert trained.training_steps == 2
