"""Child processes of the commands: their session, their end with the parent, and the signals that interrupt them."""

import os
import subprocess
import sys

import psutil
import pytest
from support.waiting import TIMEOUT_S

from verl_precision.paths import REPO
from verl_precision.process import ENDING_SIGNALS, start_child

ENVIRONMENT = os.environ | {"PYTHONPATH": str(REPO / "scripts")}
# Starts a child that would write a file after a minute, and prints its process id.
PARENT = """
import os, sys, time
from pathlib import Path
from verl_precision.process import start_child
writes = "import pathlib, time; time.sleep(60); pathlib.Path('outlived').touch()"
child = start_child([sys.executable, "-c", writes], Path.cwd(), os.environ, sys.stdout)
print(child.pid, flush=True)
time.sleep(600)
"""
INTERRUPTED = """
import signal, time
from verl_precision.process import interrupt_on_signals
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a process that a shell starts in the background
interrupt_on_signals()
try:
    print("ready", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_child_has_its_own_session_no_stdin_and_one_output(tmp_path):
    program = "import os, sys; print(os.getsid(0) == os.getpid(), os.getcwd()); sys.exit(sys.stdin.read() + 'end')"
    child = start_child([sys.executable, "-c", program], tmp_path, ENVIRONMENT, subprocess.PIPE)
    assert sorted(child.communicate()[0].splitlines()) == [f"True {tmp_path}", "end"]


def test_child_does_not_outlive_a_killed_parent(tmp_path):
    line = [sys.executable, "-c", PARENT]
    with subprocess.Popen(line, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
        parent.kill()
    assert psutil.wait_procs([child], timeout=TIMEOUT_S)[1] == [] and not (tmp_path / "outlived").exists()


def test_signals_are_ignored_during_an_orderly_end():
    killed = "[os.kill(os.getpid(), number) for number in process.ENDING_SIGNALS]"
    program = f"import os; from verl_precision import process; process.ignore_signals(); {killed}"
    assert subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT).returncode == 0


@pytest.mark.parametrize("number", ENDING_SIGNALS)
def test_ending_signals_interrupt(number):
    command = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.communicate(timeout=TIMEOUT_S)[0] == "interrupted\n"
