"""Training by ``lib.run.train``: watching, ending and restarting ``main_ppo``."""

import json
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from lib.errors import Refused
from lib.files import write_json
from lib.run import process_tree, progress, train
from lib.run.deaths import DeathReader
from lib.run.folder import lock, start_record
from lib.run.job import Job, parse_job
from lib.run.log import errors
from lib.run.metrics import REWARD, SECONDS
from lib.run.process_tree import SHARED_MEMORY, ProcessTree
from lib.run.progress import RunProgress

# Starts a process in a session of its own, as Ray does, and waits for up to a minute.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print("child", child.pid, flush=True)
time.sleep({seconds})
"""


# Has the process of these tests, in which run.py's code runs, interrupted.
SIGNAL_SELF = "import os, signal, threading; "


SIGNAL_SELF += "threading.Timer(2, os.kill, (os.getppid(), signal.SIGINT)).start()\n"


@pytest.fixture
def run_program(tmp_path, monkeypatch):
    """Run a Python program in the place of ``main_ppo``. Return the result and the ids of the processes it started."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest keeps its own handlers

    def run_program(program: str) -> tuple[dict, list[int]]:
        with lock(tmp_path) as log:
            progress, peaks = RunProgress(tmp_path, 2), []
            progress.begin([])
            watchdog = train.Watchdog(DeathReader())
            command = [sys.executable, "-c", program]
            result = train.train_once(command, {}, log, progress, watchdog, peaks.append)
        children = [int(line.split()[1]) for line in result["tail"] if line.startswith("child ")]
        return result | {"peaks": peaks}, children

    return run_program


def gone(pids: list[int]) -> bool:
    _, left = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=10)
    return not left


def test_processes_left_behind_are_ended(run_program):
    result, children = run_program(PARENT.format(seconds=1.5))
    assert result["code"] == 0 and max(result["peaks"]) > 0
    assert children and gone(children)


def test_interruption_ends_everything(run_program):
    before = time.monotonic()
    result, children = run_program(SIGNAL_SELF + PARENT.format(seconds=60))
    assert result["code"] is None and time.monotonic() - before < 50
    assert children and gone(children)


def test_failure_keeps_its_exit_code_and_its_exception(run_program):
    result, _ = run_program("raise SystemExit('ValueError: no such thing')")
    assert result["code"] == 1
    assert errors(result["tail"]) == ["ValueError: no such thing"]


