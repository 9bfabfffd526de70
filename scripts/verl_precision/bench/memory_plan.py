"""Plan the memory of a whole job on each GPU: the actor, its reference and critic, and the rollout, moment by moment.

Reads a composed configuration of verl 0.9; refuses what :mod:`verl_precision.bench.memory_model` does not cover.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

from verl_precision.bench.memory_model import TrainedModel
from verl_precision.bench.model_shape import ModelShape, model_config
from verl_precision.errors import Refused
from verl_precision.facts.dtypes import BYTES, SERVER_SPELLINGS

if TYPE_CHECKING:
    from omegaconf import DictConfig

GIB = 2**30
# Device memory outside tensors: the CUDA context, NCCL's buffers, fragmentation, the sleeping rollout.
# verl-project/verl, pull request 7461: 39.63 GiB on the device with 35.68 allocated, 37.80 with 33.70.
OUTSIDE_TENSORS = 4 * GIB
# Proportional set sizes of a job's processes on one machine without a GPU, less tensors and KV cache. Fitted to one run
# of `make run STEPS=2` (7.17 GiB, its trainer 1.05); a server's share to the processes of another run.
CPU_PROCESSES = {"job": 3.4 * GIB, "trainer": 0.9 * GIB, "server": 1.7 * GIB}
PARALLEL = ("fsdp_size", "ulysses_sequence_parallel_size")


def peak(moments: Mapping[str, Mapping[str, int]]) -> tuple[str, int]:
    """Return the moment with the largest sum of parts, and that sum in bytes."""
    name = max(moments, key=lambda each: sum(moments[each].values()))
    return name, sum(moments[name].values())


@dataclass(frozen=True)
class RolloutMemory:
    """The bytes that vLLM takes on one GPU, one of ``tensor_parallel`` per server.

    Args:
        weights: this GPU's share of the model.
        cache: of the KV cache, as large as vLLM may make it; ``cache_per_token`` of them for each token.
    """

    weights: int
    cache: int
    cache_per_token: int
    tensor_parallel: int


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a job's workers at each moment of a step, in bytes by part.

    Args:
        on_cpu: the whole job is planned on one machine without a GPU.
        memory: bytes of one GPU, or of that machine.
        tokens: of the actor's micro-batches.
    """

    model: str
    shape: ModelShape
    on_cpu: bool
    nodes: int
    gpus: int
    memory: int
    tokens: int
    rollout: RolloutMemory
    moments: dict[str, dict[str, int]]

    @property
    def training_peak(self) -> int:
        """The peak of the training process's tensors: verl's ``perf/max_memory_allocated_gb``."""
        of_rollout = ("rollout's weights", "KV cache")
        return max(sum(v for k, v in parts.items() if k not in of_rollout) for parts in self.moments.values())

    @property
    def host_memory(self) -> dict[str, float]:
        """Bytes of the whole job by kind of process, on one machine without a GPU."""
        workers = self.nodes * self.gpus
        servers = workers // self.rollout.tensor_parallel
        rollouts = workers * (self.rollout.weights + self.rollout.cache)
        return {
            "Ray, driver, agent loops": CPU_PROCESSES["job"],
            "trainers": workers * (CPU_PROCESSES["trainer"] + self.training_peak),
            "rollout servers": servers * CPU_PROCESSES["server"] + rollouts,
        }

    @property
    def fits(self) -> bool:
        if self.on_cpu:
            return sum(self.host_memory.values()) <= self.memory
        return peak(self.moments)[1] + OUTSIDE_TENSORS <= self.memory


