"""The doctor's diagnoses of each release, patched and not; no worker runs here."""

import json
from pathlib import Path

import pytest
from support.diagnoses import (
    ALL,
    ENGINE,
    NEWEST,
    RELEASES,
    ROLLOUT,
    A,
    B,
    C,
    Case,
    Examine,
    assert_matches,
    having,
    of_cases,
    of_states,
)
from support.parsed_once import yaml_parsed_once

from verl_precision.commands import doctor
from verl_precision.doctor.diagnosis import Diagnosis, diagnose
from verl_precision.doctor.dtype_rules import COMPUTE, KEEP, KEYS, LORA, SCALER, SEND, SKIP
from verl_precision.doctor.findings import MISMATCH_FREQ, SEQUENCE_WEIGHTS, TRUNCATION
from verl_precision.doctor.tree import identify_tree
from verl_precision.facts.gpus import Gpu
from verl_precision.facts.models import GEMMA4, float16_report
from verl_precision.facts.packages import package_folder
from verl_precision.patch.apply import apply
from verl_precision.patch.stack import load_stack
from verl_precision.patch.wheels import unpacked_wheel
from verl_precision.paths import CONFIGS
from verl_precision.run.machine import PRESETS
from verl_precision.sequence_weights import TRUNCATED, UNTRUNCATED

NEW = [NEWEST]
# Family A's configs that are plain dictionaries, which accept any key.
DICTIONARIES = A[:2]
HF, REWARD_WORKER = having("hf_rollout"), having("reward_worker")
# Releases whose default workers cast the weights to bfloat16 on their way to the rollout.
ROUNDING = [name for name in having("bfloat16_wire") if name in C]
EXACT = [name for name in ALL if name not in ROUNDING]
IGNORED = "is ignored by verl {release}: trains in bfloat16"
ROUNDED = {"{rollout}.dtype": "gets weights that passed through bfloat16*"}
OTHER_SERVER = "{rollout}.name=sglang"  # an unpatched 0.9.1 cannot load adapters into vLLM from 0.29 on
EXPORT = {"hf_export": "*makes bfloat16 of a model trained in float16*"}

BFLOAT16 = "actor.compute actor.autocast actor.logits critic.compute critic.autocast hf_export"
BFLOAT16 += " rollout.weights rollout.kv_cache rollout.logits"
FLOAT32 = "actor.master actor.reduce actor.optimizer critic.master critic.reduce wire"
DEFAULT = dict.fromkeys(("ref.compute", "ref.autocast", "reward_model.compute", "actor.base", "critic.base"))
DEFAULT |= dict.fromkeys(BFLOAT16.split(), "bfloat16") | dict.fromkeys(FLOAT32.split(), "float32")


@pytest.fixture(scope="session")
def examine(tmp_path_factory: pytest.TempPathFactory) -> Examine:
    """``examine(release, "patched" | "precision" | "unpatched", *overrides)``: the diagnosis, "patched" by both series.

    Each tree is created once, and its files are parsed once, which a diagnosis spends most of its time on.
    """
    made = {}

    def of(release: str, state: str, *overrides: str, config_name: str = "ppo_trainer") -> Diagnosis:
        if (release, state) not in made:
            root = unpacked_wheel(release, tmp_path_factory.mktemp(f"{release}-{state}"))
            if state != "unpatched":
                apply(root, fixes=state == "patched")
            made[release, state] = identify_tree(root)
        with yaml_parsed_once():
            return diagnose(made[release, state], list(overrides), config_name)

    return of


@pytest.mark.parametrize(("release", "state"), of_states(EXACT) + of_states(ROUNDING))
def test_defaults_agree_in_bfloat16(release: str, state: str, examine: Examine):
    diagnosis = examine(release, state)
    expected = DEFAULT | ({"wire": "bfloat16"} if release in ROUNDING else {})
    assert {name: hop.effective_dtype for name, hop in diagnosis.hops.items()} == expected
    stack = load_stack(diagnosis.tree.release).id if state == "patched" else None
    assert diagnosis.json()["verl"] == {"release": release, "state": state, "stack": stack, "nearest": None}
    assert (diagnosis.verdict, diagnosis.findings, diagnosis.scaler) == ("agree", (), {"actor": None, "critic": None})


