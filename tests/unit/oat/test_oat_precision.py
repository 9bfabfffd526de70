"""OAT's precision module by itself; requires only torch."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from support.oat_modules import Args, precision

REGIMES = {
    "fp16": (torch.float16, torch.float16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16_train_fp16_infer": (torch.bfloat16, torch.float16),
    "fp32": (torch.float32, torch.float32),
}


def settled(**given) -> Args:
    args = Args(**given)
    precision.settle_precision(args)
    return args


@pytest.mark.parametrize("regime", REGIMES)
def test_precision_key_sets_dtypes_of_learner_and_actors(regime):
    args = settled(precision=regime)
    trained, sampled = REGIMES[regime]
    assert precision.model_dtype(args.bf16, args.fp16) == trained
    assert precision.rollout_dtype(args) == sampled
    assert precision.vllm_dtype(args) == str(sampled).removeprefix("torch.")
    before = vars(args).copy()
    precision.settle_precision(args)
    assert vars(args) == before, "settling twice changes nothing"


@pytest.mark.parametrize(
    ("given", "regime"),
    [
        ({}, "bf16"),
        ({"bf16": False, "fp16": True}, "fp16"),
        ({"bf16": False}, "fp32"),
        ({"precision": "fp16", "bf16": False}, "fp16"),
        ({"precision": "fp16", "bf16": False, "fp16": True}, "fp16"),
        ({"precision": "fp32", "bf16": False}, "fp32"),
    ],
)
def test_oats_own_flags_resolve_to_a_regime(given, regime):
    assert settled(**given).precision == regime


def test_unresolved_arguments_map_to_vllms_dtype():
    assert precision.vllm_dtype(Args()) == "bfloat16"
    assert precision.vllm_dtype(Args(bf16=False, fp16=True)) == "float16"


@pytest.mark.parametrize(
    "given",
    [
        # Averaged gradients may accumulate in fp32 under ZeRO-2, and under ZeRO-1 where there is no fp16.
        {"precision": "fp16", "zero_stage": 2, "grad_accum_dtype": "fp32"},
        {"precision": "fp16", "zero_stage": 1, "grad_accum_dtype": None},
        {"precision": "bf16", "zero_stage": 1, "grad_accum_dtype": "fp32"},
        # A fixed scale has no first value.
        {"loss_scale": 2.0, "min_loss_scale": 32.0, "initial_scale_power": 4},
    ],
)
def test_valid_arguments_are_accepted(given):
    settled(**given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fp16": True}, ["precision=None", "bf16=True", "fp16=True", "both bf16 and fp16", "--no-bf16 --fp16"]),
        ({"precision": "bf16", "fp16": True}, ["precision=bf16", "fp16=True"]),
        ({"precision": "fp32", "fp16": True}, ["precision=fp32", "fp16=True"]),
        ({"precision": "bf16", "bf16": False}, ["precision=bf16", "bf16=False"]),
        ({"precision": "bf16_train_fp16_infer", "bf16": False}, ["precision=bf16_train_fp16_infer", "bf16=False"]),
        ({"precision": "half"}, ["precision=half", "fp16, bf16, bf16_train_fp16_infer, fp32"]),
        ({"precision": "fp16", "load_in_4bit": True}, ["precision=fp16", "load_in_4bit=True", "bf16"]),
        ({"precision": "fp32", "load_in_4bit": True}, ["precision=fp32", "load_in_4bit=True", "bf16"]),
        ({"precision": "fp32", "flash_attn": True}, ["precision=fp32", "flash_attn=True", "--no-flash_attn"]),
        *(
            ({"precision": "fp16", "zero_stage": stage, "grad_accum_dtype": "fp32"}, [f"zero_stage={stage}", "fp32"])
            for stage in (0, 1)
        ),
        ({"bf16": False, "flash_attn": True}, ["precision=fp32", "flash_attn=True", "--no-flash_attn"]),
        ({"loss_scale": -1.0}, ["loss_scale=-1.0", "0 (dynamic)"]),
        ({"loss_scale": math.inf}, ["loss_scale=inf"]),
        ({"loss_scale": math.nan}, ["loss_scale=nan"]),
        ({"initial_scale_power": -1}, ["initial_scale_power=-1", "0 to 32"]),
        ({"initial_scale_power": 33}, ["initial_scale_power=33", "0 to 32"]),
        ({"loss_scale_window": 0}, ["loss_scale_window=0", "1 or more"]),
        ({"hysteresis": 0}, ["hysteresis=0", "1 or more"]),
        ({"min_loss_scale": 0.0}, ["min_loss_scale=0.0", "positive"]),
        ({"min_loss_scale": 32.0, "initial_scale_power": 4}, ["min_loss_scale=32.0", "initial_scale_power=4", "16"]),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(given, words):
    with pytest.raises(ValueError) as refused:
        settled(**given)
    message = str(refused.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_deepspeed_sections_match_the_regime():
    off = {"enabled": False}
    assert precision.deepspeed_sections(settled()) == {"bf16": {"enabled": True}, "fp16": off}
    assert precision.deepspeed_sections(settled(precision="fp32")) == {"bf16": off, "fp16": off}
    scaler = {"loss_scale": 0.0, "initial_scale_power": 16, "loss_scale_window": 1000, "min_loss_scale": 1.0}
    scaler |= {"hysteresis": 3, "consecutive_hysteresis": False}
    sections = precision.deepspeed_sections(settled(precision="fp16", hysteresis=3))
    assert sections == {"bf16": off, "fp16": {"enabled": True, **scaler}}


@pytest.mark.parametrize("regime", ["fp16", "bf16", "fp32"])
def test_weight_in_the_rollouts_dtype_is_sent_without_copy(regime):
    weight = torch.full((2,), math.inf, dtype=REGIMES[regime][1])
    assert precision.on_the_wire("w", weight, settled(precision=regime)) is weight


def test_bf16_to_fp16_is_exact_in_the_documented_range():
    args = settled(precision="bf16_train_fp16_infer")
    every = torch.arange(2**15).to(torch.int16).view(torch.bfloat16)  # every non-negative value
    weights = every[(every.double() >= 2**-17) & (every.double() <= 65504)]
    assert len(weights) == 33 * 128  # 2**-17 to 2**15, seven bits each
    sent = precision.on_the_wire("w", weights, args)
    assert sent.dtype == torch.float16 and torch.equal(sent.double(), weights.double())
    small = every[every.double() < 2**-17]
    sent = precision.on_the_wire("w", small, args).double()
    assert (sent * 2**24 % 1 == 0).all() and not torch.equal(sent, small.double())
    assert (sent[small.double() < 2**-25] == 0).all()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (math.inf, "has an inf or NaN already in bfloat16"),
        (math.nan, "has an inf or NaN already in bfloat16"),
        (65536.0, ".*float16.*65504.*precision=bf16_train_fp16_infer"),
        (-1e30, ".*float16.*65504.*precision=bf16_train_fp16_infer"),
    ],
)
def test_weight_that_fp16_cannot_represent_is_refused_by_name(value, words):
    weight = torch.tensor([1.0, value], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=rf"layers\.0\.w: {words}"):
        precision.on_the_wire("layers.0.w", weight, settled(precision="bf16_train_fp16_infer"))


def test_integer_tensors_keep_their_dtype():
    ids = torch.tensor([70000])
    assert precision.on_the_wire("ids", ids, settled(precision="fp16")) is ids


def engine(**counts) -> SimpleNamespace:
    """Return a stub with the attributes of a DeepSpeedEngine that the module reads; other tests use the real one."""
    optimizer = SimpleNamespace(cur_scale=1024.0, overflow=False)
    known = {"fp16_enabled": lambda: True, "global_steps": 0, "skipped_steps": 0, "optimizer": optimizer}
    return SimpleNamespace(**{**known, **counts})


def test_scalers_are_reported_once_per_update():
    policy, critic = engine(), engine()
    learner = SimpleNamespace(model=SimpleNamespace(model=policy), critic=critic)
    assert precision.scaler_metrics(learner) == {}
    policy.global_steps, policy.skipped_steps, policy.optimizer.overflow = 5, 2, True
    first = {"train/loss_scale": 1024.0, "train/skipped_steps": 2.0, "train/overflow": 1.0}
    assert precision.scaler_metrics(learner) == first
    assert precision.scaler_metrics(learner) == {}
    policy.global_steps, policy.skipped_steps, policy.optimizer.overflow = 8, 3, False
    critic.global_steps = 1
    found = precision.scaler_metrics(learner)
    assert (found["train/skipped_steps"], found["train/overflow"]) == (1.0, 0.0)
    assert found["train/critic_skipped_steps"] == 0.0 and found["train/critic_loss_scale"] == 1024.0


def test_scalers_are_not_reported_without_fp16():
    learner = SimpleNamespace(model=SimpleNamespace(model=engine(global_steps=3, fp16_enabled=lambda: False)))
    assert precision.scaler_metrics(learner) == {}


def scaler(dynamic: bool = True, **values) -> SimpleNamespace:
    known = {"cur_scale": 65536.0, "cur_iter": 0, "last_overflow_iter": -1, "cur_hysteresis": 2}
    settings = {"min_scale": 1.0, "delayed_shift": 2, "scale_window": 1000}
    return SimpleNamespace(dynamic=dynamic, **{**known, **settings, **values})


def resumed(loaded: SimpleNamespace, configured: SimpleNamespace, **counts) -> SimpleNamespace:
    """Return an engine that was loaded with one scaler and resumed with another."""
    found = engine(**counts)
    found.optimizer.loss_scaler = loaded
    precision.resume_scaler(found, configured)
    return found


def test_resumed_scaler_has_the_checkpoints_state_and_the_runs_settings():
    loaded = scaler(cur_scale=256.0, cur_iter=40, last_overflow_iter=39, cur_hysteresis=4, scale_window=7)
    found = resumed(loaded, scaler(scale_window=3), global_steps=40, skipped_steps=9)
    now = found.optimizer.loss_scaler
    assert (now.cur_scale, now.cur_iter, now.last_overflow_iter, now.cur_hysteresis) == (256.0, 40, 39, 2)
    assert (now.scale_window, found.optimizer.dynamic_loss_scale) == (3, True)
    found.global_steps = 41  # skips before the checkpoint are not reported again
    learner = SimpleNamespace(model=SimpleNamespace(model=found))
    assert precision.scaler_metrics(learner)["train/skipped_steps"] == 0.0


def test_resumed_scale_is_at_least_min_loss_scale():
    found = resumed(scaler(cur_scale=256.0), scaler(min_scale=512.0))
    assert found.optimizer.loss_scaler.cur_scale == 512.0


def test_scaler_of_another_kind_is_not_resumed(capsys):
    configured = scaler()
    found = resumed(scaler(dynamic=False, cur_scale=64.0), configured)
    assert found.optimizer.loss_scaler is configured and configured.cur_scale == 65536.0
    assert found.optimizer.dynamic_loss_scale is True
    assert "fixed loss scale of 64.0" in capsys.readouterr().out


def test_fixed_scale_is_the_runs_own():
    found = resumed(scaler(dynamic=False, cur_scale=1.0), scaler(dynamic=False, cur_scale=128.0))
    assert found.optimizer.loss_scaler.cur_scale == 128.0


def test_largest_norm_excludes_skipped_updates():
    norms = [torch.tensor(value) for value in (1.0, math.nan, 3.0, math.inf)]
    assert precision.largest_norm(norms, settled(precision="fp16")) == {"policy_grad_norm": torch.tensor(3.0)}
    assert precision.largest_norm(norms[1::2], settled(precision="fp16")) == {}
    largest = precision.largest_norm(norms, settled())["policy_grad_norm"]
    assert largest.isnan(), "without a scaler, NaN counts as a norm"


def test_run_writes_args_json_and_metrics_jsonl(tmp_path, monkeypatch):
    args = settled(precision="fp16")
    args.max_sgd_steps, args.target_modules = math.inf, ["q_proj"]
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16))
    policy = engine(
        module=SimpleNamespace(parameters=lambda: [weight]),
        zero_optimization_stage=lambda: 2,
        get_data_types=lambda: (torch.float16, torch.float32),
        communication_data_type=torch.float16,
    )
    policy.optimizer.param_groups = [{"params": [torch.zeros(1)]}]
    learner = SimpleNamespace(args=args, strategy=SimpleNamespace(is_rank_0=lambda: True), save_path=tmp_path, steps=0)
    learner.model, learner.actors = SimpleNamespace(model=policy), [1]
    monkeypatch.setattr(precision, "patch_stamp", lambda: {"release": "0.2.4"})
    precision.report_precision(learner)
    report = json.loads((tmp_path / "args.json").read_text(), parse_constant=pytest.fail)
    assert report["precision"] == "fp16" and report["stamp"] == {"release": "0.2.4"}
    assert report["args"]["max_sgd_steps"] == "inf" and report["args"]["target_modules"] == ["q_proj"]
    actor = {"strategy": "zero2", "compute": "float16", "accumulate": "float32", "reduce": "float16"}
    rollout = {"strategy": "vllm", "wire": "float16", "rollout": "float16"}
    assert report["effective"] == {"actor": actor | {"master": "float32", "loss_scaling": True}, "rollout": rollout}
    precision.write_metrics(learner, {"eval/score": 0.5})
    precision.write_metrics(learner, {"train/learning_round": 1.0, "train/x": math.nan, "train/y": math.inf})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 0, "data": {"eval/score": 0.5}},
        {"step": 1, "data": {"train/learning_round": 1.0, "train/x": None, "train/y": None}},
    ]


def test_other_ranks_write_nothing(tmp_path):
    precision.report_precision(SimpleNamespace(strategy=SimpleNamespace(is_rank_0=lambda: False), save_path=tmp_path))
    assert not list(tmp_path.iterdir())
