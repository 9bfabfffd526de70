"""Check that this machine has what a job requests of the Ray that ``main_ppo`` starts here.

Ray keeps a request that it cannot fulfill for nodes to come, and verl waits for it without a limit.
"""

import math
from typing import TYPE_CHECKING

from verl_precision.errors import Refused
from verl_precision.facts.gpus import find_gpus

if TYPE_CHECKING:
    from omegaconf import DictConfig

WORKERS = "trainer.n_gpus_per_node"
CPUS_PER_GPU = 3  # of verl's placement groups (single_controller/ray/base.py, ResourcePoolManager.max_colocate_count)


def check_machine(config: "DictConfig", device: str) -> None:
    """Compare the job's workers with the GPUs here and with the CPUs that Ray counts.

    Args:
        config: the job's whole configuration (``job.compose``).
        device: "cpu" or "cuda"; on a CPU, Ray is given as many "GPUs" as there are workers.

    Raises:
        Refused: there is no room for so many workers, or their number is none.
    """
    workers, nodes, setting = config.trainer.n_gpus_per_node, config.trainer.nnodes, config.ray_kwargs.ray_init.num_cpus
    if not isinstance(workers, int) or workers < 1:
        raise Refused(f"{WORKERS}={workers}: must be a whole number of at least 1")
    if nodes != 1:
        raise Refused(f"trainer.nnodes={nodes}: must be 1 without RAY_ADDRESS, the address of a running Ray cluster")
    if device == "cuda" and workers > (gpus := gpu_count()):
        raise Refused(f"{WORKERS}={workers}: must be at most {gpus}, the GPUs of this machine")
    available, needed = setting or cpu_count(), cpus_per_node(config)
    if needed > available:
        others = needed - CPUS_PER_GPU * workers
        raise Refused(
            f"{WORKERS}={workers}: must be at most {max((available - others) // CPUS_PER_GPU, 0)}: of the {available} "
            f"CPUs that Ray {'is given' if setting else 'counts'} here, verl reserves {CPUS_PER_GPU} a worker and "
            f"{others} for itself; ray_kwargs.ray_init.num_cpus={needed} gives Ray as many as it needs"
        )


def cpus_per_node(config: "DictConfig") -> int:
    """Return how many CPUs each node needs free: verl would wait forever for a missing one.

    TransferQueue, which verl's v1 trainers start, takes one CPU of some node for its controller and one for each
    storage unit. It spreads these over all of the cluster's nodes that have GPUs, so that each of those needs a free
    one.
    """
    if not config.trainer.get("use_v1", False):
        return CPUS_PER_GPU * config.trainer.n_gpus_per_node
    units = config.transfer_queue.backend.SimpleStorage.num_data_storage_units
    return CPUS_PER_GPU * config.trainer.n_gpus_per_node + math.ceil(units / config.trainer.nnodes) + 1


def gpu_count() -> int:
    """Return the number of GPUs that this process may use."""
    return len(find_gpus())


def cpu_count() -> int:
    """Return the number of CPUs that Ray would count here, which in a container is its share."""
    from ray._private.utils import get_num_cpus

    return int(get_num_cpus())
