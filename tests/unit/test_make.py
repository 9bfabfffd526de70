"""``verl_precision.make`` and the Makefile: words reach their command as typed, or are refused before any set-up."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from verl_precision import make
from verl_precision.errors import Refused
from verl_precision.paths import PACKAGE, REPO
from verl_precision.run.job import VARIABLES
from verl_precision.spelling import MADE

MAKEFILE = (REPO / "Makefile").read_text()
TARGETS = re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.M)


@pytest.fixture
def started(monkeypatch):
    """``started("run", "SEED=2")``: the Python and arguments of the exec'd process, without any set-up."""
    monkeypatch.setenv(MADE, "")
    monkeypatch.setattr(make.setup_env, "setup", lambda device, python, *_, **__: f"PYTHON of {device} {python}")
    monkeypatch.setattr(make, "gpu_present", lambda: False)
    taken = {name for each in make.TARGETS.values() for name in each.takes or ()}
    for name in {*VARIABLES, *taken}:
        monkeypatch.delenv(name, raising=False)
    calls = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: calls.append((program, arguments)))

    def start(name: str, *words: str) -> tuple[str, list[str]]:
        make.start(name, list(words))
        ((program, arguments),) = calls
        return program, arguments[2:] if arguments[1] == str(PACKAGE) else arguments[1:]

    return start


IN_ITS_ENVIRONMENT, HERE = "PYTHON of cpu None", sys.executable


STARTED = [
    (["run", "SEED=2", "PRECISION=bf16"], IN_ITS_ENVIRONMENT, "run --seed=2 --precision=bf16"),
    (["run", "ARGS=+a='b c' ~d"], IN_ITS_ENVIRONMENT, "run -- '+a=b c' '~d'"),
    (["preflight", "ROWS=4", "DEVICE=cpu"], IN_ITS_ENVIRONMENT, "preflight --rows=4 --device=cpu"),
    (["doctor", "ARGS=a.b=1"], IN_ITS_ENVIRONMENT, "doctor -- a.b=1"),
    (["bench", "ARGS=--sizes 10,30"], IN_ITS_ENVIRONMENT, "bench --sizes 10,30"),
    (["mutants", "ONLY=one"], IN_ITS_ENVIRONMENT, "-m mutants.__main__ one"),
    (["gsm8k"], IN_ITS_ENVIRONMENT, "-m recipes.gsm8k.prepare --out data/gsm8k"),
    (["pr-branch", "VERL=/clone"], IN_ITS_ENVIRONMENT, "pr-branch /clone"),
    (["pr-branch", "VERL=/clone", "DIR=/d"], IN_ITS_ENVIRONMENT, "pr-branch /clone --dir /d"),
    (["probe", "PYTHON=python3.12", "DEVICE=cpu"], "PYTHON of cpu python3.12", "probe --device=cpu"),
    # the patch tool needs no environment
    (["apply-patches", "VERL=/a b"], HERE, "apply --framework verl '/a b'"),
    (["apply-patches", "VERL=/a", "FIXES=yes"], HERE, "apply --fixes --framework verl /a"),
    (["unapply-patches", "OAT=/a", "FORCE=yes"], HERE, "unapply --force --framework oat /a"),
    (["status", "OAT=/oat"], HERE, "status --framework oat /oat"),
    (["check"], HERE, "check"),
    (["port", "FROM=0.9.1", "TO=/fork/verl/"], HERE, "port 0.9.1 /fork/verl/ outputs/verl-verl"),
]


# Named by only the words: the id of a test must not depend on the machine.
@pytest.mark.parametrize(("words", "program", "arguments"), STARTED, ids=[" ".join(words) for words, *_ in STARTED])
def test_target_starts_its_command(started, words, program, arguments):
    assert started(*words) == (program, shlex.split(arguments))


@pytest.mark.parametrize("there", [False, True])
def test_tree_is_that_of_the_environment_once_there_is_one(started, monkeypatch, tmp_path, there):
    monkeypatch.setattr(make.setup_env, "REPO", tmp_path)
    python = tmp_path / ".venv/bin/python"
    if there:
        python.parent.mkdir(parents=True)
        python.touch()
    assert started("drift") == (str(python) if there else HERE, ["drift"])


def test_sanity_is_a_grid_whose_values_the_command_line_overrides(started):
    grid = ["--experiment=sanity_cpu", "--precision=fp16 bf16 bf16_train_fp16_infer fp32", "--algo=grpo pg_is ppo"]
    made = ["compare", *grid, "--seed=4 5", "--threshold=0.95", "--out=outputs/sanity", "--", "a=b c"]
    assert sorted(started("sanity", "SEED=4 5", "ARGS=a='b c'")[1]) == sorted(made)


def test_collapse_is_a_pair_whose_values_the_command_line_overrides(started):
    pair = ["--experiment=recall", "--precision=bf16 fp16", "--algo=pg_is", "--steps=60", "--out=outputs/collapse"]
    assert sorted(started("collapse", "STEPS=60")[1]) == sorted(["compare", *pair])


