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
MICRO_BATCH = ("max_token_len_per_gpu", "micro_batch_size_per_gpu")  # the ends of the keys of its size
OF_TRAINER = ("weights", "Adam", "gradients", "gathered", "reduced", "activations", "logits")
OF_ROLLOUT = ("rollout's weights", "KV cache")


def peak(moments: Mapping[str, Mapping[str, int]]) -> tuple[str, int]:
    """Return the moment with the largest sum of parts, and that sum in bytes."""
    name = max(moments, key=lambda each: sum(moments[each].values()))
    return name, sum(moments[name].values())


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a job's workers at each moment of a step, in bytes by part."""

    model: str
    shape: ModelShape
    nodes: int
    gpus: int
    memory: int  # of one GPU
    tokens: int  # of the actor's micro-batches
    cache_per_token: int  # bytes of the KV cache on one GPU
    moments: dict[str, dict[str, int]]

    @property
    def fits(self) -> bool:
        return peak(self.moments)[1] + OUTSIDE_TENSORS <= self.memory

    def table(self, title: str) -> str:
        """Return the model and the machines, the parts of each moment in GiB, and whether the job fits.

        An asterisk marks the largest sum; parts that are zero throughout are left out.
        """
        shape, cache = self.shape, self.moments["rollout"]["KV cache"]
        shown = [part for part in OF_TRAINER + OF_ROLLOUT if any(parts.get(part) for parts in self.moments.values())]
        largest, size = peak(self.moments)
        rows = [["GiB of each worker", *shown, "sum"]]
        for name, parts in self.moments.items():
            cells = [f"{parts.get(part, 0) / GIB:.1f}" if parts.get(part) else "" for part in shown]
            rows.append([name, *cells, f"{sum(parts.values()) / GIB:.1f}{' *' if name == largest else ''}"])
        first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
        experts = f", {shape.experts} experts, {shape.active} of them active" if shape.experts else ""
        fits = f"{'fits' if self.fits else 'DOES NOT FIT'} into {self.memory / GIB:.0f}"
        return "\n".join(
            [
                f"{title}: {self.model}, {shape.total / 1e9:.2f} G parameters{experts}",
                f"{self.nodes} nodes of {self.gpus} GPUs of {self.memory / GIB:.0f} GiB, "
                f"micro-batches of {self.tokens:,} tokens a worker",
                "",
                *("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows),
                "",
                f"{size / GIB:.1f} GiB of tensors at most ({largest}) and {OUTSIDE_TENSORS / GIB:.0f} outside tensors: "
                f"{fits}",
                f"KV cache: {cache // self.cache_per_token:,} tokens a rollout server at most, "
                f"{self.cache_per_token / 1024:.0f} KiB each on a GPU",
            ]
        )


def check_supported(config: "DictConfig") -> None:
    """Refuse a composed configuration that the model of memory does not cover, or that is not valid."""
    from omegaconf import OmegaConf

    name = str(config.actor_rollout_ref.model.path)
    ModelShape.of(model_config(name), name)  # before verl is imported, which takes long
    from verl.trainer.ppo.utils import need_critic

    ours = "actor_rollout_ref"
    roles = {f"{ours}.actor": "fsdp_config"} | ({"critic": "fsdp"} if need_critic(config) else {})
    supported = {
        f"{ours}.model.enable_activation_offload": (False,),
        f"{ours}.actor.entropy_coeff": (0,),
        f"{ours}.actor.calculate_entropy": (False,),
        f"{ours}.rollout.free_cache_engine": (True,),
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
    keys = [f"trainer.{key}" for key in ("nnodes", "n_gpus_per_node")]
    keys += [f"data.{key}" for key in ("train_batch_size", "max_prompt_length", "max_response_length")]
    keys += [f"{ours}.rollout.{key}" for key in ("n", "tensor_model_parallel_size")]
    keys += [f"{role}.ppo_{key}" for role in roles for key in ("mini_batch_size", *MICRO_BATCH)]
    keys += [f"{ours}.{role}.log_prob_{key}" for role in ("rollout", "ref") for key in MICRO_BATCH]
    for key in keys:
        value = OmegaConf.select(config, key)
        if value is None and key.endswith(MICRO_BATCH):  # only one of them is read
            continue
        if type(value) is not int or value < 1:
            raise Refused(f"{key}={value}: must be a whole number of at least 1")
    key = f"{ours}.rollout.gpu_memory_utilization"
    if not isinstance(value := OmegaConf.select(config, key), int | float) or not 0 < value <= 1:
        raise Refused(f"{key}={value}: must be a number above 0 and at most 1")


def plan_job(config: "DictConfig", memory: int, length: int | None) -> MemoryPlan:
    """Plan the memory of a job that :func:`check_supported` has passed.

    Args:
        config: composed and resolved.
        memory: bytes of one GPU.
        length: tokens of a prompt and its answer; None for the most that the configuration allows.
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
    weights, cache, cache_per_token = rollout_memory(config, shape, memory)
    idle = {part: sum(model.idle[part] for model in models.values()) for part in ("weights", "Adam")}
    loaded = idle | {"weights": idle["weights"] - policy.idle["weights"] + policy.resident["weights"]}
    moments = {"rollout": idle | {"rollout's weights": weights, "KV cache": cache}}

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
        "rollout's weights": weights,
    }
    if sent_from_host:
        moments["weights to the host"] = loaded | {"gathered": whole}

    def scorer(role: "DictConfig") -> TrainedModel:  # rollout or ref, which sets the size of its micro-batches
        budget, rows = role.log_prob_max_token_len_per_gpu, role.log_prob_micro_batch_size_per_gpu
        batch = config.data.train_batch_size
        return replace(policy, tokens=micro_batch(config, batch, budget, rows, length, sequence_parallel(config))[0])

    compiled = config.actor_rollout_ref.actor.fsdp_config.use_torch_compile
    for moment, parts in scorer(rollout).scoring_moments(entropy=not compiled).items():
        moments[f"log-probabilities, {moment}"] = loaded | parts
    if need_reference_policy(config):  # its weights stay on the host and are loaded layer by layer
        for moment, parts in scorer(config.actor_rollout_ref.ref).scoring_moments(entropy=False).items():
            moments[f"reference, {moment}"] = idle | parts
    for role, model in models.items():
        for moment, parts in model.update_moments().items():
            others = {part: parts[part] + idle[part] - model.idle[part] for part in idle}  # the other model's, too
            moments[f"{role}, {moment}"] = parts | others
    return MemoryPlan(
        model=name,
        shape=shape,
        nodes=config.trainer.nnodes,
        gpus=config.trainer.n_gpus_per_node,
        memory=memory,
        tokens=policy.tokens,
        cache_per_token=cache_per_token,
        moments=moments,
    )


def rollout_memory(config: "DictConfig", shape: ModelShape, memory: int) -> tuple[int, int, int]:
    """Return the bytes that vLLM takes on one GPU of ``memory`` bytes, or refuse if no KV cache fits.

    Returns:
        this GPU's share of the weights; the KV cache, as large as vLLM may make it; the cache of a token.
    """
    rollout = config.actor_rollout_ref.rollout
    dtype = SERVER_SPELLINGS["bfloat16" if rollout.dtype == "auto" else rollout.dtype]  # auto: that of most checkpoints
    tensor_parallel = rollout.tensor_model_parallel_size
    weights = BYTES[dtype] * shape.total // tensor_parallel
    cache = int(rollout.gpu_memory_utilization * memory) - weights
    if cache < GIB:
        raise Refused(
            f"actor_rollout_ref.rollout.gpu_memory_utilization={rollout.gpu_memory_utilization}: "
            f"{(weights + cache) / GIB:.1f} GiB are too few for {weights / GIB:.1f} GiB of weights and a KV cache"
        )
    # Keys and values of each layer; a GPU has at least one head of each.
    cache_per_token = 2 * shape.layers * max(shape.head_dim, shape.key_width // tensor_parallel) * BYTES[dtype]
    return weights, cache, cache_per_token


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
    world = config.trainer.nnodes * config.trainer.n_gpus_per_node
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
        checkpointing=model.enable_gradient_checkpointing,
        offload_params=engine.param_offload,
        offload_adam=engine.optimizer_offload,
        deferred=engine.use_no_sync_for_gradient_accumulation and not always_synced,
        fused_head=bool(model.get("use_fused_kernels", False)),
        padded=not model.use_remove_padding,
        scaled=config.actor_rollout_ref.rollout.temperature != 1,
    )