# fmt: off
TRAINER = (
    Case("precision key", ALL, "unpatched", "+precision=fp16",
         "actor.compute=bfloat16 rollout.weights=bfloat16", "ignored",
         sentence="*both compute in bfloat16. Not as requested: precision=fp16.",
         effect={"precision": "*nothing reads*"}, fix={"precision": f"*{KEYS}*"}),

    Case("engine dtype", A, "unpatched", "{engine}.dtype=float16 {fp16_rollout}",
         refused="Could not override '{engine}.dtype'.", fix={"{engine}.dtype": f"*{KEYS}*"}),
    Case("engine dtype", B, "unpatched", "{engine}.dtype=float16 {fp16_rollout}",  # only the actor reads it
         "actor.compute=float16 actor.autocast=float16 critic.compute=bfloat16", "agree", scaled="actor",
         effect={"{engine}.dtype": "does not reach the critic, which trains in bfloat16",
                 "{engine}.grad_scaler": "*neither saves*", **EXPORT}),
    *(Case("engine dtype", releases, "unpatched", "{engine}.dtype=float16 {fp16_rollout}",
           "actor.compute=bfloat16", "differ", sentence="*float16 was requested for the trainer*", scaled="",
           effect={"{engine}.dtype": IGNORED, **rounding}, fix={"{engine}.dtype": f"*{COMPUTE}*"})
      for releases, rounding in ((ROUNDING, ROUNDED), (C[1:], {}))),

    # float32 is the default of a mixed_precision without reduce_dtype, bfloat16 that of one without param_dtype.
    Case("param_dtype", [*A, *B], "unpatched", "+{engine}.mixed_precision.param_dtype=fp16 {fp16_rollout}",
         "actor.compute=float16 actor.autocast=bfloat16 actor.reduce=float32", "differ", scaled="",
         effect={"{engine}.mixed_precision.param_dtype": "*reaches only one half*without a loss scaler*", **EXPORT}),
    *(Case("param_dtype", releases, "unpatched", "+{engine}.mixed_precision.param_dtype=fp16 {fp16_rollout}",
           "actor.compute=float16 actor.autocast=float16 actor.reduce=float32", verdict, scaled="actor",
           effect={"{engine}.mixed_precision.param_dtype": "does not reach the critic, which trains in bfloat16",
                   "{engine}.grad_scaler": "*neither saves*", **EXPORT, **rounding},
           fix=dict.fromkeys(rounding, f"*{SEND}*"))
      for releases, verdict, rounding in ((ROUNDING, "differ", ROUNDED), (C[1:], "agree", {}))),
    Case("param_dtype of a mapping", C[1:], "unpatched",
         "++{engine}.mixed_precision={{param_dtype:fp16}} {fp16_rollout}",
         effect={"{engine}.mixed_precision.param_dtype": "*", "{engine}.grad_scaler": "*", **EXPORT}),
    Case("reduce_dtype", B, "unpatched", "{engine}.dtype=float16 +{engine}.mixed_precision.reduce_dtype=fp16",
         "actor.compute=bfloat16 actor.autocast=float16 actor.reduce=float16", "differ",
         effect={"{engine}.mixed_precision.reduce_dtype": "*sums the actor's gradients*",
                 "{engine}.dtype": "*reaches only one half*", "{engine}.grad_scaler": "*neither saves*"}),
    # A patched tree without a request has upstream's dtypes.
    *(Case("param_dtype that requests nothing", releases, "unpatched patched",
           "+{engine}.mixed_precision.param_dtype=fp32",
           f"actor.compute=float32 actor.autocast={autocast} critic.compute=bfloat16 hf_export=bfloat16", "differ")
      for releases, autocast in (([*A, *B], "bfloat16"), (C, "float32"))),
    Case("param_dtype that requests nothing", [*A, *B], "patched",
         "+{engine}.mixed_precision.param_dtype=fp32 algorithm.adv_estimator=grpo",
         fix={"{engine}.mixed_precision.param_dtype": "{actor}.dtype=float32"}),
    Case("role's dtype over param_dtype's", ALL, "patched", "{actor}.dtype=float32 {rollout}.dtype=float32",
         "actor.compute=float32 actor.autocast=float32 critic.compute=float32 hf_export=float32", "agree"),
    Case("request by the scaler", ROUNDING, "patched", "{engine}.grad_scaler.init_scale=1024",
         "actor.compute=bfloat16 wire=float32", "agree",
         effect={"{engine}.grad_scaler.init_scale": "is ignored by verl {release}: the loss is not scaled"},
         fix={"{engine}.grad_scaler.init_scale": "{actor}.dtype=float16"}),
    Case("role's dtype over its engine's", [*B, *C], "patched",
         "{actor}.dtype=float16 {engine}.dtype=bfloat16 {fp16_rollout}",
         "actor.compute=float16 actor.autocast=float16 critic.compute=float16 hf_export=float16", "ignored",
         scaled="actor critic", effect={"{engine}.dtype": "is ignored by verl {release}: trains in float16"},
         fix={"{engine}.dtype": "{actor}.dtype=bfloat16"}),
    Case("engine dtype, followed", [*B, *C], "patched",
         "{engine}.dtype=float16 {fp16_rollout} {actor}.use_kl_loss=true",
         "actor.compute=float16 ref.compute=float16 critic.compute=float16 hf_export=float16 wire=float32", "agree",
         scaled="actor critic", effect={}),

    Case("critic's contradiction", NEW, "patched", "critic.dtype=bfloat16 critic.fsdp.dtype=float16",
         refused="ValueError: dtype=bfloat16 and fsdp.dtype=float16 contradict each other*"),

    Case("critic's engine dtype", [*DICTIONARIES, *B, *C], "unpatched", "++{critic}.dtype=float16", "", "ignored",
         sentence="*both compute in bfloat16. Not as requested: critic.*", effect={"{critic}.dtype": IGNORED}),
    Case("critic's param_dtype", [*A, *B], "unpatched", "+{critic}.mixed_precision.param_dtype=fp16",
         "critic.compute=float16 critic.autocast=bfloat16", "ignored",
         effect={"{critic}.mixed_precision.param_dtype":
                 "*reaches only one half*puts the critic into fp16 without a loss scaler*"}),

    # FlowRL's spelling: keys of a patched verl, none of upstream's.
    Case("role's dtype", ALL, "unpatched", "{actor}.dtype=float16 {fp16_rollout}",
         refused="Could not override '{actor}.dtype'.",
         fix={"{actor}.dtype": f"{KEYS}: make apply-patches VERL=/*"}),
    Case("role's dtype only", ALL, "patched", "{actor}.dtype=float16", "", "differ", sentence="*without a request*"),

    Case("masters in bf16", ALL, "unpatched patched", "++{engine}.model_dtype=bf16",
         "actor.master=bfloat16 actor.optimizer=bfloat16 wire=bfloat16", "agree",
         effect={"{engine}.model_dtype": "*updates below 1/256*"},
         fix={"{engine}.model_dtype": "{engine}.model_dtype=fp32"}),
    # The wire, in the masters' dtype, rounds nothing.
    Case("masters in bf16, fp16 rollout", ALL, "unpatched", "++{engine}.model_dtype=bf16 {fp16_rollout}",
         effect={"{engine}.model_dtype": "*"}),
    Case("critic's masters in bf16", ALL, "unpatched patched", "++{critic}.model_dtype=bf16",
         effect={"{critic}.model_dtype": "*updates below 1/256*"}),
    Case("masters in fp16", ALL, "unpatched", "++{engine}.model_dtype=fp16",
         effect={"{engine}.model_dtype": "*AdamW turns them to NaN*"}),
    Case("critic's masters in fp16", NEW, "patched", "+precision=fp16 ++{critic}.model_dtype=fp16",
         refused="ValueError: critic: model_dtype=fp16 with dtype=float16 makes the optimizer's weights half *"),

    Case("scaler", ALL, "unpatched", "{engine}.grad_scaler.init_scale=1024",
         refused="Could not override*", fix={"{engine}.grad_scaler.init_scale": f"*{SCALER}*"}),
    Case("scaler, forced", DICTIONARIES, "unpatched", "+{engine}.grad_scaler.init_scale=1024",
         effect={"{engine}.grad_scaler.init_scale": "is ignored by verl {release}: the loss is not scaled"}),

    Case("ref's dtype", [*B, *C], "patched", "{actor}.use_kl_loss=true {ref}.fsdp_config.dtype=float16",
         "actor.compute=bfloat16 ref.compute=float16",
         effect={"{ref}.fsdp_config.dtype": "*their KL is not that of the policies*"}),
    Case("ref's dtype", C, "unpatched", "{actor}.use_kl_loss=true {ref}.fsdp_config.dtype=float16",
         "ref.compute=bfloat16", effect={"{ref}.fsdp_config.dtype": "*"}),

    *(Case("model engine of a legacy release", releases, "unpatched",
           "algorithm.adv_estimator=grpo trainer.use_legacy_worker_impl=disable {engine}.dtype=float16 {fp16_rollout}",
           dtypes, verdict)
      for releases, dtypes, verdict in (
          (B[:1], "actor.compute=float16 wire=float32", "agree"),  # its actor stays a legacy worker
          (B[1:2], "actor.compute=bfloat16 wire=float32", "differ"),
          (B[2:], "actor.compute=bfloat16 wire=bfloat16", "differ"))),
)

