"""``scripts/launch/slurm.sh`` with real Ray and real training: two nodes, each a network and process namespace of this
machine, with stubs of Slurm's own programs. ``pytest -m slow tests/unit/launch/test_launch_on_slurm.py``, as root."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launch_machine import LAUNCH
from support.waiting import TIMEOUT_S

from verl_precision.paths import ARITHMETIC, REPO

NODES = {"vpnode1": "10.231.47.1", "vpnode2": "10.231.47.2"}
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
OVERRIDES = ["data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_micro_batch_size_per_gpu=32"]
OVERRIDES += [f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=32", f"{ACTOR}.fsdp_config.grad_scaler.init_scale=1024"]
PROGRAMS = {
    "sbatch": """
wrap=${!#}
SLURM_JOB_ID=7 SLURM_JOB_NODELIST='vpnode[1-2]' exec sh -c "${wrap#--wrap=}" """,
    "scontrol": """
if [[ $1 == show ]]; then printf 'vpnode1\\nvpnode2\\n'; else echo "scontrol $*" >> "$SPOOL/scontrol"; fi""",
    # One task a node, all output together, the highest code of all: as in srun(1).
    "srun": """
nodes=(vpnode1 vpnode2)
while [[ $1 == -* ]]; do
  case "$1" in --nodelist=*) nodes=("${1#--nodelist=}") ;; esac
  shift
done
tasks=()
for node in "${nodes[@]}"; do
  RAY_TMPDIR=$SPOOL/$node ip netns exec "$node" unshare --pid --fork --kill-child --mount-proc "$@" &
  tasks+=($!)
done
highest=0
for task in "${tasks[@]}"; do
  code=0
  wait "$task" || code=$?
  if ((code > highest)); then highest=$code; fi
done
exit "$highest" """,
}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.fixture
def spool() -> Iterator[Path]:
    """A folder with Slurm's programs in ``bin``; its nodes exist as long as the fixture."""
    folder = Path(tempfile.mkdtemp(prefix="vp", dir="/tmp"))  # Ray's sockets need short paths
    (folder / "bin").mkdir()
    for name, body in PROGRAMS.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash{body}\n")
        (folder / "bin" / name).chmod(0o755)
    try:
        for node in NODES:
            ip("netns", "add", node)
            (folder / node).mkdir()
        ip("link", "add", "eth0", "netns", "vpnode1", "type", "veth", "peer", "name", "eth0", "netns", "vpnode2")
        for node, address in NODES.items():
            ip("-n", node, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", node, "link", "set", "eth0", "up")
            ip("-n", node, "link", "set", "lo", "up")
        yield folder
    finally:
        for node in NODES:
            subprocess.run(["ip", "netns", "delete", node])
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip"), reason="makes network namespaces: needs root and iproute2"
)
def test_two_nodes_train_by_symmetric_run(spool, tmp_path):
    prepare = [sys.executable, "-m", "recipes.arithmetic.prepare", "--task", "addition", "--out", ARITHMETIC]
    subprocess.run([*prepare, "--seed", "1"], cwd=REPO, check=True)
    (spool / "token").write_text("0123456789abcdef" * 4)  # this machine's own, if any, does not count
    out = tmp_path / "shared/out"
    knobs = {"PATH": f"{spool}/bin:{os.environ['PATH']}", "SPOOL": spool, "RAY_AUTH_TOKEN_PATH": spool / "token"}
    knobs |= {"VENV": Path(sys.executable).parents[1], "EXPERIMENT": "arithmetic", "MODEL": ARITHMETIC / "model"}
    knobs |= {"TRAIN": ARITHMETIC / "train.parquet", "VAL": ARITHMETIC / "val.parquet", "DEVICE": "cpu", "NNODES": 2}
    knobs |= {"GPUS_PER_NODE": 1, "CPUS_PER_NODE": 16, "STEPS": 2, "OUT": out, "OMP_NUM_THREADS": 1}
    knobs |= {"GLOO_SOCKET_IFNAME": "eth0"}  # both nodes have this machine's name, which is no evidence of addresses
    environment = os.environ | {name: str(value) for name, value in knobs.items()}
    done = subprocess.run(
        [LAUNCH / "slurm.sh", *OVERRIDES], env=environment, cwd="/", capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (spool / "scontrol").exists(), "nothing must be requeued"
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["precision"], summary["steps"]) == ("fp16", 2)
    assert summary["effective_dtypes"]["actor"]["compute"] == "float16"
    nodes = json.loads((out / "run.json").read_text())["nodes"]
    addresses = {node["node"].rpartition("(")[2].rstrip(")") for node in nodes}
    assert addresses == set(NODES.values()), "every node must report its verl"
    assert len(list((out / "checkpoints/global_step_2/actor").glob("model_world_size_2_rank_*.pt"))) == 2
