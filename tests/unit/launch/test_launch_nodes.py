"""``scripts/launch/head.sh`` and ``worker.sh``: refusals, and the commands that they would run."""

import os
import shlex
import subprocess

import pytest

from lib.paths import REPO

LAUNCH = REPO / "scripts/launch"


def launch(script: str, *words: str, **knobs: str) -> subprocess.CompletedProcess:
    environment = {"PATH": os.environ["PATH"], "HOME": "/", "NAME": "node", "RAY": "/no/such/ray"} | knobs
    return subprocess.run([LAUNCH / script, *words], cwd="/", env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("script", "words", "knobs", "refusal"),
    [
        ("head.sh", [], {}, "head: RAY=/no/such/ray: there is no such program"),
        ("head.sh", ["--dryrun"], {}, "head: --dryrun: takes --dry-run alone"),
        ("head.sh", [], {"GPUS": "all"}, "head: GPUS=all: must be a whole number"),
        ("head.sh", [], {"CPUS": "-1"}, "head: CPUS=-1: must be a whole number"),
        ("head.sh", [], {"PORT": "80"}, "head: PORT=80: must be a port from 1024 to 65535"),
        ("head.sh", [], {"PORT": "70000"}, "head: PORT=70000: must be a port from 1024 to 65535"),
        ("head.sh", [], {"PORT": "16379"}, "head: PORT=16379: must not be from 10002 to 19999"),
        ("head.sh", [], {"DASHBOARD_PORT": "x"}, "head: DASHBOARD_PORT=x: must be a port"),
        ("head.sh", [], {"BIND": "0.0.0.0"}, "head: BIND=0.0.0.0: must be 127.0.0.1, or the address of this machine"),
        ("head.sh", [], {"BIND": "localhost"}, "head: BIND=localhost: must be 127.0.0.1, or the address of this"),
        ("head.sh", [], {"TEMP": "ray"}, "head: TEMP=ray: must be an absolute path"),
        ("head.sh", [], {"TEMP": f"/{'a' * 40}"}, f"head: TEMP=/{'a' * 40}: has 41 characters"),
        ("head.sh", [], {"PORT": "8265"}, "head: DASHBOARD_PORT=8265: must differ from PORT"),
        ("worker.sh", [], {"HEAD": "10.0.0.1:99999"}, "worker: HEAD=10.0.0.1:99999: the port must be at most"),
        ("worker.sh", [], {}, "worker: HEAD=: must be the address and port of the head"),
        ("worker.sh", [], {"HEAD": "http://a:1"}, "worker: HEAD=http://a:1: must be the address and port of the head"),
        ("worker.sh", [], {"HEAD": "127.0.0.1:6379"}, "worker: HEAD=127.0.0.1:6379: is a loopback address"),
        ("worker.sh", [], {"HEAD": "127.0.0.2:9"}, "worker: HEAD=127.0.0.2:9: nothing answers there"),
        ("worker.sh", [], {"HEAD": "127.0.0.2:9", "TEMP": f"/{'a' * 40}"}, f"worker: TEMP=/{'a' * 40}: has 41"),
    ],
)
def test_bad_knob_is_refused_in_one_line(script, words, knobs, refusal):
    done = launch(script, *words, **knobs)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(refusal) and done.stderr.count("\n") == 1, done.stderr


def test_dry_run_shows_the_command():
    done = launch("head.sh", "--dry-run", GPUS="8", TEMP="/scratch/my ray")
    words = shlex.split(done.stdout)
    assert done.returncode == 0 and done.stderr == ""
    assert words[:2] == ["env", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0"], "else Ray replaces 127.0.0.1"
    assert words[2:5] == ["/no/such/ray", "start", "--block"] and "--head" in words
    assert {"--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", "--num-gpus=8"} < set(words)
    assert "--temp-dir=/scratch/my ray" in words and not any(word.startswith("--num-cpus") for word in words)
    words = shlex.split(launch("worker.sh", "--dry-run", HEAD="10.0.0.1:6379", BIND="10.0.0.2").stdout)
    assert words[:2] == ["env", "/no/such/ray"]
    assert {"--address=10.0.0.1:6379", "--node-ip-address=10.0.0.2", "--node-name=node"} < set(words)


def test_head_reachable_by_other_machines_warns_about_access():
    done = launch("head.sh", "--dry-run", BIND="10.0.0.1")
    assert "--node-ip-address=10.0.0.1" in shlex.split(done.stdout)
    assert "--dashboard-host=127.0.0.1" in shlex.split(done.stdout), "jobs are submitted there"
    assert "ray get-auth-token --generate" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("script", ["head.sh", "worker.sh"])
def test_node_uses_token_mode_where_a_token_exists(script, tmp_path):
    for token in ({"RAY_AUTH_TOKEN_PATH": "/a/token"}, {"RAY_AUTH_TOKEN": "0123"}):
        done = launch(script, "--dry-run", BIND="10.0.0.1", HEAD="10.0.0.1:6379", **token)
        assert shlex.split(done.stdout)[:2] == ["env", "RAY_AUTH_MODE=token"] and done.stderr == ""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").touch()
    done = launch(script, "--dry-run", BIND="10.0.0.1", HEAD="10.0.0.1:6379", HOME=str(tmp_path))
    assert shlex.split(done.stdout)[:2] == ["env", "RAY_AUTH_MODE=token"] and done.stderr == ""
