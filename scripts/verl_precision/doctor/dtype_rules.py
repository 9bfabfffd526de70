"""List, for each release of verl, the line that decides the dtype of each hop, and the key that it reads.

``resolver.py`` applies the table to a config. A release without lines here gets those of the release that its stack was
ported from (``ported_from`` in versions.toml), wherever its files contain the quoted text.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

UNKNOWN = "unknown"

# The patches that make a hop read what a user sets; tests/unit/doctor/test_doctor_rules.py finds them in each series.
KEYS = "cfg-add-one-dtype-key-per-role"
COMPUTE = "fsdp-compute-in-the-configured-dtype"
SCALER = "fsdp-configure-the-loss-scaler"
SAVED, COUNTED = "ckpt-save-the-loss-scaler", "worker-report-skipped-steps"
SEND = "rollout-send-weights-in-the-rollout-dtype"
SCORE = "worker-score-in-the-reward-models-dtype"
EXPORT = "ckpt-export-in-the-training-dtype"
REPORT = "worker-report-the-effective-dtypes"
KEEP = "fsdp-keep-named-modules-in-fp32"
SKIP = "megatron-skip-an-overflow"
LORA = "fsdp-train-lora-over-a-frozen-16-bit-base"


class Key(NamedTuple):
    """A key that decides where it is set. With ``default``, where its node is set: its value then, or the default.

    Without a leading ``actor_rollout_ref`` it is below the engine of the rule's role.
    """

    path: str
    default: str = ""


class Fixed(NamedTuple):
    """A dtype that the code itself names; with ``sharded``, only for sharded weights: FSDP1 on one worker has none."""

    dtype: str
    sharded: bool = False


class SameAs(NamedTuple):
    """The dtype of another hop; a role's ``base`` is its master without LoRA."""

    hop: str


@dataclass(frozen=True)
class Rule:
    """One line of the wheels that decides a hop.

    Args:
        hop: its name in the report, ``{role}`` for each of ``roles``.
        implementation: the code that runs: ``worker`` (``workers/fsdp_workers.py``), ``engine`` (the model engine),
            ``megatron`` or a bridge that builds its model, the name of a rollout or of a checkpoint engine, "" for all.
        path: its file below ``verl/``.
        at: line numbers in the releases' wheels, ``0.4.1:298 0.5.0:343``.
        text: the content of that line, or a part of it.
        reads: what it reads; the first that applies decides.
        patch: the patch that makes it read the user's keys; "" where nothing is ignored.
        hook: the file below ``verl/`` that the patch changes, where that is not ``path``.
    """

    hop: str
    implementation: str
    path: str
    at: str
    text: str
    reads: tuple[Key | Fixed | SameAs, ...]
    patch: str = ""
    roles: tuple[str, ...] = ("",)
    hook: str = ""

    @cached_property
    def lines(self) -> dict[str, int]:
        """The line number by release."""
        return {release: int(line) for release, _, line in (each.partition(":") for each in self.at.split())}


PARAM = Key("mixed_precision.param_dtype", default="bfloat16")
REDUCE = Key("mixed_precision.reduce_dtype", default="float32")
MASTER, DTYPE, ROLLOUT = Key("model_dtype"), Key("dtype"), Key("actor_rollout_ref.rollout.dtype")
BF16, FP32 = Fixed("bfloat16"), Fixed("float32")
BASE = SameAs("actor.base")
SHARDS = (Fixed("bfloat16", sharded=True), BASE)
POLICY, TRAINED = ("actor", "ref"), ("actor", "critic")

WORKERS, DP_ACTOR, DP_CRITIC = "workers/fsdp_workers.py", "workers/actor/dp_actor.py", "workers/critic/dp_critic.py"
ENGINE = "workers/engine/fsdp/transformer_impl.py"
MEGATRON, MEGATRON_ENGINE = "workers/megatron_workers.py", "workers/engine/megatron/transformer_impl.py"
MEGATRON_UTILS = "utils/megatron_utils.py"
VLLM_SPMD = "workers/rollout/vllm_rollout/vllm_rollout_spmd.py"
VLLM_SERVER = "workers/rollout/vllm_rollout/vllm_async_server.py"
SGLANG = "workers/rollout/sglang_rollout/sglang_rollout.py"
SGLANG_SERVER = "workers/rollout/sglang_rollout/async_sglang_server.py"
TRTLLM_SERVER = "workers/rollout/trtllm_rollout/trtllm_async_server.py"
ENGINE_MAKER = "checkpoint_engine/base.py"  # makes the receiver's checkpoint engine with its arguments

