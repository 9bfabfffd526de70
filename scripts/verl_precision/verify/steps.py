"""The steps of the verification, by stage: what each runs, and which of its results the report contains."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import IO, Any

from verl_precision.facts.gpus import find_gpus
from verl_precision.facts.metrics import PROBS_DIFF, SECONDS, metric_mean, metric_values, training_rows
from verl_precision.facts.packages import missing_packages, package_folder
from verl_precision.files import read_jsonl
from verl_precision.paths import ARITHMETIC, PROGRAM, REPO, SCRIPTS
from verl_precision.process import start_child
from verl_precision.run.job import parse_job
from verl_precision.run.machine import fit_to_gpus, oldest
from verl_precision.spelling import as_options
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
PARTS = ("optimizer", "training")  # of the command bench
LENGTHS = (128, 1024)  # tokens of the long answers, on a CPU a sixteenth
LONG_JOBS = [*((max(LENGTHS), regime) for regime in REGIMES), *((min(LENGTHS), regime) for regime in REGIMES[:2])]
WARM = 2  # steps of a job that are not timed: kernels are loaded and compiled
Command = list[str | Path]
GRACE_S = 60.0  # for a program to end its children after SIGTERM: the command run ends Ray in half of it
REASON_LINES, KEPT_LINES = 6, 300  # of a failed program's log: in the report, and beside it
# No step needs a network, and none joins a cluster.
OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"), "1")
UNSET = ("RAY_ADDRESS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # vLLM's sleep allows no expandable segments


@dataclass(frozen=True)
class VerifiedDevice:
    """What is verified: a ``device``, "cuda" or "cpu", and the folder ``work`` of the steps' files and logs.

    On a CPU every step is as small as it can be: it tests the step, not the device.
    """

    device: str
    work: Path

    @property
    def small(self) -> bool:
        return self.device == "cpu"

    @property
    def bf16(self) -> bool:
        return self.small or oldest(find_gpus()).bf16


Commands = Callable[[VerifiedDevice, Path], list[Command]]


@dataclass(frozen=True)
class Step:
    """One or more programs, run in turn.

    Attributes:
        stage: what it belongs to.
        needs: the modules that it imports; it is skipped where one of them is not installed.
        commands: returns their command lines, from the target and the folder for what they write.
        values: returns the values for the report, read from that folder, as JSON types.
        bf16: whether it computes in bfloat16; it is skipped on a GPU that emulates it.
        limit_s: the time after which a program has failed, on a GPU; on a CPU ten times as long.
    """

    stage: str
    name: str
    needs: tuple[str, ...]
    commands: Commands
    values: Callable[[Path], dict[str, Any]]
    bf16: bool = False
    limit_s: float = 600.0

    def run(self, target: VerifiedDevice) -> dict[str, Any]:
        """Run the programs and return their result.

        Returns:
            ``status``: passed, failed or skipped; ``seconds``; ``reason`` unless it passed; ``values`` as far as there
            are any; ``files``: the paths of the figures in its folder, and of the end of the log if it failed.
        """
        if missing := missing_packages(self.needs):
            return {"status": "skipped", "reason": f"not installed: {', '.join(missing)}"}
        if self.bf16 and not target.bf16:
            return {"status": "skipped", "reason": "this GPU has no bf16"}
        out = target.work / "verify-gpu" / self.name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        log, limit_s = out.with_suffix(".log"), self.limit_s * (10 if target.small else 1)
        begin, result, reason = time.monotonic(), {}, ""
        try:  # whatever goes wrong in one step, the others run
            with log.open("w") as output:
                codes = (run_to_end(command, output, limit_s) for command in self.commands(target, out))
                code = next((code for code in codes if code != 0), 0)
            reason = f"did not end within {limit_s:g} s" if code is None else f"exit code {code}" if code else ""
            result["values"] = self.values(out)
        except Exception as error:
            reason = reason or f"{type(error).__name__}: {error}"
        result = {"status": "failed" if reason else "passed", "seconds": round(time.monotonic() - begin, 1)} | result
        files = list(out.glob("*.png"))
        if reason:
            lines = log.read_text(errors="replace").splitlines()
            last = [line for line in lines if line.strip()][-REASON_LINES:]
            result["reason"] = "\n".join([f"{reason}; {log.name}", *last])
            end_of_log = out / f"{self.name}.log"
            end_of_log.write_text("\n".join(lines[-KEPT_LINES:]).replace(str(REPO), ".") + "\n")
            files.append(end_of_log)
        return result | {"files": sorted(map(str, files))}


def run_to_end(command: Command, output: IO[str], limit_s: float) -> int | None:
    """Run a program with all its output in a file; return its exit code, None where it was ended at the limit."""
    environment = {name: value for name, value in os.environ.items() if name not in UNSET} | OFFLINE
    path = [str(SCRIPTS), str(REPO), os.environ.get("PYTHONPATH")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONUNBUFFERED": "1"}
    child = start_child(command, REPO, environment, output)
    try:
        return child.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                pass
        try:  # what it leaves in its session
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.wait()


def program(name: str, *words: str | Path) -> Command:
    return [*PROGRAM, name, *words]


def module(name: str, *words: str | Path) -> Command:
    return [sys.executable, "-m", name, *words]


def report(out: Path) -> dict[str, Any]:
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


def tests(target: VerifiedDevice, out: Path, file: str) -> list[Command]:
    """Return the command of a test file on the device, with the installed verl."""
    words = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", f"--device={target.device}", f"--basetemp={out}/tmp"]
    if verl := package_folder("verl"):
        (out / "installed").mkdir()
        (out / "installed/verl").symlink_to(verl)
        words.append(f"--verl-tree={out / 'installed'}")
    return [module("pytest", *words, f"--junitxml={out / 'junit.xml'}", f"tests/engine/{file}")]


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
    "trainer.v1.sampler.custom_sampler.name": "quick_replay_buffer",
    "trainer.save_freq": -1,
}


def train(target: VerifiedDevice, out: Path, settings: dict[str, Any], **words: object) -> Command:
    """Return the command of a run on the target's device."""
    settings = ({} if target.small else ONE_GPU) | settings
    words |= {"DEVICE": target.device, "OUT": out / "run"}
    words |= {"ARGS": " ".join(f"{key}={value}" for key, value in settings.items())} if settings else {}
    return program("run", *as_options({name: str(value) for name, value in words.items()}))


