"""The scripts of ``scripts/launch``: refusals, and the commands that they exec.

Slurm's and SkyPilot's programs are stubs here, which record their arguments and run the commands that these would run;
``tests/e2e`` starts real Ray clusters.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from lib.paths import REPO
from lib.run.job import Job, compose, parse_job
from lib.run.validation import validate

LAUNCH = REPO / "scripts/launch"
SCRIPT = LAUNCH / "flowrl_7b.sh"
SECRET = "hf_this-is-a-secret"
OVERRIDES = ("data.train_batch_size=64", "+note='it costs $5, or \u20ac 5\U0001f600'", "trainer.logger=[console,file]")


@pytest.fixture
def data(tmp_path) -> Path:
    """1,000 rows of verl's schema for training and validation."""
    row = {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "reward_model": {"style": "rule"},
    }
    for split in ("train", "test"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 1000), tmp_path / f"{split}.parquet")
    return tmp_path


def launch(*overrides: str, **knobs: object) -> subprocess.CompletedProcess:
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "DEVICE": "cpu"}
    environment |= {name: str(value) for name, value in knobs.items()}
    return subprocess.run([SCRIPT, *overrides], cwd="/", env=environment, capture_output=True, text=True)


ON_CLUSTER = {"RAY_ADDRESS": "http://127.0.0.1:9", "OUT": "/tmp/flowrl"}


@pytest.mark.parametrize(
    ("knobs", "refusal"),
    [
        ({"NNODES": "0"}, "flowrl_7b: NNODES=0: must be a whole number of at least 1"),
        ({"GPUS_PER_NODE": "all"}, "flowrl_7b: GPUS_PER_NODE=all: must be a whole number of at least 1"),
        (
            {"DATA": "/no/data"},
            "flowrl_7b: DATA=/no/data: contains no train.parquet; make dapo-math writes data/dapo-math",
        ),
        ({"NNODES": "2"}, "flowrl_7b: NNODES=2: requires RAY_ADDRESS, the dashboard of a running Ray cluster"),
        ({"PRECISION": "fp61"}, "run: PRECISION=fp61: must be one of bf16, bf16_train_fp16_infer, fp16, fp32"),
        ({"RECIPE": "flow"}, "run: RECIPE=flow: must be one of flowrl, flowrl_paper"),
        ({"MODEL": "/no/model"}, "run: MODEL=/no/model: contains no config.json"),
        (
            {"RAY_ADDRESS": "http://head:8265"},
            "flowrl_7b: OUT: is not set; on a cluster it must be an absolute path on storage",
        ),
        (ON_CLUSTER | {"CARRY": "maybe"}, "submit: CARRY=maybe: must be one of yes, no"),
        (ON_CLUSTER, "submit: RAY_ADDRESS=http://127.0.0.1:9: no Ray cluster answers there"),
        (
            ON_CLUSTER | {"RAY_ADDRESS": "auto"},
            "submit: RAY_ADDRESS=auto: must be the URL of the cluster's dashboard, like http://",
        ),
    ],
)
def test_bad_knob_is_refused_by_name(knobs, refusal, data):
    done = launch(**({"DATA": data} | knobs))
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make: *** ")]
    assert done.returncode and len(lines) == 1 and lines[0].startswith(refusal), done.stderr


@pytest.mark.parametrize(("where", "goal"), [({}, "run"), ({"RAY_ADDRESS": "http://head:8265"}, "submit")])
def test_knobs_and_overrides_reach_verl(where, goal, data):
    """Each word reaches the command of make as typed, with blanks, quotes, dollars and commas."""
    knobs = {"DATA": data, "NNODES": 4 if where else 1, "OUT": data / "out", "STEPS": 7, "PRECISION": "bf16"}
    done = launch(*OVERRIDES, MAKEFLAGS="n", **knobs, **where)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if f"scripts/command.py {goal} " in line)
    words = shlex.split(line)[4:]
    job = parse_job(words)
    assert job.args == (f"trainer.nnodes={knobs['NNODES']}", "trainer.n_gpus_per_node=8", *OVERRIDES)
    config = compose(job, job.out)
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (knobs["NNODES"], 8)
    assert (config.data.train_batch_size, config.trainer.total_training_steps) == (64, 7)
    assert config.data.train_files == str(data / "train.parquet") and config.data.val_files == str(
        data / "test.parquet"
    )
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen2.5-7B"
    assert config.actor_rollout_ref.actor.dtype == "bfloat16"
    assert config.actor_rollout_ref.actor.flowrl.partition.dropout == 0.1, "the paper's preset"