@pytest.mark.parametrize(
    ("environment", "words", "arguments"),
    [
        ({"SEED": "3", "PRECISION": "bf16"}, ["run", "SEED=2"], ["run", "--precision=bf16", "--seed=2"]),
        ({"ARGS": "+precision=fp16"}, ["doctor"], ["doctor", "--", "+precision=fp16"]),
        ({"ARGS": "+precision=fp16"}, ["doctor", "ARGS=+precision=bf16"], ["doctor", "--", "+precision=bf16"]),
        ({"DEVICE": "cpu"}, ["preflight"], ["preflight", "--device=cpu"]),
        ({"FORCE": "1"}, ["unapply-patches", "VERL=/v"], ["unapply", "--framework", "verl", "/v"]),
    ],
)
def test_command_line_wins_over_the_environment(started, monkeypatch, environment, words, arguments):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert sorted(started(*words)[1]) == sorted(arguments)


@pytest.mark.parametrize(
    ("words", "device"),
    [
        ("probe", "cuda"),
        ("bench DEVICE=cpu", "cpu"),
        ("mutants", "cpu"),
        ("plan-memory EXPERIMENT=dense_7b", "cuda"),
    ],
)
def test_machine_with_a_gpu_uses_it(started, monkeypatch, words, device):
    monkeypatch.setattr(make, "gpu_present", lambda: True)
    assert started(*words.split())[0] == f"PYTHON of {device} None"


def test_recipe_is_found_and_installed_from_the_index_of_the_command_line(started, monkeypatch):
    monkeypatch.setenv("TORCH_INDEX_URL", "https://a")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    started("gsm8k", "TORCH_INDEX_URL=https://b")
    assert os.environ["TORCH_INDEX_URL"] == "https://b"
    folders = os.environ["PYTHONPATH"].split(os.pathsep)
    assert folders[0] == str(REPO) and folders[-1] == "/mine"


@pytest.mark.parametrize(
    ("name", "environments", "starts"), [("setup", ["cpu"], False), ("mutants", ["workers", "cpu"], True)]
)
def test_environments_of_a_command_are_made_with_the_python_that_is_named(monkeypatch, name, environments, starts):
    calls, programs = [], []
    monkeypatch.setenv("VERL", "/verl")
    monkeypatch.setattr(make.setup_env, "setup", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(os, "execv", lambda *_: programs.append("the command"))
    monkeypatch.setenv(MADE, "")
    make.start(name, ["DEVICE=cpu", "PYTHON=python3.12"])
    assert calls == [(environment, "python3.12") for environment in environments]
    assert bool(programs) == starts


def test_tree_of_the_environment_counts_like_one_of_the_command_line(started, monkeypatch):
    monkeypatch.setenv("VERL", "/verl")
    with pytest.raises(Refused, match="VERL=/verl OAT=/oat: set only one of the two"):
        started("status", "OAT=/oat")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "DEVICE=gpu"], "DEVICE=gpu: must be one of cpu, cuda"),
        (["run", "ARGS=trainer.save_freq"], "ARGS=trainer.save_freq: is not a Hydra override"),
        (["compare", "SEED=1 1"], "SEED=1 1: contains 1 more than once"),
        (["plan-memory", "EXPERIMENT=dense_7b none"], "EXPERIMENT=none: must be one of"),
        (["probe", "ROWS=1"], "ROWS=1: must be a whole number of at least 2"),
        (["doctor", "VERL=/nowhere"], "VERL=/nowhere is not a folder; give a checkout of verl, an unpacked release or"),
        (["doctor", "VERL="], "VERL= is empty: it must be a folder that contains verl/"),
        (["pr-branch"], "the following arguments are required: VERL"),
        (["setup", "VERL=/a"], "VERL: is not a variable of this command; the variables are DEVICE"),
        (["bench-amp", "ARGS=it's"], "ARGS=it's: No closing quotation"),
        (["status", "OAT="], "OAT= is empty: it must be a folder that contains oat/"),
        (["port", "FROM=0.9.1"], "TO: is not set; example: make port FROM=0.9.1 TO=0.9.2"),
        (["port", "FROM=0.9.1", "TO=0.9.2", "FRAMEWORK=trl"], "FRAMEWORK=trl: must be one of verl, oat"),
    ],
)
def test_bad_words_are_refused_before_any_setup(started, words, message):
    with pytest.raises(Refused, match=re.escape(message)) as refusal:
        started(*words)
    assert "\n" not in str(refusal.value)


def run_make(*words: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Run ``make`` as a user does, without the variables of a make that runs these tests."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    line = [shutil.which("make"), *words]
    return subprocess.run(line, cwd=REPO, env=environment or inherited, capture_output=True, text=True)


def test_make_passes_every_word_on_as_it_was_typed_and_a_refusal_in_one_line():
    typed = {"DEVICE=cpu", "OUT=/a b", "ARGS=x='it''s' y=[1,2] z=$HOME ${data.y} b=$$"}
    line = run_make("--dry-run", "run", *typed).stdout.splitlines()[-1]
    words = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True).stdout.split("\0")
    assert words[2:5] == ["scripts/verl_precision", "make", "run"] and set(words[5:-1]) == typed
    done = run_make("run", "PRECISON=fp16")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0].startswith("run: PRECISON: is not a variable of this command; did you mean")