ROLES = (
    Case("KL in the reward", NEW, "unpatched", "algorithm.use_kl_in_reward=true",
         "ref.compute=bfloat16 critic.compute=bfloat16"),
    Case("no critic", NEW, "unpatched", "critic.enable=false", "critic.compute=None"),
    Case("critic of GRPO", NEW, "unpatched", "algorithm.adv_estimator=grpo critic.enable=true",
         "critic.compute=bfloat16"),
    # The ref is the actor without its adapters, so its own dtype is ignored.
    *(Case(f"adapter by {word}", NEW, "unpatched",
           f"{{actor}}.use_kl_loss=true {{ref}}.fsdp_config.dtype=float16 {OTHER_SERVER}"
           f" ++actor_rollout_ref.model.{word}",
           "ref.compute=bfloat16", "agree", effect={})
      for word in ("lora_rank=4", "lora_adapter_path=/adapter", "lora.rank=4")),
    Case("reward worker", REWARD_WORKER, "unpatched",
         "reward_model.enable=true ++reward_model.use_reward_loop=false +reward_model.dtype=float16",
         effect={"reward_model.dtype": "is ignored by verl {release}: scores in bfloat16"}),
    Case("reward loop", having("reward_loop"), "patched",
         "reward_model.enable=true reward_model.rollout.name=vllm reward_model.dtype=float16",
         "reward_model.compute=bfloat16", "ignored", fix={"reward_model.dtype": "reward_model.rollout.dtype=float16"}),
    Case("reward server", [name for name in ALL if name not in REWARD_WORKER], "unpatched",
         "reward.reward_model.enable=true reward.reward_model.rollout.dtype=float16", "reward_model.compute=float16"),
    Case("head that is no list", NEW, "patched", "{engine}.keep_fp32_modules=lm_head",
         refused="*keep_fp32_modules=lm_head must be a list of module names*"),
)

