"""Start ``main_ppo`` of any release without a GPU: the route of each, and a small task."""

import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from processes import run_to_end
from support.recorded import changed_entries
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from verl_precision.patch.releases import Release, load_releases
from verl_precision.paths import CONFIGS, REPO
from verl_precision.run.job import CPU_PLATFORM, MODULES

RESULTS = REPO / "tests/expected/releases-e2e.json"
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


def prepare_task() -> Path:
    """Return the sanity task's model and data, saved by the older transformers, whose tokenizer newer ones can read."""
    folder = REPO / ".cache" / "arithmetic-workers"
    prepare = [REPO / ".venv-workers/bin/python", "-m", "recipes.arithmetic.prepare", "--out", folder, "--seed", "1"]
    subprocess.run(prepare, cwd=REPO, check=True)
    return folder


def overrides(release: str, task: Path, out: Path, steps: int, groups: Iterable[str]) -> list[str]:
    """Return overrides of the release's own configuration: ``steps`` of the sanity task with a small batch.

    Args:
        groups: further configs of this repository, and overrides, which win.
    """
    settings = {
        "data.train_batch_size": 8,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 32,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 64,
        "data.train_files": task / "train.parquet",
        "data.val_files": task / "val.parquet",
        "actor_rollout_ref.model.path": task / "model",
        "trainer.total_training_steps": steps,
        "trainer.save_freq": steps,
        "trainer.logger": "[console,tensorboard]",
        "trainer.default_local_dir": out / "checkpoints",
        "hydra.run.dir": out,
    }
    shared = [f"hydra.searchpath=[file://{CONFIGS}]", "+experiment=arithmetic", ROUTES[release].configuration]
    return [*shared, *(f"{key}={value}" for key, value in settings.items()), *groups]


def run_job(
    release: str, tree: Path, words: list[str], out: Path, name: str, variables: Mapping[str, str] | None = None
) -> tuple[dict[str, list[float]], list[str]]:
    """Run ``main_ppo`` of the verl in ``tree`` with these words.

    Args:
        name: of this run in ``out``, where its metrics go.
        variables: of the environment, beside the route's.

    Returns:
        Its metrics by tag, with a value for each step of this run, and the lines of its output.
    """
    route, metrics = ROUTES[release], out / f"metrics-{name}"
    environment = {
        **route.finds_the_cpu,
        "PYTHONPATH": f"{tree}:{REPO}",
        "TENSORBOARD_DIR": str(metrics),  # the only logger of every release that does not round
        "RAY_DEDUP_LOGS": "0",  # else Ray drops the workers' lines, which differ only in the rank
        "RAY_USAGE_STATS_ENABLED": "0",
        "HYDRA_FULL_ERROR": "1",
        **(variables or {}),
    }
    command = [REPO / route.venv / "bin/python", "-m", "verl.trainer.main_ppo", *words]
    lines = run_to_end(command, environment, out, out / f"train-{name}.log")
    events = EventAccumulator(str(metrics)).Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}, lines


def record(release: str, facts: dict) -> None:
    """Add ``facts`` to the results of the release."""
    with changed_entries(RESULTS) as known:
        known[release] = known.get(release, {}) | facts