def check_supported(config: "DictConfig") -> None:
    """Check that the model of memory covers a composed configuration.

    Raises:
        Refused: the model or a setting is not covered, or not valid.
    """
    from omegaconf import OmegaConf

    name = str(config.actor_rollout_ref.model.path)
    ModelShape.of(model_config(name), name)  # before verl is imported, which takes long
    from verl.trainer.ppo.utils import need_critic

    ours, on_cpu = "actor_rollout_ref", config.trainer.device == "cpu"
    roles = {f"{ours}.actor": "fsdp_config"} | ({"critic": "fsdp"} if need_critic(config) else {})
    supported = {
        f"{ours}.model.enable_activation_offload": (False,),
        f"{ours}.actor.entropy_coeff": (0,),
        f"{ours}.actor.calculate_entropy": (False,),
        f"{ours}.rollout.free_cache_engine": (False, True) if on_cpu else (True,),
        f"{ours}.model.lora_adapter_path": (None,),
    }
    if config.actor_rollout_ref.model.lora_rank:
        supported[f"{ours}.model.target_modules"] = ("all-linear",)
        supported |= {f"{ours}.model.{key}": (None,) for key in ("exclude_modules", "target_parameters")}
    if "critic" in roles:
        supported |= {"critic.model.lora_rank": (0,), "critic.model.lora_adapter_path": (None,)}
    for role, engine in roles.items():
        supported |= {f"{role}.strategy": ("fsdp", "fsdp2"), f"{role}.{engine}.offload_policy": (False,)}
        supported |= {f"{role}.{engine}.reshard_after_forward": (True,)}
    for key, allowed in supported.items():
        if (value := OmegaConf.select(config, key)) not in allowed:
            raise Refused(f"{key}={value}: plan-memory supports {' or '.join(map(str, allowed))}")
    for key in ("trainer.nnodes", "trainer.n_gpus_per_node", f"{ours}.rollout.tensor_model_parallel_size"):
        if (value := OmegaConf.select(config, key)) < 1:
            raise Refused(f"{key}={value}: must be at least 1")
    world = config.trainer.nnodes * config.trainer.n_gpus_per_node
    divisors = [f"{ours}.rollout.tensor_model_parallel_size"]
    divisors += [f"{role}.{engine}.{key}" for role, engine in roles.items() for key in PARALLEL]
    for key in divisors:
        if 0 < (value := OmegaConf.select(config, key)) < world and world % value or value > world:
            raise Refused(f"{key}={value}: must divide the {world} GPUs")
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    if not 0 < share <= 1:
        raise Refused(f"{ours}.rollout.gpu_memory_utilization={share}: must be above 0 and at most 1")