LORA_RANK = "actor_rollout_ref.model.lora_rank"
WIRE_AND_ROLLOUT = (
    Case("hf rollout", HF, "patched", "{rollout}.name=hf {fp16_rollout}", "rollout.logits=unknown", "unknown"),
    Case("no hf rollout", [name for name in ALL if name not in HF], "unpatched", "{rollout}.name=hf",
         refused="{rollout}.name=hf is no rollout of verl {release}"),

    # FSDP1 on one worker sends whole tensors.
    Case("whole weights", ROUNDING, "unpatched", "trainer.n_gpus_per_node=1", "wire=float32"),
    Case("two nodes", ROUNDING, "unpatched", "trainer.n_gpus_per_node=1 trainer.nnodes=2", "wire=bfloat16"),
    Case("adapters over a base in fp16", ALL, "patched",
         "+precision=fp16 ++{engine}.model_dtype=fp16 actor_rollout_ref.model.lora_rank=4",
         "actor.master=float32 actor.base=float16 actor.optimizer=float32 wire=float16", "agree"),
    Case("critic's adapters over a base in fp16", ALL, "patched",
         "+precision=fp16 ++{critic}.model_dtype=fp16 critic.model.lora_rank=4",
         "critic.master=float32 critic.base=float16 actor.base=None", "agree"),
    Case("adapters cast to a base in bf16", ("0.9.0", "0.9.1"), "unpatched",
         f"{{engine}}.model_dtype=bf16 actor_rollout_ref.model.lora_rank=4 {OTHER_SERVER}",
         "actor.master=bfloat16 actor.base=bfloat16 actor.optimizer=bfloat16", "agree",
         effect={"{engine}.model_dtype": "*"}, fix={"{engine}.model_dtype": f"{LORA}: *"}),
    *(Case(f"adapters of a patched tree{name}", ("0.9.0", "0.9.1"), "patched",
           f"{{engine}}.model_dtype=bf16 actor_rollout_ref.model.lora_rank=4{words}",
           f"actor.master={master} actor.base=bfloat16 actor.optimizer={master}", "agree", fix=fix)
      for name, words, master, fix in (
          ("", "", "bfloat16", {"{engine}.model_dtype": "{actor}.dtype=bfloat16"}),
          (", requested", " {actor}.dtype=bfloat16", "float32", {}))),
    *(Case(f"rank {rank}", NEW, "unpatched", f"{LORA_RANK}={rank}", refused=f"TypeError: {LORA_RANK}={shown} must be *")
      for rank, shown in (("many", "many"), ("2.5", "2.5"), ("null", "None"))),
    *(Case(f"adapters of {mode}{words}", ("0.9.0", "0.9.1"), "unpatched",
           f"trainer.v1.trainer_mode={mode} {LORA_RANK}=4 {OTHER_SERVER}{words}", refused=refused)
      for mode, words, refused in (
          ("separate_async", "", "*lora.merge=False fails in separate_async: verl {release} sends the base only*"),
          ("separate_async", " ++actor_rollout_ref.model.lora.merge=true", ""),
          ("colocate_async", "", ""))),
    Case("rank of the critic", NEW, "patched", "critic.model.lora_rank=many", refused="TypeError: critic.model.lora_*"),
    Case("merged adapters", C, "unpatched",
         "++actor_rollout_ref.model.lora.rank=4 ++actor_rollout_ref.model.lora.merge=true", "wire=bfloat16"),
    *(Case(f"merged adapters{words}", C, "patched",
           f"++actor_rollout_ref.model.lora.rank=4 ++actor_rollout_ref.model.lora.merge=true{words}", f"wire={wire}")
      for words, wire in (("", "bfloat16"), (" {actor}.dtype=bfloat16", "float32"))),
    *(Case(f"{engine}{which}", NEW, state, f"{{rollout}}.checkpoint_engine.backend={engine} {words}", f"wire={wire}")
      for engine in ("kimi_ckpt_engine", "mooncake")
      for own_key in [f"+{{rollout}}.checkpoint_engine.engine_kwargs.{engine}.rollout_dtype=bfloat16"]
      for which, state, words, wire in (
          (", unpatched", "unpatched", "{fp16_rollout}", "bfloat16"),
          ("", "patched", "{fp16_rollout}", "float16"),
          (", its default", "patched", "{rollout}.dtype=auto", "bfloat16"),
          (", its own key", "patched", f"{{fp16_rollout}} {own_key}", "bfloat16"))),

    Case("rollout's unknown dtype", NEW, "unpatched patched", "{rollout}.dtype=banana",
         "rollout.weights=unknown", "unknown", effect={"{rollout}.dtype": "*does not check it*"}),
    Case("rollout's dtype that no server takes", ALL, "patched", "+precision=fp16 {rollout}.dtype=fp16",
         refused="ValueError: *dtype=fp16 is unknown to the rollout: choose one of auto, half, *"),
    Case("quantized", NEW, "patched", "+precision=fp16 {rollout}.name=vllm {rollout}.quantization=fp8",
         "rollout.weights=float8_e4m3fn rollout.logits=float16", "asked",
         effect={"{rollout}.quantization": "*quantized weights*"}),
    Case("KV cache", NEW, "patched",
         "+precision=fp16 {rollout}.name=vllm +{rollout}.engine_kwargs.vllm.kv_cache_dtype=fp8",
         "rollout.weights=float16 rollout.kv_cache=float8_e4m3fn", "asked",
         effect={"{rollout}.engine_kwargs.vllm.kv_cache_dtype": "*rounds keys and values*"}),
    *(Case(f"KV cache, {mode}", A[:1], "unpatched",
           f"{{rollout}}.mode={mode} +{{rollout}}.engine_kwargs.vllm.kv_cache_dtype=fp8", f"rollout.kv_cache={cache}")
      for mode, cache in (("sync", "float8_e4m3fn"), ("async", "bfloat16"))),  # that server does not read the key
)

REPORTS = "worker-report-the-effective-dtypes: *"
REGIMES_AND_KEYS = (
    Case("report", C, "unpatched", "{engine}.report_dtypes=false", refused="Could not override*",
         fix={"{engine}.report_dtypes": REPORTS}),
    Case("split regime", NEW, "patched", "+precision=bf16_train_fp16_infer",
         "actor.autocast=bfloat16 actor.logits=bfloat16 rollout.weights=float16", "asked"),
    *(Case(f"preset {name}", ALL, "patched", f"+device={name} +precision=fp16 {{rollout}}.name=vllm",
           "actor.compute=float16 rollout.weights=float16", "agree") for name in PRESETS),
    Case("a later key wins", NEW, "patched", "+precision=fp16 {rollout}.dtype=bfloat16",
         "actor.compute=float16 rollout.weights=bfloat16", "asked"),
    Case("engine without rules", NEW, "unpatched", "model_engine=veomni {rollout}.name=vllm",
         "actor.compute=unknown", "unknown"),
    Case("key of another family", B[-1:], "patched", "critic.fsdp.dtype=float16", refused="Could not override*",
         fix={"critic.fsdp.dtype": "critic.model.fsdp_config.dtype=float16"}),
    Case("misspelt key", NEW, "unpatched", "actor_rollout_ref.rolout.dtype=float16", refused="Could not override*",
         fix={"actor_rollout_ref.rolout.dtype": "the nearest key is {rollout}.dtype"}),
    Case("unknown regime", NEW, "patched", "+precision=fp17",
         refused="In 'ppo_trainer': Could not find 'precision/fp17'; there are "
                 "bf16, bf16_train_fp16_infer, fp16, fp32",
         effect={"precision": "is no regime"},
         fix={"precision": "+precision=bf16, bf16_train_fp16_infer, fp16 or fp32"}),
    Case("regime without +", NEW, "patched", "precision=fp16", refused="Could not override 'precision'.*",
         effect={"precision": "is not in the defaults of verl {release}, so that it needs a +"},
         fix={"precision": "+precision=fp16"}),
    Case("regime without +", NEW, "unpatched", "precision=fp16", refused="Could not override 'precision'.",
         fix={"precision": f"+precision=fp16; {KEYS} brings the group: make apply-patches VERL=/*"}),
    Case("unknown regime without +", NEW, "patched", "precision=fp8", refused="Could not override 'precision'.*",
         fix={"precision": "+precision=bf16, bf16_train_fp16_infer, fp16 or fp32"}),
    Case("other group without +", NEW, "patched", "algo=grpo", refused="Could not override 'algo'.*",
         fix={"algo": "+algo=grpo"}),
    Case("misspelt group", NEW, "patched", "+precison=fp16", "", "ignored", fix={"precison": "+precision=fp16"}),
)