def job(target: VerifiedDevice, out: Path, regime: str) -> list[Command]:
    return [train(target, out, {}, PRECISION=regime, **({"STEPS": 2} if target.small else {}))]


def long_job(target: VerifiedDevice, out: Path, answer: int, regime: str) -> list[Command]:
    """Return the commands that train a model of 99 M parameters and random weights on answers of ``answer`` tokens."""
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
    values = {"DEVICE": target.device, "PRECISION": regimes, "BACKEND": "vllm"}
    values |= {"ROWS": "4", "SAMPLES": "2", "LENGTH": "16"} if target.small else {}
    return [program("probe", *as_options(values | {"OUT": str(out)}))]


def benchmark(target: VerifiedDevice, out: Path, name: str, *words: str) -> list[Command]:
    size = ["--size", "small"] if target.small else []
    return [program(name, "--device", target.device, *size, *words, "--out", out)]


def job_step(name: str, regime: str, commands: Commands) -> Step:
    return Step("job", f"{name}-{regime}", JOB, commands, trained, bf16="bf16" in regime)


def with_words(make: Callable[..., list[Command]], *words: object) -> Commands:
    """Return the function ``make`` of a target and a folder with further arguments."""
    return lambda target, out: make(target, out, *words)


STEPS = (
    Step("machine", "hardware", ("torch",), hardware, lambda out: read_json(out / "hardware.json")),
    Step("machine", "doctor", ("torch", "verl", "hydra"), doctor, diagnosis),
    Step("numerics", "scaler", ("torch", "pytest", "xdist"), with_words(tests, "test_scaler.py"), outcomes),
    Step("numerics", "engine", (*VERL, "pytest", "xdist"), with_words(tests, "test_on_device.py"), outcomes),
    *(job_step("sanity", regime, with_words(job, regime)) for regime in REGIMES),
    *(job_step(f"long{length}", regime, with_words(long_job, length, regime)) for length, regime in LONG_JOBS),
    Step("probe", "probe", JOB, probe, report),
    # Each part of bench is a step, so that one that fails leaves the others.
    *(Step("cost", part, VERL, with_words(benchmark, "bench", "--only", part), report) for part in PARTS),
    Step("amp", "bench-amp", ("torch", "gymnasium"), with_words(benchmark, "bench-amp"), report),
)
