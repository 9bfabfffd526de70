"""Every release, patched, trains the sanity task in fp16 by its own ``main_ppo``: Ray, FSDP on gloo, and as rollout
vLLM's CPU build or, before 0.7.1, HuggingFace's generate.

``make test-releases-e2e``, or one release:  ``pytest -m slow tests/e2e/test_releases.py -k 0.8.0``
"""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
from processes import kill, of_this_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lib.job import CONFIGS, CPU_PLATFORM
from lib.releases import find_release, load_releases, unpacked_wheel
from lib.runs import reports, write_json
from lib.stack import apply, load_stack

REPO = Path(__file__).resolve().parents[2]
RESULTS = REPO / "docs/results/releases-e2e.json"
STEPS = 2
HANGS_S = 900
LEGACY = {  # recipes/cpu/legacy.py in Ray's processes and in those that vLLM starts
    "RAY_RUNTIME_ENV_HOOK": "recipes.cpu.legacy.in_every_process",
    "VERL_USE_EXTERNAL_MODULES": "recipes.cpu.legacy",
    "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 16, "GPU": 1}),
}
# Of each release: its environment, how it finds the CPU, its rollout, and the configuration for all three.
VLLM, HF = "vLLM's CPU build", "HuggingFace's generate"
ROUTES = {
    "0.4.1": (".venv-workers", LEGACY, HF, "+releases=hf"),
    "0.5.0": (".venv-workers", LEGACY, HF, "+releases=hf"),
    "0.6.0": (".venv-workers", LEGACY, HF, "+releases=hf"),
    "0.6.1": (".venv-workers", LEGACY, HF, "+releases=hf"),
    "0.7.0": (".venv-workers", LEGACY, HF, "+releases=hf_server"),
    "0.7.1": (".venv", LEGACY, VLLM, "+releases=vllm"),
    "0.8.0": (".venv", LEGACY, VLLM, "+releases=vllm"),
    "0.9.0": (".venv", CPU_PLATFORM, VLLM, "+device=cpu"),
    "0.9.1": (".venv", CPU_PLATFORM, VLLM, "+device=cpu"),
}
METRICS = {
    "reward": "critic/score/mean",
    "grad_norm": "actor/grad_norm",
    "loss_scale": "actor/loss_scale",
    "skipped_steps": "actor/skipped_steps",
    "rollout_probs_diff_mean": "training/rollout_probs_diff_mean",
}


@pytest.fixture(scope="session")
def task() -> Path:
    """The sanity task's model and data, made by the older transformers: the newer ones read their tokenizer too."""
    folder = REPO / ".cache" / "arithmetic-workers"
    prepare = [REPO / ".venv-workers/bin/python", "-m", "recipes.arithmetic.prepare", "--out", folder, "--seed", "1"]
    subprocess.run(prepare, cwd=REPO, check=True)
    return folder


def train(release: str, tree: Path, task: Path, out: Path) -> tuple[dict[str, list[float]], list[dict]]:
    """Run ``main_ppo`` of the verl in ``tree``. Returns its metrics, a value a step, and what its workers reported."""
    venv, finds_the_cpu, _, configuration = ROUTES[release]
    environment = finds_the_cpu | {
        "PYTHONPATH": f"{tree}:{REPO}",
        "TENSORBOARD_DIR": str(out / "metrics"),  # the one logger of every release that does not round
        "VERL_FILE_LOGGER_PATH": str(out / "verl.jsonl"),  # not written: by it of_this_run knows them
        "RAY_DEDUP_LOGS": "0",  # or the workers' lines, which differ in a rank alone, would be dropped
        "RAY_USAGE_STATS_ENABLED": "0",
        "HYDRA_FULL_ERROR": "1",
        "OMP_NUM_THREADS": "1",
    }
    batch = {
        "data.train_batch_size": 8,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 32,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 64,
    }
    run = {
        "data.train_files": task / "train.parquet",
        "data.val_files": task / "val.parquet",
        "actor_rollout_ref.model.path": task / "model",
        "trainer.total_training_steps": STEPS,
        "trainer.save_freq": -1,
        "trainer.logger": "[console,tensorboard]",
        "trainer.default_local_dir": out / "checkpoints",
        "hydra.run.dir": out,
    }
    command = [REPO / venv / "bin/python", "-m", "verl.trainer.main_ppo", f"hydra.searchpath=[file://{CONFIGS}]"]
    command += ["+experiment=arithmetic", "+algo=grpo", configuration, "+precision=fp16"]
    command += [f"{key}={value}" for key, value in (batch | run).items()]
    with (out / "train.log").open("w") as log:
        main = subprocess.Popen(command, cwd=REPO, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            code = main.wait(HANGS_S)
        finally:
            kill(of_this_run(out))
    lines = (out / "train.log").read_text().splitlines()
    assert code == 0, "\n".join(lines[-60:])
    events = EventAccumulator(str(out / "metrics")).Reload()
    return {name: [event.value for event in events.Scalars(tag)] for name, tag in METRICS.items()}, reports(lines)


@pytest.mark.slow
@pytest.mark.parametrize("release", ROUTES)
def test_a_release_trains_in_fp16(release, task, tmp_path, pytestconfig):
    tree = unpacked_wheel(release, tmp_path / "tree")
    apply(tree)
    metrics, told = train(release, tree, task, tmp_path)

    assert all(len(values) == STEPS and all(map(math.isfinite, values)) for values in metrics.values()), metrics
    assert metrics["loss_scale"] == [65536.0] * STEPS and metrics["skipped_steps"] == [0.0] * STEPS
    assert min(metrics["grad_norm"]) > 0 and min(metrics["reward"]) > 0.1, "nothing to learn from"
    # bf16 on both sides is at 3e-4 with this model, and so is each of the mixtures.
    assert 0 < min(metrics["rollout_probs_diff_mean"]) and max(metrics["rollout_probs_diff_mean"]) < 1e-4
    roles = {report["role"]: report for report in told}
    assert (roles["actor"]["compute"], roles["actor"]["master"]) == ("float16", "float32")
    assert roles["actor"]["loss_scaling"] is True
    assert {report["stamp"]["release"] for report in told} == {release}

    if pytestconfig.getoption("write_results"):
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        means = {name: float(f"{sum(values) / STEPS:.3g}") for name, values in metrics.items()}
        known[release] = {"stack": load_stack(find_release(release)).id, "rollout": ROUTES[release][2], **means}
        write_json(RESULTS, {name: known[name] for name in ROUTES if name in known})


def test_every_release_has_a_route():
    assert list(ROUTES) == list(load_releases())