def test_progress_appears_as_verl_logs_it(run_program, tmp_path, capsys):
    row = {REWARD: 0.25, SECONDS: 2.0}
    lines = [f'{{"step": {step}, "data": {row}}}'.replace("'", '"') for step in (1, 2)]
    file = tmp_path / "verl.jsonl"
    run_program(f"""
import time
print("ray init kwargs: ...", flush=True)
with open({str(file)!r}, "w") as file:
    for line in {lines!r}:
        print(line, file=file, flush=True)
        time.sleep(1)
""")
    shown = [line.partition("] ")[2].split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["starting Python and verl", "starting Ray and its workers", "step 1/2", "step 2/2"]


def test_line_that_is_written_in_two_parts_is_read_as_one(run_program):
    report = '(WorkerDict pid=1) [verl-precision] {"role": "actor"}'
    result, _ = run_program(f"""
import time
for part in ({report[:30]!r}, {report[30:] + chr(10)!r}):
    print(part, end="", flush=True)
    time.sleep(2 * {train.POLL_S})
""")
    assert result["reports"] == [{"role": "actor"}]


def test_resumed_run_shows_its_own_steps_and_ends_with_the_last(tmp_path, capsys):
    rows = [{"step": step, "data": {REWARD: 0.5, SECONDS: 400.0}} for step in (1, 2, 3, 4)]
    shown = RunProgress(tmp_path, steps=4)
    shown.begin(rows[:2])
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    for end in (3, 4):
        (tmp_path / "verl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[2:end]))
        shown.update([])
        assert shown.finished == (end == 4)
    assert shown.patience == 3 * 400
    lines = [line.partition("] ")[2].split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["starting Python and verl", "step 3/4", "step 4/4"]


LOSES_A_WORKER = """
print("(raylet) … Worker IP address: 10.0.0.3 Worker port: 19114 Worker PID: 207 Worker exit type: SYSTEM_ERROR")
raise SystemExit("RuntimeError: Connection closed by peer")
"""


FAILS = "raise SystemExit('ValueError: no such thing')"


TRAINS = """
import os, json
with open(os.environ["VERL_FILE_LOGGER_PATH"], "w") as file:
    for step in (1, 2):
        print(json.dumps({"step": step, "data": {"critic/score/mean": 0.5, "timing_s/step": 1.0}}), file=file)
"""


DIES = "(vLLMHttpServer pid=7) (EngineCore pid=9) ERROR 11-22 13:05:46 [core.py] EngineCore encountered a fatal error."


@pytest.mark.parametrize(
    ("module", "limit", "line", "cause"),
    [
        (progress, "LINGERS_S", LOSES_A_WORKER.splitlines()[1][7:-2], "a worker (pid 207) died"),
        (train, "DEAD_S", DIES, "vLLM's engine failed"),
    ],
)
def test_verl_is_ended_if_it_continues_without_a_process(
    module, limit, line, cause, run_program, monkeypatch, tmp_path
):
    monkeypatch.setattr(module, limit, 1)
    monkeypatch.setattr(train, "MEASURE_S", 1e9)  # its children are looked for when it is ended, not before
    monkeypatch.setattr(process_tree, "SHARED_MEMORY", tmp_path / "none")
    result, children = run_program(PARENT.format(seconds=0) + f"print({line!r}, flush=True)\ntime.sleep(600)")
    assert result["code"] == -signal.SIGKILL and result["death"].cause == cause and children and gone(children)


@pytest.fixture
def watched() -> tuple[train.Watchdog, SimpleNamespace]:
    """A watchdog, and a progress of three steps."""
    return train.Watchdog(DeathReader()), SimpleNamespace(shown=3, finished=False, patience=progress.LINGERS_S)


def test_repeated_death_does_not_restart_the_clock(watched):
    """verl's agent loops query a dead server again and again, and each attempt logs its death."""
    watchdog, shown = watched
    assert watchdog.overdue([DIES], shown) is None
    watchdog.since -= train.DEAD_S + 1
    assert watchdog.overdue([DIES], shown).cause == "vLLM's engine failed"


def test_second_step_after_an_uncertain_death_disproves_it(watched):
    """The rollouts of the first may date from before the death."""
    watchdog, shown = watched
    assert watchdog.overdue([LOSES_A_WORKER.splitlines()[1][7:-2]], shown) is None
    watchdog.since -= shown.patience + 1
    shown.shown = 4
    assert watchdog.overdue([], shown).cause == "a worker (pid 207) died"
    shown.shown = 5
    assert watchdog.overdue([], shown) is None


def test_verl_is_not_ended_if_it_ends_by_itself(run_program):
    result, _ = run_program(f"print({DIES!r}, flush=True)\nraise SystemExit('ValueError: no such thing')")
    assert (result["code"], result["death"]) == (1, None)


def test_verl_is_not_ended_if_all_steps_are_completed(run_program, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "DEAD_S", 0)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "verl.jsonl"))
    result, _ = run_program(f"{TRAINS}\nprint({DIES!r}, flush=True)\nimport time; time.sleep(2)")
    assert (result["code"], result["death"]) == (0, None)


MAPS = """
import sys, time
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = resource_tracker.unregister = lambda *_: None  # as in a process that is killed
memory = shared_memory.SharedMemory(create=True, size=4096)
print("shared", memory.name, flush=True)
time.sleep({seconds})
"""


@pytest.mark.parametrize("end", ["clean", "interrupt", "death"])
def test_shared_memory_is_removed_and_that_of_another_run_is_left(end, run_program, monkeypatch):
    monkeypatch.setattr(train, "MEASURE_S", 0.1)
    monkeypatch.setattr(train, "DEAD_S", 1)
    last = {"clean": "", "interrupt": SIGNAL_SELF, "death": f"print({DIES!r}, flush=True)"}[end]
    seconds = 3 if end == "clean" else 60
    before = {file.name for file in SHARED_MEMORY.iterdir()}
    with subprocess.Popen([sys.executable, "-c", MAPS.format(seconds=60)], stdout=subprocess.PIPE, text=True) as beside:
        result, _ = run_program(last + MAPS.format(seconds=seconds))
        theirs = beside.stdout.readline().split()[1]
        beside.kill()
    (ours,) = (line.split()[1] for line in result["tail"] if line.startswith("shared "))
    left = {file.name for file in SHARED_MEMORY.iterdir()} - before
    (SHARED_MEMORY / theirs).unlink()
    assert theirs in left and ours not in left


@pytest.mark.parametrize(
    ("programs", "code", "message"),
    [
        ([LOSES_A_WORKER, TRAINS], 0, "lost a worker (pid 207) on node 10.0.0.3 after step 0 of 2"),
        ([LOSES_A_WORKER, LOSES_A_WORKER], 75, "gave up: RETRIES=1: no retry is left; the same command starts"),
        ([FAILS], 1, "failed after step 0 of 2, exit code 1"),
        (["pass"], 1, "failed after step 0 of 2, exit code 0"),
        ([SIGNAL_SELF + PARENT.format(seconds=60)], 130, "ended; the same command starts from the beginning"),
        ([LOSES_A_WORKER, FAILS], 1, "ValueError: no such thing"),
    ],
)
def test_only_a_lost_worker_is_retried(programs, code, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest keeps its own handlers
    left = list(programs)
    monkeypatch.setattr(Job, "command", lambda *_: [sys.executable, "-c", left.pop(0)])
    job = parse_job(["DEVICE=cpu", "RETRIES=1"])
    config = SimpleNamespace(trainer=SimpleNamespace(total_training_steps=2))
    record = start_record(job, tmp_path, 2)
    with lock(tmp_path) as log:
        assert train.train(job, config, tmp_path, record, log)[0] == code
    assert left == [] and message in capsys.readouterr().out


def test_attempt_adds_to_the_record_and_removes_an_older_summary(tmp_path, monkeypatch):
    """An interrupted continuation of a finished run is not finished; of a cluster the memory is not known."""
    watchdogs = []

    def train_once(command, environment, log, progress, watchdog, note) -> dict:
        assert not (tmp_path / "summary.json").exists()
        watchdogs.append(watchdog)
        note(1.0)
        return {}

    monkeypatch.setattr(train, "train_once", train_once)
    for cluster, peak_gib in (("", 3.0), ("127.0.0.1:6379", None)):
        monkeypatch.setenv("RAY_ADDRESS", cluster)
        write_json(tmp_path / "summary.json", {})
        shown = RunProgress(tmp_path, 2)
        shown.started -= 50  # an attempt before, whose time the record has
        record = {"wall_s": 150.0, "peak_memory_gib": peak_gib}
        train.attempt(parse_job(["DEVICE=cpu"]), tmp_path, record, None, shown)
        assert 150 <= record["wall_s"] < 170 and record["peak_memory_gib"] == peak_gib
    assert [watchdog.reader.shared_ray for watchdog in watchdogs] == [False, True]


def test_peak_memory_never_falls():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        tree = ProcessTree(process, set(SHARED_MEMORY.glob("*")))
        tree.measure()
        assert tree.peak_gib > 0
        tree.peak_gib = 1000.0
        tree.measure()
        process.kill()
    assert tree.peak_gib == 1000


def test_time_and_memory_are_recorded_while_the_run_goes_on(tmp_path, monkeypatch):
    """run.py may be killed, and the next attempt continues the count."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(train, "MEASURE_S", 0.1)
    record = {"wall_s": 100.0, "peak_memory_gib": 0.0}
    reads = (
        f"import json, time; time.sleep(3); print('took', json.load(open({str(tmp_path / 'run.json')!r}))['wall_s'])"
    )
    monkeypatch.setattr(Job, "command", lambda *_: [sys.executable, "-c", reads])
    with lock(tmp_path) as log:
        result, _ = train.attempt(parse_job(["DEVICE=cpu"]), tmp_path, record, log, RunProgress(tmp_path, 2))
    (recorded,) = (float(line.split()[1]) for line in result["tail"] if line.startswith("took "))
    assert 100 < recorded < record["wall_s"] and record["peak_memory_gib"] > 0


@pytest.mark.parametrize(
    ("fails", "answers", "code", "message"),
    [
        (FAILS, [[], ["second (10.0.0.3)"]], 0, "lost node second (10.0.0.3) after step 0 of 2"),
        (LOSES_A_WORKER, [[], ["second (10.0.0.3)"]], 0, "lost node second (10.0.0.3) after step 0 of 2"),
        (LOSES_A_WORKER, [[]], 0, "lost a worker (pid 207) on node second (10.0.0.3) after step 0 of 2"),
        (FAILS, [[]], 1, "ValueError: no such thing"),
        (FAILS, [Refused("no Ray cluster answers")], 75, "ValueError: no such thing"),
    ],
)
def test_node_may_be_noticed_missing_late_and_the_jobs_own_error_is_shown_first(
    fails, answers, code, message, tmp_path, monkeypatch, capsys
):
    """The cluster's answers simulate a slow Ray and a lost head."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(train, "NOTICED_S", -1 if len(answers) == 1 else 60)
    left, admitted = [fails, TRAINS], {"nodes": [{"node": "second (10.0.0.3)"}]}

    def lost_nodes(*_):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(train.cluster, "lost_nodes", lost_nodes)
    monkeypatch.setattr(train.cluster, "admit", lambda *_, **__: admitted)
    monkeypatch.setattr(Job, "command", lambda *_: [sys.executable, "-c", left.pop(0)])
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    job = parse_job(["DEVICE=cpu"])
    config = SimpleNamespace(trainer=SimpleNamespace(total_training_steps=2))
    record = start_record(job, tmp_path, 2) | admitted
    with lock(tmp_path) as log:
        assert train.train(job, config, tmp_path, record, log)[0] == code
    assert message in capsys.readouterr().out
