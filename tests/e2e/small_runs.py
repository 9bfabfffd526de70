"""Start ``verl-precision run`` on the CPU, as ``make run`` does, with batches small enough for a test."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from processes import kill, of_this_run, wait_for
from support.waiting import TIMEOUT_S

from verl_precision.files import read_jsonl
from verl_precision.paths import PROGRAM
from verl_precision.spelling import as_options

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
SCALER = f"{ACTOR}.fsdp_config.grad_scaler"
# vLLM tries out smaller batches when it starts.
SMALL_ENGINE = f"{ROLLOUT}.max_num_batched_tokens=1024 {ROLLOUT}.max_num_seqs=128"
LORA = [
    f"{MODEL}.lora_rank=8",
    f"{MODEL}.target_modules=all-linear",
    # In two steps the policy moves far from the base model, so a rollout without the adapter would be detected.
    f"{ACTOR}.optim.lr=1e-2",
]
FLOWRL_STEPS = 3
FLOWRL = [
    "data.train_batch_size=16",
    f"{ACTOR}.ppo_mini_batch_size=16",
    "algorithm.rollout_correction.rollout_is=token",
    # A loss scale that doubles at every step that is not skipped.
    f"{SCALER}.init_scale=1024",
    f"{SCALER}.growth_interval=1",
    SMALL_ENGINE,
    # vLLM runs its model in the engine's process, which saves one, and the shared memory between the two.
    f"+{ROLLOUT}.engine_kwargs.vllm.distributed_executor_backend=uni",
    '+ray_kwargs.ray_init.runtime_env.env_vars.VLLM_ENABLE_V1_MULTIPROCESSING=\\"0\\"',
]


def small_batch(micro_batch: int = 64) -> list[str]:
    """Return the overrides of a batch of 8 prompts in one update.

    Args:
        micro_batch: responses in a worker's micro-batch.
    """
    return [
        "data.train_batch_size=8",
        f"{ACTOR}.ppo_mini_batch_size=8",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu={micro_batch}",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={micro_batch}",
    ]


@dataclass(frozen=True)
class Run:
    """A run that was started in ``out``.

    Attributes:
        screen: the file with what it prints.
    """

    out: Path
    screen: Path
    process: subprocess.Popen

    @property
    def shown(self) -> str:
        return self.screen.read_text()

    @property
    def processes(self) -> list:
        return of_this_run(self.out)

    @property
    def summary(self) -> dict:
        return json.loads((self.out / "summary.json").read_text())

    @property
    def record(self) -> dict:
        return json.loads((self.out / "run.json").read_text())

    @property
    def metrics(self) -> list[dict]:
        """The rows of its metrics."""
        return read_jsonl(self.out / "metrics.jsonl")

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    @property
    def last_saved(self) -> int:
        """The step of the last whole checkpoint; 0: there is none."""
        file = self.checkpoints / "latest_checkpointed_iteration.txt"
        return int(file.read_text()) if file.exists() else 0

    def wait_for(self, condition: Callable[[], object]) -> None:
        wait_for(condition, self.process, self.screen)

    def kill_when(self, condition: Callable[[], object]) -> None:
        """Kill every process of the run as soon as the condition is true."""
        self.wait_for(condition)
        self.process.send_signal(signal.SIGSTOP)  # or it would tidy up after verl's end
        while left := self.processes:
            kill(left)
        self.process.kill()
        self.process.wait()

    def finish(self, code: int = 0) -> str:
        """Wait for its end with this exit code, and return what it printed."""
        assert self.process.wait(TIMEOUT_S) == code, self.shown
        return self.shown


def start_run(
    out: Path, steps: int, overrides: Iterable[str], *words: str, environment: Mapping[str, str] | None = None
) -> Run:
    """Start a run of ``steps`` steps, with further ``NAME=VALUE`` words and variables of the environment."""
    settings = {"DEVICE": "cpu", "STEPS": str(steps), "OUT": str(out), "ARGS": " ".join(overrides)}
    settings |= {name: value for name, _, value in (word.partition("=") for word in words)}
    command, screen = [*PROGRAM, "run", *as_options(settings)], out.with_suffix(".txt")
    with screen.open("w") as output:
        variables = os.environ | (environment or {})
        return Run(out, screen, subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT))