VLLM, FP16 = "{rollout}.name=vllm", "+precision=fp16 {rollout}.name=vllm"
CACHE, QUANTIZATION = "{rollout}.engine_kwargs.{server}.kv_cache_dtype", "{rollout}.quantization"
KV_CACHE, KV_SCALES = (f"{{rollout}}.engine_kwargs.vllm.{name}" for name in ("kv_cache_dtype", "calculate_kv_scales"))
SGLANG, ON_POLICY = "{rollout}.name=sglang", "{rollout}.engine_kwargs.sglang"
DETERMINISM, BYPASS = "{rollout}.full_determinism", "algorithm.rollout_correction.bypass_mode"
SINCE_BYPASS = [name for name in ALL if name >= "0.6.1"]
LEGACY_ENGINE_KEY = [name for name in B if RELEASES[name].has("engine_policy")]  # its legacy workers do not read it
DETERMINISTIC_ROLLOUT = [name for name in C if name >= "0.9"]
QAT = "{engine}.qat.enable=true {engine}.qat.quantization_config_path="
FUSED, BACKEND = "actor_rollout_ref.model", "fused_kernel_options.impl_backend"
KEPT_GRADIENT = [name for name in ALL if name >= "0.9"]
LOST_GRADIENT = [name for name in ALL if name < "0.9"]
AGREEMENT = (
    *(Case(f"{dtype} cache of {server}", NEW, "patched",
           f"+precision=fp16 {{rollout}}.name={server} +{CACHE.replace('{server}', server)}={dtype}",
           f"rollout.kv_cache={dtype}", verdict, sentence=sentence, effect=effect)
      for server, dtype, verdict, sentence, effect in (
          ("vllm", "bfloat16", "differ", "*writes keys and values in float16 and reads their bits as bfloat16*",
           {CACHE.replace("{server}", "vllm"): "*nonsense*"}),
          ("vllm", "float16", "agree", "*", {}),
          ("sglang", "bfloat16", "asked", "*", {}))),  # which converts
    Case("fp8", NEW, "patched", f"{FP16} {QUANTIZATION}=fp8", "rollout.kv_cache=float16", "asked",
         effect={QUANTIZATION: "*lm_head stay in float16, the KV cache in float16. The small mismatch*not hold, and "
                               "the first weight sync is not checked"}),
    # The installed vLLM is 0.24 or later.
    *(Case("fp8 that verl cannot send", [name], "unpatched", f"{VLLM} {QUANTIZATION}=fp8",
           effect={QUANTIZATION: f"*is not supported with vLLM *: *vllm_fp8_utils.py:{line} of verl {{release}} *"},
           fix={QUANTIZATION: f"vLLM below {below}, or {{rollout}}.quantization=null"})
      for name, line, below in (("0.7.0", 81, "0.14"), ("0.7.1", 76, "0.20"), ("0.8.0", 80, "0.20"))),
    Case("fp8 that verl sends", C[1:], "unpatched", f"{VLLM} {QUANTIZATION}=fp8",
         effect={QUANTIZATION: "samples from quantized weights*not hold"}),
    *(Case(f"fp8 cache{which}", NEW, "patched", f"{FP16} +{KV_CACHE}=fp8 {words}", "rollout.kv_cache=float8_e4m3fn",
           effect={KV_CACHE: effect, **more})
      for which, words, effect, more in (
          ("", "", "*by scales of 1.0, as verl sends none *not checked", {}),
          (", computed scales", f"+{KV_SCALES}=true", "rounds keys and values to float8_e4m3fn; *",
           {KV_SCALES: "computes the cache's scales in the first forward pass only *"}))),
    Case("scales of a cache in 16 bits", NEW, "patched", f"{FP16} +{KV_SCALES}=true", effect={}),
    *(Case(f"SGLang's {name}", releases, "unpatched", f"{SGLANG} {{rollout}}.n=8 +{ON_POLICY}.{name}={value}",
           effect={f"{ON_POLICY}.{name}": "gives every request the seed 42, as verl {release} sends no * 8 answers*"})
      for releases in (B[-2:], C)
      for name, value in (("rl_on_policy_target", "fsdp"), ("enable_deterministic_inference", "true"))),
    *(Case(f"SGLang's seed, {which}", releases, "unpatched", f"{words} +{ON_POLICY}.{key}", effect={})
      for which, releases, words, key in (
          ("one answer", C, f"{SGLANG} {{rollout}}.n=1", "rl_on_policy_target=fsdp"),
          ("off", C, f"{SGLANG} {{rollout}}.n=8", "enable_deterministic_inference=false"),
          ("another server", C, f"{VLLM} {{rollout}}.n=8", "rl_on_policy_target=fsdp"),
          ("not passed", ["0.6.0"], f"{SGLANG} {{rollout}}.n=8 {{rollout}}.mode=async", "rl_on_policy_target=fsdp"))),
    Case("trained quantization", C, "unpatched", f"{VLLM} {QAT}/nvfp4.json", "rollout.weights=nvfp4", "asked",
         effect={"{engine}.qat.enable": "*rounded to nvfp4 (w4a16), except lm_head, embed_tokens,*"}),
    Case("determinism", LEGACY_ENGINE_KEY, "unpatched", "{engine}.full_determinism=true",
         effect={"{engine}.full_determinism": "is not read by verl {release}'s legacy workers"}),
    Case("determinism", C, "unpatched", "{engine}.full_determinism=true", effect={}),
    Case("determinism of VeOmni", NEW, "unpatched", "model_engine=veomni {actor}.veomni.full_determinism=true",
         effect={}),
    Case("determinism of Megatron", NEW, "unpatched", "model_engine=megatron +{actor}.megatron.full_determinism=true",
         effect={"{actor}.megatron.full_determinism": "is not read by verl {release}'s megatron"}),
    Case("deterministic rollout", DETERMINISTIC_ROLLOUT, "unpatched", f"{VLLM} {DETERMINISM}=true {{rollout}}.n=4",
         effect={DETERMINISM: "*the 4 answers to a prompt that it samples are equal*to one server*"}),
    Case("deterministic rollout of the legacy trainer", DETERMINISTIC_ROLLOUT, "unpatched",
         f"{VLLM} {DETERMINISM}=true trainer.use_v1=false", effect={}),
    Case("deterministic rollout by SGLang", DETERMINISTIC_ROLLOUT, "unpatched",
         f"{{rollout}}.name=sglang {DETERMINISM}=true", effect={DETERMINISM: "is not read by*sglang server"}),
    Case("bypass mode", SINCE_BYPASS, "unpatched", f"{BYPASS}=true",
         effect={BYPASS: "leaves training/rollout_probs_diff_*"}, fix={BYPASS: f"{BYPASS}=false"}),
    Case("bypass mode", SINCE_BYPASS, "patched", f"{BYPASS}=true",
         effect={BYPASS: "leaves training/rollout_probs_diff_*"}, fix={BYPASS: f"{MISMATCH_FREQ}=10"}),
    Case("bypass mode, measured", SINCE_BYPASS, "patched", f"{BYPASS}=true {MISMATCH_FREQ}=10", effect={}),
    *(Case(f"bypass mode, measured every {freq}", NEW, "patched", f"{BYPASS}=true {MISMATCH_FREQ}={freq}",
           refused=f"ValueError: {MISMATCH_FREQ}={shown} must be a whole number of steps, or -1 to measure none")
      for freq, shown in (("often", "often"), ("null", "None"), ("2.5", "2.5"), ("1e99", "1e+99"))),
    *(Case(f"weights of whole answers in {regime}", NEW, "patched",
           f"+precision={regime} data.max_response_length=1000 {SEQUENCE_WEIGHTS}={level}", effect=effect)
      for regime, level, effect in (
          ("bf16", "sequence",
           {SEQUENCE_WEIGHTS: f"*at 1000 tokens, *k3_kl of {TRUNCATED[0] / 1e3:.1e} and {TRUNCATED[1] / 1e3:.1e}"}),
          *(("bf16", f"sequence {TRUNCATION}={threshold}",
             {SEQUENCE_WEIGHTS: f"*With untruncated*k3_kl of {UNTRUNCATED[0] / 1e3:.1e} and *"})
            for threshold in ("1e6", "10")),
          ("bf16_train_fp16_infer", "sequence", {SEQUENCE_WEIGHTS: "*in bfloat16*"}),
          ("bf16", "sequence data.max_response_length=null", {SEQUENCE_WEIGHTS: "*on"}),
          ("bf16", "token", {}), ("fp16", "sequence", {}), ("fp32", "sequence", {}))),
    *(Case(f"fused head {words}", releases, "unpatched", f"{FUSED}.use_fused_kernels=true {words}", effect=effect)
      for words, releases, effect in (
          (f"{FUSED}.{BACKEND}=triton", ALL, {f"{FUSED}.{BACKEND}": "computes with Triton*below -104*"}),
          (f"{FUSED}.use_remove_padding=false", LOST_GRADIENT, {f"{FUSED}.use_fused_kernels": "gives the model no*"}),
          (f"{FUSED}.use_remove_padding=true", LOST_GRADIENT, {}),
          (f"{FUSED}.use_remove_padding=false", KEPT_GRADIENT, {}))),
    Case("fused head of Megatron", NEW, "unpatched", f"model_engine=megatron {FUSED}.use_fused_kernels=true",
         effect={f"{FUSED}.use_fused_kernels": "computes with Triton*"}, fix={f"{FUSED}.use_fused_kernels": "*=false"}),
    Case("measured without bypass mode", SINCE_BYPASS, "patched", f"{MISMATCH_FREQ}=5", verdict="agree",
         effect={MISMATCH_FREQ: "is read only in bypass mode*"}),
)

