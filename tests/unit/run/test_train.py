"""Training by ``verl_precision.run.train``: watching, ending and restarting ``main_ppo``."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
from support.waiting import TIMEOUT_S, wait_until

from verl_precision.errors import Refused
from verl_precision.facts.metrics import REWARD, SECONDS
from verl_precision.files import write_json
from verl_precision.run import process_tree, progress, train
from verl_precision.run.folder import lock, start_record
from verl_precision.run.job import Job, parse_job
from verl_precision.run.log import DeathReader, reports
from verl_precision.run.process_tree import SHARED_MEMORY, ProcessTree
from verl_precision.run.progress import RunProgress

# Precedes each program that runs instead of main_ppo: run.json is rewritten by the watching process at each look.
PRELUDE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
metrics = Path(os.environ["VERL_FILE_LOGGER_PATH"])
record = metrics.with_name("run.json")

def watched(looks=2):
    for _ in range(looks):
        before = record.read_bytes()
        while record.read_bytes() == before:
            time.sleep(0.01)

def interrupt():  # the process of these tests, in which the code of the command run runs
    watched()
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(600)
"""
# Starts a process in a separate session, as Ray does, that would write a file after a minute.
PARENT = """
writes = f"import pathlib, time; time.sleep(60); pathlib.Path({str(metrics)!r}).with_name('outlived').touch()"
child = subprocess.Popen([sys.executable, "-c", writes], start_new_session=True)
print("child", child.pid, flush=True)
"""
MAPS = """
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = resource_tracker.unregister = lambda *_: None  # as in a process that is killed
memory = shared_memory.SharedMemory(create=True, size=4096)
print("shared", memory.name, flush=True)
"""
INTERRUPTS = "interrupt()"
FAILS = "raise SystemExit('ValueError: no such thing')"
KILLED = "import os; os.kill(os.getpid(), 9)"
TRAINS = """
with metrics.open("w") as file:
    for step in (1, 2):
        print(json.dumps({"step": step, "data": {"critic/score/mean": 0.5, "timing_s/step": 1.0}}), file=file)
"""
LOST = "(raylet) … Worker IP address: 10.0.0.3 Worker port: 19114 Worker PID: 207 Worker exit type: SYSTEM_ERROR"
LOSES_A_WORKER = f"print({LOST!r})\nraise SystemExit('RuntimeError: Connection closed by peer')"
DEAD = "(vLLMHttpServer pid=7) (EngineCore pid=9) ERROR 11-22 13:05:46 [core.py] EngineCore encountered a fatal error."
DIES = f"print({DEAD!r}, flush=True)\n"


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    """Look at a program twenty times a second, and measure it each time; pytest keeps its own signal handlers."""
    monkeypatch.setattr(train, "POLL_S", 0.05)
    monkeypatch.setattr(train, "MEASURE_S", 0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)


def program(*parts: str) -> list[str]:
    return [sys.executable, "-c", "\n".join([PRELUDE, *parts])]


@pytest.fixture
def run_program(tmp_path) -> Callable[..., dict]:
    """``run_program(*parts)``: the result of a program that runs instead of ``main_ppo``.

    ``gone``: whether it started processes, and they were ended.
    """

    def run_program(*parts: str) -> dict:
        peaks = [0.0]

        def note(peak: float) -> None:
            peaks.append(peak)
            write_json(tmp_path / "run.json", len(peaks))

        note(0.0)
        shown = RunProgress(tmp_path, 2)
        shown.begin([])
        environment = {"VERL_FILE_LOGGER_PATH": str(tmp_path / "verl.jsonl")}
        with lock(tmp_path) as log:
            result = train.train_once(program(*parts), environment, log, shown, train.Watchdog(DeathReader()), note)
        children = [int(line.split()[1]) for line in result["tail"] if line.startswith("child ")]
        wait_until(lambda: not any(map(psutil.pid_exists, children)), "the processes that it started have ended")
        return result | {"peak": max(peaks), "gone": bool(children) and not (tmp_path / "outlived").exists()}

    return run_program


def test_line_that_is_written_in_two_parts_is_read_as_one(run_program):
    report = '(WorkerDict pid=1) [verl-precision] {"role": "actor"}'
    first, second = (f"print({part!r}, end='', flush=True)" for part in (report[:30], report[30:] + "\n"))
    assert reports(run_program(first, "watched()", second)["tail"]) == [{"role": "actor"}]