@pytest.mark.parametrize("line", ["run\nARGS=a\nb=c", "doctor\nVERL=/x\n/y", "status\nVERL=/x\n", "check\nX=a\rb"])
def test_value_of_several_lines_is_refused_in_one(line):
    target, _, word = line.partition("\n")
    done = run_make(target, word)
    shown = " ".join(word.split())
    assert done.returncode == 2 and done.stderr.endswith(f"*** {shown}: its value must be one line.  Stop.\n")
    assert done.stderr.count("\n") == 1 and done.stdout == ""


def test_makefile_is_a_list_of_targets():
    text = run_make().stdout
    assert all(f"make {target} " in text for target in set(TARGETS) - {"python", "browser"})
    assert set(make.TARGETS) == set(re.search(r"^COMMANDS := ((?:.*\\\n)*.*)", MAKEFILE, re.M)[1].split()) - {"\\"}
    assert set(make.TARGETS) <= set(TARGETS) and len(MAKEFILE.splitlines()) <= 120


@pytest.mark.parametrize(
    ("pythons", "chosen"), [(["python3", "python3.10"], "python3.10"), (["python3.13"], "python3.13"), ([], None)]
)
@pytest.mark.parametrize("words", [[], ["PYTHON=python2"]], ids=["", "PYTHON=python2"])
def test_make_uses_the_first_recent_python(tmp_path, pythons, chosen, words):
    """``python3`` is too old here, as on older systems."""
    (tmp_path / "bash").symlink_to(shutil.which("bash"))
    for name in pythons:
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {int(name == 'python3')}\n")
        (tmp_path / name).chmod(0o755)
    if chosen and not words:
        done = run_make("--dry-run", "check", environment={"PATH": str(tmp_path)})
        assert done.stdout.splitlines()[-1].split()[:3] == ["exec", chosen, "scripts/verl_precision"]
        return
    done = run_make("check", *words, environment={"PATH": str(tmp_path)})
    named = "".join(f"{word}: " for word in words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{named}Python 3.10 or later is needed; install it, or name it: make PYTHON=")


@pytest.mark.parametrize("user", [0, 1000])
def test_browser_is_installed_only_by_root_and_otherwise_named(tmp_path, user):
    (tmp_path / "bash").symlink_to(shutil.which("bash"))
    for name, line in {"id": f"echo {user}", "apt-get": f"echo $@ >>{tmp_path}/installed"}.items():
        (tmp_path / name).write_text(f"#!{tmp_path}/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    done = run_make("browser", environment={"PATH": str(tmp_path)})
    assert (tmp_path / "installed").exists() == (done.returncode == 0) == (user == 0)
    assert ("chromium, in which the tests load a report, is missing; install" in done.stderr) == (user != 0)


def test_clean_keeps_runs_and_data(tmp_path):
    for name in (".venv", ".cache", "outputs", "data"):
        (tmp_path / name).mkdir()
    assert run_make("-C", str(tmp_path), "-f", str(REPO / "Makefile"), "clean").returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"outputs", "data"}


def test_python_that_does_not_exist_is_named():
    done = run_make("check", "PYTHON=/no/such/file")
    assert done.returncode == 2 and done.stderr.startswith("PYTHON=/no/such/file: no such file; Python 3.10 or later")


USUAL = "not slow and not gpu and not"
TESTS = {  # the folder of Python, what is set up, and the markers
    "test-quick": (".venv", "cpu", f"{USUAL} subprocess"),
    "test": (".venv", "cpu workers", f"{USUAL} recorded"),
    "test DEVICE=cuda": (".venv-cuda", "cuda workers", f"{USUAL} recorded"),
    "test-all": (".venv", "cpu workers", "not gpu"),
    "test-all DEVICE=cuda": (".venv-cuda", "cuda workers", "slow or not slow"),
}


@pytest.mark.parametrize("words", TESTS)
def test_tests_set_up_what_they_need_and_select_by_marker(words):
    folder, environments, markers = TESTS[words]
    setup, command_line = run_make("--dry-run", *words.split()).stdout.splitlines()[-2:]
    assert setup.split("scripts/verl_precision setup")[1].strip() == environments
    assert command_line.removeprefix("exec ").startswith(f"{folder}/bin/") and f' -m "{markers}"' in command_line


def test_help_of_every_target_is_that_of_its_command():
    """In a Python that has only the standard library."""
    for name, target in make.TARGETS.items():
        done = subprocess.run(
            [sys.executable, "-S", "-B", PACKAGE, "make", name, "--help"], capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, ""), name
        assert done.stdout.startswith(f"usage: make {name}")
        assert all(f" {each}=…" in done.stdout for each in target.takes or ())
        command = target.command or name
        module = command.startswith("-m")
        assert (f"usage: verl-precision {command} " in done.stdout) != module, name
