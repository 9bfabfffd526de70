"""The doctor's diagnoses of each release, patched and not; no worker runs here."""

import pytest
from support.diagnoses import (
    ACTOR,
    ALL,
    ENGINE,
    RELEASES,
    ROLLOUT,
    A,
    B,
    C,
    Case,
    Examine,
    having,
    of_cases,
    of_states,
    rounds_weights,
    without,
)

from lib.doctor.dtype_rules import COMPUTE, KEYS, SCALER, SEND
from lib.patches.stack import load_stack

# Configs of family A that are plain dictionaries, which accept any key, and dataclasses without dtype.
DICTIONARIES, DATACLASSES = A[:2], A[2:]
ROUNDING = [name for name in ALL if rounds_weights(name)]
EXACT = [name for name in ALL if name not in ROUNDING]
IGNORED = "is ignored by verl {release}: trains in bfloat16"
ROUNDED = {"{rollout}.dtype": "gets weights that passed through bfloat16*"}
EXPORT = {"hf_export": "*makes bfloat16 of a model trained in float16*"}
UNEXPECTED = "TypeError: FSDPEngineConfig.__init__() got an unexpected keyword argument"

BFLOAT16 = "actor.compute actor.autocast actor.logits critic.compute critic.autocast hf_export"
BFLOAT16 += " rollout.weights rollout.kv_cache rollout.logits"
FLOAT32 = "actor.master actor.reduce actor.optimizer critic.master critic.reduce wire"
UNUSED = "ref.compute ref.autocast reward_model.compute"
DEFAULT = {
    **dict.fromkeys(BFLOAT16.split(), "bfloat16"),
    **dict.fromkeys(FLOAT32.split(), "float32"),
    **dict.fromkeys(UNUSED.split(), None),
}


@pytest.mark.parametrize(
    ("release", "state"), [*of_states(EXACT, "unpatched patched"), *of_states(ROUNDING, "unpatched patched")]
)
def test_defaults_agree_in_bfloat16(release: str, state: str, examine: Examine):
    diagnosis = examine(release, state)
    expected = DEFAULT | ({"wire": "bfloat16"} if state == "unpatched" and release in ROUNDING else {})
    assert {name: hop.effective_dtype for name, hop in diagnosis.hops.items()} == expected
    stack = load_stack(RELEASES[release]).id if state == "patched" else None
    assert diagnosis.json()["verl"] == {"release": release, "state": state, "stack": stack, "nearest": None}
    assert (diagnosis.verdict, diagnosis.findings, diagnosis.scaler) == ("agree", (), {"actor": None, "critic": None})


