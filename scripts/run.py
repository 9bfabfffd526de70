"""Train: ``scripts/run.py [NAME=VALUE ...]`` with the variables of ``make run``.

Starts verl's own ``main_ppo`` and shows its progress. Everything goes to the folder OUT, and the same command takes up
a run that was interrupted. With RAY_ADDRESS in the environment it trains on that running Ray cluster, whose nodes prove
what they run before. A run that lost a worker or a node waits until the cluster has again what it needs and goes on
from the last whole checkpoint, RETRIES times; any other failure ends it. Exit code 0: trained all steps; 1: refused or
failed; 75: gave up after a worker or node was lost, so that whoever started it may start it again; 130: interrupted.
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import psutil

from lib.errors import Refused
from lib.files import write_json
from lib.format import duration
from lib.paths import REPO
from lib.run import cluster, machine
from lib.run import folder as runs
from lib.run import job as jobs
from lib.run import log as logs
from lib.run.metrics import SECONDS, merge_metrics, metric_values, training_rows
from lib.run.summary import plot_curves, progress_line, summarize, summary_table

START_UP = {  # what verl's log says, and what begins then
    "ray init kwargs": "Ray and its workers",
    "worker group kwargs": "the trainer's model",
    "reward loop manager initialized": "vLLM",
    "all initialize finished": "the first step",
}
POLL_S, MEASURE_S, HEARTBEAT_S, GRACE_S = 0.5, 5, 20, 15
TAIL = 2000  # lines of the log in which a failure is looked for
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# verl asks a dead server of the rollout for ever: how long main_ppo may go on after the evidence that it is dead.
DEAD_S = 20
# The same for a process that may have been of no consequence, and how often the longest step before it.
LINGERS_S, LINGERS = 600, 3
SHARED = Path("/dev/shm")
REJOIN_S = 1800  # how long to wait for nodes in the place of lost ones
GAVE_UP = 75  # EX_TEMPFAIL of sysexits.h


def listen() -> None:
    """Take every signal to end as Ctrl-C."""
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)


class Processes:
    """``main_ppo`` and all that it starts, wherever Ray and vLLM put it: measured and ended together.

    Attributes:
        shared: files of shared memory that the run made; vLLM and verl leave them behind.
    """

    def __init__(self, root: subprocess.Popen, others: set[Path]):
        """``others``: the files of shared memory that were there before ``root``."""
        self.root = psutil.Process(root.pid)
        self.known = {self.root}
        self.peak_gib = 0.0
        self.others, self.shared = others, set()

    def alive(self) -> set[psutil.Process]:
        """Those of all known processes and their children that run. A process whose parent has ended stays known."""
        for process in list(self.known):
            try:
                self.known |= set(process.children(recursive=True))
            except psutil.NoSuchProcess:
                self.known.discard(process)
        return set(self.known)

    def find_shared(self) -> None:
        """Add to ``shared`` what is new in shared memory and mapped by a process of the run: another run's is not."""
        new = set(SHARED.glob("*")) - self.others - self.shared
        if not new:
            return
        for process in self.alive():
            try:
                maps = Path(f"/proc/{process.pid}/maps").read_text()
            except OSError:  # it has ended, or is not ours
                continue
            self.shared |= new & {Path(mapped) for mapped in re.findall(rf"{SHARED}/\S+$", maps, re.M)}

    def measure(self) -> None:
        """Note the greatest sum of proportional set sizes, and the shared memory."""
        self.find_shared()
        size = 0
        for process in self.alive():
            try:
                size += process.memory_full_info().pss
            except psutil.NoSuchProcess:
                continue
        self.peak_gib = max(self.peak_gib, size / 2**30)

    def end(self) -> None:
        """Ask ``main_ppo`` to end, which takes Ray down, then kill whatever is left and remove its shared memory."""
        self.find_shared()
        if self.root in self.alive():
            self.root.terminate()
            psutil.wait_procs([self.root], timeout=GRACE_S)
        left = self.alive()
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=GRACE_S)
        for file in self.shared:
            file.unlink(missing_ok=True)


