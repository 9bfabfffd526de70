"""Run ``main_ppo`` to its end, end it if it cannot continue, and resume it after the loss of a worker or a node."""

import os
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from verl_precision.errors import Refused
from verl_precision.facts.metrics import merge_metrics, training_rows
from verl_precision.files import write_json
from verl_precision.paths import WORK
from verl_precision.process import ignore_signals, interrupt_on_signals, start_child
from verl_precision.run import cluster
from verl_precision.run.cluster_query import NOTICED_S
from verl_precision.run.folder import checkpoint_step
from verl_precision.run.job import Job
from verl_precision.run.log import Death, DeathReader, errors, short
from verl_precision.run.process_tree import SHARED_MEMORY, ProcessTree
from verl_precision.run.progress import RunProgress

if TYPE_CHECKING:
    from omegaconf import DictConfig

POLL_S, MEASURE_S = 0.5, 5
TAIL = 2000  # last lines of the log that are searched for exceptions
DEAD_S = 20  # how long main_ppo may continue after a certain death: verl queries a dead rollout server indefinitely
REJOIN_S = 1800  # how long to wait for nodes that replace lost ones
GAVE_UP = 75  # EX_TEMPFAIL of sysexits.h


class Watchdog:
    """Decides when ``main_ppo`` has gone on for too long after the death of one of its processes."""

    def __init__(self, reader: DeathReader) -> None:
        self.reader, self.death = reader, None
        self.steps, self.since = 0, 0.0  # steps shown at the death, and when it was

    def overdue(self, lines: list[str], progress: RunProgress) -> Death | None:
        """Return the death that makes it necessary to end ``main_ppo`` now, if any; ``lines`` are new in its log."""
        if self.death and progress.shown > self.steps + 1:  # the rollouts of one step may date from before the death
            self.death = None
        death = self.reader.read(lines)
        if death and (not self.death or death.certain > self.death.certain):
            self.death, self.steps, self.since = death, progress.shown, time.monotonic()
        if not self.death or progress.finished:  # at the end, verl's servers may seem to die
            return None
        waited = time.monotonic() - self.since
        return self.death if waited > (DEAD_S if self.death.certain else progress.patience) else None


def train_once(
    command: list[str],
    environment: dict[str, str],
    log: TextIO,
    progress: RunProgress,
    watchdog: Watchdog,
    note: Callable[[float], None],
) -> dict:
    """Run ``main_ppo`` to its end, or end it when this process is interrupted or ``watchdog`` finds it overdue.

    Args:
        note: is called every ``MEASURE_S`` and at the end with the greatest memory so far, in GiB.

    Returns:
        ``code``, the exit code, None if interrupted; ``death``, which made it necessary to end it; the log's ``tail``.
    """
    earlier = set(SHARED_MEMORY.glob("*"))
    process = start_child(command, WORK, os.environ | environment, log)
    tree, tail, rest = ProcessTree(process, earlier), deque(maxlen=TAIL), ""
    code, death, measured = None, None, 0.0
    with open(log.name) as written:
        written.seek(log.tell())
        try:
            while code is None:
                time.sleep(POLL_S)
                code = process.poll()
                *complete, rest = (rest + written.read()).split("\n")
                tail += complete
                progress.update(complete)
                overdue = watchdog.overdue(complete, progress)
                if overdue and code is None and not death:
                    death = overdue
                    tree.alive()  # or its children would have no known parent
                    process.kill()
                if code is None and time.monotonic() - measured > MEASURE_S:
                    tree.measure()
                    note(tree.peak_gib)
                    measured = time.monotonic()
        except KeyboardInterrupt:
            progress.print("interrupted: ending verl, Ray and vLLM")
        finally:
            ignore_signals()
            tree.end()
            note(tree.peak_gib)
    return {"code": code, "death": death, "tail": list(tail)}