def test_resumed_run_shows_its_own_steps_and_ends_with_the_last(tmp_path, capsys):
    rows = [{"step": step, "data": {REWARD: 0.5, SECONDS: 400.0}} for step in (1, 2, 3, 4)]
    shown = RunProgress(tmp_path, steps=4)
    shown.begin(rows[:2])
    shown.update(["ray init kwargs: ..."])
    lines = [json.dumps(row) + "\n" for row in rows]
    metrics, logged = tmp_path / "metrics.jsonl", tmp_path / "verl.jsonl"
    metrics.write_text("".join(lines[:2]))
    file = metrics.stat().st_ino
    for end in (3, 4):
        logged.write_text("".join(lines[2:end]) + '{"step": ')  # verl is still writing
        shown.update([])
        assert shown.finished == (end == 4) and metrics.read_text() == "".join(lines[:end])
    assert shown.patience == 3 * 400 and metrics.stat().st_ino == file, "a step is appended, not all are written again"
    lines = [line.partition("] ")[2].split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["starting Python and verl", "starting Ray and its workers", "step 3/4", "step 4/4"]


@pytest.mark.parametrize(("line", "cause"), [(LOST, "a worker (pid 207) died"), (DEAD, "vLLM's engine failed")])
def test_verl_is_ended_if_it_continues_without_a_process(line, cause, run_program, monkeypatch, tmp_path):
    monkeypatch.setattr(progress, "LINGERS_S", 0.1)
    monkeypatch.setattr(train, "DEAD_S", 0.1)
    monkeypatch.setattr(train, "MEASURE_S", 1e9)  # its children are looked for when it is ended, not before
    monkeypatch.setattr(process_tree, "SHARED_MEMORY", tmp_path / "none")
    result = run_program(PARENT, f"print({line!r}, flush=True)\ntime.sleep(600)")
    assert result["code"] == -signal.SIGKILL and result["death"].cause == cause and result["gone"]


def test_repeated_death_does_not_restart_the_clock_and_a_second_step_disproves_it():
    """verl's agent loops query a dead server again and again; the rollouts of one step may date from before."""
    watchdog, shown = train.Watchdog(DeathReader()), SimpleNamespace(shown=3, finished=False, patience=600)
    assert watchdog.overdue([DEAD], shown) is None
    watchdog.since -= train.DEAD_S + 1
    shown.shown = 4
    assert watchdog.overdue([DEAD], shown).cause == "vLLM's engine failed"
    shown.shown = 5
    assert watchdog.overdue([], shown) is None


def test_uncertain_deaths_do_not_restart_the_clock_and_a_certain_one_does():
    watchdog, shown = train.Watchdog(DeathReader()), SimpleNamespace(shown=3, finished=False, patience=600)
    assert watchdog.overdue([LOST], shown) is None
    watchdog.since -= 601
    assert watchdog.overdue([LOST], shown).cause == "a worker (pid 207) died"
    assert watchdog.overdue([DEAD], shown) is None, "from now on the shorter patience counts"
    watchdog.since -= train.DEAD_S + 1
    assert watchdog.overdue([DEAD], shown).cause == "vLLM's engine failed"


def test_verl_is_not_ended_if_all_steps_are_completed(run_program, monkeypatch):
    monkeypatch.setattr(train, "DEAD_S", 0)
    result = run_program(TRAINS, DIES, "watched(5)")
    assert (result["code"], result["death"]) == (0, None)


@pytest.mark.parametrize("end", ["watched()", f"watched()\n{DIES}time.sleep(600)"])
def test_shared_memory_is_removed_and_that_of_another_run_is_left(end, run_program, monkeypatch):
    monkeypatch.setattr(train, "DEAD_S", 0.1)
    other = [sys.executable, "-c", f"{MAPS}\nimport time; time.sleep(600)"]
    with subprocess.Popen(other, stdout=subprocess.PIPE, text=True) as beside:
        result = run_program(MAPS, end)
        theirs = beside.stdout.readline().split()[1]
        beside.kill()
    (ours,) = (line.split()[1] for line in result["tail"] if line.startswith("shared "))
    assert not (SHARED_MEMORY / ours).exists()
    (SHARED_MEMORY / theirs).unlink()  # it was left


NODE = "second (10.0.0.3)"


@pytest.mark.parametrize(
    ("programs", "answers", "code", "message"),
    [
        ([LOSES_A_WORKER, TRAINS], None, 0, "lost a worker (pid 207) on node 10.0.0.3 after step 0 of 2"),
        ([LOSES_A_WORKER] * 2, None, 75, "gave up: RETRIES=1: no retry is left; the same command starts"),
        ([FAILS], None, 1, "failed after step 0 of 2, exit code 1"),
        (["pass"], None, 1, "failed after step 0 of 2, exit code 0"),
        ([KILLED], None, 1, "failed after step 0 of 2, killed by SIGKILL, as Linux does when memory runs out"),
        ([INTERRUPTS], None, 130, "ended; the same command starts from the beginning"),
        # a cluster that may notice late which nodes it has lost, or whose head is lost
        ([FAILS, TRAINS], [[], [NODE]], 0, f"lost node {NODE} after step 0 of 2"),
        ([LOSES_A_WORKER, TRAINS], [[], [NODE]], 0, f"lost node {NODE} after step 0 of 2"),
        ([LOSES_A_WORKER, TRAINS], [[]], 0, "lost a worker (pid 207) on node 10.0.0.3 after step 0 of 2"),
        ([FAILS], [Refused("no Ray cluster answers")], 75, "ValueError: no such thing"),
    ],
)
def test_only_a_lost_worker_or_node_is_retried(programs, answers, code, message, tmp_path, monkeypatch, capsys):
    admitted, left = {"nodes": [{"node": NODE}]} if answers else {}, list(programs)
    if answers:
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        monkeypatch.setattr(train, "NOTICED_S", -1 if len(answers) == 1 else TIMEOUT_S)
        monkeypatch.setattr(train.cluster, "lost_nodes", Mock(side_effect=answers))
        monkeypatch.setattr(train.cluster, "admit", lambda *_, **__: admitted)
    monkeypatch.setattr(Job, "command", lambda *_: program(left.pop(0)))
    job = parse_job(["DEVICE=cpu", "RETRIES=1"])
    config = SimpleNamespace(trainer=SimpleNamespace(total_training_steps=2))
    record = start_record(job, tmp_path, 2) | admitted
    with lock(tmp_path) as log:
        assert train.train(job, config, tmp_path, record, log) == code
    assert left == [] and message in capsys.readouterr().out


PASSED_ON = "raise SystemExit('RuntimeError: Sync replay buffer selected no trajectories')"


@pytest.mark.parametrize(
    ("parts", "first"),
    [
        ([f"print({DEAD!r})", "print('chatter\\n' * 3000)", PASSED_ON], DEAD),
        ([f"print({DEAD!r})", PASSED_ON], DEAD),
        ([f"print('ValueError: the cause')\nprint({DEAD!r})", PASSED_ON], "ValueError: the cause"),
    ],
)
def test_death_of_a_process_is_shown_before_what_it_led_to(parts, first, tmp_path, monkeypatch, capsys):
    """After a vLLM worker was killed, the log ends with an error of verl's replay buffer."""
    monkeypatch.setattr(Job, "command", lambda *_: program(*parts))
    job, config = parse_job(["DEVICE=cpu"]), SimpleNamespace(trainer=SimpleNamespace(total_training_steps=2))
    record = start_record(job, tmp_path, 2)
    with lock(tmp_path) as log:
        assert train.train(job, config, tmp_path, record, log) == 1
    shown = capsys.readouterr().out.partition("all output: ")[2].splitlines()[1:]
    assert shown == [f"  {first}", "  RuntimeError: Sync replay buffer selected no trajectories"]


def test_attempt_adds_to_the_record_and_removes_an_older_summary(tmp_path, monkeypatch):
    """What is written while the run goes on counts: the command may be killed. Of a cluster the memory is not known."""

    def train_once(command, environment, log, progress, watchdog, note) -> dict:
        assert not (tmp_path / "summary.json").exists()
        assert json.loads((tmp_path / "run.json").read_text())["wall_s"] == 150
        note(1.0)
        assert json.loads((tmp_path / "run.json").read_text()) == record and record["wall_s"] > 150
        return {}

    monkeypatch.setattr(train, "train_once", train_once)
    for cluster, peak_gib in (("", 3.0), ("127.0.0.1:6379", None)):
        monkeypatch.setenv("RAY_ADDRESS", cluster)
        write_json(tmp_path / "summary.json", {})
        shown = RunProgress(tmp_path, 2)
        shown.started -= 50  # an attempt before, whose time the record has
        record = {"wall_s": 150.0, "peak_memory_gib": peak_gib}
        train.attempt(parse_job(["DEVICE=cpu"]), tmp_path, record, None, shown, train.Watchdog(DeathReader()))
        assert 150 < record["wall_s"] < 170 and record["peak_memory_gib"] == peak_gib


@pytest.mark.parametrize(("cluster", "shared"), [("", False), ("127.0.0.1:6379", True)])
def test_requests_of_other_jobs_count_only_on_a_ray_of_its_own(cluster, shared, tmp_path, monkeypatch):
    def attempt(job, out, record, log, progress, watchdog) -> tuple[dict, int]:
        assert watchdog.reader.shared_ray == shared
        return {"code": 0}, 2

    monkeypatch.setattr(train, "attempt", attempt)
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    config = SimpleNamespace(trainer=SimpleNamespace(total_training_steps=2))
    assert train.train(parse_job(["DEVICE=cpu"]), config, tmp_path, {}, None) == 0


def test_process_whose_memory_may_not_be_read_is_left_out(monkeypatch):
    def denied(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "memory_full_info", denied)
    tree = ProcessTree(SimpleNamespace(pid=os.getpid()), set(SHARED_MEMORY.glob("*")))
    tree.measure()
    assert tree.peak_gib == 0


def test_peak_memory_never_falls():
    tree = ProcessTree(SimpleNamespace(pid=os.getpid()), set(SHARED_MEMORY.glob("*")))
    tree.peak_gib = 1000.0
    tree.measure()
    assert tree.peak_gib == 1000