class Screen:
    """What the user sees: start-up, then a line a step."""

    def __init__(self, out: Path, steps: int):
        self.out, self.steps = out, steps
        self.started = time.monotonic()

    def begin(self, earlier: list[dict]) -> None:
        """``main_ppo`` starts, and goes on after the steps whose metrics are ``earlier``."""
        self.earlier, self.shown, self.size, self.patience = earlier, 0, 0, LINGERS_S
        self.phase("Python and verl")

    @property
    def finished(self) -> bool:
        """Whether the last step was completed."""
        return len(self.earlier) + self.shown >= self.steps

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def say(self, text: str) -> None:
        self.spoken = self.elapsed()
        print(f"[{duration(self.spoken):>6}] {text}", flush=True)

    def phase(self, what: str) -> None:
        self.what = what
        self.say(f"starting {what}")

    def update(self, lines: list[str]) -> None:
        """Show what is new in the log's ``lines`` and in verl's metrics."""
        for marker, what in START_UP.items():
            if any(marker in line for line in lines):
                self.phase(what)
        file = self.out / "verl.jsonl"
        if file.exists() and file.stat().st_size > self.size:
            self.size = file.stat().st_size
            data = training_rows(merge_metrics(self.out))
            for end in range(len(self.earlier) + self.shown, len(data)):
                self.say(progress_line(data[: end + 1], self.steps))
            self.shown = len(data) - len(self.earlier)
            self.patience = max([LINGERS_S, *(LINGERS * seconds for seconds in metric_values(data, SECONDS))])
        if not self.shown and self.elapsed() - self.spoken > HEARTBEAT_S:
            self.say(f"still starting {self.what}")


class Vigil:
    """Decides when ``main_ppo`` has gone on for too long after the death of one of its processes.

    Args:
        cluster: whether other jobs may run on the same Ray.
    """

    def __init__(self, cluster: bool = False) -> None:
        self.watch, self.death = logs.Watch(cluster), None
        self.steps, self.since = 0, 0.0  # shown at the death, and when

    def overdue(self, lines: list[str], screen: Screen) -> logs.Death | None:
        """Return the death for which ``main_ppo`` is to be ended now, if any; ``lines`` are new in its log."""
        if self.death and screen.shown > self.steps + 1:  # of one step the rollouts may have been there before
            self.death = None
        evidence = self.watch.read(lines)
        if evidence and not (self.death and self.death.certain):
            self.death, self.steps, self.since = evidence, screen.shown, time.monotonic()
        if not self.death or screen.finished:  # at the end, verl's servers may seem to die
            return None
        waited = time.monotonic() - self.since
        return self.death if waited > (DEAD_S if self.death.certain else screen.patience) else None


def train(
    command: list[str],
    environment: dict[str, str],
    log: TextIO,
    screen: Screen,
    note: Callable[[float], None] = lambda peak_gib: None,
    cluster: bool = False,
) -> dict:
    """Run ``main_ppo`` to its end, or end it when we are interrupted or the log has evidence that it cannot go on.

    Args:
        note: is called every ``MEASURE_S`` and at the end with the greatest memory so far.
        cluster: whether other jobs may run on the same Ray.

    Returns:
        ``code`` the exit code, None if interrupted; ``death``, for which it was ended; the workers' ``reports``; the
        log's ``tail``.
    """
    others = set(SHARED.glob("*"))
    process = subprocess.Popen(
        command,
        cwd=REPO,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches us alone, and we end it
        preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM),  # PR_SET_PDEATHSIG: it does not outlive us
    )
    processes, code, reports, tail, rest, measured = Processes(process, others), None, [], deque(maxlen=TAIL), "", 0.0
    vigil, death = Vigil(cluster), None
    with open(log.name) as written:
        written.seek(log.tell())
        try:
            while code is None:
                time.sleep(POLL_S)
                code = process.poll()
                *complete, rest = (rest + written.read()).split("\n")
                reports += logs.reports(complete)
                tail += complete
                screen.update(complete)
                overdue = vigil.overdue(complete, screen)
                if overdue and code is None and not death:
                    death = overdue
                    processes.find_shared()
                    processes.alive()  # or its children would be nobody's
                    process.kill()
                if code is None and time.monotonic() - measured > MEASURE_S:
                    processes.measure()
                    note(processes.peak_gib)
                    measured = time.monotonic()
        except KeyboardInterrupt:
            screen.say("interrupted: ending verl, Ray and vLLM")
        finally:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            processes.end()
            note(processes.peak_gib)
    return {"code": code, "death": death, "reports": reports, "tail": tail}


