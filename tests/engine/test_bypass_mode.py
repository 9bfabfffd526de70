"""The mismatch of rollout and trainer: the share of equal log-probabilities, and bypass mode, which computes only one.

tests/e2e/test_resume.py trains in bypass mode with and without the measurement, on the same rollouts.
"""

import ast
import logging
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import hydra
import mismatch
import pytest
import torch
from mismatch import equal_share, measures_mismatch
from omegaconf import OmegaConf
from support.selected import every_release
from support.trees import patched_tree
from weight_sync import check_weight_sync

from verl import DataProto
from verl.trainer.ppo import rollout_corr_helper
from verl.trainer.ppo.core_algos import agg_loss
from verl_precision.patch.releases import VERL

SHARE = "training/rollout_logprobs_equal_share"
MEASURED = {SHARE, "training/rollout_probs_diff_mean", "rollout_corr/k3_kl", "training/weight_sync_diff"}


def trainer_of(config, step: int, base: bool) -> SimpleNamespace:
    """Return a trainer whose workers compute log-probabilities of -2, but only in its base class's method.

    Args:
        base: whether another method, as fully_async's, overrides the base class's.
    """

    def compute(batch: DataProto):
        assert "old_log_probs" not in batch.batch, "a copy, or the union would fail"
        like = batch.batch["rollout_log_probs"]
        tensors = {"old_log_probs": torch.full_like(like, -2.0), "entropys": torch.ones_like(like)}
        return DataProto.from_dict(tensors, meta_info={"temperature": 1.0}), 0.5

    def overriding(batch: DataProto):
        raise AssertionError("computes with the weights of another step")

    workers = SimpleNamespace(compute_log_prob=lambda batch: compute(batch)[0])
    chosen = overriding if base else compute
    trainer = SimpleNamespace(config=config, global_steps=step, _compute_old_log_prob=chosen, actor_rollout_wg=workers)
    trainer.base = SimpleNamespace(_compute_old_log_prob=compute)
    return trainer


def log_prob_step(file: Path) -> ast.Module:
    """Return the statements of a trainer's loop that set ``old_log_probs``."""
    tree = ast.parse(file.read_text())
    for body in (node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list)):
        texts = [ast.unparse(each) for each in body]
        ends = [place for place, text in enumerate(texts) if text.startswith("assert 'old_log_probs' in batch.batch")]
        if ends:
            start = next(place for place, text in enumerate(texts) if text.startswith("rollout_corr_config = "))
            return ast.Module(body[start : ends[0] + 1], [])
    raise AssertionError(f"{file}: no step computes old_log_probs")


def in_bypass_mode(file: Path, config, step: int) -> tuple[DataProto, dict]:
    """Run a trainer's step on a batch of two equal and two unequal log-probabilities; return batch and metrics."""
    rows = {"rollout_log_probs": torch.tensor([[-2.0, -2.0, -2.0625, -9.0], [-1.75, -9.0, -9.0, -9.0]])}
    rows["response_mask"] = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    rows["responses"] = rows["response_mask"].clone()
    batch, metrics = DataProto.from_dict(rows, meta_info={"a": 1}), {}
    trainer = trainer_of(config, step, base="separation" in str(file))
    names = {name: getattr(mismatch, name) for name in mismatch.__all__} | {"super": lambda: trainer.base}
    names |= {"self": trainer, "batch": batch, "metrics": metrics, "timing_raw": {}, "agg_loss": agg_loss}
    names |= {"marked_timer": lambda *_, **__: nullcontext(), "check_weight_sync": check_weight_sync}
    exec(compile(log_prob_step(file), str(file), "exec"), names)
    assert names["batch"] is batch and set(batch.batch.keys()) == {*rows, "old_log_probs"}
    assert batch.meta_info == {"a": 1} and torch.equal(batch.batch["old_log_probs"], rows["rollout_log_probs"])
    return batch, metrics


@pytest.mark.parametrize("release", every_release(VERL))
def test_bypass_mode_is_measured_for_the_metrics_alone(release, tmp_path, pytestconfig, monkeypatch):
    tree = patched_tree(release, tmp_path, pytestconfig.getoption("verl_tree"))
    trainers = [*(tree / "verl").rglob("ppo/ray_trainer.py"), *(tree / "verl").rglob("separation/ray_trainer.py")]
    trainers = [file for file in trainers if "bypass_mode" in file.read_text()]
    with hydra.initialize_config_dir(config_dir=str(tree / "verl/trainer/config"), version_base=None):
        config = hydra.compose("ppo_trainer", overrides=["actor_rollout_ref.rollout.name=vllm"])
    assert bool(trainers) == ("mismatch_freq" in config.trainer)
    monkeypatch.setattr(rollout_corr_helper, "apply_rollout_correction", rollout_corr_helper.apply_bypass_mode, False)
    for file in trainers:
        assert config.trainer.mismatch_freq == -1
        OmegaConf.update(config, "algorithm.rollout_correction.bypass_mode", True, force_add=True)
        _, metrics = in_bypass_mode(file, config, step=1)
        assert metrics == {}
        measuring = OmegaConf.merge(config, {"trainer": {"mismatch_freq": 2}})  # requests a precision
        _, metrics = in_bypass_mode(file, measuring, step=1)
        assert set(metrics) >= MEASURED and metrics[SHARE] == 0.5
        assert metrics["training/weight_sync_diff"] == 0.078125
        assert metrics["rollout_corr/kl"] == 0.046875, "the mean of the rollout's minus the trainer's"
    for file in (tree / "verl").rglob("v1/trainer_base.py"):  # the job of tests/e2e runs that of the newest release
        assert file.read_text().count("measures_mismatch(self)") == 1


def test_equal_share_counts_bits_of_response_tokens():
    trained = torch.tensor([[-1.0, -2.0, -3.0, -4.0]])
    sampled = torch.nextafter(trained, torch.tensor([0.0, -9.0, -3.0, 0.0]))
    assert equal_share(trained, sampled, torch.tensor([[True, True, True, False]])) == {SHARE: 1 / 3}
    assert equal_share(trained.bfloat16(), trained, torch.ones(1, 4, dtype=torch.bool)) == {SHARE: 1.0}
    many = torch.zeros(1, 2**25)
    assert equal_share(many, many + (torch.arange(2**25) == 0), many == 0)[SHARE] < 1, "fp32 would round it to 1"


@pytest.mark.parametrize(("freq", "measured"), [(-1, []), (0, []), (1, [5, 6, 7, 8, 9]), (3, [5, 6, 9])])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_first_batch_and_every_nth_step_are_measured(freq, measured, dtype, caplog):
    roles = {"rollout": {"dtype": dtype}}
    config = OmegaConf.create({"trainer": {"mismatch_freq": freq}, "actor_rollout_ref": roles})
    trainer = SimpleNamespace(config=config)
    with caplog.at_level(logging.WARNING):
        steps = [step for step in range(5, 10) if setattr(trainer, "global_steps", step) or measures_mismatch(trainer)]
    assert steps == measured, "of a run that resumes after step 4"
    warned = freq <= 0 and dtype == "float16"
    assert caplog.text.count("trainer.mismatch_freq=N") == warned, (
        "once, where a precision is requested but not measured"
    )
