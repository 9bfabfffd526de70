"""List the steps of the verification, by stage: what each runs, and which of its results the report contains."""

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from verl_precision.facts.metrics import PROBS_DIFF, SECONDS, metric_mean, metric_values, training_rows
from verl_precision.facts.packages import package_folder
from verl_precision.files import read_jsonl
from verl_precision.paths import ARITHMETIC, PROGRAM, REPO
from verl_precision.run.job import parse_job
from verl_precision.run.presets import fit_to_gpus
from verl_precision.spelling import as_options
from verl_precision.verify.step import Command, Step, VerifiedDevice
from verl_precision.words import options

STAGES = {
    "machine": "Machine",
    "numerics": "Numerics and faults",
    "job": "Jobs",
    "probe": "Mismatch before training",
    "cost": "Cost",
    "amp": "AMP outside verl",
}
REGIMES = ("fp16", "bf16", "bf16_train_fp16_infer")
VERL = ("torch", "verl", "hydra", "transformers", "tensordict")
JOB = (*VERL, "ray", "vllm")
PARTS = ("optimizer", "layers", "training")  # of the command bench
LENGTHS = (128, 1024)  # tokens of the long answers, on a CPU a sixteenth
LONG_JOBS = [*((max(LENGTHS), regime) for regime in REGIMES), *((min(LENGTHS), regime) for regime in REGIMES[:2])]
WARM = 2  # steps of a job that are not timed: kernels are loaded and compiled


def program(name: str, *words: str | Path) -> Command:
    return [*PROGRAM, name, *words]


def module(name: str, *words: str | Path) -> Command:
    return [sys.executable, "-m", name, *words]


def report(out: Path) -> dict[str, Any]:
    """Return a program's own Markdown report."""
    (file,) = out.glob("*.md")
    return {"report": file.read_text()}


def read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


# --- machine ----------------------------------------------------------------------------------------------------------


def hardware(target: VerifiedDevice, out: Path) -> list[Command]:
    return [module("verl_precision.verify.hardware", target.device, out / "hardware.json")]


def doctor(target: VerifiedDevice, out: Path) -> list[Command]:
    job, _ = fit_to_gpus(replace(parse_job([f"DEVICE={target.device}", f"OUT={out / 'run'}"]), cluster=None))
    overrides = job.overrides(out / "run")
    return [["bash", "-c", 'exec "$@" > "$0"', out / "doctor.json", *program("doctor", "--json", *overrides)]]


def diagnosis(out: Path) -> dict[str, Any]:
    found = read_json(out / "doctor.json")
    return {"verdict": found["verdict"], "sentence": found["sentence"].replace(f"{REPO}/", "")}


# --- numerics ---------------------------------------------------------------------------------------------------------


def tests(file: str) -> Callable[[VerifiedDevice, Path], list[Command]]:
    """Return the command of a test file on the device, with the installed verl."""

    def command(target: VerifiedDevice, out: Path) -> list[Command]:
        words = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", f"--device={target.device}", f"--basetemp={out}/tmp"]
        if verl := package_folder("verl"):
            (out / "installed").mkdir()
            (out / "installed/verl").symlink_to(verl)
            words.append(f"--verl-tree={out / 'installed'}")
        return [module("pytest", *words, f"--junitxml={out / 'junit.xml'}", f"tests/engine/{file}")]

    return command


def outcomes(out: Path) -> dict[str, Any]:
    """Return the tests by name with their outcome, and the properties that they recorded."""
    found: dict[str, Any] = {}
    for case in ElementTree.parse(out / "junit.xml").iter("testcase"):
        outcome = next((each.tag for each in case if each.tag in ("skipped", "failure", "error")), "passed")
        found[case.get("name")] = {"outcome": outcome} | {
            each.get("name"): json.loads(each.get("value")) for each in case.iter("property")
        }
    return {"tests": found}


# --- jobs -------------------------------------------------------------------------------------------------------------

# One GPU and few CPUs: what configs/device/cpu.yaml sets for the same reasons, and no checkpoints in a step's time.
ONE_GPU = {
    "ray_kwargs.ray_init.num_cpus": 16,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "actor_rollout_ref.rollout.agent.num_workers": 1,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.3,
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": 256,
    "reward.num_workers": 1,
    "trainer.v1.sampler.custom_sampler.path": "pkg://recipes.cpu.replay_buffer",
    "trainer.v1.sampler.custom_sampler.name": "QuickReplayBuffer",
    "trainer.save_freq": -1,
}


def train(target: VerifiedDevice, out: Path, settings: dict[str, Any], **words: object) -> Command:
    """Return the command of a run on the target's device."""
    settings = ({} if target.small else ONE_GPU) | settings
    words |= {"DEVICE": target.device, "OUT": out / "run"}
    words |= {"ARGS": " ".join(f"{key}={value}" for key, value in settings.items())} if settings else {}
    return program("run", *as_options({name: str(value) for name, value in words.items()}))


