"""How much memory a job of verl takes on each GPU, by arithmetic: what is held, and what comes and goes in each phase.

Follows the engine of verl 0.9 (``workers/engine/fsdp``) and torch's FSDP1 and FSDP2. Every size is in bytes and of one
rank. What of it is exact, what is assumed and what is not known: docs/scale.md.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import OmegaConf

from lib.errors import Refused
from lib.paths import CACHE

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# What a process of an accelerator holds beside tensors: its context, NCCL's buffers, fragments, the sleeping rollout.
# verl-project/verl, pull request 7461: 39.63 GiB on the device where 35.68 were allocated, 37.80 where 33.70 were.
BESIDE_TENSORS = 4 * GIB
# Proportional set sizes of the processes of a job on one machine without a GPU, less tensors and KV cache. Fitted on
# one run of `make run STEPS=2` (7.17 GiB, its trainer 1.05); a server's share on the processes of another.
ON_A_CPU = {"job": 3.4 * GIB, "trainer": 0.9 * GIB, "server": 1.7 * GIB}
# Bytes a token and word of the vocabulary when the loss's backward begins, beside the logits, which have c bytes.
# cpu: log_softmax, the zeros that gather's backward makes, and what it adds to them, all in fp32. cuda: flash-attn's
# cross entropy writes its gradient over the logits. npu: log-probabilities and a gradient in the logits' dtype.
LOSS = {"cpu": lambda c: 12, "cuda": lambda c: 0, "npu": lambda c: 2 * c}
ENTROPY = 10  # the same of entropy in its eager form, in fp32; compiled it has none
PARALLEL = ("fsdp_size", "ulysses_sequence_parallel_size")
KINDS = ("llama", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class Shape:
    """The numbers of a decoder of Llama's kind, as ``config.json`` has them.

    Args:
        bias: whether query, key and value have one (Qwen2).
        qk_norm: whether query and key are normalized (Qwen3).
        intermediate: width of the MLP, or of each expert.
        experts: in a layer, 0 for a dense model; a token takes ``active`` of them.
    """

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    bias: bool
    qk_norm: bool
    experts: int = 0
    active: int = 1

    @classmethod
    def of(cls, config: Mapping[str, Any], name: str) -> "Shape":
        """The shape that a model's ``config.json`` gives.

        Raises:
            Refused: a number is missing, or the model is of a kind whose layers are others.
        """
        kind = config.get("model_type")
        if kind not in KINDS:
            raise Refused(f"MODEL={name}: its model_type is {kind}; planned are {', '.join(KINDS)}")
        moe = kind.endswith("moe")
        width = "moe_intermediate_size" if moe else "intermediate_size"
        needed = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", width]
        needed += [key for key in ("num_key_value_heads", "head_dim") if config.get(key) is not None]
        for key in [*needed, *(["num_experts", "num_experts_per_tok"] if moe else [])]:
            if not isinstance(config.get(key), int) or config[key] < 1:
                raise Refused(f"MODEL={name}: {key} is {config.get(key)}; must be a whole number of at least 1")
        if moe and (config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers")):
            raise Refused(f"MODEL={name}: some of its layers have no experts; planned are layers that are all alike")
        heads = config["num_attention_heads"]
        return cls(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            intermediate=config[width],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            tied=bool(config.get("tie_word_embeddings", False)),
            bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
            qk_norm=kind.startswith("qwen3"),
            **({"experts": config["num_experts"], "active": config["num_experts_per_tok"]} if moe else {}),
        )

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def largest(self) -> int:
        """Parameters of the largest tensor: the embedding, or gate and up of all experts of a layer."""
        return max(self.embedding, 2 * self.hidden * self.intermediate * self.experts)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the head where that is another."""
        return self.vocab * self.hidden

    @property
    def block(self) -> int:
        """Parameters of one layer."""
        attention = 2 * self.hidden * (self.queries + self.keys)
        attention += (self.queries + 2 * self.keys) * self.bias + 2 * self.head_dim * self.qk_norm
        mlp = 3 * self.hidden * self.intermediate * max(1, self.experts) + self.hidden * self.experts
        return attention + mlp + 2 * self.hidden

    @property
    def total(self) -> int:
        return self.layers * self.block + self.hidden + (1 if self.tied else 2) * self.embedding

    def saved(self, c: int, upcast: bool = False) -> int:
        """Bytes a token that one layer keeps for its backward pass.

        A norm keeps its input in fp32, that in the computing dtype, and its output; attention query, key, value and
        output; an MLP gate, activated gate, up and their product. A token is kept again by each expert that takes it.

        Args:
            c: size of the dtype that it computes in.
            upcast: products are of fp32 copies, one for each (recipes/cpu in fp16).
        """
        h, q, k, i = self.hidden, self.queries, self.keys, self.intermediate * self.active
        if upcast:
            return 2 * (4 + c) * h + 4 * 5 * h + 4 * q + 4 * 2 * (q + k) + (4 + 3 * c) * i
        norms = 2 * (4 + 2 * c) * h + (4 + 2 * c) * (q + k) * self.qk_norm
        experts = 2 * c * h * self.active * bool(self.experts)  # what each of them takes, and gives
        return norms + 2 * c * (q + k) + 4 * c * i + experts


