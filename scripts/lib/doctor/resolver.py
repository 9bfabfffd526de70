"""What each hop of a job holds, by ``hops.RULES``.

Where a tree is patched, the hops that the patches changed are resolved by the tree's own ``verl.utils.precision``,
the code that its workers run.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lib.doctor.dtype_rules import LEGACY, UNKNOWN, As, Fixed, Rule, Sharded, rule_for
from lib.doctor.tree import Config, Tree, select
from lib.run.vllm_float16 import float16_support

HOPS = (
    *(f"actor.{what}" for what in ("master", "compute", "autocast", "reduce", "optimizer", "logits")),
    *("wire", "rollout.weights", "rollout.kv_cache", "rollout.logits"),
    *("ref.compute", "ref.autocast", "critic.master", "critic.compute", "critic.autocast", "critic.reduce"),
    *("reward_model.compute", "hf_export"),
)
ROLES = {
    "actor": "actor_rollout_ref.actor",
    "ref": "actor_rollout_ref.ref",
    "critic": "critic",
    "reward_model": "reward_model",
}
SPELLINGS = {
    "float16": ("float16", "fp16", 16, "16"),
    "bfloat16": ("bfloat16", "bf16"),
    "float32": ("float32", "fp32", 32, "32"),
}
SERVER_SPELLINGS = {"half": "float16", "float": "float32"} | {name: name for name in SPELLINGS}
KV_SPELLINGS = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
SIXTEEN_BITS = ("float16", "bfloat16")
ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
# torch's defaults, with the growth interval that upstream's line gives (torch.amp.GradScaler).
UPSTREAM_SCALER = {
    "init_scale": 65536.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 400,
    "min_scale": None,
    "max_consecutive_skips": None,
    "saved": False,
    "reported": False,
}


class Unreadable(Exception):
    """A worker would end here; the message is its error."""


def dtype_name(value: Any) -> str:
    """The full name of what verl's ``PrecisionType.to_dtype`` takes.

    Raises:
        Unreadable: it takes no such value.
    """
    for name, spellings in SPELLINGS.items():
        if value in spellings:
            return name
    raise Unreadable(f"RuntimeError: unexpected precision: {value}")


@dataclass(frozen=True)
class Hop:
    """What holds (None: there is no such hop), what the user set for it, and the line that decides."""

    holds: str | None
    asked: Mapping[str, Any]
    because: str


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or not known: the key and value that it is about, its effect, and what mends it."""

    key: str
    value: Any
    effect: str
    mend: str


