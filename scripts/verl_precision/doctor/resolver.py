"""Resolve the effective dtype of each hop of a job, by the table of dtype rules.

Where a tree is patched and a precision is requested, the tree's own ``verl.utils.precision``, which its workers run,
resolves the hops that the patches changed. Without a request upstream's lines decide there, too.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from verl_precision.doctor.config import JobConfig
from verl_precision.doctor.dtype_rules import FIXED_BUFFER, UNKNOWN, Fixed, Rule, SameAs, rule_for
from verl_precision.doctor.tree import Tree
from verl_precision.facts.dtypes import SERVER_SPELLINGS, SIXTEEN_BITS, SPELLINGS, cache_refusal
from verl_precision.facts.vllm_float16 import float16_support, ignores_head_dtype

HOPS = (
    *(f"actor.{what}" for what in ("master", "base", "compute", "autocast", "reduce", "optimizer", "logits")),
    *("wire", "rollout.weights", "rollout.kv_cache", "rollout.logits", "ref.compute", "ref.autocast"),
    *(f"critic.{what}" for what in ("master", "base", "compute", "autocast", "reduce")),
    *("reward_model.compute", "hf_export"),
)
ROLES = {
    "actor": "actor_rollout_ref.actor",
    "ref": "actor_rollout_ref.ref",
    "critic": "critic",
    "reward_model": "reward_model",
}
KV_SPELLINGS = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
TRAINED = ("actor", "critic")
FSDP, FSDP_IMPLEMENTATIONS = ("fsdp", "fsdp2"), ("worker", "engine")
SENDING_ENGINES = (*FSDP_IMPLEMENTATIONS, "merged LoRA")  # of the trainer; others are checkpoint engines
ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
# torch's defaults, with the growth interval that upstream's line sets (torch.amp.GradScaler).
UPSTREAM_SCALER = {"init_scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 400}
UPSTREAM_SCALER |= {"min_scale": None, "max_consecutive_skips": None, "saved": False, "reported": False}


class UnexpectedPrecision(Exception):
    """A value of a dtype key on which a worker ends in a RuntimeError; the message is verl's."""


def dtype_name(value: Any) -> str:
    """Return the full name of a dtype as verl's ``PrecisionType.to_dtype`` takes it.

    Raises:
        UnexpectedPrecision: it takes no such value.
    """
    for name, spellings in SPELLINGS.items():
        if value in spellings:
            return name
    raise UnexpectedPrecision(f"unexpected precision: {value}")


def server_dtype(value: Any, model: str | None = None) -> str:
    """Return the full name of a rollout server's dtype; for ``auto``, the dtype in the config.json of ``model``."""
    if value == "auto" and model and (file := Path(model).expanduser() / "config.json").exists():
        content = json.loads(file.read_text())
        value = content.get("dtype", content.get("torch_dtype"))
        return value if value in SIXTEEN_BITS else UNKNOWN  # each server rounds a model in float32 differently
    return SERVER_SPELLINGS.get(value, UNKNOWN)


def names_head(patterns: Sequence[str] | None) -> bool:
    """Return whether ``keep_fp32_modules`` names a language model's head."""
    return any(fnmatchcase("lm_head", pattern) for pattern in patterns or ())


class Hop(NamedTuple):
    """One hop of a job.

    Args:
        effective_dtype: None where there is no such hop.
        reason: the line that decides, or why another hop does.
        requested: the keys that the user set for it, with their values.
    """

    effective_dtype: str | None
    reason: str
    requested: Mapping[str, Any] = {}


