"""``scripts/run.py`` as a command, and how it watches and ends what it starts."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import run
from lib.errors import Refused
from lib.paths import REPO
from lib.run import folder as runs
from lib.run import job as jobs
from lib.run import log as logs
from lib.run.metrics import REWARD, SECONDS

# Starts a process in a session of its own, as Ray does, waits, and would go on for a minute.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print("child", child.pid, flush=True)
time.sleep({seconds})
"""


# Has the process of these tests, in which run.py's code runs, interrupted.
SIGNAL_SELF = "import os, signal, threading; "
SIGNAL_SELF += "threading.Timer(2, os.kill, (os.getppid(), signal.SIGINT)).start()\n"


def command(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, REPO / "scripts" / "run.py", *words], capture_output=True, text=True)


@pytest.mark.parametrize(
    "words",
    [
        ["PRECISION=fp61"],
        ["PRECISON=fp16"],
        ["STEPS=none"],
        ["MODEL=./no/such/model"],
        ["TRAIN=no-such.parquet"],
        ["ARGS=trainer.n_gpu=2"],
        ["ALGO=ppo", "RECIPE=flowrl"],
        ["ARGS=actor_rollout_ref.actor.flowrl.beta=0", "RECIPE=flowrl"],
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(words, tmp_path):
    refused(words, words[0].partition("=")[0], tmp_path)


def test_workers_that_ray_cannot_place_are_refused_before_it_starts(tmp_path):
    refused(["ARGS=trainer.n_gpus_per_node=64"], "trainer.n_gpus_per_node=64: must be at most 4: ", tmp_path)


def refused(words: list[str], begin: str, folder: Path) -> None:
    done = command("DEVICE=cpu", f"OUT={folder / 'out'}", *words)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"run: {begin}")
    assert list(folder.iterdir()) == []


def test_help_lists_every_variable():
    text = command("--help").stdout
    assert all(name in text for name in jobs.VARIABLES)
    assert "bf16_train_fp16_infer" in text


def make(*words: str) -> subprocess.CompletedProcess:
    """``make`` as a user types it, whatever make has started these tests."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *words], cwd=REPO, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("word", ["PRECISON=fp16", "STEPS=none", "ARGS=it's"])
def test_make_refuses_before_it_sets_anything_up(word):
    done = make("run", word, "DEVICE=cpu")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[0].startswith(f"run: {word.partition('=')[0]}")


def test_make_leaves_a_linked_environment_alone(tmp_path):
    shared, checkout = tmp_path / "shared", tmp_path / "checkout"
    shared.mkdir()
    (shared / "in-use").touch()
    checkout.mkdir()
    (checkout / ".venv").symlink_to(shared)
    shutil.copy(REPO / "Makefile", checkout)
    shutil.copytree(REPO / "requirements", checkout / "requirements")
    words = ["make", "-C", checkout, "setup", "DEVICE=cpu", f"PYTHON={sys.executable}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(".venv is a link and its environment is not up to date")
    assert [path.name for path in shared.iterdir()] == ["in-use"]


def test_make_hands_over_every_word_as_it_was_typed():
    line = make("--dry-run", "run", "DEVICE=cpu", "OUT=/a b", "ARGS=x='it''s' y=[1,2] z=$$HOME").stdout.splitlines()[-1]
    words = shlex.split(line)
    assert words[2:] == ["scripts/run.py", "ARGS=x='it''s' y=[1,2] z=$HOME", "DEVICE=cpu", "OUT=/a b"]


def test_make_alone_lists_every_target_and_variable():
    text = make().stdout
    targets = re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.M)
    assert {"run", "test", "apply-patches", "lint"} < set(targets)
    assert all(f"make {target} " in text for target in set(targets) - {"python", "venvs-python", "accept", "browser"})
    assert all(f"  {name} " in text for name in jobs.VARIABLES)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Runs a Python program in the place of ``main_ppo``; gives the result and the processes it had started."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest keeps its own handlers

    def of(program: str) -> tuple[dict, list[int]]:
        with runs.lock(tmp_path) as log:
            screen = run.Screen(tmp_path, 2)
            screen.begin([])
            peaks = []
            result = run.train([sys.executable, "-c", program], {}, log, screen, peaks.append)
        children = [int(line.split()[1]) for line in result["tail"] if line.startswith("child ")]
        return result | {"peaks": peaks}, children

    return of


def gone(pids: list[int]) -> bool:
    _, left = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=10)
    return not left


def test_what_a_run_leaves_behind_is_ended(train):
    result, children = train(PARENT.format(seconds=1.5))
    assert result["code"] == 0 and max(result["peaks"]) > 0
    assert children and gone(children)


def test_an_interruption_ends_everything(train):
    before = time.monotonic()
    result, children = train(SIGNAL_SELF + PARENT.format(seconds=60))
    assert result["code"] is None and time.monotonic() - before < 50
    assert children and gone(children)


def test_a_failure_keeps_its_code_and_its_words(train):
    result, _ = train("raise SystemExit('ValueError: no such thing')")
    assert result["code"] == 1
    assert logs.errors(result["tail"]) == ["ValueError: no such thing"]


def test_progress_appears_as_verl_logs_it(train, tmp_path, capsys):
    row = {REWARD: 0.25, SECONDS: 2.0}
    lines = [f'{{"step": {step}, "data": {row}}}'.replace("'", '"') for step in (1, 2)]
    file = tmp_path / "verl.jsonl"
    train(f"""
import time
print("ray init kwargs: ...", flush=True)
with open({str(file)!r}, "w") as file:
    for line in {lines!r}:
        print(line, file=file, flush=True)
        time.sleep(1)
""")
    shown = [line.partition("] ")[2].split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["starting Python and verl", "starting Ray and its workers", "step 1/2", "step 2/2"]


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
    ("limit", "line", "what"),
    [
        ("LINGERS_S", LOSES_A_WORKER.splitlines()[1][7:-2], "a worker (pid 207) died"),
        ("DEAD_S", DIES, "vLLM's engine failed"),
    ],
)
def test_verl_is_ended_where_it_goes_on_without_a_process(limit, line, what, train, monkeypatch):
    monkeypatch.setattr(run, limit, 1)
    result, children = train(PARENT.format(seconds=0) + f"print({line!r}, flush=True)\ntime.sleep(600)")
    assert result["code"] == -signal.SIGKILL and result["death"].what == what and children and gone(children)


def test_verl_is_not_ended_where_it_ends_by_itself(train):
    result, _ = train(f"print({DIES!r}, flush=True)\nraise SystemExit('ValueError: no such thing')")
    assert (result["code"], result["death"]) == (1, None)


def test_verl_is_not_ended_where_all_steps_are_completed(train, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "DEAD_S", 0)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "verl.jsonl"))
    result, _ = train(f"{TRAINS}\nprint({DIES!r}, flush=True)\nimport time; time.sleep(2)")
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
def test_shared_memory_of_the_run_is_removed_and_another_ones_is_left(end, train, monkeypatch):
    monkeypatch.setattr(run, "MEASURE_S", 0.1)
    monkeypatch.setattr(run, "DEAD_S", 1)
    last = {"clean": "", "interrupt": SIGNAL_SELF, "death": f"print({DIES!r}, flush=True)"}[end]
    seconds = 3 if end == "clean" else 60
    before = {file.name for file in run.SHARED.iterdir()}
    with subprocess.Popen([sys.executable, "-c", MAPS.format(seconds=60)], stdout=subprocess.PIPE, text=True) as beside:
        result, _ = train(last + MAPS.format(seconds=seconds))
        theirs = beside.stdout.readline().split()[1]
        beside.kill()
    (ours,) = (line.split()[1] for line in result["tail"] if line.startswith("shared "))
    left = {file.name for file in run.SHARED.iterdir()} - before
    (run.SHARED / theirs).unlink()
    assert theirs in left and ours not in left


@pytest.mark.parametrize(
    ("programs", "code", "said"),
    [
        ([LOSES_A_WORKER, TRAINS], 0, "lost a worker (pid 207) on node 10.0.0.3 after step 0 of 2"),
        ([LOSES_A_WORKER, LOSES_A_WORKER], 75, "gave up: RETRIES=1: none is left; the same command starts"),
        ([FAILS], 1, "failed after step 0 of 2, exit code 1"),
        ([LOSES_A_WORKER, FAILS], 1, "ValueError: no such thing"),
    ],
)
def test_only_a_lost_worker_is_tried_again(programs, code, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest keeps its own handlers
    left = list(programs)
    monkeypatch.setattr(jobs.Job, "command", lambda *_: [sys.executable, "-c", left.pop(0)])
    job = jobs.parse(["DEVICE=cpu", "RETRIES=1"])
    config = SimpleNamespace(trainer=SimpleNamespace(total_training_steps=2))
    record = runs.admit(job, tmp_path, 2)
    with runs.lock(tmp_path) as log:
        assert run.train_all(job, config, tmp_path, record, log)[0] == code
    assert left == [] and said in capsys.readouterr().out


def test_what_a_run_took_is_recorded_while_it_runs(tmp_path, monkeypatch):
    """run.py may be killed, and the next attempt counts on from there."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(run, "MEASURE_S", 0.1)
    record = {"wall_s": 100.0, "peak_memory_gib": 0.0}
    reads = (
        f"import json, time; time.sleep(3); print('took', json.load(open({str(tmp_path / 'run.json')!r}))['wall_s'])"
    )
    monkeypatch.setattr(jobs.Job, "command", lambda *_: [sys.executable, "-c", reads])
    with runs.lock(tmp_path) as log:
        result, _ = run.attempt(jobs.parse(["DEVICE=cpu"]), tmp_path, record, log, run.Screen(tmp_path, 2))
    (seen,) = (float(line.split()[1]) for line in result["tail"] if line.startswith("took "))
    assert 100 < seen < record["wall_s"] and record["peak_memory_gib"] > 0


@pytest.mark.parametrize(
    ("fails", "answers", "code", "said"),
    [
        (FAILS, [[], ["second (10.0.0.3)"]], 0, "lost node second (10.0.0.3) after step 0 of 2"),
        (LOSES_A_WORKER, [[], ["second (10.0.0.3)"]], 0, "lost node second (10.0.0.3) after step 0 of 2"),
        (LOSES_A_WORKER, [[]], 0, "lost a worker (pid 207) on node second (10.0.0.3) after step 0 of 2"),
        (FAILS, [[]], 1, "ValueError: no such thing"),
        (FAILS, [Refused("no Ray cluster answers")], 75, "ValueError: no such thing"),
    ],
)
def test_a_node_may_be_missed_late_and_the_jobs_own_error_is_shown_first(
    fails, answers, code, said, tmp_path, monkeypatch, capsys
):
    """The cluster's answers stand for a Ray that takes its time, and for a head that is gone."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(run.cluster, "NOTICED_S", -1 if len(answers) == 1 else 60)
    left, admitted = [fails, TRAINS], {"nodes": [{"node": "second (10.0.0.3)"}]}

    def lost(*_):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(run.cluster, "lost", lost)
    monkeypatch.setattr(run.cluster, "admit", lambda *_, **__: admitted)
    monkeypatch.setattr(jobs.Job, "command", lambda *_: [sys.executable, "-c", left.pop(0)])
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    job = jobs.parse(["DEVICE=cpu"])
    config = SimpleNamespace(trainer=SimpleNamespace(total_training_steps=2))
    record = runs.admit(job, tmp_path, 2) | admitted
    with runs.lock(tmp_path) as log:
        assert run.train_all(job, config, tmp_path, record, log)[0] == code
    assert said in capsys.readouterr().out
