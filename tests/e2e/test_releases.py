"""Every release, patched, trains the sanity task in fp16 by its own ``main_ppo``: Ray, FSDP on gloo, and as rollout
vLLM's CPU build or, before 0.7.1, HuggingFace's generate. FlowRL trains where verl has a registry of trainers.

``make e2e-releases``, or one release:  ``pytest -m slow tests/e2e/test_releases.py -k 0.8.0``
"""

import math
from pathlib import Path
from statistics import fmean

import hydra
import pytest
from release_jobs import RELEASES, ROUTES, overrides, prepare_task, record, run_job
from support import matrix

from verl_precision.patch.apply import apply
from verl_precision.patch.wheels import unpacked_wheel
from verl_precision.run.folder import TRACKER
from verl_precision.run.job import MODULES
from verl_precision.run.log import reports

STEPS = 2
SCALE = 1024.0  # the first loss scale
# The first release of each family of legacy workers; test_resume.py covers the model engine.
RESUMED = {
    release.family: name for name, release in reversed(RELEASES.items()) if release.has("legacy_workers")
}.values()
METRICS = {
    "reward": "critic/score/mean",
    "grad_norm": "actor/grad_norm",
    "loss_scale": "actor/loss_scale",
    "skipped_steps": "actor/skipped_steps",
    "rollout_probs_diff_mean": "training/rollout_probs_diff_mean",
    "weight_sync_diff": "training/weight_sync_diff",
}
FLOWRL = {
    "distinct_right_answers": "flowrl/distinct_right_answers",
    "log_z": "actor/flowrl/log_z",
    "partition_grad_norm": "actor/flowrl/partition_grad_norm",
}


@pytest.fixture(scope="session")
def task() -> Path:
    return prepare_task()


def in_fp16(release: str, task: Path, out: Path, steps: int, recipe: str | None = None) -> list[str]:
    """Return the overrides of a job in fp16, with a scale that doubles every step."""
    scaler = "actor_rollout_ref.actor.fsdp_config.grad_scaler"
    groups = ["+algo=grpo", *([f"+recipe={recipe}"] if recipe else []), "+precision=fp16"]
    groups += [f"{scaler}.init_scale={SCALE}", f"{scaler}.growth_interval=1"]
    return overrides(release, task, out, steps, groups)


def train(
    release: str, tree: Path, task: Path, out: Path, steps: int, recipe: str | None = None
) -> tuple[dict[str, list[float]], list[dict]]:
    """Run ``main_ppo`` of the verl in ``tree`` in fp16 up to ``steps``, resuming from ``out`` if possible.

    Returns:
        Its metrics, with a value for each step of this run, and the reports of its workers.
    """
    modules = {MODULES: f"{ROUTES[release].finds_the_cpu[MODULES]},recipes.{recipe}.trainer"} if recipe else {}
    metrics, lines = run_job(release, tree, in_fp16(release, task, out, steps, recipe), out, str(steps), modules)
    tags = METRICS | (FLOWRL if recipe else {})
    return {name: metrics[tag] for name, tag in tags.items()}, reports(lines)


def measurements(release: str, metrics: dict[str, list[float]], worker_reports: list[dict]) -> dict:
    """Return the facts of a run to record."""
    return {
        "stack": worker_reports[0]["stamp"]["stack"],
        "rollout": ROUTES[release].rollout,
        "steps": STEPS,
        "reward": round(fmean(metrics["reward"]), 3),
        "loss_scale": metrics["loss_scale"][-1],
        "skipped_steps": int(sum(metrics["skipped_steps"])),
        "rollout_probs_diff_mean": float(f"{fmean(metrics['rollout_probs_diff_mean']):.3g}"),
    }


