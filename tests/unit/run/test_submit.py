"""``make submit``: refusals, the files that a job carries to the nodes, and its end."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest

from verl_precision.cli import parse
from verl_precision.commands import submit
from verl_precision.errors import Refused
from verl_precision.paths import PACKAGE
from verl_precision.run.job import Job, parse_job

HEAD = "http://127.0.0.1:8265"


@pytest.fixture
def job(monkeypatch, tmp_path) -> Job:
    monkeypatch.setenv("RAY_ADDRESS", HEAD)
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody_else")
    return parse_job(["DEVICE=cpu", f"OUT={tmp_path}/run", "STEPS=2", "RETRIES=1", "ARGS=trainer.nnodes=2"])


def test_job_carries_patched_verl_and_its_part_of_this_checkout(job, trees, imported, tmp_path):
    imported(trees["patched"])
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    option, runtime_env, _, *entrypoint = submit.prepare(job, scratch)
    assert option == "--runtime-env-json" and shlex.join(entrypoint) == (
        "python3 scripts/verl_precision run --experiment=arithmetic --precision=fp16 --algo=grpo --device=cpu --seed=1 "
        f"--steps=2 --out={tmp_path}/run --retries=1 -- trainer.nnodes=2"
    )
    modules = [str(trees["patched"] / "verl")]
    carried = {"working_dir": str(scratch), "py_modules": modules, "excludes": ["__pycache__"]}
    assert json.loads(runtime_env) == carried and not list(scratch.rglob("__pycache__"))
    assert sorted(path.name for path in scratch.iterdir()) == ["configs", "patches", "recipes", "scripts"]
    _, program, name, *settings = entrypoint  # accepted there by a Python without packages
    assert parse(name, settings)[0].args == job.args
    subprocess.run([sys.executable, "-S", program, name, "--help"], cwd=scratch, check=True, capture_output=True)


def test_unpatched_verl_is_not_carried(job, trees, imported, tmp_path):
    imported(trees["pristine"])
    with pytest.raises(Refused, match=f"^CARRY=yes: {trees['pristine']}/verl: unpatched: "):
        submit.prepare(job, tmp_path)
    own = submit.prepare(replace(job, carry=False, seed=0, retries=0), tmp_path)
    assert own[:4] == ["--", sys.executable, str(PACKAGE), "run"]
    assert {"--seed=0", "--retries=0"} <= {*own}, "0 is a value, not a missing one"


def test_dry_run_shows_the_submission_and_does_nothing(validated_here, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")  # no server listens there
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    assert submit.main(submit.parse(["DEVICE=cpu", f"OUT={tmp_path}/run"]), dry_run=True) == 0
    shown = "".join(capsys.readouterr())
    assert (
        "would submit to http://127.0.0.1:1: python3 scripts/verl_precision run " in shown
        and f"--out={tmp_path}/run" in shown
    )
    assert "carries verl 0.9.1 with stack " in shown and "0123456789abcdef" not in shown
    assert not list(tmp_path.iterdir())


MINI_BATCH = "ARGS=actor_rollout_ref.actor.ppo_mini_batch_size=64"
ROLLOUT = "actor_rollout_ref.rollout.name"
NO_DASHBOARD = "must be the URL of the cluster's dashboard"


@pytest.mark.parametrize(
    ("address", "words", "refusal"),
    [
        ("", "OUT=/out", f"RAY_ADDRESS=: {NO_DASHBOARD}"),
        ("127.0.0.1:6379", "OUT=/out", f"RAY_ADDRESS=127.0.0.1:6379: {NO_DASHBOARD}"),
        (HEAD, "OUT=outputs/run", "OUT=outputs/run: must be an absolute path on storage shared by all nodes"),
        (HEAD, "CARRY=no OUT={}", "OUT={}: is not empty and contains no run"),
        (HEAD, f"CARRY=no OUT={{}}/run {MINI_BATCH}", f"{MINI_BATCH}: train_batch_size (32) must be >="),
        (HEAD, f"CARRY=no OUT={{}}/run ARGS={ROLLOUT}=hf", f"{ROLLOUT}=hf is no rollout of verl 0.9.1"),
    ],
)
def test_submission_is_refused_as_the_run_would_be(address, words, refusal, validated_here, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(Refused, match=f"^{re.escape(refusal.format(tmp_path))}"):
        submit.main(submit.parse(["DEVICE=cpu", *words.format(tmp_path).split()]), dry_run=True)


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "git_token", "WANDB_API_KEY", "OPENAI_APIKEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"),
        *("CLIENT_SECRET", "DB_PASSWORD", "GCP_CREDENTIALS", "GIT_CREDENTIAL"),
    ],
)
def test_secret_in_a_word_is_refused_and_not_repeated(name, monkeypatch):
    monkeypatch.setenv(name, "hf_of_nobody_else")
    with pytest.raises(Refused, match=f"^{name}: its value is part of the command line") as refusal:
        submit.main(submit.parse(["DEVICE=cpu", "ARGS=+trainer.token=hf_of_nobody_else"]))
    assert "hf_of_nobody_else" not in str(refusal.value)


@pytest.mark.parametrize("code", [0, 1])
def test_exit_code_is_the_jobs(code, validated_here, tmp_path, monkeypatch, capfd):
    program = f"import sys; print(sys.argv[1:4]); sys.exit({code})"
    monkeypatch.setenv("RAY_ADDRESS", HEAD)
    monkeypatch.setattr(submit, "RAY", (sys.executable, "-c", program))
    monkeypatch.setattr(submit, "check_dashboard", lambda address: None)
    assert submit.main(submit.parse(["DEVICE=cpu", f"OUT={tmp_path}/run"])) == code
    assert capfd.readouterr().out.endswith("['job', 'submit', '--address']\n")


def test_dashboard_that_does_not_answer_is_refused_in_one_line(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")
    with pytest.raises(Refused, match="^RAY_ADDRESS=http://127.0.0.1:1: no Ray cluster answers there") as refusal:
        submit.main(submit.parse(["DEVICE=cpu", "OUT=/out"]))
    assert "\n" not in str(refusal.value)