def attempt(job: jobs.Job, out: Path, record: dict, log: TextIO, screen: Screen) -> tuple[dict, int]:
    """Train from the last whole checkpoint until ``main_ppo`` ends, and note in ``record`` what it took.

    Returns:
        What ``train`` does, and the last step that is known of.
    """
    begin, spent, peak_gib = runs.checkpoint_step(out), record["wall_s"] - screen.elapsed(), record["peak_memory_gib"]
    earlier = training_rows(merge_metrics(out, upto=begin))
    for name in ("verl.jsonl", "summary.json"):
        (out / name).unlink(missing_ok=True)
    write_json(out / "run.json", record)
    print(f"{f'resuming after step {begin} of' if begin else 'training'} {screen.steps} steps in {out}", flush=True)
    screen.begin(earlier)

    def note(peak: float) -> None:
        """Record what the run took so far: run.py itself may be killed."""
        record["wall_s"] = spent + screen.elapsed()
        if not job.cluster:  # whose nodes have processes that are not ours to measure
            record["peak_memory_gib"] = max(peak_gib or 0.0, peak)
        write_json(out / "run.json", record)

    result = train(job.command(out), job.environment(out), log, screen, note, bool(job.cluster))
    return result, max([runs.checkpoint_step(out), *(row["step"] for row in training_rows(merge_metrics(out)))])


def loss(job: jobs.Job, out: Path, record: dict, lines: list[str]) -> str | None:
    """What a run that ended with these ``lines`` has lost, nodes or a worker, in words; None: it failed by itself.

    Raises:
        Refused: the head of the cluster does not answer.
    """
    until = time.monotonic() + cluster.NOTICED_S
    while job.cluster:
        if gone := cluster.lost(job, out, record["nodes"]):
            return f"node {', '.join(gone)}"
        if time.monotonic() > until:
            break
    return logs.lost_worker(lines, record.get("nodes", ()))


def train_all(job: jobs.Job, config, out: Path, record: dict, log: TextIO) -> tuple[int, list[dict]]:
    """Train to the last step, through the loss of workers and nodes, and say how it goes.

    Returns:
        The exit code, and what the workers reported.
    """
    steps = config.trainer.total_training_steps
    screen = Screen(out, steps)
    for left in reversed(range(job.retries + 1)):
        result, reached = attempt(job, out, record, log, screen)
        if result["code"] == 0 and reached >= steps:
            return 0, result["reports"]
        saved = runs.checkpoint_step(out)
        again = f"the same command {f'resumes after step {saved}' if saved else 'starts again'}"
        try:
            if result["code"] is None:
                raise KeyboardInterrupt
            listen()
            death, why = result["death"], logs.errors(result["tail"])
            how = f"ended because {death.what}" if death else f"exit code {result['code']}"
            print(f"failed after step {reached} of {steps}, {how}; all output: {log.name}")
            print("\n".join(f"  {line}" for line in ([death.line] if death else []) + why), flush=True)
            lost = loss(job, out, record, list(result["tail"])) if job.cluster or job.retries else None
            if not lost:
                return 1, []
            screen.say(f"lost {lost} after step {reached} of {steps}")
            if not left:
                raise Refused(f"RETRIES={job.retries}: none is left")
            if job.cluster:
                record |= cluster.admit(job, config, out, wait_s=REJOIN_S, say=screen.say)
        except Refused as refusal:
            screen.say(f"gave up: {refusal}; {again}")
            return GAVE_UP, []
        except KeyboardInterrupt:
            screen.say(f"ended; {again}")
            return 130, []


def main(words: list[str]) -> int:
    if words in (["--help"], ["-h"]):
        print(f"{__doc__}\n{jobs.usage()}")
        return 0
    listen()
    job = jobs.parse(words)
    out = runs.folder(job, REPO / "outputs")
    config = jobs.compose(job, out)
    jobs.check(job, config, out)
    if not job.cluster:
        machine.check(config, job.device)
    record = runs.admit(job, out, config.trainer.total_training_steps)
    jobs.validate(job, config)
    if job.cluster:
        record |= cluster.admit(job, config, out)
    if job.made:
        prepare = [sys.executable, "-m", "recipes.arithmetic.prepare", "--task", jobs.MADE[job.experiment]]
        if subprocess.run([*prepare, "--out", str(job.made), "--seed", "1"], cwd=REPO).returncode:
            return 1  # it has said why

    out.mkdir(parents=True, exist_ok=True)
    with runs.lock(out) as log:
        if not runs.checkpoint_step(out):
            record |= {"wall_s": 0.0, "peak_memory_gib": None if job.cluster else 0.0}
        print(job.shell_line(out), end="\n\n")
        code, reports = train_all(job, config, out, record, log)
        data = merge_metrics(out)

    if code:
        return code
    summary = summarize(job, record, data, reports)
    write_json(out / "summary.json", summary)
    title = f"{job.experiment}, {job.objective}, {job.precision}"
    plot_curves([(title, data)], title, out / "curves.png")
    print(f"\n{summary_table(summary)}\n")
    for name in ("curves.png", "summary.json", "metrics.jsonl", "train.log"):
        print(f"  {out / name}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Refused as refusal:
        sys.exit(f"run: {refusal}")
    except KeyboardInterrupt:  # nothing of the run had started
        sys.exit(130)