def check(release: str, metrics: dict[str, list[float]], worker_reports: list[dict]) -> dict[str, dict]:
    """Check what every objective has in common. Return the workers' reports by role."""
    assert len(metrics.pop("weight_sync_diff")) == 1, "only the first step is checked"
    assert all(len(values) == STEPS and all(map(math.isfinite, values)) for values in metrics.values()), metrics
    assert metrics["loss_scale"] == [SCALE * 2, SCALE * 4] and metrics["skipped_steps"] == [0.0] * STEPS
    mismatch = metrics["rollout_probs_diff_mean"]
    assert max(mismatch) < ROUTES[release].bf16 / 3, mismatch
    roles = {report["role"]: report for report in worker_reports}
    assert roles["actor"]["compute"] == "float16"
    assert {report["stamp"]["release"] for report in worker_reports} == {release}
    return roles


@pytest.mark.slow
@pytest.mark.parametrize("release", ROUTES)
def test_release_trains_in_fp16(release, task, tmp_path, pytestconfig):
    tree = unpacked_wheel(release, tmp_path / "tree")
    apply(tree, fixes=False)  # the default: nothing of fp16 needs the series fixes
    metrics, worker_reports = train(release, tree, task, tmp_path, STEPS)
    roles = check(release, metrics, worker_reports)
    assert min(metrics["grad_norm"]) > 0 and min(metrics["reward"]) > 0.1, "nothing to learn from"
    assert min(metrics["rollout_probs_diff_mean"]) > 0
    assert (roles["actor"]["master"], roles["actor"]["loss_scaling"]) == ("float32", True)
    if "cpu" in RELEASES[release].dependencies:  # else HuggingFace's generate runs in the recipe or the actor
        assert (roles["rollout"]["wire"], roles["rollout"]["rollout"]) == ("float32", "float16")
    assert (tmp_path / "checkpoints" / TRACKER).read_text() == str(STEPS)
    if release in RESUMED:
        third, _ = train(release, tree, task, tmp_path, STEPS + 1)
        assert third["loss_scale"] == [SCALE * 8], "only step 3, from the scale of step 2"

    if pytestconfig.getoption("write_results"):
        record(release, measurements(release, metrics, worker_reports))


@pytest.mark.slow
@pytest.mark.parametrize("release", [name for name in ROUTES if name not in matrix.WITHOUT_FLOWRL])
def test_flowrl_trains_on_release(release, task, tmp_path, pytestconfig):
    tree = unpacked_wheel(release, tmp_path / "tree")
    apply(tree)
    metrics, worker_reports = train(release, tree, task, tmp_path, STEPS, "flowrl")
    roles = check(release, metrics, worker_reports)
    assert metrics["log_z"][0] == 0 != metrics["log_z"][1], "log Z starts from 0 and is learned"
    assert min(metrics["partition_grad_norm"]) > 0 and min(metrics["distinct_right_answers"]) > 0.1
    assert roles["ref"]["compute"] == "float16"
    assert (tmp_path / f"checkpoints/global_step_{STEPS}/actor/flowrl_partition.pt").exists()

    if pytestconfig.getoption("write_results"):
        facts = {name: float(f"{values[-1]:.3g}") for name, values in metrics.items() if name in FLOWRL}
        record(release, {"flowrl": measurements(release, metrics, worker_reports) | facts})


@pytest.mark.parametrize("release", ROUTES)
def test_configuration_fits_the_release(release, tmp_path):
    tree = unpacked_wheel(release, tmp_path)
    apply(tree)
    with hydra.initialize_config_dir(config_dir=str(tree / "verl/trainer/config"), version_base=None):
        config = hydra.compose("ppo_trainer", overrides=in_fp16(release, tmp_path, tmp_path, STEPS))
    later = config.get("reward", {}).get("reward_manager") is not None  # where the release reads the reward
    reward = (config.reward if later else config).custom_reward_function
    assert reward.name == "compute_score"
    rollout = config.actor_rollout_ref.rollout
    assert rollout.calculate_log_probs and rollout.dtype == "float16"