@pytest.mark.parametrize(("release", "state"), of_states(ALL, "patched"))
def test_patched_tree_computes_in_fp16_by_one_key(release: str, state: str, examine: Examine):
    diagnosis = examine(release, state, "+precision=fp16", f"{ACTOR}.use_kl_loss=true")
    used = [*BFLOAT16.split(), "ref.compute", "ref.autocast"]
    assert diagnosis.json()["hops"] == DEFAULT | dict.fromkeys(used, "float16")
    assert diagnosis.verdict == "agree" and not diagnosis.findings
    settings = {"init_scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 400}
    settings |= {"min_scale": 1.0, "max_consecutive_skips": 32, "saved": True, "reported": True}
    assert diagnosis.scaler == {"actor": settings, "critic": settings}


# fmt: off
TRAINER = (
    Case("precision key", ALL, "unpatched", "+precision=fp16",
         "actor.compute=bfloat16 rollout.weights=bfloat16", "ignored",
         sentence="*both compute in bfloat16. Not as requested: precision=fp16.",
         effect={"precision": "*nothing reads*"}, mend={"precision": f"*{KEYS}*"}),

    Case("engine dtype", ALL, "patched", "{engine}.dtype=float16 {fp16_rollout}",
         "actor.compute=float16 actor.autocast=float16 critic.compute=float16", "agree", scaled="actor critic"),
    Case("engine dtype", A, "unpatched", "{engine}.dtype=float16 {fp16_rollout}",
         refused="Could not override '{engine}.dtype'.", mend={"{engine}.dtype": f"*{KEYS}*"}),
    Case("engine dtype", B, "unpatched", "{engine}.dtype=float16 {fp16_rollout}",  # the actor alone reads it
         "actor.compute=float16 actor.autocast=float16 critic.compute=bfloat16", "agree", scaled="actor",
         effect={"{engine}.dtype": "does not reach the critic, which trains in bfloat16",
                 "{engine}.grad_scaler": "*neither saves*", **EXPORT}),
    *(Case("engine dtype", releases, "unpatched", "{engine}.dtype=float16 {fp16_rollout}",
           "actor.compute=bfloat16", "differ", sentence="*float16 was requested for the trainer*", scaled="",
           effect={"{engine}.dtype": IGNORED, **rounding}, mend={"{engine}.dtype": f"*{COMPUTE}*"})
      for releases, rounding in ((ROUNDING, ROUNDED), (C[1:], {}))),
    Case("unknown dtype", [*B, *C], "patched", "{engine}.dtype=banana",
         refused="*dtype=banana is not a dtype to compute in*"),
    Case("unknown dtype", B, "unpatched", "{engine}.dtype=banana",
         refused="RuntimeError: unexpected precision: banana"),
    Case("unknown dtype", C, "unpatched", "{engine}.dtype=banana", effect={"{engine}.dtype": IGNORED}),

    # float32 is the default of a mixed_precision without reduce_dtype, bfloat16 that of one without param_dtype.
    Case("param_dtype", [*A, *B], "unpatched", "+{engine}.mixed_precision.param_dtype=fp16 {fp16_rollout}",
         "actor.compute=float16 actor.autocast=bfloat16 actor.reduce=float32", "differ", scaled="",
         effect={"{engine}.mixed_precision.param_dtype": "*reaches only one half*without a loss scaler*", **EXPORT}),
    *(Case("param_dtype", releases, "unpatched", "+{engine}.mixed_precision.param_dtype=fp16 {fp16_rollout}",
           "actor.compute=float16 actor.autocast=float16 actor.reduce=float32", verdict, scaled="actor",
           effect={"{engine}.mixed_precision.param_dtype": "does not reach the critic, which trains in bfloat16",
                   "{engine}.grad_scaler": "*neither saves*", **EXPORT, **rounding})
      for releases, verdict, rounding in ((ROUNDING, "differ", ROUNDED), (C[1:], "agree", {}))),
    Case("param_dtype", ALL, "patched", "+{engine}.mixed_precision.param_dtype=fp16 {fp16_rollout}", verdict="agree"),
    Case("reduce_dtype", B, "unpatched", "{engine}.dtype=float16 +{engine}.mixed_precision.reduce_dtype=fp16",
         "actor.compute=bfloat16 actor.autocast=float16 actor.reduce=float16", "differ",
         effect={"{engine}.mixed_precision.reduce_dtype": "*sums the actor's gradients*",
                 "{engine}.dtype": "*reaches only one half*", "{engine}.grad_scaler": "*neither saves*"}),
    Case("contradiction", [*B, *C], "patched", "{engine}.dtype=float16 +{engine}.mixed_precision.param_dtype=bf16",
         refused="*contradict*"),
    Case("contradiction", B, "unpatched", "{engine}.dtype=float16 +{engine}.mixed_precision.param_dtype=bf16",
         "actor.compute=bfloat16 actor.autocast=float16 actor.logits=float16", "differ", scaled="actor"),

    Case("critic's engine dtype", DICTIONARIES, "unpatched", "++{critic}.dtype=float16", "", "ignored",
         sentence="*both compute in bfloat16. Not as requested: critic.*", effect={"{critic}.dtype": IGNORED}),
    Case("critic's engine dtype", DATACLASSES, "unpatched", "++{critic}.dtype=float16",
         refused=f"{UNEXPECTED} 'dtype'"),
    Case("critic's engine dtype", [*B, *C], "unpatched", "{critic}.dtype=float16", "", "ignored",
         sentence="*both compute in bfloat16. Not as requested: critic.*", effect={"{critic}.dtype": IGNORED}),
    Case("critic's engine dtype", ALL, "patched", "{critic}.dtype=float16",
         "actor.compute=bfloat16 critic.compute=float16"),
    Case("critic's param_dtype", [*A, *B], "unpatched", "+{critic}.mixed_precision.param_dtype=fp16",
         "critic.compute=float16 critic.autocast=bfloat16", "ignored",
         effect={"{critic}.mixed_precision.param_dtype":
                 "*reaches only one half*puts the critic into fp16 without a loss scaler*"}),

    # FlowRL's spelling: keys of a patched verl, none of upstream's.
    Case("role's dtype", ALL, "patched", "{actor}.dtype=float16 {fp16_rollout}", "", "agree"),
    Case("role's dtype", ALL, "unpatched", "{actor}.dtype=float16 {fp16_rollout}",
         refused="Could not override '{actor}.dtype'.",
         mend={"{actor}.dtype": f"{KEYS}: make apply-patches VERL={{root}}"}),
    Case("role's dtype, forced", DICTIONARIES, "unpatched", "+{actor}.dtype=float16 {fp16_rollout}",
         effect={"{actor}.dtype": IGNORED}),
    Case("role's dtype, forced", having("validate_config"), "unpatched", "+{actor}.dtype=float16 {fp16_rollout}",
         refused="*got an unexpected keyword argument 'dtype'*"),
    Case("role's dtype alone", ALL, "patched", "{actor}.dtype=float16", "", "differ", sentence="*nobody requested*"),
    Case("rollout's dtype alone", ALL, "unpatched patched", "{fp16_rollout}",
         "actor.logits=bfloat16 rollout.weights=float16 rollout.kv_cache=float16", "differ"),
    Case("rollout's dtype, spelt half", ALL, "unpatched patched", "{rollout}.dtype=half", "rollout.weights=float16"),

    Case("masters in bf16", ALL, "unpatched patched", "++{engine}.model_dtype=bf16",
         "actor.master=bfloat16 actor.optimizer=bfloat16 wire=bfloat16", "agree",
         effect={"{engine}.model_dtype": "*updates below 1/256*"},
         mend={"{engine}.model_dtype": "{engine}.model_dtype=fp32"}),
    Case("critic's masters in bf16", ALL, "unpatched patched", "++{critic}.model_dtype=bf16",
         effect={"{critic}.model_dtype": "*updates below 1/256*"}),
    Case("masters in fp16", ALL, "patched", "+precision=fp16 ++{engine}.model_dtype=fp16",
         refused="*model_dtype=fp16 with dtype=float16 makes the optimizer's weights half precision*"),
    Case("masters in fp16", ALL, "unpatched", "++{engine}.model_dtype=fp16",
         effect={"{engine}.model_dtype": "*AdamW turns them to NaN*"}),

    Case("scaler", ALL, "patched", "{engine}.grad_scaler.growth_factor=0.5",
         refused="*grad_scaler.growth_factor=0.5 must be above 1*"),
    Case("scaler", ALL, "unpatched", "{engine}.grad_scaler.init_scale=1024",
         refused="Could not override*", mend={"{engine}.grad_scaler.init_scale": f"*{SCALER}*"}),
    Case("scaler, forced", DICTIONARIES, "unpatched", "+{engine}.grad_scaler.init_scale=1024",
         effect={"{engine}.grad_scaler.init_scale": "is ignored by verl {release}: the loss is not scaled"}),
    Case("scaler, forced", having("validate_config"), "unpatched", "+{engine}.grad_scaler.init_scale=1024",
         refused=f"{UNEXPECTED} 'grad_scaler'"),

    Case("ref's dtype", [*B, *C], "patched", "{actor}.use_kl_loss=true {ref}.fsdp_config.dtype=float16",
         "actor.compute=bfloat16 ref.compute=float16",
         effect={"{ref}.fsdp_config.dtype": "*their KL is not that of the policies*"}),
    Case("ref's dtype", B, "unpatched", "{actor}.use_kl_loss=true {ref}.fsdp_config.dtype=float16",
         "ref.compute=float16", effect={"{ref}.fsdp_config.dtype": "*"}),
    Case("ref's dtype", C, "unpatched", "{actor}.use_kl_loss=true {ref}.fsdp_config.dtype=float16",
         "ref.compute=bfloat16", effect={"{ref}.fsdp_config.dtype": "*"}),
    Case("dtype of no ref", [*B, *C], "patched", "{ref}.fsdp_config.dtype=float16", "ref.compute=None"),
)

OFF = "trainer.use_legacy_worker_impl=disable"
GRPO = f"algorithm.adv_estimator=grpo {OFF}"
ENGINES_OF_LEGACY_RELEASES = (
    Case("fp16", [*A[1:], *B], "patched", f"+precision=fp16 {OFF}",
         refused="*trainer.use_legacy_worker_impl=disable trains in on this release*"),
    Case("defaults", [*A[1:], *B], "patched", GRPO, "", "agree"),
    Case("critic", having("engine_critic_fails"), "unpatched", OFF, refused="*no attribute 'hf_config'*"),
    # The first one's actor stays a legacy worker.
    Case("dtype", B[:1], "unpatched", f"{GRPO} {{engine}}.dtype=float16 {{fp16_rollout}}",
         "actor.compute=float16 wire=float32", "agree"),
    Case("dtype", B[1:2], "unpatched", f"{GRPO} {{engine}}.dtype=float16 {{fp16_rollout}}",
         "actor.compute=bfloat16 wire=float32", "differ"),
    Case("dtype", B[2:], "unpatched", f"{GRPO} {{engine}}.dtype=float16 {{fp16_rollout}}",
         "actor.compute=bfloat16 wire=bfloat16", "differ"),
)

HF = having("hf_rollout")
WIRE_AND_SERVERS = (
    Case("hf rollout", HF, "unpatched", "{rollout}.name=hf {fp16_rollout}",
         "wire=None rollout.weights=float32 rollout.logits=bfloat16", "ignored", sentence="*both compute in bfloat16*",
         effect={"{rollout}.dtype": "is ignored by the hf rollout of verl {release}: samples in bfloat16"}),
    Case("hf rollout", HF, "patched", "{rollout}.name=hf {fp16_rollout} +precision=fp16",
         "rollout.weights=float32 rollout.logits=float16", "agree"),
    Case("hf rollout of FSDP2", HF, "patched",
         "{rollout}.name=hf {fp16_rollout} {actor}.strategy=fsdp2",
         refused="*name=hf, whose weights FSDP2 rounds to the actor's bfloat16*"),
    Case("no hf rollout", without("hf_rollout"), "unpatched", "{rollout}.name=hf", refused="*Rollout hf with mode*"),

    Case("rounded wire", ROUNDING, "unpatched", "+{engine}.mixed_precision.param_dtype=fp16 {fp16_rollout}",
         "wire=bfloat16", "differ", mend={"{rollout}.dtype": f"*{SEND}*"}),
    Case("rounded wire", ROUNDING, "patched", "+{engine}.mixed_precision.param_dtype=fp16 {fp16_rollout}",
         "wire=float32"),
    # FSDP1 on one worker sends whole tensors.
    Case("whole weights", ROUNDING, "unpatched", "trainer.n_gpus_per_node=1", "wire=float32"),
    Case("two nodes", ROUNDING, "unpatched", "trainer.n_gpus_per_node=1 trainer.nnodes=2", "wire=bfloat16"),
    Case("FSDP2", ROUNDING, "unpatched", "trainer.n_gpus_per_node=1 {actor}.strategy=fsdp2", "wire=bfloat16"),
    Case("two workers", ROUNDING, "unpatched", "trainer.n_gpus_per_node=2", "wire=bfloat16"),
    *(Case(f"merged adapters by {rank}", C, state,
           f"++actor_rollout_ref.model.{rank}=4 ++actor_rollout_ref.model.lora.merge=true", f"wire={wire}")
      for rank in ("lora_rank", "lora.rank") for state, wire in (("unpatched", "bfloat16"), ("patched", "float32"))),

    Case("reward worker", having("reward_worker"), "patched",
         "reward_model.enable=true ++reward_model.use_reward_loop=false reward_model.dtype=float16",
         "reward_model.compute=float16"),
    Case("reward worker", having("reward_worker"), "unpatched",
         "reward_model.enable=true ++reward_model.use_reward_loop=false +reward_model.dtype=float16",
         effect={"reward_model.dtype": "is ignored by verl {release}: scores in bfloat16"}),
    Case("reward loop", having("reward_loop"), "patched",
         "reward_model.enable=true reward_model.rollout.name=vllm reward_model.dtype=float16",
         "reward_model.compute=bfloat16", "ignored", mend={"reward_model.dtype": "reward_model.rollout.dtype=float16"}),
    Case("reward server", without("reward_worker"), "unpatched",
         "reward.reward_model.enable=true reward.reward_model.rollout.dtype=float16", "reward_model.compute=float16"),
)
# fmt: on


@of_cases(*TRAINER)
def test_trainer(case: Case, release: str, state: str, examine: Examine):
    case.check(release, state, examine)


@of_cases(*ENGINES_OF_LEGACY_RELEASES)
def test_model_engine_of_legacy_releases(case: Case, release: str, state: str, examine: Examine):
    case.check(release, state, examine)


@of_cases(*WIRE_AND_SERVERS)
def test_wire_and_servers(case: Case, release: str, state: str, examine: Examine):
    case.check(release, state, examine)


@pytest.mark.parametrize(("release", "state"), of_states(ALL, "unpatched"))
def test_mapping_requests_its_keys(release: str, state: str, examine: Examine):
    node, rollout = f"{ENGINE}.mixed_precision", f"{ROLLOUT}.dtype=float16"
    by_key = examine(release, state, f"+{node}.param_dtype=fp16", rollout)
    assert examine(release, state, f"++{node}={{param_dtype:fp16}}", rollout).json() == by_key.json()


@pytest.mark.parametrize(("release", "state"), of_states(ALL, "patched"))
def test_settings_of_the_actors_scaler_are_its_own(release: str, state: str, examine: Examine):
    scaler = examine(release, state, "+precision=fp16", f"{ENGINE}.grad_scaler.init_scale=1024").scaler
    assert scaler["actor"]["init_scale"] == 1024 and scaler["critic"]["init_scale"] == 65536


@pytest.mark.parametrize(("release", "state"), of_states(ALL, "unpatched patched"))
def test_wire_in_the_masters_dtype_rounds_nothing(release: str, state: str, examine: Examine):
    diagnosis = examine(release, state, f"++{ENGINE}.model_dtype=bf16", f"{ROLLOUT}.dtype=float16")
    assert f"{ROLLOUT}.dtype" not in {finding.key for finding in diagnosis.findings}


def test_rounded_wire_is_that_of_its_line(examine: Examine):
    wire = examine(ROUNDING[-1], "unpatched").hops["wire"]
    assert wire.reason.startswith("workers/engine/fsdp/transformer_impl.py:")
