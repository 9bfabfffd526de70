"""Checkpoints of the trainer: a resumed run is the uninterrupted one, and an invalid file is refused whole."""

import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from amp_trainer_cases import ADAMW_KINDS, INF, NAN, adamw, batches, loss_of, network, same_bits, snapshot, trainer

from recipes.amp.checkpoint import InvalidCheckpointError
from recipes.amp.trainer import FP16Trainer


@pytest.mark.parametrize("kind", ADAMW_KINDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_resumed_run_equals_uninterrupted_run_bit_for_bit(dtype, kind, tmp_path):
    """Through an overflow and a scale that grows, on both sides of the checkpoint, which comes right after a skip."""

    def run(on: FP16Trainer, part: list[torch.Tensor]) -> list[float]:
        return [on.training_step(batch, loss_of).item() for batch in part]

    data = batches(16)
    for place in (3, 8, 11):
        data[place] = data[place] * INF
    make = lambda seed: trainer(network(seed), adamw(kind), dtype=dtype, growth_interval=4)
    straight, first, second = make(0), make(0), make(1)
    losses = run(straight, data)
    part = run(first, data[:9])
    first.save_checkpoint(tmp_path / "half.pt", {"epoch": 9})
    assert second.load_checkpoint(tmp_path / "half.pt") == {"epoch": 9}
    assert same_bits(snapshot(first), snapshot(second)) and second.consecutive_skips == 1
    assert np.array_equal(losses, part + run(second, data[9:]), equal_nan=True)
    assert same_bits(snapshot(straight), snapshot(second))
    assert straight.overflow_steps == 3
    assert [path.name for path in tmp_path.iterdir()] == ["half.pt"]


def test_checkpoint_contains_provenance(tmp_path):
    trained = trainer()
    trained.training_step(batches(1)[0], loss_of)
    trained.save_checkpoint(tmp_path / "a.pt")
    provenance = torch.load(tmp_path / "a.pt", weights_only=True)["provenance"]
    assert provenance["config"]["dtype"] == "float16" and provenance["torch"] == torch.__version__
    assert provenance["stats"]["effective_dtype"] == "float16"


def test_optimizer_implementation_stays_the_trainers(tmp_path):
    """The implementation that a checkpoint restores would not fit the scaler's way of skipping."""
    for one, other in (("fused", "foreach"), ("foreach", "fused")):
        saving, loading = trainer(make=adamw(one)), trainer(network(1), make=adamw(other), lr=1.0)
        for batch in batches(2):
            saving.training_step(batch, loss_of)
        saving.save_checkpoint(tmp_path / "a.pt")
        loading.load_checkpoint(tmp_path / "a.pt")
        (group,) = loading.optimizer.param_groups
        assert group[other] and not group[one] and group["lr"] == 1e-2
        loading.training_step(batches(1)[0], loss_of)
        loading.training_step(batches(1)[0] * INF, loss_of)
        assert (loading.training_steps, loading.overflow_steps) == (4, 1)


def test_checkpoint_during_accumulation_restarts_the_update(tmp_path):
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
    assert same_bits(snapshot(trained), snapshot(fresh)) and trained.training_steps == 1


def test_checkpoint_without_loss_scale_loads_with_a_warning(tmp_path):
    full, half = trainer(dtype="float32"), trainer(network(1))
    for each in (full, half):
        each.training_step(batches(1)[0], loss_of)
    full.save_checkpoint(tmp_path / "fp32.pt")
    half.save_checkpoint(tmp_path / "fp16.pt")
    with pytest.warns(UserWarning, match="fp32.pt holds no loss scale: starting at 1024"):
        half.load_checkpoint(tmp_path / "fp32.pt")
    assert same_bits(half.module.state_dict(), full.module.state_dict())
    with pytest.warns(UserWarning, match="fp16.pt holds a loss scale, which this run does not use"):
        full.load_checkpoint(tmp_path / "fp16.pt")
    old = torch.load(tmp_path / "fp32.pt", weights_only=True)
    torch.save({key: old[key] for key in ("model", "optimizer")}, tmp_path / "old.pt")  # of another trainer
    with pytest.warns(UserWarning, match="old.pt holds no loss scale"):
        assert half.load_checkpoint(tmp_path / "old.pt") == {}
    assert half.training_steps == 0


def test_extra_round_trips(tmp_path):
    trained = trainer()
    extra = {"rng": torch.get_rng_state(), "epoch": 3, "best": None, "returns": [1.0, (2, "x")], 5: OrderedDict(a=b"b")}
    extra["schedule"] = torch.optim.lr_scheduler.MultiStepLR(trained.optimizer, [1, 2]).state_dict()
    trained.save_checkpoint(tmp_path / "a.pt", extra)
    assert same_bits(trained.load_checkpoint(tmp_path / "a.pt"), extra)


@pytest.mark.parametrize("value, named", [(np.float64(1.0), "numpy.float64"), (Path("x"), "pathlib"), (len, "builtin")])
def test_extra_that_torch_cannot_load_is_refused(value, named, tmp_path):
    trained = trainer()
    trained.save_checkpoint(tmp_path / "a.pt", {"epoch": 1})
    with pytest.raises(ValueError, match=rf"extra.returns.1 is of {named}"):
        trained.save_checkpoint(tmp_path / "a.pt", {"returns": [1.0, value]})
    with pytest.raises(ValueError, match=rf"extra.returns \(a key\) is of {named}"):
        trained.save_checkpoint(tmp_path / "a.pt", {"returns": {value: 1.0}})
    assert trained.load_checkpoint(tmp_path / "a.pt") == {"epoch": 1}  # the existing file stays
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_failed_write_leaves_no_file(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        trainer().save_checkpoint(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_interrupted_write_keeps_the_older_checkpoint(tmp_path, monkeypatch):
    trained = trainer()
    trained.save_checkpoint(tmp_path / "a.pt", {"epoch": 1})

    def interrupted(saved: dict, file: Path) -> None:
        Path(file).write_bytes(b"half of it")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", interrupted)
        with pytest.raises(OSError, match="disk full"):
            trained.save_checkpoint(tmp_path / "a.pt", {"epoch": 2})
    assert trained.load_checkpoint(tmp_path / "a.pt") == {"epoch": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def edited(change: Callable[[dict], None]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        change(saved)
        torch.save(saved, path)

    return write


def state_of(saved: dict) -> dict:
    return saved["optimizer"]["state"][0]


INVALID = {
    **{
        f"{share:.0%} of it": (
            lambda path, share=share: path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)]),
            "truncated, or not a checkpoint",
        )
        for share in (0.0, 0.01, 0.5, 0.99)
    },
    "text": (lambda path: path.write_text("epoch,loss\n1,0.5\n"), "truncated, or not a checkpoint"),
    "other text": (lambda path: path.write_text("import torch\n"), "truncated, or not a checkpoint"),
    "a module": (lambda path: torch.save(network(), path), "truncated, or not a checkpoint"),
    "weights alone": (lambda path: torch.save(network().state_dict(), path), "no model or no optimizer"),
    "a number": (lambda path: torch.save(1, path), "no model or no optimizer"),
    "newer": (edited(lambda saved: saved.update(version=2)), "version 2, but this trainer reads up to 1"),
    "odd version": (edited(lambda saved: saved.update(version="1.0")), "version 1.0, but this trainer"),
    "version 0": (edited(lambda saved: saved.update(version=0)), "version 0, but this trainer"),
    **{
        f"{part} that are none": (
            edited(lambda saved, part=part: saved.update({part: None})),
            f"not a checkpoint of this trainer: its {part} is NoneType",
        )
        for part in ("optimizer_of", "counters", "extra")
    },
    "another shape": (
        edited(lambda saved: saved["model"].update({"0.weight": torch.ones(3, 6)})),
        r"of another model: 0.weight has shape \(3, 6\), here \(16, 6\)",
    ),
    "a layer more": (
        edited(lambda saved: saved["model"].update({"4.weight": torch.ones(1)})),
        "of another model: only the checkpoint has 4.weight",
    ),
    "a layer less": (edited(lambda saved: saved["model"].pop("2.bias")), "only this model has 2.bias"),
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
        "of another optimizer: its parameters are in a different order",
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


@pytest.mark.parametrize("case", INVALID)
def test_invalid_checkpoint_is_refused_and_nothing_is_loaded(case, tmp_path):
    write, message = INVALID[case]
    path = tmp_path / "a.pt"
    saving = trainer()
    saving.training_step(batches(1)[0], loss_of)
    saving.save_checkpoint(path)
    write(path)

    trained = trainer(network(1), accumulation_steps=2)
    for batch in batches(3, seed=2):
        trained.training_step(batch, loss_of)
    before, gradient = snapshot(trained), trained.module[0].weight.grad.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(InvalidCheckpointError, match=message) as refused:
            trained.load_checkpoint(path)
    assert str(refused.value).startswith(f"{path}: ") and "\n" not in str(refused.value)
    assert same_bits(before, snapshot(trained)) and torch.equal(gradient, trained.module[0].weight.grad)
    trained.training_step(batches(1)[0], loss_of)  # the second half of the update
    assert trained.training_steps == 2


def test_missing_checkpoint_raises_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.pt"):
        trainer().load_checkpoint(tmp_path / "none.pt")