def plan_job(config: "DictConfig", memory: int, length: int | None) -> MemoryPlan:
    """Plan the memory of a job that :func:`check_supported` has passed.

    Args:
        config: composed and resolved.
        memory: bytes of one GPU, or of the machine if it has none.
        length: tokens of a prompt and its answer; None for the most that the configuration allows.

    Raises:
        Refused: a critic's model or LoRA on experts is not supported, or the rollout's weights exceed its limit.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    name, rollout = config.actor_rollout_ref.model.path, config.actor_rollout_ref.rollout
    shape = ModelShape.of(model_config(name), name)
    length = length or config.data.max_prompt_length + config.data.max_response_length
    policy = trained_model(config, shape, length, critic=False)
    models = {"actor": policy}
    if need_critic(config):
        path = config.critic.model.path
        models["critic"] = trained_model(config, ModelShape.of(model_config(path), path), length, critic=True)
    server = rollout_memory(config, shape, memory)
    idle = {part: sum(model.idle[part] for model in models.values()) for part in ("weights", "Adam")}
    loaded = idle | {"weights": idle["weights"] - policy.idle["weights"] + policy.resident["weights"]}
    moments = {"rollout": idle | {"rollout's weights": server.weights, "KV cache": server.cache}}

    # Weights are sent tensor by tensor, through a bucket. verl merges LoRA adapters in fp32, with 8 bytes per parameter
    # of the tensor, or sends them unmerged: then FSDP1 gathers the model to read them, and an offloaded base goes to
    # the host before the rollout wakes up.
    merged = policy.lora_rank > 0 and bool(config.actor_rollout_ref.model.lora.get("merge"))
    adapters_only = policy.lora_rank > 0 and not merged
    summoned = adapters_only and policy.strategy == "fsdp" and policy.shards > 1
    whole = BYTES[policy.base] * policy.parameters if summoned else 0
    sent_from_host = adapters_only and policy.offload_params
    # FSDP2 sends from where the shards are
    sent_from_gpu = (policy.strategy == "fsdp" or policy.lora_rank > 0) and not sent_from_host
    bucket = rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
    tensor = (BYTES[policy.base] + 8 * merged) * shape.largest_tensor
    moments["weights to the rollout"] = {
        **(loaded if sent_from_gpu else idle),
        "gathered": (0 if sent_from_host else whole) + tensor + bucket,
        "rollout's weights": server.weights,
    }
    if sent_from_host:
        moments["weights to the host"] = loaded | {"gathered": whole}

    scoring = replace(policy, tokens=scored_tokens(config, rollout, length))
    compiled = config.actor_rollout_ref.actor.fsdp_config.use_torch_compile
    for moment, parts in scoring.scoring_moments(entropy=not compiled).items():
        moments[f"log-probabilities, {moment}"] = loaded | parts
    if need_reference_policy(config):  # its weights stay on the host and are loaded layer by layer
        reference = replace(policy, tokens=scored_tokens(config, config.actor_rollout_ref.ref, length))
        for moment, parts in reference.scoring_moments(entropy=False).items():
            moments[f"reference, {moment}"] = idle | parts
    for role, model in models.items():
        for moment, parts in model.update_moments().items():
            others = {part: parts[part] + idle[part] - model.idle[part] for part in idle}  # the other model's, too
            moments[f"{role}, {moment}"] = parts | others
    return MemoryPlan(
        model=name,
        shape=shape,
        on_cpu=config.trainer.device == "cpu",
        nodes=config.trainer.nnodes,
        gpus=config.trainer.n_gpus_per_node,
        memory=memory,
        tokens=policy.tokens,
        rollout=server,
        moments=moments,
    )


def rollout_memory(config: "DictConfig", shape: ModelShape, memory: int) -> RolloutMemory:
    """Return the memory of a rollout server on one GPU of ``memory`` bytes.

    Raises:
        Refused: its weights leave no room for a KV cache.
    """
    rollout = config.actor_rollout_ref.rollout
    dtype = SERVER_SPELLINGS["bfloat16" if rollout.dtype == "auto" else rollout.dtype]  # auto: that of most checkpoints
    tensor_parallel = rollout.tensor_model_parallel_size
    weights = BYTES[dtype] * shape.total // tensor_parallel
    if config.trainer.device == "cpu":  # vLLM allocates a KV cache of a fixed size there
        cache = int(config.ray_kwargs.ray_init.runtime_env.env_vars.VLLM_CPU_KVCACHE_SPACE) * GIB
    else:
        cache = int(rollout.gpu_memory_utilization * memory) - weights
    if cache < GIB:
        raise Refused(
            f"actor_rollout_ref.rollout.gpu_memory_utilization={rollout.gpu_memory_utilization}: "
            f"{(weights + cache) / GIB:.1f} GiB are too few for {weights / GIB:.1f} GiB of weights and a KV cache"
        )
    # Keys and values of each layer; a GPU has at least one head of each.
    per_token = 2 * shape.layers * max(shape.head_dim, shape.key_width // tensor_parallel) * BYTES[dtype]
    return RolloutMemory(weights, cache, per_token, tensor_parallel)


def micro_batch(
    config: "DictConfig", mini_batch: int, budget: int | None, rows: int | None, length: int, parallel: int
) -> tuple[int, int]:
    """Return the tokens of a full micro-batch on a rank, and the number of micro-batches in a mini-batch.

    Args:
        mini_batch: prompts.
        budget: tokens of a micro-batch, read if ``use_dynamic_bsz``.
        rows: answers of a micro-batch, read otherwise.
        length: tokens of a prompt and its answer.
        parallel: ranks that share a sequence.
    """
    world = config.trainer.nnodes * config.trainer.n_gpus_per_node
    sequences = -(-mini_batch * config.actor_rollout_ref.rollout.n * parallel // world)
    if config.actor_rollout_ref.actor.use_dynamic_bsz:
        full = max(budget * parallel, length)
        return min(full, sequences * length) // parallel, math.ceil(sequences * length / full)
    rows = min(rows, sequences)
    return rows * length // parallel, math.ceil(sequences / rows)


def sequence_parallel(config: "DictConfig") -> int:
    """Return the actor's sequence parallelism; its older key wins if set."""
    actor = config.actor_rollout_ref.actor
    old = actor.ulysses_sequence_parallel_size
    return old if old > 1 else actor.fsdp_config.ulysses_sequence_parallel_size