MEGATRON = "algorithm.adv_estimator=grpo {rollout}.name=vllm"
FP16_MEGATRON = f"{MEGATRON} {{actor}}.megatron.dtype=float16 {{actor}}.megatron.use_mbridge="
OPTIM, REDUCED = "{actor}.optim", "{actor}.megatron.override_ddp_config.grad_reduce_in_fp32"
MUON = f"{OPTIM}.optimizer=muon {OPTIM}.use_layer_wise_distributed_optimizer=true"
UNIMPLEMENTED = {"{actor}.megatron.dtype": "*NotImplementedError*"}
MEGATRON_RULES = (
    Case("defaults", ALL, "unpatched", MEGATRON,
         "actor.compute=bfloat16 actor.autocast=unknown actor.master=unknown", "agree"),
    Case("fp16", B, "unpatched", f"{FP16_MEGATRON}true", "actor.compute=float16", "differ", effect=UNIMPLEMENTED),
    Case("fp16", C, "unpatched", f"{FP16_MEGATRON}true {{actor}}.megatron.vanilla_mbridge=true",
         "actor.compute=float16", "differ", effect=UNIMPLEMENTED,
         fix={"{actor}.megatron.dtype": f"*{SKIP}*"}),
    # Gradient buffers: mbridge's are fp32; Megatron-Bridge, 0.9.0's default, leaves the model's dtype, 0.9.1 sets fp32.
    Case("defaults' buffers", [*B, *C[:1], *C[2:]], "unpatched", MEGATRON, "actor.reduce=float32", effect={}),
    Case("reduction that no key decides", A[:1], "unpatched", f"{MEGATRON} +{REDUCED}=false", "actor.reduce=float32",
         effect={REDUCED: "is ignored by verl {release}, whose gradient buffers are always in float32 (*:132)"}),
    Case("reduction", C[1:2], "unpatched patched", MEGATRON, "actor.reduce=bfloat16 critic.reduce=None",
         effect={REDUCED: "is not set, and Megatron-Bridge's default adds up the actor's gradients, * in bfloat16 *"}),
    Case("reduction in fp16 by default", C[1:2], "patched", f"{MEGATRON} +precision=fp16", "actor.reduce=float16",
         effect={REDUCED: "*in float16 (utils/megatron_utils.py:397)"}, fix={REDUCED: f"+{REDUCED}=true"}),
    Case("reduction in fp32", C[1:2], "patched", f"{MEGATRON} +precision=fp16 +{REDUCED}=true",
         "actor.reduce=float32", effect={}),
    Case("reduction of Muon", C[1:2], "patched", f"{MEGATRON} +precision=bf16 {MUON}", "actor.reduce=float32",
         effect={}),
    Case("reduction by mbridge", C[1:], "patched", f"{MEGATRON} {{actor}}.megatron.vanilla_mbridge=true",
         "actor.reduce=float32", effect={}),
    Case("reduction by Megatron-Bridge", C[:1], "patched", f"{MEGATRON} {{actor}}.megatron.vanilla_mbridge=false",
         "actor.reduce=bfloat16", effect={REDUCED: "*(utils/megatron_utils.py:295)"}),
    Case("reduction", [*C[:1], *C[2:]], "patched", f"{MEGATRON} +precision=fp16", "actor.reduce=float32", effect={}),
    Case("reduction in fp16", C, "patched", f"{MEGATRON} +precision=fp16 +{REDUCED}=false", "actor.reduce=float16",
         effect={REDUCED: "adds up the actor's gradients, and sums them over the ranks, in float16"},
         fix={REDUCED: f"{REDUCED}=true"}),
    Case("gradients of an optimizer that reads them", C[1:], "patched",
         f"{MEGATRON} +precision=bf16 {{actor}}.megatron.vanilla_mbridge=true {OPTIM}.main_grads_dtype=bf16"
         f" {OPTIM}.use_precision_aware_optimizer=true", "actor.reduce=bfloat16", "agree",
         effect={f"{OPTIM}.main_grads_dtype": "adds up the actor's gradients, * in bfloat16"},
         fix={f"{OPTIM}.main_grads_dtype": f"{OPTIM}.main_grads_dtype=fp32"}),
)
# fmt: on


