"""``scripts/launch/head.sh`` and ``worker.sh``: the commands that they would run."""

import shlex

import pytest

NODE = {"NAME": "node", "RAY": "/no/such/ray"}


def test_dry_run_shows_the_command(machine):
    done = machine.succeed("head.sh", "--dry-run", GPUS="8", TEMP="/scratch/my ray", **NODE)
    words = shlex.split(done.stdout)
    assert done.stderr == ""
    assert words[:2] == ["env", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0"], "else Ray replaces 127.0.0.1"
    assert words[2:5] == ["/no/such/ray", "start", "--block"] and "--head" in words
    assert {"--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", "--num-gpus=8"} < set(words)
    assert "--temp-dir=/scratch/my ray" in words and not any(word.startswith("--num-cpus") for word in words)
    done = machine.succeed("worker.sh", "--dry-run", HEAD="10.0.0.1:6379", BIND="10.0.0.2", **NODE)
    words = shlex.split(done.stdout)
    assert words[:2] == ["env", "/no/such/ray"]
    assert {"--address=10.0.0.1:6379", "--node-ip-address=10.0.0.2", "--node-name=node"} < set(words)


def test_head_reachable_by_other_machines_warns_about_access(machine):
    done = machine.succeed("head.sh", "--dry-run", BIND="10.0.0.1", **NODE)
    assert "--node-ip-address=10.0.0.1" in shlex.split(done.stdout)
    assert "--dashboard-host=127.0.0.1" in shlex.split(done.stdout), "jobs are submitted there"
    assert "ray get-auth-token --generate" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("token", [{"RAY_AUTH_TOKEN_PATH": "/a/token"}, {"RAY_AUTH_TOKEN": "0123"}, {}])
@pytest.mark.parametrize("script", ["head.sh", "worker.sh"])
def test_node_uses_token_mode_where_a_token_exists(script, token, machine):
    if not token:
        (machine.home / ".ray").mkdir()
        (machine.home / ".ray/auth_token").touch()
    done = machine.succeed(script, "--dry-run", BIND="10.0.0.1", HEAD="10.0.0.1:6379", **NODE, **token)
    assert shlex.split(done.stdout)[:2] == ["env", "RAY_AUTH_MODE=token"] and done.stderr == ""