class DtypeResolver:
    """Resolves each hop's effective dtype, for one configuration on one tree."""

    def __init__(self, tree: Tree, config: JobConfig):
        self.tree, self.config, self.release, self.get = tree, config, tree.release, config.get
        self.legacy = tree.release.has("legacy_workers")
        # From 0.8.0 on the rollout's name has no default. Unset, vLLM is assumed: all servers read one dtype key.
        self.server = config.get(f"{ROLLOUT}.name", "vllm")

    def uses(self, role: str) -> bool:
        """Return whether the algorithm has a worker of this role."""
        get = self.get
        if role == "ref":
            return bool(get("algorithm.use_kl_in_reward") or get("actor_rollout_ref.actor.use_kl_loss"))
        if role == "critic":
            enabled = get("critic.enable")
            return get("algorithm.adv_estimator") == "gae" if enabled is None else bool(enabled)
        if role == "reward_model":
            return bool(get("reward.reward_model.enable", get("reward_model.enable")))
        return True

    def used(self, *roles: str) -> list[str]:
        return [role for role in roles if self.uses(role)]

    def strategy(self, role: str) -> str:
        return self.get(f"{ROLES[role]}.strategy", "fsdp")

    def implementation(self, role: str) -> str:
        """Return the implementation that the role runs on, by its name in the table."""
        if self.strategy(role) not in FSDP:
            return self.strategy(role)
        if not self.legacy:
            return "engine"
        if self.get("trainer.use_legacy_worker_impl") != "disable" or role == "reward_model":
            return "worker"
        return "engine" if self.release.has("engine_critic" if role == "critic" else "engine_policy") else "worker"

    def on_fsdp(self, role: str) -> bool:
        return self.implementation(role) in FSDP_IMPLEMENTATIONS

    def rule(self, hop: str, implementation: str) -> Rule | None:
        return rule_for(hop, implementation, self.tree.table)

    def engine_node(self, role: str) -> str:
        """Return the key of the config of the role's engine."""
        if (strategy := self.strategy(role)) not in FSDP:
            return f"{ROLES[role]}.{strategy}"
        if role == "critic" and not self.legacy:
            return "critic.fsdp"
        return f"{ROLES[role]}.{'fsdp_config' if role in ('actor', 'ref') else 'model.fsdp_config'}"

    def dtype_keys(self, role: str) -> list[str]:
        """Return the keys by which a user may request what the role computes in."""
        node = self.engine_node(role)
        return [f"{ROLES[role]}.dtype", f"{node}.dtype", f"{node}.mixed_precision.param_dtype"]

    def requested_dtypes(self, role: str) -> dict[str, Any]:
        return self.config.user_values(*self.dtype_keys(role))

    @property
    def lora_rank(self) -> int:
        return self.get(f"{MODEL}.lora.rank", 0) or self.get(f"{MODEL}.lora_rank", 0)

    @property
    def ref_in_actor(self) -> bool:
        """Return whether the ref is the actor without its adapters."""
        adapter = self.release.has("lora_adapter_path") and self.config.has(f"{MODEL}.lora_adapter_path")
        return self.lora_rank > 0 or adapter

    def trains_adapters(self, role: str) -> bool:
        """Return whether a trained role's worker has LoRA adapters."""
        model = {"actor": MODEL, "critic": "critic.model"}.get(role)
        if model is None or not self.on_fsdp(role):
            return False
        takes_path = self.legacy and self.release.has("lora_adapter_path")
        return self.get(f"{model}.lora_rank", 0) > 0 or (takes_path and self.config.has(f"{model}.lora_adapter_path"))

    def read(self, rule: Rule, role: str) -> str:
        """Return the dtype that the line of a rule reads from the configuration."""
        for source in rule.reads:
            if isinstance(source, Fixed):
                # FSDP1 on one worker returns whole tensors, not shards.
                workers = self.get("trainer.nnodes", 1) * self.get("trainer.n_gpus_per_node", 1)
                if workers > 1 or self.get(f"{ROLES[role]}.strategy") != "fsdp" or not source.sharded:
                    return source.dtype
            elif isinstance(source, SameAs):
                hop = source.hop.format(role=role)
                return self.base(role) if hop == f"{role}.base" else self.effective_dtype(hop)
            else:
                parent = "" if source.path.startswith("actor_rollout_ref") else f"{self.engine_node(role)}."
                node, _, key = f"{parent}{source.path}".rpartition(".")
                if source.default and self.config.has(node):
                    return dtype_name(self.get(node)[key]) if key in self.get(node) else source.default
                if not source.default and self.config.has(f"{node}.{key}"):
                    return dtype_name(self.get(f"{node}.{key}"))
        return UNKNOWN

    def decide(self, name: str, implementation: str, role: str, field: str = "") -> Hop:
        """Return a hop as its rule decides it or, where a patch changed that line, by ``field`` of ``Precision``."""
        rule = self.rule(name, implementation)
        if rule is None:
            return Hop(UNKNOWN, f"no rule for {implementation} in verl {self.release.name}")
        path = rule.hook or rule.path
        for each in (rule.path, path):
            if self.tree.files[f"verl/{each}"] == UNKNOWN:
                return Hop(UNKNOWN, f"{each} is not verl {self.release.name}'s")
        if self.tree.files[f"verl/{path}"] == "release":
            line = self.tree.line(rule)
            if line is None:
                return Hop(UNKNOWN, f"{rule.path} has no line {rule.text!r}")
            return Hop(self.read(rule, role), f"{rule.path}:{line}")
        if not rule.patch:
            return Hop(self.read(rule, role), f"{rule.path}, patched")
        if dtype := self.patched_dtype(implementation, role, field):
            return Hop(dtype, f"{path}, patched by {rule.patch}")
        return Hop(self.read(rule, role), f"{rule.path}, as upstream: no precision is requested")

    def patched_dtype(self, implementation: str, role: str, field: str) -> str | None:
        """Return the dtype of a hop whose line a patch changed; None where no precision is requested."""
        if not field and implementation not in SENDING_ENGINES:
            rollout = self.get(f"{ROLLOUT}.dtype")
            if rollout not in self.tree.precision.roles.REQUESTED_ROLLOUTS:
                return None
            own_key = f"{ROLLOUT}.checkpoint_engine.engine_kwargs.{implementation}.rollout_dtype"
            return server_dtype(self.get(own_key, rollout))
        precision = self.precision(role)
        if not precision.requested:
            return None
        if not field:  # the wire
            return "float32" if implementation == "merged LoRA" else self.base(role)
        return str(getattr(precision, field)).removeprefix("torch.")

    def precision(self, role: str) -> Any:
        """Return the ``Precision`` that the tree's own module resolves from the config of the role's engine."""
        precision, lora = self.tree.precision.Precision, self.trains_adapters(role)
        if self.legacy:
            node = dict(self.get(self.engine_node(role), {}))
            return precision.of_worker(self.get(f"{ROLES[role]}.dtype"), node, role in TRAINED, lora)
        return precision.resolve(self.engine_config(role), lora)

    def engine_config(self, role: str) -> SimpleNamespace:
        """Return what a patched tree's module reads of the config of the role's engine, with the role's dtype.

        Raises:
            ValueError, TypeError: the dataclass of the engine, or that of the role, refuses it.
        """
        module, path = self.tree.precision, self.engine_node(role)
        node = dict(self.get(path, {}))
        fields = {key: node.get(key) for key in ("dtype", "mixed_precision", "model_dtype", "strategy")}
        fields["grad_scaler"] = module.GradScalerConfig.read(node.get("grad_scaler"))
        fields["keep_fp32_modules"] = node.get("keep_fp32_modules", [])
        engine = SimpleNamespace(**fields, forward_only=role not in TRAINED)
        module.apply_engine_dtype(engine)
        engine.strategy = self.get(f"{ROLES[role]}.strategy")
        module.apply_role_dtype(self.get(f"{ROLES[role]}.dtype"), path.rpartition(".")[2], engine)
        return engine

    def base(self, role: str) -> str:
        """Return the dtype in which a trained role's model is loaded: the master's, or that below the adapters."""
        return self.effective_dtype(f"{role}.{'base' if self.trains_adapters(role) else 'master'}")

    def scaler(self, role: str) -> dict[str, Any] | None:
        """Return the settings of the role's loss scaler; None where its loss is not scaled."""
        if not self.uses(role) or not self.on_fsdp(role):
            return None
        implementation = self.implementation(role)
        compute = self.rule(f"{role}.autocast", implementation)
        if compute is not None and self.tree.files[f"verl/{compute.path}"] == "patched":
            if not self.precision(role).loss_scaling:
                return None
            settings = self.tree.precision.GradScalerConfig.read(self.get(f"{self.engine_node(role)}.grad_scaler"))
            return asdict(settings) | {"saved": True, "reported": True}
        rule = self.rule(f"{role}.scaler", implementation)
        return UPSTREAM_SCALER if rule is not None and self.read(rule, role) == "float16" else None

    def resolve(self, name: str) -> Hop:
        """Return the hop of this name, one of HOPS.

        Raises:
            UnexpectedPrecision: a worker would end on a value.
            ValueError, TypeError: the patched tree's module refuses one.
        """
        role, _, what = name.partition(".")
        if role in ROLES:
            return self.role_hop(role, what)
        if role == "rollout":
            return self.server_hop(what)
        if name == "wire":
            return self.decide("wire", self.sender, "actor")
        if not self.on_fsdp("actor"):
            return Hop(UNKNOWN, f"{self.implementation('actor')} has another checkpoint manager")
        return self.decide("hf_export", "", "actor", "compute")

    def effective_dtype(self, name: str) -> str | None:
        return self.resolve(name).effective_dtype

    def dtypes(self, *names: str) -> tuple[str | None, ...]:
        """Return the effective dtypes of several hops."""
        return tuple(map(self.effective_dtype, names))

    def role_hop(self, role: str, what: str) -> Hop:
        if not self.uses(role):
            return Hop(None, "not used by this algorithm")
        if role == "reward_model" and (key := self.reward_server_key()):
            return Hop(server_dtype(self.get(key)), f"a separate server: {key}", self.config.user_values(key))
        if role == "ref" and self.ref_in_actor:
            return Hop(self.effective_dtype(f"actor.{what}"), "the actor without its adapters")
        node, implementation, lora = self.engine_node(role), self.implementation(role), self.trains_adapters(role)
        if what == "optimizer":
            impl = self.get(f"{ROLES[role]}.optim.optimizer_impl", "torch.optim")
            if not self.on_fsdp(role) or impl != "torch.optim":
                return Hop(UNKNOWN, f"{implementation if impl == 'torch.optim' else impl} decides")
            return Hop(self.effective_dtype(f"{role}.master"), "AdamW's state has its parameters' dtype")
        if what == "reduce" and implementation == "megatron":
            return self.gradient_buffer(role)
        if what == "logits":
            key = f"{node}.keep_fp32_modules"
            if self.tree.precision and not self.legacy and names_head(self.get(key)):
                return Hop("float32", "the head is kept in fp32", self.config.user_values(key))
            return Hop(self.effective_dtype(f"{role}.autocast"), "the head runs under autocast")
        if what == "base" and not lora:
            return Hop(None, "no LoRA adapters")
        if what == "master" and lora:
            if self.rule(f"{role}.adapters", implementation) is None:
                return Hop("float32", "peft's adapters over a base in 16 bits")
            return self.decide(f"{role}.adapters", implementation, role, "master")
        rule, field, keys = what, what, self.dtype_keys(role)
        if what in ("master", "base"):  # one line loads the model
            rule, keys = "master", [f"{node}.model_dtype"]
        elif what == "reduce":
            keys = [f"{node}.mixed_precision.reduce_dtype"]
        elif what == "autocast":
            field = "compute"
        hop = self.decide(f"{role}.{rule}", implementation, role, field)
        return hop._replace(requested=self.config.user_values(*keys))

    def gradient_buffer(self, role: str) -> Hop:
        """Return the dtype of Megatron's gradient buffers, in which it adds up micro-batches and reduces over ranks."""
        node, optim = self.engine_node(role), f"{ROLES[role]}.optim"
        key, grads = f"{node}.override_ddp_config.grad_reduce_in_fp32", f"{optim}.main_grads_dtype"
        muon = self.get(f"{optim}.optimizer") == "muon" and self.get(f"{optim}.use_layer_wise_distributed_optimizer")
        builder = "megatron"  # verl itself wraps the model, as it does for Muon by layers
        if self.get(f"{node}.use_mbridge") and not muon:
            builder = "mbridge" if self.get(f"{node}.vanilla_mbridge", True) else "Megatron-Bridge"
        hop = self.decide(f"{role}.reduce", builder, role)._replace(requested=self.config.user_values(key, grads))
        if hop.effective_dtype == UNKNOWN or self.rule(f"{role}.reduce", builder).text == FIXED_BUFFER:
            return hop
        explicit, compute = self.get(key), self.effective_dtype(f"{role}.compute")
        if explicit is not None:
            return hop._replace(effective_dtype="float32" if explicit else compute, reason=key)
        aware = self.get(f"{optim}.use_precision_aware_optimizer")
        if aware and self.get(grads, "fp32") not in SPELLINGS["float32"]:
            return hop._replace(effective_dtype=compute, reason=grads)
        return hop

    def reward_server_key(self) -> str | None:
        """Return the dtype key of a reward model that is a server of the rollout's kind; None where it is a worker."""
        if self.config.has("reward.reward_model.rollout"):
            return "reward.reward_model.rollout.dtype"
        return "reward_model.rollout.dtype" if self.get("reward_model.use_reward_loop") else None

    @property
    def sender(self) -> str:
        """Return the implementation that sends the weights to the rollout, by its name in the table."""
        backend = self.get(f"{ROLLOUT}.checkpoint_engine.backend", "naive")
        if self.rule("wire", backend):
            return backend
        merged = self.lora_rank > 0 and self.get(f"{MODEL}.lora.merge", False)
        return "merged LoRA" if merged and self.rule("wire", "merged LoRA") else self.implementation("actor")

    @property
    def wire_is_lossy(self) -> bool:
        """Return whether the wire rounds the actor's weights to 16 bits other than the rollout's."""
        wire, weights = self.dtypes("wire", "rollout.weights")
        return wire in SIXTEEN_BITS and wire not in (weights, self.base("actor")) and weights in SPELLINGS

    @property
    def served(self) -> bool:
        """Return whether the rollout is a server beside the trainer, not an engine in its process."""
        return self.get(f"{ROLLOUT}.mode") == "async" or not self.release.has("sync_rollout")

    @property
    def reads_engine_kwargs(self) -> bool:
        return not self.served or self.release.has("server_engine_kwargs")

    @property
    def rollout_dtype_key(self) -> str:
        """The key that decides the dtype of a rollout server."""
        extra = f"{ROLLOUT}.engine_kwargs.{self.server}.dtype"
        return extra if self.reads_engine_kwargs and self.served and self.config.has(extra) else f"{ROLLOUT}.dtype"

    @property
    def is_quantized(self) -> bool:
        return self.effective_dtype("rollout.weights") not in (*SPELLINGS, UNKNOWN)

    @property
    def misread_cache(self) -> str | None:
        """What vLLM does with a KV cache whose 16 bits are of another dtype than its keys; None without one."""
        return cache_refusal(*self.dtypes("rollout.compute", "rollout.kv_cache")) if self.server == "vllm" else None

    @property
    def rollout_head_key(self) -> str | None:
        """The key that puts the server's head in fp32; None where its head has the model's dtype."""
        kwargs, patterns = f"{ROLLOUT}.engine_kwargs.{self.server}", f"{ROLLOUT}.keep_fp32_modules"
        own = {"vllm": f"{kwargs}.hf_overrides.head_dtype", "sglang": f"{kwargs}.enable_fp32_lm_head"}.get(self.server)
        if own and self.reads_engine_kwargs and (value := self.get(own)) is not None:
            key = own if value is True or server_dtype(value) == "float32" else None
        else:
            key = patterns if self.server == "vllm" and self.tree.precision and names_head(self.get(patterns)) else None
        return None if key and self.server == "vllm" and ignores_head_dtype(self.tree.root) else key

    def server_hop(self, what: str) -> Hop:
        name, kwargs = self.server, f"{ROLLOUT}.engine_kwargs.{self.server}"
        keys = [f"{node}.{key}" for key in ("dtype", "quantization") for node in (ROLLOUT, kwargs)]
        requested = self.config.user_values(*keys)
        implementation = f"{name} async" if self.served else name
        rule = self.rule("rollout.weights", implementation)
        line = self.tree.line(rule) if rule else None
        if line is None or self.tree.files[f"verl/{rule.path}"] == UNKNOWN:
            return Hop(UNKNOWN, f"{implementation}: not known in verl {self.release.name}", requested)
        reason, value, model = f"{rule.path}:{line}", self.get(self.rollout_dtype_key), self.get(f"{MODEL}.path")
        dtype = server_dtype(value, model)
        if (name, value, dtype) == ("vllm", "auto", "float16"):
            support = float16_support(model, self.tree.root)
            if support.supported is False:
                dtype, reason = "bfloat16", support.reason
        if what == "logits" and (key := self.rollout_head_key):
            return Hop("float32", "the head is in fp32", self.config.user_values(key))
        if what == "kv_cache":
            key = f"{kwargs}.kv_cache_dtype"
            value = self.get(key, "auto") if self.reads_engine_kwargs else "auto"
            requested = self.config.user_values(key)
            if value == "auto":
                return Hop(dtype, f"{name}: as the weights are loaded", requested)
            return Hop(KV_SPELLINGS.get(value, server_dtype(value)), f"{key} goes to {name}", requested)
        if what == "weights" and name == "vllm" and self.get(f"{ROLLOUT}.qat.enable"):
            return Hop("nvfp4", f"{self.engine_node('actor')}.qat", requested)
        extra = self.get(f"{kwargs}.quantization") if self.reads_engine_kwargs else None
        if what == "weights" and (quantization := self.get(f"{ROLLOUT}.quantization") or extra):
            quantized = "float8_e4m3fn" if quantization == "fp8" else str(quantization)
            return Hop(quantized, "quantized by the server", requested)
        return Hop(dtype, reason, requested)
