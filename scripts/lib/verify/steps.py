"""List the steps of the verification, by stage: what each runs, and which of its results the report contains."""

import csv
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from lib.files import read_jsonl
from lib.paths import ARITHMETIC, REPO
from lib.run.job import parse_job
from lib.run.metrics import K3_KL, LAST, PROBS_DIFF, REWARD, SECONDS, metric_mean, metric_values, training_rows
from lib.verify.step import Command, Step, Target

STAGES = {
    "machine": "Machine",
    "numerics": "Numerics and faults",
    "cost": "Cost",
    "job": "Jobs",
    "probe": "Mismatch before training",
    "amp": "AMP outside verl",
}
REGIMES = ("fp16", "bf16", "bf16_train_fp16_infer")
VERL = ("torch", "verl", "hydra", "transformers", "tensordict")
JOB = (*VERL, "ray", "vllm")
PARTS = ("optimizer", "layers", "training")  # of scripts/bench.py
LENGTHS = (128, 1024)  # tokens of the long answers, on a CPU a sixteenth
LONG_JOBS = [(length, regime) for length in LENGTHS for regime in REGIMES[: 3 if length == max(LENGTHS) else 2]]
WARM = 2  # steps of a job that are not timed: kernels are loaded and compiled


def script(name: str, *words: str | Path) -> Command:
    return [sys.executable, REPO / "scripts" / name, *words]


def module(name: str, *words: str | Path) -> Command:
    return [sys.executable, "-m", name, *words]


def report(pattern: str) -> Callable[[Path], dict[str, Any]]:
    """Return a reader of a program's own Markdown report and of the CSV or JSON of the same name."""

    def read(out: Path) -> dict[str, Any]:
        (file,) = out.glob(f"{pattern}.md")
        found: dict[str, Any] = {"report": file.read_text()}
        if (table := file.with_suffix(".csv")).exists():
            with table.open(newline="") as lines:
                return found | {"rows": list(csv.DictReader(lines))}
        return found | json.loads(file.with_suffix(".json").read_text())

    return read


def content(name: str) -> Callable[[Path], dict[str, Any]]:
    """Return a reader of the JSON file ``name``."""
    return lambda out: json.loads((out / name).read_text())


# --- machine ----------------------------------------------------------------------------------------------------------


def doctor(target: Target, out: Path) -> list[Command]:
    overrides = parse_job([f"DEVICE={target.device}", f"OUT={out / 'run'}"]).overrides(out / "run")
    return [["bash", "-c", 'exec "$@" > "$0"', out / "doctor.json", *script("doctor.py", "--json", *overrides)]]


def diagnosis(out: Path) -> dict[str, Any]:
    found = content("doctor.json")(out)
    return {name: found[name] for name in ("verdict", "sentence")}


# --- numerics ---------------------------------------------------------------------------------------------------------


def tests(file: str) -> Callable[[Target, Path], list[Command]]:
    """Return the command of a test file on the device, with the installed verl."""

    def command(target: Target, out: Path) -> list[Command]:
        words = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", f"--device={target.device}", f"--basetemp={out}/tmp"]
        if spec := find_spec("verl"):
            (out / "installed").mkdir()
            (out / "installed/verl").symlink_to(spec.submodule_search_locations[0])
            words.append(f"--verl-tree={out / 'installed'}")
        return [module("pytest", *words, f"--junitxml={out / 'junit.xml'}", f"tests/engine/{file}")]

    return command


def outcomes(out: Path) -> dict[str, Any]:
    """Return the tests by name with their outcome, and the properties that they recorded."""
    found: dict[str, Any] = {}
    for case in ElementTree.parse(out / "junit.xml").iter("testcase"):
        outcome = "skipped" if case.find("skipped") is not None else "passed"
        found[case.get("name")] = {"outcome": outcome} | {
            each.get("name"): json.loads(each.get("value")) for each in case.iter("property")
        }
    return {"tests": found}


# --- jobs -------------------------------------------------------------------------------------------------------------


def job(regime: str) -> Callable[[Target, Path], list[Command]]:
    """Return the command that trains on the sanity task."""

    def command(target: Target, out: Path) -> list[Command]:
        words = ["STEPS=2"] if target.small else []
        return [script("run.py", f"PRECISION={regime}", f"DEVICE={target.device}", f"OUT={out / 'run'}", *words)]

    return command