@dataclass(frozen=True)
class Trained:
    """A model that is trained, on one rank.

    Args:
        critic: its head has one output.
        strategy: ``fsdp`` or ``fsdp2``.
        shards: the ranks among which it is divided.
        tokens: of a micro-batch, on this rank: sequence parallelism has divided them.
        micro_batches: of an optimizer step.
        compute: the name of a dtype; ``reduce`` and ``master`` likewise.
        device: ``cpu``, ``cuda`` or ``npu``.
        offload_params, offload_adam: they wait on the host while another model, or the rollout, works.
        deferred: gradients are reduced after the last micro-batch alone (``use_no_sync_for_gradient_accumulation``).
        fused_head: logits are never there as a whole (``use_fused_kernels``).
        twice: logits are there twice: before and after a temperature that is not 1, or with and without padding.
    """

    shape: Shape
    critic: bool
    strategy: str
    shards: int
    tokens: int
    micro_batches: int
    compute: str
    device: str
    checkpointing: bool
    reduce: str = "float32"
    master: str = "float32"
    offload_params: bool = False
    offload_adam: bool = False
    deferred: bool = False
    fused_head: bool = False
    twice: bool = False

    @property
    def head(self) -> int:
        """Parameters of the head: none where it is the embedding."""
        return self.shape.hidden + 1 if self.critic else 0 if self.shape.tied else self.shape.embedding

    @property
    def parameters(self) -> int:
        return self.shape.layers * self.shape.block + self.shape.embedding + self.shape.hidden + self.head

    @property
    def weights(self) -> int:
        return BYTES[self.master] * self.parameters // self.shards

    @property
    def idle(self) -> dict[str, int]:
        """What stays while another model, or the rollout, works."""
        return {
            "weights": 0 if self.offload_params else self.weights,
            "Adam": 0 if self.offload_adam else 2 * self.weights,
        }

    @property
    def words(self) -> int:
        """Numbers in the logits of one micro-batch."""
        return 0 if self.critic or self.fused_head else self.tokens * self.shape.vocab

    @property
    def logits(self) -> int:
        return (1 + self.twice) * self.words * BYTES[self.compute]

    def activations(self) -> tuple[int, int]:
        """At the end of the forward pass; and of one layer that the backward pass computes again."""
        c, upcast = BYTES[self.compute], self.device == "cpu" and self.compute == "float16"
        layer = self.shape.saved(c, upcast)
        copies = 4 * (self.shape.layers * self.shape.block + self.head) if upcast and not self.checkpointing else 0
        each = c * self.shape.hidden if self.checkpointing else layer
        end = (4 + (c + 4 if upcast else 2 * c)) * self.shape.hidden
        return self.tokens * (self.shape.layers * each + end) + copies, self.checkpointing * self.tokens * layer

    def update(self) -> dict[str, dict[str, int]]:
        """The moments of an update at which most may be held, and their parts.

        ``loss``: its backward begins. ``head``: its gradient is made and reduced. ``layer``: the last layer's backward.
        ``embedding``: the gradient of the embedding, under FSDP1 of all outside of layers, is reduced, and all other
        gradients are there. ``step``: the optimizer's.
        """
        s, c, r, n = self.shape, BYTES[self.compute], BYTES[self.reduce], self.shards
        one, several = self.strategy == "fsdp", self.micro_batches > 1
        saved, again = self.activations()
        gradients = r * self.parameters // n
        earlier = gradients if several else 0
        if self.deferred and several:  # whole ones: FSDP1 adds up in the computing dtype, FSDP2 in that of reduction
            earlier = (c if one else r) * self.parameters
        outside = s.embedding + s.hidden + self.head
        root = c * outside if one else 0  # FSDP1 leaves its outermost unit gathered until its gradient is there
        final = r * (outside if one else s.embedding)
        renewed = final // n if several and not self.deferred else 0  # the sum and what is added to it
        in_loss = {
            "gradients": earlier,
            "gathered": root,
            "activations": saved,
            "logits": self.logits + self.words * LOSS[self.device](c),
        }
        in_head = {  # its gradient is computed from that of the logits, and the last layer is being gathered
            "gradients": earlier + c * self.head,
            "gathered": (root or c * self.head) + c * s.block,
            "activations": saved,
            "logits": self.logits,
        }
        in_reduction = {
            "gradients": earlier + c * self.head + (0 if one else r * self.head // n),
            "gathered": root + c * s.block,
            "reduced": 0 if one else r * self.head,
            "activations": saved,
        }
        in_layer = {
            "gradients": earlier + (c * self.head if one else r * self.head // n) + c * s.block,
            "gathered": root + 2 * c * s.block,
            "reduced": r * s.block if one else r * max(self.head, s.block),
            "activations": saved + again,
        }
        in_embedding = {"gradients": gradients + renewed + (root if one else c * s.embedding), "reduced": final}
        foreach = one and self.device != "cpu"
        in_step = {"gradients": gradients, "reduced": gradients if foreach else r * max(s.embedding, self.head) // n}
        moments = {"loss": in_loss, "head": in_head, "head, reduced": in_reduction, "layer": in_layer}
        moments |= {"embedding": in_embedding, "step": in_step}
        return {name: {"weights": self.weights, "Adam": 2 * self.weights} | parts for name, parts in moments.items()}

    def score(self, entropy: bool) -> dict[str, dict[str, int]]:
        """The moments of a forward pass alone: in the layers, and where log-probabilities, and entropy, are taken."""
        s, c = self.shape, BYTES[self.compute]
        root = c * (s.embedding + s.hidden + self.head) if self.strategy == "fsdp" else 0
        layer = self.tokens * s.saved(c, self.device == "cpu" and self.compute == "float16")
        taken = max(ENTROPY if entropy else 0, {"cpu": 4, "cuda": 0, "npu": c}[self.device])
        return {
            "layers": {"gathered": root + 2 * c * max(s.block, 0 if root else self.head), "activations": layer // 2},
            "words": {"gathered": root, "logits": self.logits + self.words * taken},
        }


def peak(moments: Mapping[str, Mapping[str, int]]) -> tuple[str, int]:
    """The moment at which most is held, and how much."""
    name = max(moments, key=lambda each: sum(moments[each].values()))
    return name, sum(moments[name].values())


@dataclass(frozen=True)
class Rollout:
    """vLLM on one GPU.

    Args:
        weights: of its share of the model.
        limit: all that it may take, its KV cache with it.
        token: bytes of the KV cache a token, on this GPU.
        across: its tensor parallelism.
    """

    weights: int
    limit: int
    token: int
    across: int

    @property
    def cache(self) -> int:
        return max(0, self.limit - self.weights)


@dataclass(frozen=True)
class Plan:
    """A job, by the moments of a step; see ``of_job``."""

    model: str
    shape: Shape
    device: str
    nodes: int
    gpus: int
    memory: int
    tokens: int
    rollout: Rollout
    moments: dict[str, dict[str, int]]

    @property
    def trainers(self) -> int:
        """The most that tensors of the training process take: verl's ``perf/max_memory_allocated_gb``."""
        of_rollout = ("rollout's weights", "KV cache")
        return max(sum(v for k, v in parts.items() if k not in of_rollout) for parts in self.moments.values())

    @property
    def machine(self) -> dict[str, float]:
        """The whole job where all of it is on one machine without a GPU."""
        workers = self.nodes * self.gpus
        servers = workers // self.rollout.across
        served = self.rollout.limit * self.rollout.across
        return {
            "Ray, driver, agent loops": ON_A_CPU["job"],
            "trainers": workers * (ON_A_CPU["trainer"] + self.trainers),
            "rollout servers": servers * (ON_A_CPU["server"] + served),
        }

    @property
    def fits(self) -> bool:
        if self.device == "cpu":
            return sum(self.machine.values()) <= self.memory
        return peak(self.moments)[1] + BESIDE_TENSORS <= self.memory


def model_config(path: str) -> Mapping[str, Any]:
    """The numbers of ``path``: a folder with a ``config.json``, or a model whose numbers are at hand.

    Raises:
        Refused: there is neither.
    """
    file = Path(path).expanduser() / "config.json"
    if file.exists():
        try:
            return json.loads(file.read_text())
        except ValueError as error:
            raise Refused(f"MODEL={path}: its config.json is not JSON ({error})") from error
    if path in MODELS:
        return MODELS[path]
    if Path(path).is_relative_to(CACHE):  # still to be made
        return SANITY
    raise Refused(f"MODEL={path}: give a folder with its config.json, or one of {', '.join(MODELS)}")


def check(config) -> None:
    """See whether a composed configuration is of those that are planned.

    Raises:
        Refused: a setting is another.
    """
    from verl.trainer.ppo.utils import need_critic

    ours, on_cpu = "actor_rollout_ref", config.trainer.device == "cpu"
    roles = {f"{ours}.actor": "fsdp_config"} | ({"critic": "fsdp"} if need_critic(config) else {})
    asked = {
        f"{ours}.model.lora_rank": (0,),
        f"{ours}.model.enable_activation_offload": (False,),
        f"{ours}.actor.entropy_coeff": (0,),
        f"{ours}.actor.calculate_entropy": (False,),
        f"{ours}.rollout.free_cache_engine": (False, True) if on_cpu else (True,),
    }
    for role, engine in roles.items():
        asked |= {f"{role}.strategy": ("fsdp", "fsdp2"), f"{role}.{engine}.offload_policy": (False,)}
        asked |= {f"{role}.{engine}.reshard_after_forward": (True,)}
    for key, planned in asked.items():
        if (value := OmegaConf.select(config, key)) not in planned:
            raise Refused(f"{key}={value}: planned is {' or '.join(map(str, planned))}")
    for key in ("trainer.nnodes", "trainer.n_gpus_per_node", f"{ours}.rollout.tensor_model_parallel_size"):
        if (value := OmegaConf.select(config, key)) < 1:
            raise Refused(f"{key}={value}: must be at least 1")
    world = config.trainer.nnodes * config.trainer.n_gpus_per_node
    divisors = [f"{ours}.rollout.tensor_model_parallel_size"]
    divisors += [f"{role}.{engine}.{key}" for role, engine in roles.items() for key in PARALLEL]
    for key in divisors:
        if 0 < (value := OmegaConf.select(config, key)) < world and world % value or value > world:
            raise Refused(f"{key}={value}: does not divide {world} GPUs")
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    if not 0 < share <= 1:
        raise Refused(f"{ours}.rollout.gpu_memory_utilization={share}: must be above 0 and at most 1")


def of_job(config, memory: int, length: int | None) -> Plan:
    """The plan of a job's composed configuration.

    Args:
        config: as ``job.compose`` gives it.
        memory: of one GPU, or of the machine without one.
        length: tokens of a prompt and its answer, the most that the configuration allows by default.

    Raises:
        Refused: the model or a setting is not among those planned.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    check(config)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    name = config.actor_rollout_ref.model.path
    shape = Shape.of(model_config(name), name)
    length = length or config.data.max_prompt_length + config.data.max_response_length
    policy = trained(config, shape, length, critic=False)
    others = [policy]
    if need_critic(config):
        path = config.critic.model.path
        others.append(trained(config, Shape.of(model_config(path), path), length, critic=True))
    dtype = {"auto": "bfloat16"}.get(rollout.dtype, rollout.dtype)
    across = rollout.tensor_model_parallel_size
    device, weights = config.trainer.device, BYTES[dtype] * shape.total // across
    if device == "cpu":  # vLLM takes its cache by itself there
        room = weights + int(config.ray_kwargs.ray_init.runtime_env.env_vars.VLLM_CPU_KVCACHE_SPACE) * GIB
    else:
        room = int(rollout.gpu_memory_utilization * memory)
    served = Rollout(
        weights=weights,
        limit=room,
        token=2 * shape.layers * max(shape.head_dim, shape.keys // across) * BYTES[dtype],
        across=across,
    )
    bucket = rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
    idle = {part: sum(each.idle[part] for each in others) for part in ("weights", "Adam")}
    if served.weights + BESIDE_TENSORS // 4 > served.limit:
        raise Refused(
            f"actor_rollout_ref.rollout.gpu_memory_utilization={rollout.gpu_memory_utilization}: "
            f"{served.limit / GIB:.1f} GiB do not hold {served.weights / GIB:.1f} of weights and a KV cache"
        )
    moments = {"rollout": idle | {"rollout's weights": served.weights, "KV cache": served.cache}}
    at_work = idle | {"weights": policy.weights + idle["weights"] - policy.idle["weights"]}
    moments["weights to the rollout"] = {  # FSDP2's come from where they are, FSDP1's from the GPU
        **(at_work if policy.strategy == "fsdp" else idle),
        "gathered": BYTES[policy.master] * shape.largest + bucket,
        "rollout's weights": served.weights,
    }
    scored = replace(policy, tokens=scored_tokens(config, rollout, length))
    for moment, parts in scored.score(entropy=not actor.fsdp_config.use_torch_compile).items():
        moments[f"log-probabilities, {moment}"] = at_work | parts
    if need_reference_policy(config):  # its weights wait on the host and come layer by layer
        reference = replace(policy, tokens=scored_tokens(config, config.actor_rollout_ref.ref, length))
        for moment, parts in reference.score(entropy=False).items():
            moments[f"reference, {moment}"] = idle | parts
    for each in others:
        role = "critic" if each.critic else "actor"
        beside = {part: idle[part] - each.idle[part] for part in idle}
        for moment, parts in each.update().items():
            moments[f"{role}, {moment}"] = parts | {part: parts[part] + beside[part] for part in beside}
    return Plan(
        model=name,
        shape=shape,
        device=device,
        nodes=config.trainer.nnodes,
        gpus=config.trainer.n_gpus_per_node,
        memory=memory,
        tokens=policy.tokens,
        rollout=served,
        moments=moments,
    )


def micro_batch(
    config, mini_batch: int, budget: int | None, rows: int | None, length: int, parallel: int
) -> tuple[int, int]:
    """Tokens of a full micro-batch on a rank, and how many of them a mini-batch has.

    Args:
        mini_batch: prompts.
        budget: tokens of a micro-batch with ``use_dynamic_bsz``; ``rows``: its answers without.
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


def sequence_parallel(config) -> int:
    """Of the actor, whose old key wins where it is set."""
    actor = config.actor_rollout_ref.actor
    old = actor.ulysses_sequence_parallel_size
    return old if old > 1 else actor.fsdp_config.ulysses_sequence_parallel_size


def scored_tokens(config, role, length: int) -> int:
    """Tokens of a micro-batch whose log-probabilities are taken; ``role``: rollout or ref, which have its size."""
    budget, rows = role.log_prob_max_token_len_per_gpu, role.log_prob_micro_batch_size_per_gpu
    return micro_batch(config, config.data.train_batch_size, budget, rows, length, sequence_parallel(config))[0]


def trained(config, shape: Shape, length: int, critic: bool) -> Trained:
    """The actor, or the critic, of a composed configuration; ``length``: tokens of a prompt and its answer."""
    from verl.utils.precision import Precision, dtype_name

    role = config.critic if critic else config.actor_rollout_ref.actor
    engine, model = (role.fsdp, role.model) if critic else (role.fsdp_config, config.actor_rollout_ref.model)
    asked = {key: engine.get(key) for key in ("dtype", "mixed_precision", "model_dtype")}
    precision = Precision.resolve(SimpleNamespace(**asked, strategy=role.strategy, forward_only=False))
    world = config.trainer.nnodes * config.trainer.n_gpus_per_node
    # Of a critic, verl 0.9.1's trainer hands on this key alone, which its yaml does not have.
    budget = role.get("ppo_infer_max_token_len_per_gpu", 32768) if critic else role.ppo_max_token_len_per_gpu
    parallel = engine.ulysses_sequence_parallel_size if critic else sequence_parallel(config)
    rows = role.ppo_micro_batch_size_per_gpu
    tokens, micro_batches = micro_batch(config, role.ppo_mini_batch_size, budget, rows, length, parallel)
    return Trained(
        shape=shape,
        critic=critic,
        strategy=role.strategy,
        shards=engine.fsdp_size if 0 < engine.fsdp_size < world else world,
        tokens=tokens,
        micro_batches=micro_batches,
        compute=dtype_name(precision.compute),
        reduce=dtype_name(precision.reduce),
        master=dtype_name(precision.master),
        device=config.trainer.device,
        checkpointing=model.enable_gradient_checkpointing,
        offload_params=engine.param_offload,
        offload_adam=engine.optimizer_offload,
        deferred=engine.use_no_sync_for_gradient_accumulation,
        fused_head=bool(model.get("use_fused_kernels", False)),
        twice=config.actor_rollout_ref.rollout.temperature != 1
        or not (model.use_remove_padding or config.trainer.device == "cpu"),  # there the loss outweighs it
    )


def numbers(kind: str, vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv: int, **more) -> dict:
    """A ``config.json``'s entries."""
    return {
        "model_type": kind,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        **more,
    }


SANITY = numbers("qwen2", 259, 128, 384, 2, 2, 2)  # recipes/arithmetic/model.py
# The config.json of each on the Hugging Face Hub, 2026-11.
MODELS = {
    "Qwen/Qwen2.5-0.5B-Instruct": numbers("qwen2", 151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": numbers("qwen2", 151936, 1536, 8960, 28, 12, 2),
    "Qwen/Qwen2.5-7B": numbers("qwen2", 152064, 3584, 18944, 28, 28, 4),
    "Qwen/Qwen2.5-32B": numbers("qwen2", 152064, 5120, 27648, 64, 40, 8),
    "Qwen/Qwen3-8B": numbers("qwen3", 151936, 4096, 12288, 36, 32, 8, head_dim=128),
    "Qwen/Qwen3-30B-A3B": numbers(
        *("qwen3_moe", 151936, 2048, 6144, 48, 32, 4),
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
    ),
}
