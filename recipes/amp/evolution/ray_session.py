"""Connect to the Ray cluster that runs the members' tasks, or start one, and choose the tasks' device."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import ray

from recipes.amp.evolution.config import EvolutionConfig

QUIET = {"logging_level": "ERROR", "log_to_driver": False}


def choose_device(config: EvolutionConfig, nodes: Sequence[dict[str, float]]) -> str:
    """Return the workers' device, cpu or cuda.

    Args:
        nodes: the resources of each node of the cluster.

    Raises:
        ValueError: no node has what a member's task asks for: Ray would wait for one for ever.
    """
    gpus = max((node.get("GPU", 0) for node in nodes if node.get("CPU", 0) >= 1), default=None)
    if gpus is None:
        raise ValueError(f"address={config.address} must be a Ray cluster with at least one CPU")
    if config.device == "cuda" and not gpus:
        raise ValueError("device=cuda must be auto or cpu: Ray has no GPU here")
    if config.device == "cpu" or not gpus:
        return "cpu"
    if config.gpus > gpus:
        raise ValueError(f"gpus={config.gpus} must be at most {gpus:g}, the GPUs of one node of this Ray cluster")
    return "cuda"


@contextmanager
def ray_session(config: EvolutionConfig) -> Iterator[str]:
    """Run the body with Ray, started here or at ``config.address``; a running session is used, and left running.

    Yields:
        the workers' device.

    Raises:
        ValueError: no cluster answers at the address, or one of another Ray; as :func:`choose_device`.
    """
    started = not ray.is_initialized()
    if started and config.address is None:
        ray.init(address="local", num_cpus=config.cpus, include_dashboard=False, **QUIET)
    elif started:
        host, _, port = config.address.rpartition(":")
        try:
            if port.isdigit() and "/" not in host:  # Ray itself would wait for minutes
                socket.create_connection((host, int(port)), timeout=5).close()
            ray.init(address=config.address, **QUIET)
        except (OSError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"address={config.address} must be a Ray cluster: {reason}") from None
    try:
        yield choose_device(config, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    finally:
        if started:
            ray.shutdown()