def long_job(answer: int, regime: str) -> Callable[[Target, Path], list[Command]]:
    """Return the commands that train a model of 99 M parameters and random weights on answers of ``answer`` tokens."""

    def command(target: Target, out: Path) -> list[Command]:
        length, batch, samples, tiny = (answer // 16, 4, 2, ["--tiny"]) if target.small else (answer, 16, 8, [])
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
        words = {
            "PRECISION": regime,
            "DEVICE": target.device,
            "MODEL": out / "model",
            "TRAIN": ARITHMETIC / "train.parquet",
            "EXPERIMENT": "arithmetic",
            "STEPS": 2 if target.small else 6,
            "OUT": out / "run",
            "ARGS": " ".join(f"{key}={value}" for key, value in settings.items()),
        }
        return [
            module("recipes.arithmetic.prepare", "--task", "addition", "--out", ARITHMETIC, "--seed", "1"),
            module("lib.verify.long_model", str(length), out / "model", *tiny),
            script("run.py", *(f"{name}={value}" for name, value in words.items())),
        ]

    return command


def trained(out: Path) -> dict[str, Any]:
    """Return a run's medians over the steps, and the reward: the mean of the last ``LAST`` steps."""
    data = training_rows(read_jsonl(out / "run/metrics.jsonl"))
    summary = content("run/summary.json")(out)
    timed = data[WARM:] or data
    return {
        "steps": len(data),
        "s_per_step": median(metric_values(timed, SECONDS)),
        "k3": median(metric_values(data, K3_KL)),
        "probs_diff": median(metric_values(data, PROBS_DIFF)),
        "answer_tokens": metric_mean(data, "response_length/mean"),
        "reward_first": metric_mean(data[:1], REWARD),
        "reward_last": metric_mean(data[-LAST:], REWARD),
        "memory_gib": max(metric_values(data, "perf/max_memory_allocated_gb"), default=None),
        "skipped_steps": summary["skipped_steps"],
        "loss_scale": summary["loss_scale"],
        "dtypes": summary["effective_dtypes"],
    }


# --- probe, cost, AMP -------------------------------------------------------------------------------------------------


def probe(target: Target, out: Path) -> list[Command]:
    small = ["ROWS=4", "SAMPLES=2", "LENGTH=16", "PRECISION=fp16 bf16"] if target.small else []
    plain = ["WIRE=fp32", "HEAD=none", "BACKEND=vllm"]
    return [script("probe.py", f"DEVICE={target.device}", *plain, *small, f"OUT={out}")]


def bench(part: str) -> Callable[[Target, Path], list[Command]]:
    """Return the command of one part of the benchmark, so that a part that fails leaves the others."""

    def command(target: Target, out: Path) -> list[Command]:
        size = ["--size", "small"] if target.small else []
        return [script("bench.py", *size, "--only", part, "--out", out)]

    return command


def amp(target: Target, out: Path) -> list[Command]:
    size = ["--size", "small"] if target.small else []
    return [script("bench_amp.py", "--device", target.device, *size, "--out", out)]


STEPS = (
    Step(
        "machine",
        "hardware",
        ("torch",),
        lambda target, out: [module("lib.verify.hardware", target.device, out / "hardware.json")],
        content("hardware.json"),
    ),
    Step("machine", "doctor", ("verl", "hydra"), doctor, diagnosis),
    Step("numerics", "scaler", ("torch", "pytest", "xdist"), tests("test_scaler.py"), outcomes),
    Step("numerics", "engine", (*VERL, "pytest", "xdist"), tests("test_on_device.py"), outcomes),
    *(Step("cost", part, VERL, bench(part), report("cost-*"), ("*.png",)) for part in PARTS),
    *(Step("job", f"sanity-{regime}", JOB, job(regime), trained) for regime in REGIMES),
    *(Step("job", f"long{length}-{regime}", JOB, long_job(length, regime), trained) for length, regime in LONG_JOBS),
    Step("probe", "probe", JOB, probe, report("probe-*"), ("*.png",)),
    Step("amp", "bench-amp", ("torch", "gymnasium"), amp, report("amp-bench-*"), ("*.png",)),
)
