"""The command line: its help, its two spellings, its refusals, and how a command ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.patch_tool import run_command

from verl_precision import __version__, cli
from verl_precision.patch.releases import find_release
from verl_precision.patch.stack import release_stacks
from verl_precision.paths import PACKAGE, REPO
from verl_precision.spelling import MADE, as_options, spelled

SETTINGS = {"PRECISION": "fp16", "STEPS": "8", "OUT": "/a b", "ARGS": "+x='a b' ~y z=[1,2]"}


@pytest.fixture(autouse=True)
def by_hand(monkeypatch):
    monkeypatch.delenv(MADE, raising=False)


def test_options_are_the_variables_of_make():
    assert as_options(SETTINGS) == ["--precision=fp16", "--steps=8", "--out=/a b", "--", "+x=a b", "~y", "z=[1,2]"]
    job, flags = cli.parse("run", [*as_options(SETTINGS)[:3], "--check", *as_options(SETTINGS)[3:]])
    assert flags == {"check": True, "check_each": False} and job.args == ("+x=a b", "~y", "z=[1,2]")
    assert (job.precision, job.steps, job.out) == ("fp16", 8, Path("/a b"))
    for words in (["--args=a=1 b=2"], ["a=1", "b=2"], ["--args=a=1", "--", "b=2"], ["a=1", "--steps=", "b=2"]):
        job, _ = cli.parse("run", words)
        assert job.args == ("a=1", "b=2") and job.steps is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("PRECISION=fp17: must be one of fp16", "--precision fp17: must be one of fp16"),
        ("RUNS: is not set; give RUNS='L=F …'", "--runs: is not set; give --runs 'L=F …'"),
        ("ARGS=a.b: is not a Hydra override", "a.b: is not a Hydra override"),
        ("unpatched; make apply-patches VERL=/a/b FIXES=yes", "unpatched; verl-precision apply --fixes /a/b"),
        ("make unapply-patches OAT=/a restores it, then", "verl-precision unapply /a restores it, then"),
        ("make port FROM=0.9.1 TO=/x", "verl-precision port 0.9.1 /x outputs/verl-x"),
        ("(make preflight), make status VERL=… there", "(verl-precision preflight), verl-precision status … there"),
        ("make doctor VERL=/a PYTHON=/p/python3", f"/p/python3 {PACKAGE} doctor --verl=/a"),
        ("`make run PRECISION=bf16 OUT='/a b'` resumes", "`verl-precision run --precision=bf16 '--out=/a b'` resumes"),
        ("removed; FIXES=yes puts it back", "removed; --fixes puts it back"),
        (
            "/tmp/FIXES=yes: no; agree, or make apply-patches VERL=/a.",
            "/tmp/FIXES=yes: no; agree, or verl-precision apply /a.",
        ),
        ("ARGS: no override", "no override"),
        ("they make sense; RAY_ADDRESS=a: no", "they make sense; RAY_ADDRESS=a: no"),
    ],
)
def test_messages_have_the_spelling_of_the_caller(monkeypatch, text, shown):
    variables = ("PRECISION", "RUNS", "ARGS")
    assert spelled(text, variables) == shown
    monkeypatch.setenv(MADE, "run")
    assert spelled(text, variables) == text


REFUSED = {
    "aply": "verl-precision: aply: is not a command; did you mean apply? --help lists them",
    "apply-patches": "verl-precision: apply-patches: is not a command; did you mean apply?",
    "version": "verl-precision: version: is not a command; did you mean --version?",
    "run PRECISION=bf16": "run: 'PRECISION=bf16' is a variable of make; write --precision bf16",
    "preflight MODEL=x": "preflight: 'MODEL=x' is not an argument of this command",
    "xyz": "verl-precision: xyz: is not a command; --help lists them",
    "run --presision fp16": "run: '--presision' is not an option of this command; did you mean --precision?",
    "run --prec fp16": "run: '--prec' is not an option of this command; ",
    "run --precision": "run: argument --precision: expected one argument; --help lists the options",
    "run --precision fp17": "run: --precision fp17: must be one of bf16, bf16_train_fp16_infer, fp16, fp32",
    "run trainer.save_freq": "run: trainer.save_freq: is not a Hydra override",
    "probe word": "probe: 'word' is not an argument of this command",
    "apply --fixs": "apply: '--fixs' is not an option of this command; did you mean --fixes?",
    "apply": "has no verl; use a Python that has it, or give the folder that contains verl/",
    "apply --framework trl": "apply: argument --framework: invalid choice: 'trl'",
    "report": "report: --from: is not set; give a report's folder, e.g. --from outputs/compare/arithmetic/grpo/report",
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_input_is_refused_in_one_line(words):
    done = run_command(REPO, *words.split())
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1 and REFUSED[words] in done.stderr and done.stderr.startswith("verl-precision")


def test_overview_lists_every_command():
    for words in ([], ["--help"], ["-h"], ["help"]):
        shown = run_command(REPO, *words).stdout
        assert all(f"\n  {name} " in shown for name in cli.SUMMARIES) and "None" not in shown
    shown = run_command(REPO, "--version").stdout
    assert shown.startswith(f"verl-precision {__version__}\n")
    for stack in release_stacks(find_release("0.9.1")):
        assert f"  verl 0.9.1: stack {stack.id} ({stack.series})\n" in shown


@pytest.mark.parametrize("name", cli.SUMMARIES)
def test_help_of_a_command_is_shown_by_any_python(name):
    done = run_command(REPO, name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: verl-precision {name} ")
    assert not {"scripts/", "NAME=VALUE", "{precision}"} & set(done.stdout.split())
    variables = getattr(cli.find_module(name), "VARIABLES", ())
    assert all(f"--{each.lower().replace('_', '-')} {each}" in done.stdout for each in variables)


ENDS = {  # a program: its exit code, and its last line on stderr
    "sys.exit(3)": (3, ""),
    "raise Refused('KEY=1: no')": (1, "name: KEY=1: no"),
    "open('/no/such/file')": (1, "name: /no/such/file: No such file or directory"),
    "os.rename('/no/a', '/no/b')": (1, "name: /no/a -> /no/b: No such file or directory"),
    "raise OSError('plain')": (1, "name: plain"),
    "subprocess.run(['false', 'x'], check=True)": (1, "name: exit code 1: false x"),
    "raise KeyboardInterrupt": (130, "name: interrupted; repeat the command to continue"),
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
    code = f"{head}with cli.handled_errors('name'):\n{body}\n"
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=REPO / "scripts", env=buffered, capture_output=True, text=True
    )
