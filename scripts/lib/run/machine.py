"""Whether this machine has what a job requests of the Ray that ``main_ppo`` starts here.

Ray keeps a request that it cannot fulfill for nodes to come, and verl waits for it without a limit.
"""

from lib.errors import Refused
from lib.run.cluster import CPUS_PER_GPU, cpus

WORKERS = "trainer.n_gpus_per_node"


def check(config, device: str) -> None:
    """Compare the job's workers with the GPUs here and with the CPUs that Ray counts.

    Args:
        config: the job's whole configuration (``job.compose``).
        device: "cpu" or "cuda"; on a CPU, Ray is given as many "GPUs" as there are workers.

    Raises:
        Refused: there is no room for so many workers, or their number is none.
    """
    workers, nodes, given = config.trainer.n_gpus_per_node, config.trainer.nnodes, config.ray_kwargs.ray_init.num_cpus
    if not isinstance(workers, int) or workers < 1:
        raise Refused(f"{WORKERS}={workers}: must be a whole number of at least 1")
    if nodes != 1:
        raise Refused(f"trainer.nnodes={nodes}: must be 1 without RAY_ADDRESS, the address of a running Ray cluster")
    if device == "cuda" and workers > (gpus := gpu_count()):
        raise Refused(f"{WORKERS}={workers}: must be at most {gpus}, the GPUs of this machine")
    counted = given or cpu_count()
    if cpus(config) > counted:
        others = cpus(config) - CPUS_PER_GPU * workers
        raise Refused(
            f"{WORKERS}={workers}: must be at most {max((counted - others) // CPUS_PER_GPU, 0)}: of the {counted} CPUs "
            f"that Ray {'is given' if given else 'counts'} here, verl reserves {CPUS_PER_GPU} a worker and {others} "
            f"for itself; ray_kwargs.ray_init.num_cpus={cpus(config)} gives Ray as many as it needs"
        )


def gpu_count() -> int:
    """Return the number of GPUs that this process may use."""
    import torch

    return torch.cuda.device_count()


def cpu_count() -> int:
    """Return the number of CPUs that Ray would count here, which in a container is its share."""
    from ray._private.utils import get_num_cpus

    return int(get_num_cpus())
