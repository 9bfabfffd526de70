"""The scripts of ``scripts/launch``: dry runs, their Python, the job of ``flowrl_7b.sh``, and Ray's nodes."""

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.launch_machine import ALL_BUT_THE_JOB, IMAGE, LAUNCH, OVERRIDES, SECRET

from verl_precision.paths import REPO
from verl_precision.run.job import compose, parse_job

NODE = {"NAME": "node", "RAY": "/no/such/ray"}


def test_scripts_pass_shellcheck():
    line = [Path(sys.executable).parent / "shellcheck", *LAUNCH.glob("*.sh")]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("where", "goal", "dtype"),
    [({}, "run", "float16"), ({"RAY_ADDRESS": "http://head:8265", "PRECISION": "bf16"}, "submit", "bfloat16")],
)
def test_knobs_and_overrides_reach_verl(where, goal, dtype, machine, parquet):
    """Each word reaches the command of make as typed, with blanks, quotes, dollars and commas."""
    knobs = {"DATA": parquet, "NNODES": 4 if where else 1, "OUT": machine.folder / "out", "STEPS": 7}
    done = machine.succeed("flowrl_7b.sh", *OVERRIDES, MAKEFLAGS="n", DEVICE="cpu", **knobs, **where)
    (line,) = (line for line in done.stdout.splitlines() if f"scripts/verl_precision make {goal} " in line)
    job = parse_job(shlex.split(line)[5:])
    assert job.args == (f"trainer.nnodes={knobs['NNODES']}", "trainer.n_gpus_per_node=8", *OVERRIDES)
    config = compose(job, job.out)
    assert (config.trainer.nnodes, config.trainer.total_training_steps) == (knobs["NNODES"], 7)
    splits = (str(parquet / "train.parquet"), str(parquet / "test.parquet"))
    assert (config.data.train_files, config.data.val_files) == splits and config.data.train_batch_size == 64
    actor = config.actor_rollout_ref.actor
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen2.5-7B" and actor.dtype == dtype
    data, rollout = config.data, config.actor_rollout_ref.rollout  # the paper's preset
    paper = (actor.ppo_mini_batch_size, rollout.n, actor.optim.lr, actor.flowrl.partition.dropout)
    assert paper == (32, 8, 1e-6, 0.1)
    assert compose(replace(job, args=()), job.out).data.train_batch_size == 512
    for longest in (actor.ppo_max_token_len_per_gpu, rollout.log_prob_max_token_len_per_gpu):
        assert longest >= data.max_prompt_length + data.max_response_length == 2048 + 8192


DRY = {
    "flowrl_7b": {},
    "slurm": {"VENV": "", "IN_JOB": "yes"},
    "kuberay": IMAGE,
    "sky": IMAGE | {"OUT": "/shared/out"},
    "train": {"RAY_ADDRESS": "head:6379", "NNODES": "2", "GPUS_PER_NODE": "8"},
}


@pytest.mark.parametrize("name", DRY)
def test_dry_run_shows_the_commands_and_does_nothing(name, machine, parquet):
    for program in ("make", "sbatch", "srun", "scontrol", "kubectl", "sky", "ray"):
        machine.program(program)
    knobs = {"EXPERIMENT": "arithmetic", "PRECISION": "bf16", "NNODES": 1, "HF_TOKEN": SECRET, "WANDB_API_KEY": SECRET}
    knobs |= {"DATA": parquet, "OUT": machine.folder / "shared/out", "SHARED": machine.folder} | DRY[name]
    before = sorted(machine.folder.rglob("*"))
    done = machine.succeed(f"{name}.sh", "--dry-run", *OVERRIDES, **knobs)
    assert "bf16" in done.stdout and "data.train_batch_size=64" in done.stdout and str(knobs["OUT"]) in done.stdout
    assert SECRET not in done.stdout + done.stderr
    assert sorted(machine.folder.rglob("*")) == before


@pytest.mark.parametrize("name", ["slurm", "kuberay", "sky"])
def test_script_takes_the_first_python_that_fits(name, machine):
    """Without overrides, which is another path through the shell's empty arrays."""
    machine.program("python3", "exit 1")  # as one that is too old does
    machine.program("python3.14", f'exec {sys.executable} "$@"')
    knobs = {"EXPERIMENT": "arithmetic", "NNODES": 1, "PYTHON": "", "OUT": "/shared/out"} | DRY[name] | {"IN_JOB": ""}
    done = machine.succeed(f"{name}.sh", "--dry-run", **knobs)
    assert "fp16" in done.stdout, "the default of make run"
    assert machine.called("python3") and machine.called("python3.14")


def test_job_takes_the_python_of_its_own_node(machine):
    """Slurm hands on the environment of the machine that submitted the job, PYTHON too."""
    machine.program("python3", ALL_BUT_THE_JOB)
    machine.succeed("train.sh", RAY_ADDRESS="head:6379", NNODES=2, GPUS_PER_NODE=8, PYTHON="/not/here/python")
    assert machine.words("python3")[:2] == [str(REPO / "scripts/verl_precision"), "run"]


def test_dry_run_of_a_node_shows_its_command(machine):
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
    done = machine.succeed("head.sh", "--dry-run", BIND="10.0.0.1", **NODE)  # which others can reach
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