@of_cases(*TRAINER, *ROLES, *WIRE_AND_ROLLOUT, *AGREEMENT, *REGIMES_AND_KEYS)
def test_diagnosis(case: Case, release: str, state: str, examine: Examine):
    case.check(release, state, examine)


@of_cases(*MEGATRON_RULES)
def test_megatron_computes_in_its_own_dtype_key(case: Case, release: str, state: str, examine: Examine):
    case.check(release, state, lambda *words: examine(*words, config_name="ppo_megatron_trainer"))


def write_config(folder: Path, **content) -> None:
    (folder / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("dtype", "effective", "verdict"), [("bfloat16", "bfloat16", "agree"), ("float32", "unknown", "unknown")]
)
def test_auto_resolves_to_the_models_dtype(dtype, effective, verdict, examine: Examine, tmp_path: Path):
    write_config(tmp_path, torch_dtype=dtype)
    diagnosis = examine(NEWEST, "patched", f"{ROLLOUT}.dtype=auto", f"actor_rollout_ref.model.path={tmp_path}")
    assert (diagnosis.hops["rollout.weights"].effective_dtype, diagnosis.verdict) == (effective, verdict)
    assert verdict == "agree" or "config.json" in diagnosis.findings[0].effect


@pytest.mark.parametrize("model_type", GEMMA4)
@pytest.mark.parametrize(
    ("words", "sides"),
    [
        ("+precision=fp16", "trainer and rollout"),
        ("+precision=bf16_train_fp16_infer", "rollout"),
        (f"+precision=fp16 {ROLLOUT}.dtype=bfloat16", "trainer"),
        (f"+precision=fp16 {ROLLOUT}.dtype=float32 {ENGINE}.keep_fp32_modules=[model.*.mlp]", ""),
        (f"+precision=fp16 {ENGINE}.keep_fp32_modules=[model.*.mlp]", "rollout"),
        (f"+precision=fp16 {ENGINE}.keep_fp32_modules=[lm_head]", "trainer and rollout"),
        ("+precision=bf16", ""),
    ],
)
def test_model_that_overflowed_elsewhere_is_reported(model_type, words, sides, examine: Examine, tmp_path: Path):
    write_config(tmp_path, model_type=model_type, text_config={"num_key_value_heads": 1})
    model = f"actor_rollout_ref.model.path={tmp_path}"
    found = examine(NEWEST, "patched", f"{ROLLOUT}.name=vllm", model, *words.split())
    effects = [finding.effect for finding in found.findings if finding.key == "actor_rollout_ref.model.path"]
    assert found.refused is None and len(effects) == bool(sides)
    for effect in effects:
        assert_matches(effect, f"is a {model_type} model. *unsloth-zoo #600*. Here {sides} would compute in float16")


