"""``scripts/launch/slurm.sh`` on stubs of Slurm and Ray, which record their arguments and run their commands."""

import os
import shlex
import signal

import pytest
from support.launch_machine import OVERRIDES, SECRET, job_of
from support.waiting import TIMEOUT_S

from verl_precision.paths import REPO

KNOBS = {"EXPERIMENT": "arithmetic", "VENV": "", "RECIPE": "flowrl", "PRECISION": "bf16", "STEPS": 9, "NNODES": 2}
IN_JOB = {"IN_JOB": "yes", "SLURM_JOB_ID": 7, "SLURM_JOB_NODELIST": "node[1-2]", "DEVICE": "cpu", "GPUS_PER_NODE": 8}
IN_JOB |= KNOBS


def test_slurm_queues_itself_and_trains_on_every_node(slurm):
    out = slurm.folder / "shared/out"
    limits = {"TIME_LIMIT": "8:00:00", "CPUS_PER_NODE": 32, "GPUS_PER_NODE": 4, "START_S": 60}
    more = {"SBATCH_ARGS": "--partition=gpu --account=me", "SRUN_ARGS": "--container-image=x"}
    outer = {"RAY_ADDRESS": "another:6379", "SLURM_JOB_ID": 3, "HF_TOKEN": SECRET}
    knobs = KNOBS | limits | more | outer | {"OUT": out, "ARGS": "a=1\nb=2"}
    done = slurm.succeed("slurm.sh", *OVERRIDES, **knobs)

    queued = slurm.words("sbatch")
    assert {"--nodes=2", "--gpus-per-node=4", "--cpus-per-task=32", "--time=8:00:00"} <= {*queued}
    assert {"--partition=gpu", "--account=me", "--job-name=arithmetic-flowrl-bf16-seed1"} <= {*queued}
    assert {"--requeue", "--export=ALL", "--open-mode=append"} <= {*queued}
    assert "--signal=B:USR1@120" in queued, "the script must get the signal, not the workers"
    assert "RAY_ADDRESS" not in slurm.environment("sbatch"), "RAY_ADDRESS of another cluster"

    step = slurm.words("srun")
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=32", "--container-image=x"} <= {*step}
    assert "--kill-on-bad-exit=0" in step, "a site's default may be 1, and srun would return the killed workers' code"

    cluster = slurm.words("ray")
    assert cluster[:5] == ["symmetric-run", "--address", "10.0.0.7:6379", "--min-nodes", "2"]
    assert {"--num-gpus=4", "--num-cpus=32", "--dashboard-host=127.0.0.1"} <= {*cluster}
    assert "RAY_AUTH_MODE" not in slurm.environment("ray"), "there is no token"
    assert slurm.environment("ray")["RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT"] == "60", "as symmetric_run.py names it"

    words, environment = slurm.words("python3"), slurm.environment("python3")
    job = job_of(words)
    assert (job.recipe, job.precision, job.steps, job.out) == ("flowrl", "bf16", 9, out)
    assert job.args == ("trainer.nnodes=2", "trainer.n_gpus_per_node=4", "a=1", "b=2", *OVERRIDES)
    assert environment["RAY_ADDRESS"] == "10.0.0.7:6379"
    assert environment["HF_TOKEN"] == SECRET, "the job must have the secrets of the shell that queued it"
    assert SECRET not in "".join([*queued, *step, *cluster, *words, done.stdout, done.stderr])


def test_slurm_passes_on_the_token_that_the_head_requires(slurm):
    """Ray's head requires a token if it finds one; the other nodes send it only in token mode."""
    (slurm.home / ".ray").mkdir()
    (slurm.home / ".ray/auth_token").write_text(SECRET)
    slurm.succeed("slurm.sh", OUT=slurm.folder / "out", **IN_JOB)
    assert slurm.environment("ray")["RAY_AUTH_MODE"] == "token"


def test_slurm_derives_the_default_out_from_the_knobs(slurm):
    """The same command and a requeued job resume: nothing but the knobs is in the folder's name."""
    done = slurm.succeed("slurm.sh", "--dry-run", SEED=2, **KNOBS)
    job = job_of(shlex.split(done.stdout.splitlines()[-1])[1:])
    assert job.out == REPO / "outputs/slurm/arithmetic-flowrl-bf16-seed2"


@pytest.mark.parametrize(
    ("body", "count", "code", "message"),
    [
        ("exit 75", 0, 0, "slurm: the cluster was lost: requeued, to resume from OUT="),
        ("exit 75", 20, 1, "slurm: the cluster was lost, and all REQUEUES=20 are used up; a run with the same"),
        ("exit 130", 0, 130, ""),
        ("exit 0", 0, 1, "slurm: Ray did not start on node1; see above"),
    ],
)
def test_slurm_requeues_a_lost_cluster_and_nothing_else(body, count, code, message, slurm):
    """An exit code of 0 is no success without a new summary."""
    out = slurm.folder / "out"
    out.mkdir()
    (out / "summary.json").write_text("{}")
    slurm.program("ray", body)
    done = slurm.run("slurm.sh", OUT=out, SLURM_RESTART_COUNT=count, **IN_JOB)
    assert done.returncode == code
    (line,) = (done.stdout + done.stderr).splitlines() or [""]
    assert line.startswith(message)
    assert (slurm.words("scontrol") == ["requeue", "7"]) == ("requeued, to resume" in message)


def test_slurm_requeues_before_the_time_limit(slurm):
    slurm.program("ray", "echo started; sleep 30; touch trained")
    job = slurm.start("slurm.sh", OUT=slurm.folder / "out", **IN_JOB)
    try:
        assert job.stdout.readline() == "started\n"
        job.send_signal(signal.SIGUSR1)  # as sbatch --signal=B:USR1@120 does, only to the batch shell
        assert job.wait(timeout=TIMEOUT_S) == 0
        assert job.stdout.readline().startswith("slurm: the time limit is near: requeued, to resume")
        assert slurm.words("scontrol") == ["requeue", "7"]
        assert not (slurm.home / "trained").exists(), "the requeue must not wait for the training"
    finally:
        os.killpg(job.pid, signal.SIGKILL)