def job(regime: str) -> Callable[[VerifiedDevice, Path], list[Command]]:
    """Return the command that trains on the sanity task."""
    return lambda target, out: [train(target, out, {}, PRECISION=regime, **({"STEPS": 2} if target.small else {}))]


def long_job(answer: int, regime: str) -> Callable[[VerifiedDevice, Path], list[Command]]:
    """Return the commands that train a model of 99 M parameters and random weights on answers of ``answer`` tokens."""

    def command(target: VerifiedDevice, out: Path) -> list[Command]:
        length, batch, samples, tiny = (answer // 16, 4, 2, ["tiny"]) if target.small else (answer, 8, 4, [])
        settings = {
            "data.max_response_length": length,
            "data.train_batch_size": batch,
            "actor_rollout_ref.actor.ppo_mini_batch_size": batch,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": batch * samples // 4,
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": batch * samples // 4,
            "actor_rollout_ref.rollout.n": samples,
            "actor_rollout_ref.rollout.ignore_eos": "true",
            "actor_rollout_ref.actor.optim.lr": 1e-5,
        }
        words = {"PRECISION": regime, "EXPERIMENT": "arithmetic", "STEPS": 2 if target.small else 6}
        words |= {"MODEL": out / "model", "TRAIN": ARITHMETIC / "train.parquet"}
        return [
            module("recipes.arithmetic.prepare", "--task", "addition", "--out", ARITHMETIC, "--seed", "1"),
            module("verl_precision.verify.long_model", str(length), out / "model", *tiny),
            train(target, out, settings, **words),
        ]

    return command


def trained(out: Path) -> dict[str, Any]:
    """Return a run's medians over the steps, and what its summary has of them."""
    data = training_rows(read_jsonl(out / "run/metrics.jsonl"))
    summary = read_json(out / "run/summary.json")
    timed = data[WARM:] or data
    return {
        "steps": len(data),
        "s_per_step": median(metric_values(timed, SECONDS)),
        "k3": summary["k3_kl_median"],
        "probs_diff": median(metric_values(data, PROBS_DIFF)),
        "answer_tokens": metric_mean(data, "response_length/mean"),
        "reward_first": summary["reward_first"],
        "reward_last": summary["reward_last"],
        "memory_gib": max(metric_values(data, "actor/perf/max_memory_allocated_gb"), default=None),
        "skipped_steps": summary["skipped_steps"],
        "loss_scale": summary["loss_scale"],
        "dtypes": summary["effective_dtypes"],
    }


# --- probe, cost, AMP -------------------------------------------------------------------------------------------------


def probe(target: VerifiedDevice, out: Path) -> list[Command]:
    regimes = "fp16 bf16" if target.small else " ".join(options("precision")) if target.bf16 else "fp16 fp32"
    values = {"DEVICE": target.device, "PRECISION": regimes, "WIRE": "fp32", "HEAD": "none", "BACKEND": "vllm"}
    values |= {"ROWS": "4", "SAMPLES": "2", "LENGTH": "16"} if target.small else {}
    return [program("probe", *as_options(values | {"OUT": str(out)}))]


def benchmark(name: str, *words: str) -> Callable[[VerifiedDevice, Path], list[Command]]:
    """Return the command of a benchmark. Each part of bench is a step, so that one that fails leaves the others."""

    def command(target: VerifiedDevice, out: Path) -> list[Command]:
        size = ["--size", "small"] if target.small else []
        return [program(name, "--device", target.device, *size, *words, "--out", out)]

    return command


STEPS = (
    Step("machine", "hardware", ("torch",), hardware, lambda out: read_json(out / "hardware.json")),
    Step("machine", "doctor", ("torch", "verl", "hydra"), doctor, diagnosis),
    Step("numerics", "scaler", ("torch", "pytest", "xdist"), tests("test_scaler.py"), outcomes),
    Step("numerics", "engine", (*VERL, "pytest", "xdist"), tests("test_on_device.py"), outcomes),
    *(Step("job", f"sanity-{regime}", JOB, job(regime), trained, bf16="bf16" in regime) for regime in REGIMES),
    *(
        Step("job", f"long{length}-{regime}", JOB, long_job(length, regime), trained, bf16="bf16" in regime)
        for length, regime in LONG_JOBS
    ),
    Step("probe", "probe", JOB, probe, report),
    *(Step("cost", part, VERL, benchmark("bench", "--only", part), report) for part in PARTS),
    Step("amp", "bench-amp", ("torch", "gymnasium"), benchmark("bench-amp"), report),
)