def test_preset_has_the_papers_settings(data):
    words = ["EXPERIMENT=flowrl_7b", "RECIPE=flowrl_paper", "DEVICE=cpu", f"TRAIN={data / 'train.parquet'}"]
    job = replace(parse_job(words), device="cuda")
    config = compose(job, data / "out")
    validate(job, config)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size, rollout.n, rollout.temperature) == (512, 32, 8, 1)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (2048, 8192)
    assert (actor.optim.lr, actor.optim.lr_warmup_steps, actor.optim.weight_decay, actor.optim.clip_grad) == (
        1e-6,
        10,
        0.1,
        1,
    )
    assert (actor.strategy, config.actor_rollout_ref.ref.strategy, actor.flowrl.beta) == ("fsdp2", "fsdp2", 15)
    for role in (actor.ppo_max_token_len_per_gpu, rollout.log_prob_max_token_len_per_gpu):
        assert role >= config.data.max_prompt_length + config.data.max_response_length
    assert rollout.log_prob_use_dynamic_bsz and config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz


# --- all of them ------------------------------------------------------------------------------------------------------


ALL_BUT_THE_JOB = f'[[ $1 == */run.py ]] || exec {sys.executable} "$@"'  # the body of a python3


class Machine:
    """A folder of stubs on PATH. Each writes its arguments and environment to ``NAME.json`` and runs its body."""

    def __init__(self, folder: Path):
        self.folder, self.bin, self.home = folder, folder / "bin", folder / "home"
        self.bin.mkdir()
        self.home.mkdir()

    def program(self, name: str, body: str = "") -> None:
        record = f"""{sys.executable} -c 'import json, os, sys
json.dump({{"argv": sys.argv[1:], "environment": dict(os.environ)}}, open("{self.folder}/{name}.json", "w"))' "$@"
"""
        file = self.bin / name
        file.write_text(f"#!/bin/bash\n{record}{body}\n")
        file.chmod(0o755)

    def called(self, name: str) -> bool:
        return (self.folder / f"{name}.json").exists()

    def words(self, name: str) -> list[str]:
        return json.loads((self.folder / f"{name}.json").read_text())["argv"]

    def environment(self, name: str) -> dict[str, str]:
        return json.loads((self.folder / f"{name}.json").read_text())["environment"]

    def start(self, script: Path | str, *arguments: str, **knobs: object) -> subprocess.Popen:
        environment = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.home), "PYTHON": sys.executable}
        environment |= {name: str(value) for name, value in knobs.items()}
        return subprocess.Popen(
            [script, *arguments],
            cwd=self.home,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, script: Path | str, *arguments: str, **knobs: object) -> subprocess.CompletedProcess:
        process = self.start(script, *arguments, **knobs)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def slurm(machine) -> Machine:
    """Stubs of Slurm with one node. Like the real one, sbatch runs a copy of its script elsewhere with the environment;
    ``ray symmetric-run`` runs its command, and python3 stands for scripts/run.py: it writes the run's summary.json."""
    spool = machine.folder / "spool"
    machine.program("hostname", "echo 10.0.0.7 192.168.0.7")
    machine.program("scontrol", """case "$1" in show) printf 'node1\\nnode2\\n' ;; esac""")
    machine.program("srun", """while [[ $1 == -* ]]; do shift; done; exec "$@" """)
    machine.program("ray", """until [[ $1 == -- ]]; do shift; done; shift; exec "$@" """)
    machine.program(
        "sbatch",
        f"""mkdir {spool}
for word in "$@"; do
  case "$word" in --wrap=*) printf '#!/bin/sh\\n%s\\n' "${{word#--wrap=}}" > {spool}/slurm_script ;; esac
done
SLURM_JOB_ID=7 SLURM_JOB_NODELIST='node[1-2]' exec sh {spool}/slurm_script""",
    )
    machine.program(
        "python3",
        f"""{ALL_BUT_THE_JOB}
for word in "$@"; do
  case "$word" in OUT=*) mkdir -p "${{word#OUT=}}"; echo {{}} > "${{word#OUT=}}/summary.json" ;; esac
done""",
    )
    return machine


