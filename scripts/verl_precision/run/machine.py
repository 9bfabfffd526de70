"""Fit a job to this machine: its GPUs by the presets of configs/device, and the counts of GPUs and CPUs.

Ray keeps a request that it cannot fulfill for nodes to come, and verl waits for it without a limit. So what this
machine lacks is refused beforehand.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from importlib import metadata
from typing import TYPE_CHECKING

from verl_precision.errors import Refused
from verl_precision.facts.gpus import Gpu, find_gpus
from verl_precision.facts.models import attention_width, config_file
from verl_precision.run.job import Job

if TYPE_CHECKING:
    from omegaconf import DictConfig

# The least compute capability of each preset, highest first; Ada (8.9) takes ampere, Blackwell (10.0, 12.0) hopper.
PRESETS = {"hopper": (9, 0), "ampere": (8, 0), "turing": (7, 5), "volta": (7, 0)}
FLASH_ATTENTION = PRESETS["ampere"]  # least capability for flash attention 2
DEFAULT_ATTENTION = "flash_attention_2"  # of verl
WORKERS = "trainer.n_gpus_per_node"
CPUS_PER_GPU = 3  # of verl's placement groups (single_controller/ray/base.py, ResourcePoolManager.max_colocate_count)
GUIDE = "docs/how-to/gpus.md#what-is-refused"
# Beyond these, vLLM's attention takes more shared memory than a block has (docs/results/kernels.md): heads on a T4,
# latent attention on a V100, too. Ranks are rounded up to a power of two.
T4, LARGEST_HEAD, LARGEST_LATENT = (7, 5), 256, 256


def preset_of(gpu: Gpu) -> str:
    """Return the preset of a GPU; refuse one that is older than what vLLM supports."""
    for name, least in PRESETS.items():
        if gpu.capability >= least:
            return name
    raise Refused(f"DEVICE=cuda: {gpu}: vLLM requires compute capability 7.0 (sm70) or higher")


def oldest(gpus: tuple[Gpu, ...]) -> Gpu:
    """Return the GPU of the lowest compute capability: a worker may get any of them."""
    return min(gpus, key=lambda gpu: gpu.capability)


def flash_attn_installed() -> bool:
    return any(metadata.distributions(name="flash-attn"))


def flash_attention_missing(gpu: Gpu) -> str:
    """Return why flash attention 2 does not run on a GPU in this Python, as a clause; empty if it does."""
    if gpu.capability < FLASH_ATTENTION:
        return f"flash attention 2 requires sm{FLASH_ATTENTION[0]}{FLASH_ATTENTION[1]}"
    return "" if flash_attn_installed() else "flash-attn is not installed"


def fit_to_gpus(job: Job) -> tuple[Job, str]:
    """Return the job with the overrides for the GPUs of this machine, and a line that reports them.

    Without such GPUs, on the CPU or on a cluster, return the job as it is and an empty line.
    """
    gpus = find_gpus() if job.device == "cuda" and not job.cluster else ()
    if not gpus:
        return job, ""
    gpu = oldest(gpus)
    missing = flash_attention_missing(gpu)
    overrides = [f"+device={preset_of(gpu)}"]
    if missing and gpu.capability >= FLASH_ATTENTION:
        overrides.append("+attention=sdpa")  # the presets of older GPUs contain it
    line = f"{gpu}: {' '.join(overrides)}"
    line += f": attention sdpa, padding is not removed, because {missing}" if missing else ""
    return replace(job, gpu_overrides=tuple(overrides)), line


def check_gpus(job: Job, config: "DictConfig") -> None:
    """Refuse GPUs without kernels in this torch, emulated bfloat16, and attention that does not run."""
    from verl.trainer.ppo.utils import need_critic

    gpus = find_gpus()
    for each in gpus:
        if not each.kernels:
            raise Refused(f"DEVICE=cuda: torch {metadata.version('torch')} has no kernels for {each}; see {GUIDE}")
    gpu, models = oldest(gpus), {"actor_rollout_ref": config.actor_rollout_ref.model}
    dtypes = {role: config.actor_rollout_ref[role].dtype for role in ("actor", "rollout")}
    if need_critic(config):
        models["critic"], dtypes["critic"] = config.critic.model, config.critic.dtype
    in_bf16 = [role for role, dtype in dtypes.items() if dtype in ("bfloat16", "bf16")]
    if in_bf16 and not gpu.bf16:
        raise Refused(
            f"PRECISION={job.precision}: {', '.join(in_bf16)} would compute in bfloat16, which {gpu} emulates and "
            "vLLM refuses there; use PRECISION=fp16, which is +precision=fp16 for main_ppo"
        )
    check_attention(config.actor_rollout_ref.model.path, gpus)
    if missing := flash_attention_missing(gpu):
        for role, model in models.items():
            attention = model.get("override_config", {}).get("attn_implementation", DEFAULT_ATTENTION)
            if attention == DEFAULT_ATTENTION:
                key = f"{role}.model.override_config.attn_implementation"
                raise Refused(f"{key}={attention}: {missing} ({gpu}); use +attention=sdpa")


def check_attention(model: str, gpus: Iterable[Gpu]) -> None:
    """Refuse a model for which vLLM's attention needs more shared memory than a block has on one of the GPUs."""
    file = config_file(model)
    head, latent = attention_width(file) if file else (0, 0)
    for gpu in gpus:
        if head > LARGEST_HEAD and gpu.capability == T4:
            excess = f"attention heads of {head}, at most {LARGEST_HEAD} are"
        elif latent > LARGEST_LATENT and gpu.capability < FLASH_ATTENTION:
            excess = f"latent attention of rank {latent} (kv_lora_rank), at most {LARGEST_LATENT} is"
        else:
            continue
        raise Refused(
            f"MODEL={model}: has {excess} possible on {gpu}: vLLM's attention would exceed its shared memory; "
            f"see {GUIDE}"
        )


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