LOADED = "torch_dtype = torch.float32 if self._is_actor else torch.bfloat16"
ENGINE_LOADED = "torch_dtype = self.engine_config.model_dtype"
REDUCED = 'reduce_dtype = PrecisionType.to_dtype(mixed_precision_config.get("reduce_dtype", "fp32"))'
AUTOCAST = "with torch.autocast(device_type=self.device_name, dtype=torch.bfloat16):"
WORKER_REDUCED = "0.4.1:295 0.5.0:340 0.6.0:444 0.6.1:464 0.7.0:488 0.7.1:566"
CRITIC_REDUCED = "0.4.1:967 0.5.0:1078 0.6.0:1303 0.6.1:1343 0.7.0:1399 0.7.1:1502"
ENGINE_REDUCED = "0.6.0:264 0.6.1:282 0.7.0:294 0.7.1:313 0.8.0:349 0.9.0:375 0.9.1:394"
EXPORTED = "torch_dtype=torch.bfloat16"
FIXED_BUFFER = "grad_reduce_in_fp32=True,"  # of a call: no key overrides it
FP32_BUFFER = 'override_ddp_config["grad_reduce_in_fp32"] = not use_low_precision_main_grads'

# fmt: off
RULES = (
    # The workers of 0.4.1 to 0.7.1: actor and ref.
    Rule("actor.master", "worker", WORKERS, "0.4.1:216 0.5.0:248 0.6.0:313 0.6.1:313 0.7.0:326 0.7.1:389", LOADED,
         (MASTER, FP32)),
    Rule("{role}.compute", "worker", WORKERS, "0.4.1:298 0.5.0:343 0.6.0:447", "param_dtype = torch.bfloat16",
         (PARAM, BF16), COMPUTE, POLICY),
    Rule("{role}.compute", "worker", WORKERS, "0.6.1:467 0.7.0:491 0.7.1:569",
         "param_dtype = PrecisionType.to_dtype(fsdp_config.dtype)", (PARAM, DTYPE), COMPUTE, POLICY),
    Rule("actor.reduce", "worker", WORKERS, WORKER_REDUCED, REDUCED, (REDUCE, FP32)),
    Rule("{role}.autocast", "worker", DP_ACTOR, "0.4.1:100 0.5.0:100 0.6.0:101", AUTOCAST, (BF16,), COMPUTE, POLICY),
    Rule("{role}.autocast", "worker", DP_ACTOR, "0.6.1:86 0.7.0:86 0.7.1:92",
         'self.param_dtype = PrecisionType.to_dtype(self.config.fsdp_config.get("dtype", "bfloat16"))', (DTYPE, BF16),
         COMPUTE, POLICY),
    Rule("actor.scaler", "worker", DP_ACTOR, "0.6.1:90 0.7.0:90 0.7.1:96",
         "self.scaler = ShardedGradScaler(growth_interval=400)", (SameAs("actor.autocast"),), SCALER),
    # The same workers' critic and reward model.
    Rule("critic.master", "worker", WORKERS, "0.4.1:905 0.5.0:1010 0.6.0:1229 0.6.1:1249 0.7.0:1292 0.7.1:1395",
         'self.config.model.fsdp_config.get("model_dtype", "fp32")', (MASTER, FP32)),
    Rule("critic.compute", "worker", WORKERS, "0.4.1:970 0.5.0:1081 0.6.0:1306 0.6.1:1346 0.7.0:1402 0.7.1:1505",
         "param_dtype = torch.bfloat16", (PARAM, BF16), COMPUTE),
    Rule("critic.reduce", "worker", WORKERS, CRITIC_REDUCED, REDUCED, (REDUCE, FP32)),
    Rule("critic.autocast", "worker", DP_CRITIC, "0.4.1:65 0.5.0:66 0.6.0:61 0.6.1:61 0.7.0:61 0.7.1:61", AUTOCAST,
         (BF16,), COMPUTE),
    Rule("reward_model.compute", "worker", WORKERS, "0.4.1:1300 0.5.0:1443 0.6.0:1693 0.6.1:1728 0.7.0:1788",
         "torch.autocast(device_type=device_name, dtype=torch.bfloat16)", (BF16,), SCORE),
    # The model engine. With use_legacy_worker_impl=disable: the critic's from 0.6.0, all from 0.7.0; always from 0.8.0.
    Rule("{role}.master", "engine", ENGINE, "0.6.0:189 0.6.1:189 0.7.0:201 0.7.1:219 0.8.0:234 0.9.0:239 0.9.1:258",
         ENGINE_LOADED, (MASTER, FP32), roles=TRAINED),
    Rule("{role}.adapters", "engine", ENGINE, "0.9.0:362 0.9.1:381", "param.data = param.data.to(base_dtype)",
         (SameAs("{role}.base"),), LORA, TRAINED),
    Rule("{role}.compute", "engine", ENGINE, "0.6.0:267 0.6.1:285 0.7.0:297 0.7.1:316 0.8.0:352 0.9.0:378 0.9.1:397",
         "param_dtype = torch.bfloat16", (PARAM, BF16), COMPUTE, (*POLICY, "critic")),
    Rule("{role}.reduce", "engine", ENGINE, ENGINE_REDUCED, REDUCED, (REDUCE, FP32), roles=TRAINED),
    Rule("{role}.autocast", "engine", ENGINE, "0.6.0:929 0.6.1:945 0.7.0:948 0.7.1:1108",
         "torch.autocast(device_type=device_name, dtype=torch.bfloat16)", (BF16,), COMPUTE, (*POLICY, "critic")),
    Rule("{role}.autocast", "engine", ENGINE, "0.8.0:358 0.9.0:384 0.9.1:403", "self._autocast_dtype = param_dtype",
         (SameAs("{role}.compute"),), COMPUTE, (*POLICY, "critic")),
    Rule("{role}.scaler", "engine", ENGINE, "0.8.0:364 0.9.0:390 0.9.1:409",
         "self.scaler = ShardedGradScaler(growth_interval=400)", (SameAs("{role}.compute"),), SCALER, TRAINED),
    # Megatron: what its layers compute in. Masters and wire are megatron-core's and are not in this table.
    Rule("{role}.compute", "megatron", MEGATRON, "0.4.1:355 0.5.0:404 0.6.0:474", "self.param_dtype = torch.bfloat16",
         (BF16,), roles=POLICY),
    Rule("critic.compute", "megatron", MEGATRON, "0.4.1:726 0.5.0:868 0.6.0:977", "self.param_dtype = torch.bfloat16",
         (BF16,)),
    Rule("{role}.compute", "megatron", MEGATRON, "0.6.1:473 0.7.0:565 0.7.1:579",
         "PrecisionType.to_dtype(self.config.actor.megatron.dtype)", (Key("actor_rollout_ref.actor.megatron.dtype"),),
         roles=POLICY),
    Rule("critic.compute", "megatron", MEGATRON, "0.6.1:1020 0.7.0:1158 0.7.1:1166",
         "PrecisionType.to_dtype(self.config.megatron.dtype)", (DTYPE,)),
    Rule("{role}.compute", "megatron", MEGATRON_ENGINE, "0.8.0:172 0.9.0:293 0.9.1:292",
         "PrecisionType.to_dtype(self.engine_config.dtype)", (DTYPE,), KEYS, (*POLICY, "critic"),
         hook="workers/config/actor.py"),  # as critic.py
    # Its gradient buffers without a request, by what builds the model. mbridge's default is fp32 (core/util.py:193 of
    # 0.15.1), Megatron-Bridge's is megatron-core's, the model's dtype, until verl 0.9.1 sets fp32 (verl #7485).
    Rule("{role}.reduce", "megatron", MEGATRON_UTILS, "0.4.1:132", FIXED_BUFFER, (FP32,), roles=TRAINED),
    Rule("{role}.reduce", "megatron", MEGATRON_UTILS,
         "0.5.0:136 0.6.0:140 0.6.1:141 0.7.0:141 0.7.1:148 0.9.0:105 0.9.1:104", '"grad_reduce_in_fp32": True,',
         (FP32,), roles=TRAINED),
    Rule("{role}.reduce", "mbridge", MEGATRON_UTILS, "0.6.1:197 0.7.0:275 0.7.1:284", "ddp_config=override_ddp_config,",
         (FP32,), roles=TRAINED),
    Rule("{role}.reduce", "mbridge", MEGATRON_UTILS, "0.8.0:323 0.9.0:455", "ddp_config = ddp_config_dict", (FP32,),
         roles=TRAINED),
    Rule("{role}.reduce", "mbridge", MEGATRON_ENGINE, "0.9.1:460", FP32_BUFFER, (FP32,), roles=TRAINED),
    Rule("{role}.reduce", "Megatron-Bridge", MEGATRON_UTILS, "0.7.0:250 0.7.1:257", "ddp_config_dict = {",
         (SameAs("{role}.compute"),), roles=TRAINED),
    Rule("{role}.reduce", "Megatron-Bridge", MEGATRON_UTILS, "0.8.0:295 0.9.0:397", "ddp_config = create_ddp_config(",
         (SameAs("{role}.compute"),), roles=TRAINED),
    Rule("{role}.reduce", "Megatron-Bridge", MEGATRON_ENGINE, "0.9.1:460", FP32_BUFFER, (FP32,), roles=TRAINED),
    # The wire: the weights as they leave for the rollout.
    Rule("wire", "worker", "workers/sharding_manager/fsdp_vllm.py", "0.4.1:168 0.5.0:206",
         "params = self.module.state_dict()", (BASE,)),
    Rule("wire", "worker", WORKERS, "0.6.0:657 0.6.1:672 0.7.0:697 0.7.1:771",
         "params = self.actor_module_fsdp.state_dict()", (BASE,)),
    Rule("wire", "engine", ENGINE, "0.7.0:656 0.9.0:988 0.9.1:1016", "params = self.module.state_dict()",
         (BASE,)),
    Rule("wire", "engine", ENGINE, "0.7.1:770 0.8.0:841", ".full_tensor().to(torch.bfloat16, non_blocking=True)",
         SHARDS, SEND),
    Rule("wire", "merged LoRA", ENGINE, "0.8.0:841 0.9.0:1054 0.9.1:1082",
         ".full_tensor().to(torch.bfloat16, non_blocking=True)", SHARDS, SEND),
    Rule("wire", "delta_sharded", ENGINE, "0.9.0:916 0.9.1:944", "p = p.to(torch.bfloat16, non_blocking=True)",
         (BF16,), SEND),
    Rule("wire", "kimi_ckpt_engine", "checkpoint_engine/kimi_checkpoint_engine.py",
         "0.7.1:42 0.8.0:42 0.9.0:42 0.9.1:42", "rollout_dtype: torch.dtype = torch.bfloat16,", (BF16,), SEND,
         hook=ENGINE_MAKER),
    Rule("wire", "mooncake", "checkpoint_engine/mooncake_checkpoint_engine.py", "0.7.1:49 0.8.0:49 0.9.0:53 0.9.1:53",
         "rollout_dtype: torch.dtype = torch.bfloat16,", (BF16,), SEND, hook=ENGINE_MAKER),
    # The rollout.
    Rule("rollout.weights", "vllm", VLLM_SPMD, "0.4.1:154 0.5.0:170 0.6.0:197 0.6.1:236", "dtype=config.dtype,",
         (ROLLOUT,)),
    Rule("rollout.weights", "vllm async", VLLM_SERVER,
         "0.4.1:171 0.5.0:250 0.6.0:207 0.6.1:220 0.7.0:295 0.7.1:303 0.8.0:254 0.9.0:289 0.9.1:326", "config.dtype,",
         (ROLLOUT,)),
    Rule("rollout.weights", "sglang", SGLANG, "0.4.1:392 0.5.0:442 0.6.0:438 0.6.1:447", "self.config.dtype",
         (ROLLOUT,)),
    Rule("rollout.weights", "sglang async", SGLANG, "0.4.1:392 0.5.0:442", "dtype=self.config.dtype,", (ROLLOUT,)),
    Rule("rollout.weights", "sglang async", SGLANG_SERVER,
         "0.6.0:134 0.6.1:136 0.7.0:154 0.7.1:181 0.8.0:287 0.9.0:297 0.9.1:316", '"dtype": self.config.dtype,',
         (ROLLOUT,)),
    Rule("rollout.weights", "trtllm async", TRTLLM_SERVER, "0.8.0:229 0.9.0:230 0.9.1:227",
         '"dtype": self.config.dtype,', (ROLLOUT,)),
    # What is written to disk for others.
    Rule("hf_export", "", "utils/checkpoint/fsdp_checkpoint_manager.py",
         "0.4.1:288 0.5.0:325 0.6.0:342 0.6.1:342 0.7.0:345 0.7.1:328 0.8.0:365 0.9.0:446 0.9.1:446", EXPORTED,
         (BF16,), EXPORT),
)
# fmt: on


KNOWN = frozenset(release for rule in RULES for release in rule.lines)


def rule_for(hop: str, implementation: str, release: str) -> Rule | None:
    """Return the rule of a hop where this implementation runs; None where the table has none for the release."""
    for rule in RULES:
        hops = [rule.hop.format(role=role) for role in rule.roles]
        if rule.implementation in (implementation, "") and hop in hops and release in rule.lines:
            return rule
    return None
