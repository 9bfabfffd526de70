"""Skipped steps are counted, a storm of overflows saves a checkpoint, and rewards of inf or NaN are refused."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from precision import (
    GradScalerConfig,
    LossScaleError,
    StepAccounting,
    check_rewards,
    label_fields,
    save_after_storm,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial


class ReportedEngine(StepAccounting):
    """An engine whose optimizer skips steps, as Megatron's does."""

    cleared = 0

    def optimizer_zero_grad(self):
        self.cleared += 1


def test_a_reported_skip_is_accounted():
    engine, config = ReportedEngine(), GradScalerConfig(max_consecutive_skips=2)
    assert engine.account_reported_step(False, None, 512.0, config) is None
    assert engine.cleared == 1 and not engine.close_update(), "the learning rate advanced"
    assert engine.update_metrics() == {"skipped_steps": 1.0, "loss_scale": 512.0}

    assert engine.account_reported_step(True, 0.5, 512.0, config) == 0.5
    assert engine.account_reported_step(False, None, 256.0, config) is None
    assert engine.close_update() and engine.update_metrics() == {"skipped_steps": 1.0, "loss_scale": 256.0}

    with pytest.raises(LossScaleError, match="2 optimizer steps in a row overflowed .*, loss scale 128"):
        engine.account_reported_step(False, None, 128.0, config)


def test_every_skip_of_an_update_is_counted():
    engine, config = ReportedEngine(), GradScalerConfig(max_consecutive_skips=9)
    for applied in (False, True, False, False):
        engine.account_reported_step(applied, 0.5 if applied else None, 512.0, config)
    assert engine.close_update() and engine.update_metrics() == {"skipped_steps": 3.0, "loss_scale": 512.0}


def account_a_part(rank: int, store: Path) -> None:
    """Account on one of two ranks for a step whose norm overflows on the other."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    part = torch.tensor(1.0 if rank == 0 else math.inf)
    engine = ReportedEngine()
    norm = DTensor.from_local(part, init_device_mesh("cpu", (2,)), [Partial()])
    assert engine.account_step(norm, None) is None and engine.cleared == 1 and not engine.close_update()
    assert engine.update_metrics() == {"skipped_steps": 1.0}
    dist.destroy_process_group()


@pytest.mark.subprocess
def test_norm_that_each_rank_has_a_part_of_counts_the_same_skip_on_all(tmp_path):
    mp.start_processes(account_a_part, (tmp_path / "store",), nprocs=2, start_method="fork")


def test_a_reported_step_without_loss_scaling_is_accounted():
    engine, config = ReportedEngine(), GradScalerConfig()
    assert engine.account_reported_step(True, torch.tensor(0.5), None, config) == 0.5
    assert engine.account_reported_step(True, float("nan"), None, config) is None, "it would make the mean norm NaN"
    assert engine.close_update() and engine.update_metrics() == {"skipped_steps": 0.0}


def test_a_storm_is_saved_and_raised():
    saved = []
    with pytest.raises(LossScaleError, match="the storm"):
        with save_after_storm(lambda: saved.append("storm")):
            raise LossScaleError("the storm")
    with save_after_storm(lambda: saved.append("no error")):
        pass
    assert saved == ["storm"]


@pytest.mark.parametrize("error", [ValueError, RuntimeError, torch.OutOfMemoryError, dist.DistBackendError])
def test_no_other_error_saves_a_checkpoint(error):
    with pytest.raises(error), save_after_storm(lambda: pytest.fail("saved")):
        raise error("no storm")


def test_a_failing_save_does_not_hide_the_storm():
    def save():
        raise OSError("disk full")

    with pytest.raises(LossScaleError, match="the storm") as storm, save_after_storm(save):
        raise LossScaleError("the storm")
    assert "disk full" in str(storm.value.__cause__)


def test_a_storm_in_a_ray_worker_is_saved():
    """Ray raises an error of a class derived from its own and from the worker's."""
    from ray.exceptions import RayTaskError

    error = RayTaskError("update_actor", "the traceback", LossScaleError("the storm"))
    saved = []
    with pytest.raises(LossScaleError), save_after_storm(lambda: saved.append(1)):
        raise error.as_instanceof_cause()
    assert saved == [1]


def test_an_engine_that_accounts_for_nothing_advances_and_reports_nothing():
    """As every engine does without a request for a precision."""
    engine = ReportedEngine()
    for _ in range(2):
        assert engine.close_update() and engine.update_metrics() == {}
    assert not engine.precision.requested and engine.cleared == 0


def run(rollout: str = "bfloat16", **trainer) -> dict:
    """Return the config of a PPO run as far as the check of its rewards reads it."""
    return {"trainer": trainer, "actor_rollout_ref": {"rollout": {"dtype": rollout}}}


@pytest.mark.parametrize(
    ("config", "checked"),
    [
        (run(), False),
        (run(check_rewards=None), False),
        (run(check_rewards=True), True),
        (run("float16"), True),
        (run("float16", check_rewards=None), True),
        (run("float16", check_rewards=False), False),
    ],
    ids=str,
)
def test_rewards_are_checked_where_a_precision_is_requested_or_by_their_key(config, checked):
    assert label_fields(config) == (["data_source"] if checked else [])
    if checked:
        with pytest.raises(ValueError, match="1 of 1 rewards are not finite"):
            check_rewards(config, torch.tensor([[float("nan")]]), {})
    else:
        check_rewards(config, torch.tensor([[float("nan")]]), {})


def test_nonfinite_rewards_are_refused_by_row():
    rewards, config = torch.zeros(5, 3), run(check_rewards=True)
    check_rewards(config, rewards, {})
    rewards[1, 2], rewards[4, 0] = float("nan"), float("-inf")
    labels = {"uid": list("abcde"), "data_source": ["sum"] * 5, "other": [0] * 5}
    with pytest.raises(ValueError) as refusal:
        check_rewards(config, rewards, labels)
    assert str(refusal.value).startswith("2 of 5 rewards are not finite") and "\n" not in str(refusal.value)
    rows = "row 1, data_source=sum, uid=b; row 4, data_source=sum, uid=e"
    assert str(refusal.value).endswith(f"{rows}; trainer.check_rewards=false turns this check off")
    rewards[:] = float("nan")
    with pytest.raises(ValueError, match="5 of 5 .* row 0; row 1; row 2 …; trainer.check"):
        check_rewards(config, rewards, {})
