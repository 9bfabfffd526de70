"""Admit a job to a running Ray cluster that has enough nodes and GPUs, all with the driver's code.

Each query runs in a separate process, ``verl_precision.run.cluster_query``, which joins the cluster as ``main_ppo``
will, with its environment and from its folder. So nothing of Ray stays behind in this process, and a lost head cannot
end it.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_precision.errors import Refused
from verl_precision.paths import IMPORTS, WORK
from verl_precision.run.cluster_query import CONNECT_S, REACH_S
from verl_precision.run.job import Job
from verl_precision.run.machine import cpus_per_node

if TYPE_CHECKING:
    from omegaconf import DictConfig


def admit(job: Job, config: "DictConfig", out: Path, wait_s: float = 10) -> dict[str, list[dict]]:
    """Check that the cluster ``job.cluster`` can train the job, and print a line on each node.

    Args:
        config: the job's whole configuration (``job.compose``).
        wait_s: seconds to wait for nodes and GPUs that are missing or not free.

    Returns:
        ``{"nodes": [facts of each node that may get a worker]}``, for ``run.json``.

    Raises:
        Refused: the cluster cannot be reached, is too small, or a node differs from this process.
    """
    from omegaconf import OmegaConf

    folder = next(folder for folder in out.parents if folder.exists())
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".seen-") as mark:  # a new name: only a shared OUT has it
        request = {
            "runtime_env": OmegaConf.to_container(config.ray_kwargs.ray_init.runtime_env),
            "nnodes": config.trainer.nnodes,
            "gpus": config.trainer.n_gpus_per_node,
            "cpus": cpus_per_node(config),
            "wait_s": wait_s,
            "paths": [mark.name, *(path for path in (job.model, job.train, job.val) if path and path[0] == "/")],
        }
        nodes = query_cluster(job, out, request)
    print("{} nodes run verl {verl} with stack {stack}, tree {tree:.12}".format(len(nodes), **nodes[0]))
    for node in nodes:
        print("  {node}: {gpus:g} GPUs, {cpus:g} CPUs".format(**node), flush=True)
    return {"nodes": nodes}


def lost_nodes(job: Job, out: Path, nodes: list[dict]) -> list[str]:
    """Return the names of those of ``nodes``, as ``admit`` returned them, that the cluster no longer has.

    Ray itself may take up to ``NOTICED_S`` (``cluster_query``) to notice that a node is gone.
    """
    alive = query_cluster(job, out, {"runtime_env": {}})
    return [node["node"] for node in nodes if node["id"] not in alive]


def query_cluster(job: Job, out: Path, request: Mapping[str, Any]) -> list:
    """Start a process that joins the cluster, and return its answer to ``request``.

    Raises:
        Refused: the cluster does not answer, or the process refused the request or ended without an answer.
    """
    check_address(job.cluster)
    environment = os.environ | job.environment(out)
    environment["PYTHONPATH"] = os.pathsep.join([*IMPORTS, environment["PYTHONPATH"]])
    command = [sys.executable, "-m", "verl_precision.run.cluster_query", job.cluster]
    # Not as an argument, which all users of the machine see: runtime_env may have secrets.
    asked = {"input": json.dumps(request), "stdout": subprocess.PIPE, "text": True}
    done = subprocess.run(command, cwd=WORK, env=environment, **asked)
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]  # Ray may print, too
    if answers:
        result = json.loads(answers[-1])
        if "answer" in result:
            return result["answer"]
        why = result["refused"]
    elif done.returncode == -signal.SIGALRM:
        why = f"no Ray cluster answers there within {CONNECT_S} s"
    else:
        why = f"the cluster could not be queried: exit code {done.returncode}; the reason is above"
    raise Refused(f"RAY_ADDRESS={job.cluster}: {why}")


def check_address(address: str) -> None:
    """Refuse an address where nothing listens, or that no node can join: Ray itself would keep trying for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise Refused(f"RAY_ADDRESS={address}: must be HOST:PORT of a cluster that this machine is a node of, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except (OSError, OverflowError) as error:
        raise Refused(f"RAY_ADDRESS={address}: no Ray cluster answers there ({error})") from error