def test_models_that_overflowed_elsewhere_are_the_installed_transformers(tmp_path: Path):
    source = package_folder("transformers") / "models/gemma4/configuration_gemma4.py"
    assert all(f'model_type = "{name}"' in source.read_text() for name in GEMMA4)
    write_config(tmp_path, model_type="gemma3_text")
    assert float16_report(str(tmp_path)) is None is float16_report("owner/name")


def test_groups_of_this_repository(examine: Examine, tmp_path: Path):
    """They are on the search path by default; a search path in the overrides replaces the default."""
    words = ["+experiment=sanity_cpu", "+algo=grpo", "+device=cpu", "+precision=fp16"]
    diagnosis = examine(NEWEST, "patched", *words, "+recipe=flowrl")
    assert diagnosis.verdict == "agree" and diagnosis.hops["critic.compute"].effective_dtype is None  # grpo
    words += [f"hydra.searchpath=['file://{tmp_path}']", "+trainer.mismach_freq=10"]
    effects = {finding.key: finding.effect for finding in examine(NEWEST, "patched", *words).findings}
    assert effects["trainer.mismach_freq"] == "is a new key beside mismatch_freq"
    assert effects["experiment"] == f"is a key that nothing reads in verl {NEWEST}" and "precision" not in effects
    # It composes, and verl's dataclasses refuse the keys at once.
    unpatched = examine(NEWEST, "unpatched", f"hydra.searchpath=['file://{CONFIGS}']", "+precision=fp16")
    effects = {finding.key: finding.effect for finding in unpatched.findings}
    assert unpatched.verdict == "differ" and effects["actor_rollout_ref.actor.dtype"].startswith("is ignored by verl")


@pytest.mark.parametrize("release", [B[-1], NEWEST])
def test_legacy_workers_are_not_advised_a_patch_that_they_lack(release: str, examine: Examine):
    findings = examine(release, "unpatched", f"{ENGINE}.keep_fp32_modules=[lm_head]").findings
    assert any(KEEP in finding.fix for finding in findings) == (release in C)


def test_configs_of_experimental_trainers_are_found(examine: Examine):
    """The asynchronous trainer's own config turns bypass mode on."""
    words = ["+precision=fp16", "+device=cpu", f"{ROLLOUT}.name=vllm"]
    diagnosis = examine(NEWEST, "patched", *words, config_name="fully_async_ppo_trainer")
    assert [finding.key for finding in diagnosis.findings] == ["algorithm.rollout_correction.bypass_mode"]
    assert diagnosis.verdict == "agree" and diagnosis.hops["actor.compute"].effective_dtype == "float16"


T4, V100 = Gpu("Tesla T4", (7, 5), bf16=False, kernels=True), Gpu("Tesla V100", (7, 0), bf16=False, kernels=False)
H100 = Gpu("NVIDIA H100", (9, 0), bf16=True, kernels=True)
ON_T4 = "Tesla T4 (sm75): fp16 and fp32 native, bf16 emulated in fp32"
NO_KERNELS = "the torch of this Python has no kernels for"


@pytest.mark.parametrize(
    ("gpus", "words", "lines", "verdict"),
    [
        ((), "+precision=fp16 +device=volta", [], "agree: *"),
        ((T4,), "+precision=fp16 +device=turing", [ON_T4], "agree: *"),
        ((T4,), "+precision=bf16", [f"{ON_T4}; actor.*, rollout.weights in bf16, *: +precision=fp16"], "agree: *"),
        (
            (T4, H100),
            f"+precision=fp16 {ROLLOUT}.full_determinism=true",
            [f"{ON_T4}; vLLM has batch-invariant kernels from sm80 on", "NVIDIA H100 (sm90): *, bf16 native"],
            "agree: *",
        ),
        ((H100, H100), "+precision=bf16", ["2 x NVIDIA H100 (sm90): fp16 and fp32 native, bf16 native"], "agree: *"),
        ((V100,), "+precision=fp16", [f"Tesla V100 (sm70): *; {NO_KERNELS} it: docs/*"], "agree: *"),
    ],
)
def test_hardware_of_this_machine(gpus, words, lines, verdict, examine: Examine):
    tree = examine(NEWEST, "patched").tree
    diagnosis = diagnose(tree, [*words.split(), f"{ROLLOUT}.name=vllm"])
    deterministic = "full_determinism" in words
    for line, expected in zip(doctor.hardware_lines(gpus, diagnosis.hops, deterministic), lines, strict=True):
        assert_matches(line, expected)
    shown = doctor.text(diagnosis, gpus)
    assert_matches(shown.rpartition("\n\n")[2], verdict)
    assert shown.count("hardware: ") == len(lines) and len(diagnosis.json(gpus)["hardware"]) == len(gpus)


# --- routers of a mixture of experts ----------------------------------------------------------------------------------

KEPT_ROUTERS = "{engine}.keep_fp32_modules=[model.layers.*.gate]"


@of_cases(
    Case("routers of SGLang", NEW, "patched", f"{KEPT_ROUTERS} {ROLLOUT}.name=sglang",
         effect={"{engine}.keep_fp32_modules": "is not followed by sglang*"}),
    Case("routers of vLLM", NEW, "patched", f"+precision=fp16 {KEPT_ROUTERS} {ROLLOUT}.name=vllm", effect={}),
    Case("routers of the server that is not set", NEW, "patched", f"+precision=fp16 {KEPT_ROUTERS}", effect={}),
)  # fmt: skip
def test_routers(case, release, state, examine):
    case.check(release, state, examine)
