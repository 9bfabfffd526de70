"""Every release, patched, trains the sanity task in fp16 by its own ``main_ppo``: Ray, FSDP on gloo, and as rollout
vLLM's CPU build or, before 0.7.1, HuggingFace's generate. FlowRL trains where verl has a registry of trainers.

``make e2e-releases``, or one release:  ``pytest -m slow tests/e2e/test_releases.py -k 0.8.0``
"""

import json
import math
import subprocess
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import hydra
import pytest
from processes import run_to_end
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import matrix
from lib.files import write_json
from lib.patches.apply import apply
from lib.patches.releases import Release, load_releases
from lib.patches.wheels import unpacked_wheel
from lib.paths import CONFIGS, REPO
from lib.run.folder import TRACKER
from lib.run.job import CPU_PLATFORM, MODULES
from lib.run.log import reports

RESULTS = REPO / "tests/expected/releases-e2e.json"
STEPS = 2
SCALE = 1024.0  # the first loss scale
LEGACY = {  # recipes/cpu/legacy.py in Ray's processes and in those that vLLM starts
    "RAY_RUNTIME_ENV_HOOK": "recipes.cpu.legacy.runtime_env_hook",
    MODULES: "recipes.cpu.legacy",
    "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 16, "GPU": 1}),
}


class Route(NamedTuple):
    """A way to train a release without a GPU; ``bf16`` is the measured mean difference of probabilities in bf16."""

    rollout: str
    venv: str
    finds_the_cpu: dict[str, str]
    configuration: str
    bf16: float


def route(release: Release) -> Route:
    """Return the release's route: vLLM's CPU build where the release supports it, else HuggingFace's generate."""
    if "cpu" in release.dependencies:
        cpu, configuration = (CPU_PLATFORM, "+device=cpu") if release.has("platforms") else (LEGACY, "+releases=vllm")
        return Route("vLLM's CPU build", ".venv", cpu, configuration, bf16=3e-4)
    # Samples from the actor itself, by autocast, or from a copy in 16 bits.
    bf16 = 3e-4 if release.has("hf_rollout") else 7e-5
    configuration = "+releases=hf" if release.has("sync_rollout") else "+releases=hf_server"
    return Route("HuggingFace's generate", ".venv-workers", LEGACY, configuration, bf16)


RELEASES = load_releases()
ROUTES = {name: route(release) for name, release in RELEASES.items()}
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
    """The sanity task's model and data, saved by the older transformers, whose tokenizer files newer ones can read."""
    folder = REPO / ".cache" / "arithmetic-workers"
    prepare = [REPO / ".venv-workers/bin/python", "-m", "recipes.arithmetic.prepare", "--out", folder, "--seed", "1"]
    subprocess.run(prepare, cwd=REPO, check=True)
    return folder


def overrides(release: str, task: Path, out: Path, steps: int, recipe: str | None = None) -> list[str]:
    """Return overrides of the release's own configuration: the sanity task in fp16, a small batch, a scale that doubles
    every step."""
    batch = {
        "data.train_batch_size": 8,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 32,
        "actor_rollout_ref.actor.fsdp_config.grad_scaler.init_scale": SCALE,
        "actor_rollout_ref.actor.fsdp_config.grad_scaler.growth_interval": 1,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 64,
    }
    run = {
        "data.train_files": task / "train.parquet",
        "data.val_files": task / "val.parquet",
        "actor_rollout_ref.model.path": task / "model",
        "trainer.total_training_steps": steps,
        "trainer.save_freq": steps,
        "trainer.logger": "[console,tensorboard]",
        "trainer.default_local_dir": out / "checkpoints",
        "hydra.run.dir": out,
    }
    groups = [f"hydra.searchpath=[file://{CONFIGS}]", "+experiment=arithmetic", "+algo=grpo"]
    groups += [ROUTES[release].configuration, *([f"+recipe={recipe}"] if recipe else []), "+precision=fp16"]
    return groups + [f"{key}={value}" for key, value in (batch | run).items()]


def train(
    release: str, tree: Path, task: Path, out: Path, steps: int, recipe: str | None = None
) -> tuple[dict[str, list[float]], list[dict]]:
    """Run ``main_ppo`` of the verl in ``tree`` up to ``steps``, resuming from ``out`` if possible.

    Returns:
        Its metrics, with a value for each step of this run, and the reports of its workers.
    """
    route, metrics = ROUTES[release], out / f"metrics-{steps}"
    environment = route.finds_the_cpu | {
        "PYTHONPATH": f"{tree}:{REPO}",
        "TENSORBOARD_DIR": str(metrics),  # the only logger of every release that does not round
        "RAY_DEDUP_LOGS": "0",  # else Ray drops the workers' lines, which differ only in the rank
        "RAY_USAGE_STATS_ENABLED": "0",
        "HYDRA_FULL_ERROR": "1",
    }
    if recipe:
        environment[MODULES] += f",recipes.{recipe}.trainer"
    words = overrides(release, task, out, steps, recipe)
    command = [REPO / route.venv / "bin/python", "-m", "verl.trainer.main_ppo", *words]
    lines = run_to_end(command, environment, out, out / "train.log")
    events = EventAccumulator(str(metrics)).Reload()
    tags = METRICS | (FLOWRL if recipe else {})
    return {name: [event.value for event in events.Scalars(tag)] for name, tag in tags.items()}, reports(lines)


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


def record(release: str, facts: dict) -> None:
    """Add ``facts`` to the results of the release."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[release] = known.get(release, {}) | facts
    write_json(RESULTS, {name: known[name] for name in ROUTES if name in known})


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
        config = hydra.compose("ppo_trainer", overrides=overrides(release, tmp_path, tmp_path, STEPS))
    later = config.get("reward", {}).get("reward_manager") is not None  # where the release reads the reward
    reward = (config.reward if later else config).custom_reward_function
    assert reward.name == "compute_score"
    rollout = config.actor_rollout_ref.rollout
    assert rollout.calculate_log_probs and rollout.dtype == "float16"
