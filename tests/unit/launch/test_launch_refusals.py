"""The scripts of ``scripts/launch``: refusals, in one line and before anything is queued."""

import pytest
from support.launch_machine import IMAGE, knobs_and_arguments

LONG = f"/{'a' * 40}"
PROGRAMS = ("sbatch", "srun", "ray", "kubectl", "sky")
QUEUED = {"EXPERIMENT": "arithmetic", "NNODES": "2"}
# The knobs of a job that would be queued.
USUAL = {
    "flowrl_7b": {"DEVICE": "cpu"},
    "slurm": QUEUED | {"VENV": ""},
    "kuberay": QUEUED | IMAGE,
    "sky": QUEUED | IMAGE,
    "train": QUEUED,
    "head": {"NAME": "node", "RAY": "/no/such/ray"},
    "worker": {"NAME": "node", "RAY": "/no/such/ray"},
}
STARTS_RAY = "RAY_ADDRESS=http://127.0.0.1:9 OUT=/tmp/flowrl"
# By script: knobs and arguments that are added to these, and how the refusal begins.
REFUSED = {
    "flowrl_7b": {
        "NNODES=0": "flowrl_7b: NNODES=0: must be a whole number of at least 1",
        "DATA=/no/data": "flowrl_7b: DATA=/no/data: contains no train.parquet; make dapo-math writes data/dapo-math",
        "NNODES=2": "flowrl_7b: NNODES=2: requires RAY_ADDRESS, the dashboard of a running Ray cluster",
        "RAY_ADDRESS=http://head:8265": "flowrl_7b: OUT: is not set; on a cluster it must be an absolute path on",
        "PRECISION=fp61": "run: PRECISION=fp61: must be one of bf16, bf16_train_fp16_infer, fp16, fp32",
        STARTS_RAY: "verl-precision submit: RAY_ADDRESS=http://127.0.0.1:9: no Ray cluster",
    },
    "slurm": {
        "NNODES=": "slurm: NNODES: is not set; give the number of nodes with GPUS_PER_NODE=8 GPUs",
        "GPUS_PER_NODE=all": "slurm: GPUS_PER_NODE=all: must be a whole number of at least 1",
        "PORT=12000": "slurm: PORT=12000: must be a port from 1024 to 65535, but not from 10002",
        "REQUEUES=many": "slurm: REQUEUES=many: must be a whole number of at least 0",
        "CPUS_PER_NODE=half": "slurm: CPUS_PER_NODE=half: must be a whole number of at least 1",
        "DEVICE=tpu": "slurm: DEVICE=tpu: must be one of cpu, cuda",
        "OUT=runs/1": "slurm: OUT=runs/1: must be an absolute path on storage that all nodes share",
        "EXPERIMENT=gsm8k_8gpu": "slurm: TRAIN: is not set; EXPERIMENT=gsm8k_8gpu needs a parquet file",
        "VENV=/no/venv": "slurm: VENV=/no/venv: has no bin/ray; make setup DEVICE=cuda creates it",
        "TRAIN=/no.parquet": "run: TRAIN=/no.parquet: is not a readable parquet file",
        "--dryrun": "slurm: --dryrun: must be --dry-run, in the first place, or a Hydra override",
    },
    "kuberay": {
        "IMAGE=": "kuberay: IMAGE: is not set; build one with configs/launch/Dockerfile and push it",
        "BACKOFF=-1": "kuberay: BACKOFF=-1: must be a whole number of at least 0",
        "OUT=/shared2/out": "kuberay: OUT=/shared2/out: must lie under /shared, which all",
        "TRAIN=a.parquet": "kuberay: TRAIN=a.parquet: must lie under /shared, which all nodes",
        "VAL=/tmp/v.parquet": "kuberay: VAL=/tmp/v.parquet: must lie under /shared, which",
        "PYTHON=false": "kuberay: PYTHON=false: must be Python 3.10 or later",
        "RECIPE=flowrl ALGO=ppo": "run: ALGO=ppo: RECIPE=flowrl requires grpo",
    },
    "sky": {
        "IMAGE=": "sky: IMAGE: is not set; build one with configs/launch/Dockerfile and push it",
        "MODEL=/tmp/model": "sky: MODEL=/tmp/model: must lie under /shared, which all nodes",
        'ARGS="a=\'b"': "run: ARGS=a='b: No closing quotation",
    },
    "train": {
        "": "train: GPUS_PER_NODE=: must be a whole number of at least 1",
        "GPUS_PER_NODE=8": "train: RAY_ADDRESS: is not set; it is the running cluster's",
    },
    "head": {
        "": "head: RAY=/no/such/ray: there is no such program",
        "--dryrun": "head: --dryrun: takes only --dry-run",
        "GPUS=all": "head: GPUS=all: must be a whole number",
        "PORT=80": "head: PORT=80: must be a port from 1024 to 65535",
        "PORT=70000": "head: PORT=70000: must be a port from 1024 to 65535",
        "PORT=16379": "head: PORT=16379: must not be from 10002 to 19999",
        "PORT=8265": "head: DASHBOARD_PORT=8265: must differ from PORT",
        "DASHBOARD_PORT=x": "head: DASHBOARD_PORT=x: must be a port",
        "BIND=0.0.0.0": "head: BIND=0.0.0.0: must be 127.0.0.1, or the address of this machine",
        "TEMP=ray": "head: TEMP=ray: must be an absolute path",
    },
    "worker": {
        "": "worker: HEAD=: must be the address and port of the head",
        "HEAD=10.0.0.1:99999": "worker: HEAD=10.0.0.1:99999: the port must be at most",
        "HEAD=127.0.0.1:6379": "worker: HEAD=127.0.0.1:6379: is a loopback address",
        "HEAD=127.0.0.2:9": "worker: HEAD=127.0.0.2:9: nothing answers there",
        f"HEAD=127.0.0.2:9 TEMP={LONG}": f"worker: TEMP={LONG}: has 41",
    },
}
ROWS = [
    pytest.param(script, words, refusal, marks=[pytest.mark.subprocess] if words == STARTS_RAY else [])
    for script, rows in REFUSED.items()
    for words, refusal in rows.items()
]


@pytest.mark.parametrize(("script", "words", "refusal"), ROWS)
def test_script_refuses_before_anything_is_queued(script, words, refusal, slurm, parquet):
    for program in ("kubectl", "sky"):
        slurm.program(program)
    knobs, arguments = knobs_and_arguments(words)
    done = slurm.run(f"{script}.sh", *arguments, **({"DATA": parquet} | USUAL[script] | knobs))
    lines = done.stderr.splitlines()
    if lines[-1].startswith("make: *** "):  # by make, which prints further lines
        lines.pop()
    else:
        assert done.returncode == 1 and done.stdout == ""
    (line,) = lines
    assert done.returncode and line.startswith(refusal)
    assert not any(slurm.called(program) for program in PROGRAMS)