def job_of(command: list[str]) -> Job:
    """Return the job that ``python3 …/scripts/run.py NAME=VALUE …`` parses."""
    assert command[0].endswith("scripts/run.py")
    return parse_job([*command[1:], "DEVICE=cpu"])


def test_scripts_pass_shellcheck():
    scripts = sorted(LAUNCH.glob("*.sh"))
    done = subprocess.run([Path(sys.executable).parent / "shellcheck", *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    for script in scripts:
        assert subprocess.run(["bash", "-n", script]).returncode == 0


DRY = {
    "flowrl_7b": {},
    "slurm": {"VENV": "", "IN_JOB": "yes"},
    "kuberay": {"IMAGE": "registry/verl-precision:0.9.1"},
    "sky": {"IMAGE": "registry/verl-precision:0.9.1", "OUT": "/shared/out"},
    "train": {"RAY_ADDRESS": "head:6379", "NNODES": "2", "GPUS_PER_NODE": "8"},
}


@pytest.mark.parametrize("name", DRY)
def test_dry_run_shows_the_commands_and_does_nothing(name, machine, data):
    for program in ("make", "sbatch", "srun", "scontrol", "kubectl", "sky", "ray"):
        machine.program(program)
    knobs = {
        "EXPERIMENT": "arithmetic",
        "PRECISION": "bf16",
        "SEED": 3,
        "NNODES": 1,
        "HF_TOKEN": SECRET,
        "WANDB_API_KEY": SECRET,
    }
    knobs |= {"DATA": data, "OUT": machine.folder / "shared/out", "SHARED": machine.folder} | DRY[name]
    before = sorted(machine.folder.rglob("*"))
    done = machine.run(LAUNCH / f"{name}.sh", "--dry-run", *OVERRIDES, **knobs)
    assert done.returncode == 0, done.stderr
    assert "bf16" in done.stdout and "data.train_batch_size=64" in done.stdout and str(knobs["OUT"]) in done.stdout
    without = machine.run(LAUNCH / f"{name}.sh", "--dry-run", **knobs)
    assert without.returncode == 0, without.stderr
    assert SECRET not in done.stdout + done.stderr
    assert sorted(machine.folder.rglob("*")) == before


@pytest.mark.parametrize("name", ["slurm", "kuberay", "sky"])
def test_script_takes_the_first_python_that_fits(name, machine):
    machine.program("python3", "exit 1")  # as one that is too old does
    machine.program("python3.14", f'exec {sys.executable} "$@"')
    knobs = {"EXPERIMENT": "arithmetic", "NNODES": 1, "PYTHON": "", "OUT": "/shared/out"} | DRY[name] | {"IN_JOB": ""}
    done = machine.run(LAUNCH / f"{name}.sh", "--dry-run", **knobs)
    assert done.returncode == 0, done.stderr
    assert machine.called("python3") and machine.called("python3.14")


def test_job_takes_the_python_of_its_own_node(machine):
    """Slurm hands on the environment of the machine that submitted the job, PYTHON too."""
    machine.program("python3", f'[[ $1 == */run.py ]] || exec {sys.executable} "$@"')
    knobs = {"RAY_ADDRESS": "head:6379", "NNODES": 2, "GPUS_PER_NODE": 8, "PYTHON": "/not/here/python"}
    done = machine.run(LAUNCH / "train.sh", **knobs)
    assert done.returncode == 0 and machine.words("python3")[0] == str(REPO / "scripts/run.py"), done.stderr


IMAGE = {"IMAGE": "registry/verl-precision:0.9.1"}
REFUSED = [
    ("slurm", [], {"NNODES": ""}, "slurm: NNODES: is not set; give the number of nodes with GPUS_PER_NODE=8 GPUs"),
    ("slurm", [], {"NNODES": "0"}, "slurm: NNODES=0: must be a whole number of at least 1"),
    ("slurm", [], {"GPUS_PER_NODE": "all"}, "slurm: GPUS_PER_NODE=all: must be a whole number of at least 1"),
    ("slurm", [], {"PORT": "ray"}, "slurm: PORT=ray: must be a whole number of at least 1"),
    ("slurm", [], {"PORT": "12000"}, "slurm: PORT=12000: must be a port from 1024 to 65535, but not from 10002"),
    ("slurm", [], {"REQUEUES": "many"}, "slurm: REQUEUES=many: must be a whole number of at least 0"),
    ("slurm", [], {"CPUS_PER_NODE": "half"}, "slurm: CPUS_PER_NODE=half: must be a whole number of at least 1"),
    ("slurm", [], {"OUT": "runs/1"}, "slurm: OUT=runs/1: must be an absolute path on storage that all nodes share"),
    ("slurm", [], {"EXPERIMENT": "gsm8k_8gpu"}, "slurm: TRAIN: is not set; EXPERIMENT=gsm8k_8gpu needs a parquet file"),
    ("slurm", [], {"VENV": "/no/venv"}, "slurm: VENV=/no/venv: has no bin/ray; make setup DEVICE=cuda creates it"),
    ("slurm", [], {"TRAIN": "/no.parquet"}, "run: TRAIN=/no.parquet: is not a readable parquet file"),
    ("slurm", ["--dryrun"], {}, "slurm: --dryrun: must be --dry-run, in the first place, or a Hydra override"),
    ("slurm", ["trainer.save_freq"], {}, "slurm: trainer.save_freq: must be --dry-run, in the first place, or a Hydra"),
    ("kuberay", [], {}, "kuberay: IMAGE: is not set; build one with configs/launch/Dockerfile and push it"),
    ("kuberay", [], IMAGE | {"BACKOFF": "-1"}, "kuberay: BACKOFF=-1: must be a whole number of at least 0"),
    (
        "kuberay",
        [],
        IMAGE | {"OUT": "/tmp/out"},
        "kuberay: OUT=/tmp/out: must lie under /shared, which all nodes share",
    ),
    (
        "kuberay",
        [],
        IMAGE | {"TRAIN": "a.parquet"},
        "kuberay: TRAIN=a.parquet: must lie under /shared, which all nodes",
    ),
    ("kuberay", [], IMAGE | {"VAL": "/tmp/v.parquet"}, "kuberay: VAL=/tmp/v.parquet: must lie under /shared, which"),
    ("kuberay", [], IMAGE | {"OUT": "/shared2/out"}, "kuberay: OUT=/shared2/out: must lie under /shared, which all"),
    ("kuberay", [], IMAGE | {"PYTHON": "python9"}, "kuberay: PYTHON=python9: must be Python 3.10 or later"),
    ("kuberay", [], IMAGE | {"PYTHON": "false"}, "kuberay: PYTHON=false: must be Python 3.10 or later"),
    ("kuberay", [], IMAGE | {"PRECISION": "fp61"}, "run: PRECISION=fp61: must be one of bf16, bf16_train_fp16_infer"),
    ("kuberay", [], IMAGE | {"RECIPE": "flowrl", "ALGO": "ppo"}, "run: ALGO=ppo: RECIPE=flowrl requires grpo"),
    ("sky", [], {}, "sky: IMAGE: is not set; build one with configs/launch/Dockerfile and push it"),
    ("sky", [], IMAGE | {"OUT": "/tmp/out"}, "sky: OUT=/tmp/out: must lie under /shared, which all nodes share"),
    (
        "sky",
        [],
        IMAGE | {"MODEL": "/tmp/model"},
        "sky: MODEL=/tmp/model: must lie under /shared, which all nodes",
    ),
    ("slurm", [], {"DEVICE": "tpu"}, "slurm: DEVICE=tpu: must be one of cpu, cuda"),
    ("sky", [], IMAGE | {"STEPS": "many"}, "run: STEPS=many: must be a whole number of at least 1"),
    ("sky", [], IMAGE | {"ARGS": "a='b"}, "run: ARGS=a='b: No closing quotation"),
    ("train", [], {}, "train: GPUS_PER_NODE=: must be a whole number of at least 1"),
    ("train", [], {"GPUS_PER_NODE": "8"}, "train: RAY_ADDRESS: is not set; it is the running cluster's"),
]


@pytest.mark.parametrize(("name", "arguments", "knobs", "refusal"), REFUSED)
def test_script_refuses_before_anything_is_queued(name, arguments, knobs, refusal, slurm):
    for program in ("kubectl", "sky"):
        slurm.program(program)
    done = slurm.run(
        LAUNCH / f"{name}.sh", *arguments, **({"EXPERIMENT": "arithmetic", "VENV": "", "NNODES": 2} | knobs)
    )
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(refusal)
    assert not any(slurm.called(program) for program in ("sbatch", "srun", "ray", "kubectl", "sky"))


# --- Slurm ------------------------------------------------------------------------------------------------------------

KNOBS = {"EXPERIMENT": "arithmetic", "VENV": "", "RECIPE": "flowrl", "PRECISION": "bf16", "STEPS": 9, "NNODES": 2}


def test_slurm_queues_itself_and_trains_on_every_node(slurm, tmp_path):
    out = tmp_path / "shared/out"
    limits = {
        "TIME_LIMIT": "8:00:00",
        "SBATCH_ARGS": "--partition=gpu --account=me",
        "CPUS_PER_NODE": 32,
        "GPUS_PER_NODE": 4,
    }
    knobs = {
        "OUT": out,
        "ARGS": "a=1\nb=2",
        "RAY_ADDRESS": "another:6379",
        "SLURM_JOB_ID": 3,
        "SRUN_ARGS": "--container-image=x",
        "HF_TOKEN": SECRET,
    }
    done = slurm.run(LAUNCH / "slurm.sh", *OVERRIDES, **(KNOBS | limits | knobs))
    assert done.returncode == 0, done.stderr
    queued = slurm.words("sbatch")
    for word in (
        "--nodes=2",
        "--gpus-per-node=4",
        "--cpus-per-task=32",
        "--time=8:00:00",
        "--partition=gpu",
        "--account=me",
    ):
        assert word in queued
    assert {"--requeue", "--export=ALL", "--open-mode=append", "--job-name=arithmetic-flowrl-bf16-seed1"} <= {*queued}
    assert "--signal=B:USR1@120" in queued, "the script must get the signal, not the workers"
    step = slurm.words("srun")
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=32", "--container-image=x"} <= {*step}
    assert "--kill-on-bad-exit=0" in step, "a site's default may be 1, and srun would return the killed workers' code"
    assert "RAY_ADDRESS" not in slurm.environment("sbatch"), "RAY_ADDRESS of another cluster"
    cluster = slurm.words("ray")
    assert cluster[:5] == ["symmetric-run", "--address", "10.0.0.7:6379", "--min-nodes", "2"]
    assert {"--num-gpus=4", "--num-cpus=32", "--dashboard-host=127.0.0.1"} <= {*cluster}
    job = job_of(slurm.words("python3"))
    assert (job.recipe, job.precision, job.steps, job.out) == ("flowrl", "bf16", 9, out)
    assert job.args == ("trainer.nnodes=2", "trainer.n_gpus_per_node=4", "a=1", "b=2", *OVERRIDES)
    assert slurm.environment("python3")["RAY_ADDRESS"] == "10.0.0.7:6379"
    assert slurm.environment("python3")["HF_TOKEN"] == SECRET, (
        "the job must have the secrets of the shell that queued it"
    )
    shown = [*queued, *step, *cluster, *slurm.words("python3"), done.stdout, done.stderr]
    assert SECRET not in "".join(shown)


@pytest.mark.parametrize("token", [False, True], ids=["open", "token"])
def test_slurm_passes_on_the_token_that_the_head_requires(token, slurm, tmp_path):
    """Ray's head requires a token if it finds one; the other nodes send it only in token mode."""
    if token:
        (slurm.home / ".ray").mkdir()
        (slurm.home / ".ray/auth_token").write_text(SECRET)
    done = slurm.run(LAUNCH / "slurm.sh", OUT=tmp_path / "out", **KNOBS)
    assert done.returncode == 0, done.stderr
    assert slurm.environment("ray").get("RAY_AUTH_MODE") == ("token" if token else None)


def test_slurm_derives_the_same_default_out_from_the_same_knobs(slurm):
    """The same command and a requeued job resume: the folder follows from the knobs."""
    slurm.program("python3", f"{ALL_BUT_THE_JOB}; exit 1")
    folders = []
    for seed in (1, 1, 2):
        slurm.run("rm", "-rf", slurm.folder / "spool")
        slurm.run(LAUNCH / "slurm.sh", **(KNOBS | {"SEED": seed}))
        folders.append(job_of(slurm.words("python3")).out)
    assert folders[0] == folders[1] == REPO / "outputs/slurm/arithmetic-flowrl-bf16-seed1"
    assert folders[2] == REPO / "outputs/slurm/arithmetic-flowrl-bf16-seed2"


IN_JOB = KNOBS | {"IN_JOB": "yes", "SLURM_JOB_ID": 7, "SLURM_JOB_NODELIST": "node[1-2]", "DEVICE": "cpu"}


@pytest.mark.parametrize(
    ("body", "count", "code", "message"),
    [
        ("exit 75", 0, 0, "slurm: the cluster was lost: requeued, to resume from OUT="),
        ("exit 75", 20, 1, "slurm: the cluster was lost, and all REQUEUES=20 are used up; a run with the same OUT="),
        ("exit 1", 0, 1, ""),
        ("exit 130", 0, 130, ""),
        ("exit 0", 0, 1, "slurm: Ray did not start on node1; see above"),
    ],
)
@pytest.mark.parametrize("earlier", [False, True], ids=["fresh", "finished before"])
def test_slurm_requeues_a_lost_cluster_and_nothing_else(body, count, code, message, earlier, slurm, tmp_path):
    """An exit code of 0 is not a success by itself: symmetric-run also returns it if Ray did not start."""
    out = tmp_path / "out"
    if earlier:
        out.mkdir()
        (out / "summary.json").write_text("{}")
    slurm.program("ray", body)
    done = slurm.run(LAUNCH / "slurm.sh", OUT=out, SLURM_RESTART_COUNT=count, **IN_JOB)
    assert done.returncode == code
    (line,) = (done.stdout + done.stderr).splitlines() or [""]
    assert line.startswith(message)
    assert (slurm.words("scontrol") == ["requeue", "7"]) == ("requeued, to resume" in message)


def test_slurm_requeues_before_the_time_limit(slurm, tmp_path):
    slurm.program("ray", "echo started; exec sleep 60")
    job = slurm.start(LAUNCH / "slurm.sh", OUT=tmp_path / "out", **IN_JOB)
    try:
        assert job.stdout.readline() == "started\n"
        job.send_signal(signal.SIGUSR1)  # as sbatch --signal=B:USR1@120 does, only to the batch shell
        assert job.wait(timeout=30) == 0
        assert job.stdout.readline().startswith("slurm: the time limit is near: requeued, to resume")
        assert slurm.words("scontrol") == ["requeue", "7"]
    finally:
        os.killpg(job.pid, signal.SIGKILL)
