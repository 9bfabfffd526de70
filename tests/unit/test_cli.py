"""The ``NAME=VALUE`` words of the commands: values, refusals, and their usage."""

import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from verl_precision import cli
from verl_precision.errors import Refused
from verl_precision.files import check_room
from verl_precision.paths import REPO
from verl_precision.run.job import VARIABLES


def test_words_are_parsed_and_an_unknown_name_is_refused_with_the_nearest_one():
    assert cli.parse_words(["ARGS=a=1 b=2", "STEPS="], VARIABLES) == {"ARGS": "a=1 b=2"}
    for name, nearest in {"precison": "did you mean PRECISION? The", "COLOUR": "the", "--": "the"}.items():
        message = f"^{name}: is not a variable of this command; {re.escape(nearest)} variables are EXPERIM.*, CARRY$"
        with pytest.raises(Refused, match=message):
            cli.parse_words(["STEPS=3", f"{name}=1"], VARIABLES)
    lines = cli.usage({"A": "one of {precision}", "LONGER": "text"}).splitlines()
    assert lines == ["  A      one of bf16, bf16_train_fp16_infer, fp16, fp32", "  LONGER text"]


def test_overrides_have_up_to_two_plus_signs_or_a_tilde():
    assert cli.override_words("ARGS", "a.b=1 +a=x=y ++a= ~a.b") == ["a.b=1", "+a=x=y", "++a=", "~a.b"]
    for word in ("+++a=1", "+a", "--a=1", "=1"):
        with pytest.raises(Refused, match=f"^ARGS={re.escape(word)}: is not a Hydra override"):
            cli.override_words("ARGS", f"a=1 {word}")
    with pytest.raises(Refused, match="^RUNS=a='x: No closing quotation; quote it$"):
        cli.override_words("RUNS", "a='x", "; quote it")


@pytest.mark.parametrize("code", [0, 9])
def test_gpu_is_present_where_nvidia_smi_lists_it(code, tmp_path, monkeypatch):
    """It fails without a driver, or without a GPU."""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nexit {code}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.gpu_present() == (code == 0)


def test_paths_of_models_and_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "outputs/run").mkdir(parents=True)
    assert cli.file_path({"OUT": "~/run"}, "OUT") == str(tmp_path / "home/run")
    assert cli.file_path({"OUT": "run"}, "OUT") == str(tmp_path / "run") and cli.file_path({}, "OUT") is None
    assert cli.model_path("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    with pytest.raises(Refused, match="^MODEL=outputs/run: contains no config.json"):
        cli.model_path("outputs/run")
    (tmp_path / "outputs/run/config.json").write_text("{}")
    assert cli.model_path("outputs/run") == str(tmp_path / "outputs/run")


def test_room_is_checked_in_the_folder_itself(tmp_path, monkeypatch):
    check_room(tmp_path / "new/folder")
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match=f"^OUT={tmp_path}/file: cannot be written to"):
        check_room(tmp_path / "file")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**29))
    with pytest.raises(Refused, match=f"^OUT={tmp_path}: 0.50 GiB free on its disk, 1.0 needed"):
        check_room(tmp_path)


ENDS = {  # a program: its exit code, and its last line on stderr
    "sys.exit(3)": (3, ""),
    "raise Refused('KEY=1: no')": (1, "name: KEY=1: no"),
    "open('/no/such/file')": (1, "name: /no/such/file: No such file or directory"),
    "os.rename('/no/a', '/no/b')": (1, "name: /no/a -> /no/b: No such file or directory"),
    "raise OSError('plain')": (1, "name: plain"),
    "subprocess.run(['false', 'x'], check=True)": (1, "name: exit code 1: false x"),
    "raise KeyboardInterrupt": (130, "name: interrupted; repeat it"),
    "print('\\udc80')": (0, ""),  # as in a path that is not UTF-8
    "1 / 0": (1, "name: ZeroDivisionError: division by zero; this is a defect: open an issue with these lines"),
}


@pytest.mark.parametrize("program", ENDS)
def test_end_of_a_command_is_a_line_and_an_exit_code(program):
    done = run_handled(program)
    last = done.stderr.splitlines()[-1:]
    assert (done.returncode, "".join(last)) == ENDS[program]
    assert ("Traceback" in done.stderr) == ("defect" in ENDS[program][1])


@pytest.mark.parametrize("program", ["for _ in range(99999): print('line')", "print('line'); time.sleep(1)"])
def test_closed_pipe_ends_a_command_in_silence(program):
    done = run_handled(f"import time\nos.close(1); r, w = os.pipe(); os.close(r); os.dup2(w, 1)\n{program}")
    assert (done.returncode, done.stderr) == (141, "")


def run_handled(program: str) -> subprocess.CompletedProcess:
    """Run a program as the ``main`` of a command."""
    body = "\n".join(f"    {line}" for line in program.splitlines())
    head = "import os, subprocess, sys\nfrom verl_precision import cli\nfrom verl_precision.errors import Refused\n"
    code = f"{head}with cli.handled_errors('name', 'repeat it'):\n{body}\n"
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=REPO / "scripts", env=buffered, capture_output=True, text=True
    )