def scored_tokens(config: "DictConfig", role: "DictConfig", length: int) -> int:
    """Return the tokens of a micro-batch of log-probabilities, whose size ``role`` sets: rollout or ref."""
    budget, rows = role.log_prob_max_token_len_per_gpu, role.log_prob_micro_batch_size_per_gpu
    return micro_batch(config, config.data.train_batch_size, budget, rows, length, sequence_parallel(config))[0]


def trained_model(config: "DictConfig", shape: ModelShape, length: int, critic: bool) -> TrainedModel:
    """Return the actor, or the critic, of a composed configuration; ``length``: tokens of a prompt and its answer."""
    from verl.utils.precision import Precision, apply_role_dtype, dtype_name

    role = config.critic if critic else config.actor_rollout_ref.actor
    engine, model = (role.fsdp, role.model) if critic else (role.fsdp_config, config.actor_rollout_ref.model)
    lora_rank = 0 if critic else model.lora_rank
    if lora_rank and shape.experts:
        raise Refused(f"actor_rollout_ref.model.lora_rank={lora_rank}: plan-memory supports 0 for a mixture of experts")
    # Where nothing is requested, upstream's own lines take the same dtypes from these keys.
    dtypes = {key: engine.get(key) for key in ("dtype", "mixed_precision", "model_dtype")}
    resolved = SimpleNamespace(**dtypes, strategy=role.strategy, forward_only=False, precision_requested=True)
    apply_role_dtype(role.get("dtype"), "fsdp" if critic else "fsdp_config", resolved)
    precision = Precision.resolve(resolved, lora=lora_rank > 0)
    world, on_cpu = config.trainer.nnodes * config.trainer.n_gpus_per_node, config.trainer.device == "cpu"
    # For a critic verl 0.9.1's trainer passes on this key only, which its yaml does not have.
    budget = role.get("ppo_infer_max_token_len_per_gpu", 32768) if critic else role.ppo_max_token_len_per_gpu
    parallel = engine.ulysses_sequence_parallel_size if critic else sequence_parallel(config)
    rows = role.ppo_micro_batch_size_per_gpu
    always_synced = precision.loss_scaling and role.strategy == "fsdp"  # FSDP1 in fp16
    tokens, micro_batches = micro_batch(config, role.ppo_mini_batch_size, budget, rows, length, parallel)
    return TrainedModel(
        shape=shape,
        critic=critic,
        strategy=role.strategy,
        shards=engine.fsdp_size if 0 < engine.fsdp_size < world else world,
        tokens=tokens,
        micro_batches=micro_batches,
        compute=dtype_name(precision.compute),
        reduce=dtype_name(precision.reduce),
        base=dtype_name(precision.base),
        lora_rank=lora_rank,
        on_cpu=on_cpu,
        checkpointing=model.enable_gradient_checkpointing,
        offload_params=engine.param_offload,
        offload_adam=engine.optimizer_offload,
        deferred=engine.use_no_sync_for_gradient_accumulation and not always_synced,
        fused_head=bool(model.get("use_fused_kernels", False)),
        # Padding takes a copy; on a CPU the loss outweighs it.
        logits_twice=config.actor_rollout_ref.rollout.temperature != 1 or not (model.use_remove_padding or on_cpu),
    )