def attempt(
    job: Job, out: Path, record: dict, log: TextIO, progress: RunProgress, watchdog: Watchdog
) -> tuple[dict, int]:
    """Train from the last whole checkpoint until ``main_ppo`` ends, and update time and memory in ``record``.

    Returns:
        What ``train_once`` returns, and the last step that a checkpoint or the metrics know.
    """
    begin, spent, peak_gib = checkpoint_step(out), record["wall_s"] - progress.elapsed(), record["peak_memory_gib"]
    earlier = training_rows(merge_metrics(out, upto=begin))
    for name in ("verl.jsonl", "summary.json"):
        (out / name).unlink(missing_ok=True)
    write_json(out / "run.json", record)
    print(f"{f'resuming after step {begin} of' if begin else 'training'} {progress.steps} steps in {out}", flush=True)
    progress.begin(earlier)

    def note(peak: float) -> None:
        """Write the time and memory used so far, because this process may be killed, too."""
        record["wall_s"] = spent + progress.elapsed()
        if not job.cluster:  # processes of other nodes cannot be measured from here
            record["peak_memory_gib"] = max(peak_gib or 0.0, peak)
        write_json(out / "run.json", record)

    result = train_once(job.command(out), job.environment(out), log, progress, watchdog, note)
    return result, max([checkpoint_step(out), *(row["step"] for row in training_rows(merge_metrics(out)))])


def how_it_ended(result: dict, death: Death | None) -> tuple[str, list[str]]:
    """Return how ``main_ppo`` ended, and why: the ``death`` of a process, unless an exception precedes it, and errors.

    Args:
        result: what ``train_once`` returned.
        death: the last one in its log, which may not have made it necessary to end it.
    """
    lines, code = [short(line) for line in result["tail"]], result["code"]
    why = errors(lines)
    if result["death"]:
        return f"ended because {death.cause}", [death.line, *why]
    if death and not (death.line in lines and errors(lines[: lines.index(death.line)])):
        why = [death.line, *why]
    if code >= 0:
        return f"exit code {code}", why
    name = signal.Signals(-code).name  # Popen reports a signal as a negative code
    return f"killed by {name}{', as Linux does when memory runs out (dmesg shows it)' * (name == 'SIGKILL')}", why


def find_loss(job: Job, out: Path, record: dict, lost_worker: str | None) -> str | None:
    """Describe the nodes that a run lost, or else its ``lost_worker``; None if the failure is its own.

    Raises:
        Refused: the head of the cluster does not answer.
    """
    until = time.monotonic() + NOTICED_S
    while job.cluster:
        if gone := cluster.lost_nodes(job, out, record["nodes"]):
            return f"node {', '.join(gone)}"
        if time.monotonic() > until:
            break
    return lost_worker


def train(job: Job, config: "DictConfig", out: Path, record: dict, log: TextIO) -> int:
    """Train to the last step, through the loss of workers and nodes. Show the progress and return the exit code."""
    steps = config.trainer.total_training_steps
    progress = RunProgress(out, steps)
    for left in reversed(range(job.retries + 1)):
        watchdog = Watchdog(DeathReader(shared_ray=job.cluster is not None))
        result, reached = attempt(job, out, record, log, progress, watchdog)
        if result["code"] == 0 and reached >= steps:
            return 0
        saved = checkpoint_step(out)
        again = f"the same command {f'resumes after step {saved}' if saved else 'starts from the beginning'}"
        try:
            if result["code"] is None:
                raise KeyboardInterrupt
            interrupt_on_signals()
            end, why = how_it_ended(result, result["death"] or watchdog.death)
            print(f"failed after step {reached} of {steps}, {end}; all output: {log.name}")
            print("\n".join(f"  {line}" for line in why), flush=True)
            loss = find_loss(job, out, record, watchdog.reader.lost) if job.cluster or job.retries else None
            if not loss:
                return 1
            progress.print(f"lost {loss} after step {reached} of {steps}")
            if not left:
                raise Refused(f"RETRIES={job.retries}: no retry is left")
            if job.cluster:
                record |= cluster.admit(job, config, out, wait_s=REJOIN_S)
        except Refused as refusal:
            progress.print(f"gave up: {refusal}; {again}")
            return GAVE_UP
        except KeyboardInterrupt:
            progress.print(f"ended; {again}")
            return 130
