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
    """Refuse more workers than the GPUs here, or the CPUs that Ray counts, have room for."""
    from ray._private.utils import get_num_cpus  # what Ray would count, in a container its share

    workers, nodes, setting = config.trainer.n_gpus_per_node, config.trainer.nnodes, config.ray_kwargs.ray_init.num_cpus
    if not isinstance(workers, int) or workers < 1:
        raise Refused(f"{WORKERS}={workers}: must be a whole number of at least 1")
    if nodes != 1:
        raise Refused(f"trainer.nnodes={nodes}: must be 1 without RAY_ADDRESS, the address of a running Ray cluster")
    if device == "cuda" and workers > (gpus := len(find_gpus())):
        raise Refused(f"{WORKERS}={workers}: must be at most {gpus}, the GPUs of this machine")
    available, needed = setting or int(get_num_cpus()), cpus_per_node(config)
    if needed > available:
        others = needed - CPUS_PER_GPU * workers
        raise Refused(
            f"{WORKERS}={workers}: must be at most {max((available - others) // CPUS_PER_GPU, 0)}: of the {available} "
            f"CPUs that Ray {'is given' if setting else 'counts'} here, verl reserves {CPUS_PER_GPU} a worker and "
            f"{others} for itself; ray_kwargs.ray_init.num_cpus={needed} gives Ray as many as it needs"
        )


def cpus_per_node(config: "DictConfig") -> int:
    """Return how many CPUs each node needs free: verl would wait indefinitely for a missing one.

    TransferQueue, which verl's v1 trainers start, takes one CPU of some node for its controller and one for each
    storage unit. It spreads the units over the nodes that have GPUs, ``ceil(units / nnodes)`` on each.
    """
    if not config.trainer.get("use_v1", False):
        return CPUS_PER_GPU * config.trainer.n_gpus_per_node
    units = config.transfer_queue.backend.SimpleStorage.num_data_storage_units
    return CPUS_PER_GPU * config.trainer.n_gpus_per_node + math.ceil(units / config.trainer.nnodes) + 1
