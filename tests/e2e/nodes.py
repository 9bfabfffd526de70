"""Ray clusters of several nodes on one machine, started by ``scripts/launch/head.sh`` and ``worker.sh``.

The nodes have loopback addresses, one "GPU" each, their own ports and folders, and an environment without verl. Joining
the cluster requires its token.
"""

import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from processes import kill, wait_for

from verl_precision.paths import REPO

LAUNCH = REPO / "scripts" / "launch"
HEAD = "127.0.0.2"  # all of 127.0.0.0/8 is local


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Cluster:
    """A cluster whose head and workers are processes of this machine.

    Attributes:
        address: the value of RAY_ADDRESS for a run on it.
        dashboard: the address that accepts jobs.
        token: the environment of a process that may join it.
    """

    def __init__(self, folder: Path):
        self.folder, self.nodes = folder, []
        (folder / "token").write_text(secrets.token_hex(16))
        self.token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
        self.ports = {"PORT": free_port(), "DASHBOARD_PORT": free_port()}
        self.address = f"{HEAD}:{self.ports['PORT']}"
        self.dashboard = f"http://127.0.0.1:{self.ports['DASHBOARD_PORT']}"

    def start(self, script: str, name: str, address: str, **knobs: object) -> psutil.Process:
        """Start a node, wait until it has joined, and return its process, the parent of its raylet and agents."""
        environment = {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "HOME": str(self.folder)} | self.token
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "RAY_worker_niceness": "0"}
        environment |= {"NAME": name, "BIND": address, "TEMP": str(self.folder / name), "GPUS": "1", "CPUS": "16"}
        environment |= {knob: str(value) for knob, value in knobs.items()}
        screen = self.folder / f"{name}.txt"
        with screen.open("w") as output:
            node = subprocess.Popen([LAUNCH / script], cwd="/", env=environment, stdout=output, stderr=output)
        self.nodes.append(psutil.Process(node.pid))
        wait_for(lambda: "Ray runtime started." in screen.read_text(), node, screen)
        return self.nodes[-1]

    def join(self, name: str, address: str, **knobs: object) -> psutil.Process:
        return self.start("worker.sh", name, address, HEAD=self.address, **knobs)


@contextmanager
def running(bind: str = HEAD) -> Iterator[Cluster]:
    """Run a cluster of a head at the address ``bind``, and end all its nodes on exit."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # Ray's sockets need a short path
    cluster = Cluster(folder)
    try:
        cluster.start("head.sh", "head", bind, **cluster.ports)
        yield cluster
    finally:
        for node in cluster.nodes:
            end(node)
        shutil.rmtree(folder)


def below(node: psutil.Process, name: str) -> psutil.Process:
    """Return the process of a node whose program or title begins with ``name``; a worker's title names its class."""
    commands = {each: each.cmdline() for each in node.children(recursive=True)}
    (process,) = (each for each, words in commands.items() if words and Path(words[0]).name.startswith(name))
    return process


def end(node: psutil.Process) -> None:
    """Terminate a node, so that the cluster notices at once, then kill the remaining processes."""
    if node.is_running():
        processes = [node, *node.children(recursive=True)]
        node.terminate()
        psutil.wait_procs([node], timeout=10)
        kill(processes)