class Patient:
    """A tree with a config: what each of its hops holds."""

    def __init__(self, tree: Tree, config: Config):
        self.tree, self.config, self.release = tree, config, tree.release
        self.legacy = tree.release in LEGACY

    # Which code runs.

    def uses(self, role: str) -> bool:
        get = self.config.get
        if role == "ref":
            return bool(get("algorithm.use_kl_in_reward") or get("actor_rollout_ref.actor.use_kl_loss"))
        if role == "critic":
            enabled = get("critic.enable")
            return get("algorithm.adv_estimator") == "gae" if enabled is None else bool(enabled)
        if role == "reward_model":
            return bool(get("reward.reward_model.enable", get("reward_model.enable")))
        return True

    def by(self, role: str) -> str:
        """The code that the role's worker runs."""
        strategy = self.config.get(f"{ROLES[role]}.strategy", "fsdp")
        if strategy not in ("fsdp", "fsdp2"):
            return strategy
        if not self.legacy:
            return "engine"
        if self.config.get("trainer.use_legacy_worker_impl") != "disable" or self.release == "0.4.1":
            return "worker"
        if self.release in ("0.5.0", "0.6.0", "0.6.1"):
            return "engine" if role == "critic" else "worker"
        return "worker" if role == "reward_model" else "engine"

    def engine(self, role: str) -> str:
        """The node of the role's engine."""
        strategy = self.config.get(f"{ROLES[role]}.strategy", "fsdp")
        if strategy not in ("fsdp", "fsdp2"):
            return f"{ROLES[role]}.{strategy}"
        if role == "critic" and not self.legacy:
            return "critic.fsdp"
        return f"{ROLES[role]}.{'fsdp_config' if role in ('actor', 'ref') else 'model.fsdp_config'}"

    def dtype_keys(self, role: str) -> list[str]:
        """What a user may have set for what the role computes in."""
        engine = self.engine(role)
        return [f"{ROLES[role]}.dtype", f"{engine}.dtype", f"{engine}.mixed_precision.param_dtype"]

    def sharded(self, role: str) -> bool:
        """Whether the role's ``state_dict`` has shards: FSDP1 on one worker gives whole tensors."""
        workers = self.config.get("trainer.nnodes", 1) * self.config.get("trainer.n_gpus_per_node", 1)
        return workers > 1 or self.config.get(f"{ROLES[role]}.strategy") != "fsdp"

    @property
    def ref_in_actor(self) -> bool:
        """Whether the ref is the actor without its adapters."""
        return self.lora_rank > 0 or (
            self.release not in ("0.4.1", "0.5.0", "0.6.0") and self.config.has(f"{MODEL}.lora_adapter_path")
        )

    @property
    def lora_rank(self) -> int:
        return self.config.get(f"{MODEL}.lora.rank", 0) or self.config.get(f"{MODEL}.lora_rank", 0)

    # What a rule gives.

    def reading(self, rule: Rule, role: str) -> str:
        for read in rule.reads:
            if isinstance(read, Fixed):
                return read.dtype
            if isinstance(read, Sharded):
                return read.dtype if self.sharded(role) else self.hop(read.hop).holds
            if isinstance(read, As):
                return self.hop(read.hop.format(role=role)).holds
            below = "" if read.path.startswith("actor_rollout_ref") else f"{self.engine(role)}."
            if read.under and self.config.has(below + read.under):
                node = self.config.get(below + read.under)
                key = read.path.rpartition(".")[2]
                return dtype_name(node[key]) if key in node else read.default
            if not read.under and self.config.has(below + read.path):
                return dtype_name(self.config.get(below + read.path))
        return UNKNOWN

    def precision(self, role: str) -> Any:
        """What the tree's own module makes of the role's engine config."""
        module, node = self.tree.precision, dict(self.config.get(self.engine(role), {}))
        if self.legacy:
            return module.Precision.of_worker(node, role in ("actor", "critic"))
        read = {key: node.get(key) for key in ("dtype", "mixed_precision", "model_dtype")}
        strategy = self.config.get(f"{ROLES[role]}.strategy")
        return module.Precision.resolve(
            SimpleNamespace(**read, strategy=strategy, forward_only=role not in ("actor", "critic"))
        )

    def decided(self, name: str, by: str, role: str, patched: Any) -> tuple[str, str]:
        """What a hop holds and why: by the rule of the release, or by ``patched`` where its file is the patched one."""
        rule = rule_for(name, by, self.release)
        if rule is None:
            return UNKNOWN, f"no rule for {by} in verl {self.release}"
        state = self.tree.files[f"verl/{rule.path}"]
        if state == UNKNOWN:
            return UNKNOWN, f"{rule.path} is not verl {self.release}'s"
        if state == "release":
            return self.reading(rule, role), f"{rule.path}:{rule.lines[self.release]}"
        return patched() if rule.mend else self.reading(rule, role), f"{rule.path}, patched" + (
            f" by {rule.mend}" if rule.mend else ""
        )

    def hop(self, name: str) -> Hop:
        role, _, what = name.partition(".")
        if role in ROLES:
            return self.role_hop(role, what)
        return {"wire": self.wire, "rollout": self.rollout, "hf_export": self.export}[role](what)

    def role_hop(self, role: str, what: str) -> Hop:
        if not self.uses(role):
            return Hop(None, {}, "not used by this algorithm")
        if role == "reward_model" and (served := self.reward_server()):
            asked = self.asked([served])
            return Hop(server_dtype(self.config.get(served)), asked, f"a server of its own: {served}")
        if role == "ref" and self.ref_in_actor:
            actor = self.role_hop("actor", what)
            return Hop(actor.holds, {}, "the actor without its adapters")
        engine, by = self.engine(role), self.by(role)
        if what == "optimizer":
            impl = self.config.get(f"{ROLES[role]}.optim.optimizer_impl", "torch.optim")
            if by not in ("worker", "engine") or impl != "torch.optim":
                return Hop(UNKNOWN, {}, f"{by if impl == 'torch.optim' else impl} decides")
            return Hop(self.role_hop(role, "master").holds, {}, "AdamW's state has its parameters' dtype")
        if what == "logits":
            kept = self.config.get(f"{engine}.keep_fp32_modules", [])
            if self.tree.precision and not self.legacy and any(fnmatchcase("lm_head", each) for each in kept):
                return Hop("float32", self.asked([f"{engine}.keep_fp32_modules"]), "the head is kept in fp32")
            return Hop(self.role_hop(role, "autocast").holds, {}, "the head runs under autocast")
        keys = {
            "master": [f"{engine}.model_dtype"],
            "reduce": [f"{engine}.mixed_precision.reduce_dtype"],
        }.get(what, self.dtype_keys(role))
        field_of = {"autocast": "compute"}.get(what, what)
        holds, because = self.decided(
            f"{role}.{what}", by, role, lambda: str(getattr(self.precision(role), field_of)).removeprefix("torch.")
        )
        return Hop(holds, self.asked(keys), because)

    def reward_server(self) -> str | None:
        """The dtype key of a reward model that is a server of the rollout's kind."""
        if self.config.has("reward.reward_model.rollout"):
            return "reward.reward_model.rollout.dtype"
        return "reward_model.rollout.dtype" if self.config.get("reward_model.use_reward_loop") else None

    def asked(self, keys: list[str]) -> dict[str, Any]:
        return {key: select(self.config.values, key) for key in keys if self.config.user(key)}

    @property
    def backend(self) -> str:
        """What carries the weights to the rollout."""
        get = self.config.get
        backend = get(f"{ROLLOUT}.checkpoint_engine.backend", "naive")
        if rule_for("wire", backend, self.release):
            return backend
        merged = self.lora_rank > 0 and get(f"{MODEL}.lora.merge", False)
        return "merged LoRA" if merged and rule_for("wire", "merged LoRA", self.release) else self.by("actor")

    def wire(self, _: str) -> Hop:
        if self.config.get(f"{ROLLOUT}.name") == "hf":
            return Hop(None, {}, "the hf rollout samples from the actor itself")
        backend = self.backend

        def patched() -> str:
            if backend in ("worker", "engine", "merged LoRA"):
                return self.hop("actor.master").holds
            given = self.config.get(f"{ROLLOUT}.checkpoint_engine.engine_kwargs.{backend}.rollout_dtype")
            dtype = server_dtype(given or self.config.get(f"{ROLLOUT}.dtype"))
            return dtype if dtype != UNKNOWN else "bfloat16"  # auto leaves the engine's own default

        holds, because = self.decided("wire", backend, "actor", patched)
        return Hop(holds, {}, because)

    @property
    def served(self) -> bool:
        """Whether the rollout is a server beside the trainer, not an engine in its process."""
        return self.config.get(f"{ROLLOUT}.mode") == "async" or self.release not in ("0.4.1", "0.5.0", "0.6.0", "0.6.1")

    @property
    def takes_extra(self) -> bool:
        """Whether ``engine_kwargs`` reach the rollout."""
        return not (self.release in ("0.4.1", "0.5.0") and self.served)

    @property
    def rollout_dtype_key(self) -> str:
        """The key that decides the dtype of a rollout server."""
        extra = f"{ROLLOUT}.engine_kwargs.{self.config.get(f'{ROLLOUT}.name', 'vllm')}.dtype"
        return extra if self.takes_extra and self.served and self.config.has(extra) else f"{ROLLOUT}.dtype"

    def rollout(self, what: str) -> Hop:
        name = self.config.get(f"{ROLLOUT}.name", "vllm")  # to be set from 0.8.0 on; all servers read the same key
        keys = [f"{ROLLOUT}.dtype"]
        if name == "hf":
            holds, because = self.decided("rollout.logits", "hf", "actor", lambda: dtype_name(self.config.get(keys[0])))
            if what == "weights" and holds != UNKNOWN:
                held = "compute" if self.config.get("actor_rollout_ref.actor.strategy") == "fsdp2" else "master"
                return Hop(self.hop(f"actor.{held}").holds, {}, "the actor's own, as FSDP gathers them")
            return Hop(holds, self.asked(keys), because)
        extra, served, takes_extra = f"{ROLLOUT}.engine_kwargs.{name}", self.served, self.takes_extra
        by = f"{name} async" if served else name
        rule = rule_for("rollout.weights", by, self.release)
        if rule is None or self.tree.files[f"verl/{rule.path}"] == UNKNOWN:
            return Hop(UNKNOWN, self.asked(keys), f"{by}: not known in verl {self.release}")
        because = f"{rule.path}:{rule.lines[self.release]}"
        value, model = self.config.get(self.rollout_dtype_key), self.config.get(f"{MODEL}.path")
        dtype = server_dtype(value, model)
        if (name, value, dtype) == ("vllm", "auto", "float16"):
            support = float16_support(model, self.tree.root)
            if support.supported is False:
                dtype, because = "bfloat16", support.reason
        if what == "kv_cache":
            key = f"{extra}.kv_cache_dtype"
            given = self.config.get(key, "auto") if takes_extra else "auto"
            if given != "auto":
                return Hop(KV_SPELLINGS.get(given, server_dtype(given)), self.asked([key]), f"{key} goes to {name}")
            return Hop(dtype, self.asked([key]), f"{name}: as the weights are loaded")
        quantization = self.config.get(f"{ROLLOUT}.quantization") or (
            self.config.get(f"{extra}.quantization") if takes_extra else None
        )
        asked = self.asked([*keys, f"{extra}.dtype", f"{ROLLOUT}.quantization", f"{extra}.quantization"])
        if what == "weights" and quantization:
            return Hop(
                "float8_e4m3fn" if quantization == "fp8" else str(quantization), asked, "quantized by the server"
            )
        return Hop(dtype, asked, because)

    def export(self, _: str) -> Hop:
        if self.by("actor") not in ("worker", "engine"):
            return Hop(UNKNOWN, {}, f"{self.by('actor')} has a checkpoint manager of its own")
        holds, because = self.decided("hf_export", "", "actor", lambda: self.hop("actor.compute").holds)
        return Hop(holds, {}, because)

    def scaler(self, role: str) -> dict[str, Any] | None:
        """The loss scaler's settings where the role's loss is scaled."""
        rule = rule_for(f"{role}.scaler", self.by(role), self.release)
        if not self.uses(role) or self.by(role) not in ("worker", "engine"):
            return None
        compute = rule_for(f"{role}.autocast", self.by(role), self.release)
        if compute is not None and self.tree.files[f"verl/{compute.path}"] == "patched":
            if not self.precision(role).loss_scaling:
                return None
            given = dict(self.config.get(f"{self.engine(role)}.grad_scaler", {}))
            given.pop("_target_", None)
            return asdict(self.tree.precision.GradScalerConfig(**given)) | {"saved": True, "reported": True}
        return UPSTREAM_SCALER if rule is not None and self.reading(rule, role) == "float16" else None


def server_dtype(value: Any, model: str | None = None) -> str:
    """The full name of a rollout server's dtype; of ``auto``, what the model's own config.json says.

    A model in float32 is one that each server rounds by a rule of its own: unknown.
    """
    if value == "auto" and model and (file := Path(model).expanduser() / "config.json").exists():
        content = json.loads(file.read_text())
        value = content.get("dtype", content.get("torch_dtype"))
        return value if value in SIXTEEN_BITS else UNKNOWN
    return SERVER_SPELLINGS.get(value, UNKNOWN)
