"""OAT's precision and mismatch modules, without OAT; they require only torch."""

import json
import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support.oat_modules import Args, mismatch, precision

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
    weight, ids = torch.full((2,), math.inf, dtype=sampled), torch.tensor([70000])
    assert trained != sampled or precision.on_the_wire("w", weight, args) is weight
    assert precision.on_the_wire("ids", ids, args) is ids


def test_valid_arguments_are_accepted():
    # Averaged gradients may accumulate in fp32 under ZeRO-2, and under ZeRO-1 where there is no fp16.
    settled(precision="fp16", zero_stage=2, grad_accum_dtype="fp32")
    settled(precision="bf16", zero_stage=1, grad_accum_dtype="fp32")
    settled(loss_scale=2.0, min_loss_scale=32.0, initial_scale_power=4)  # a fixed scale has no first value


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fp16": True}, ["precision=None", "bf16=True", "fp16=True", "both bf16 and fp16", "--no-bf16 --fp16"]),
        ({"precision": "bf16", "fp16": True}, ["precision=bf16", "fp16=True"]),
        ({"precision": "bf16", "bf16": False}, ["precision=bf16", "bf16=False"]),
        ({"precision": "half"}, ["precision=half", "fp16, bf16, bf16_train_fp16_infer, fp32"]),
        ({"precision": "fp32", "load_in_4bit": True}, ["precision=fp32", "load_in_4bit=True", "bf16"]),
        ({"precision": "fp32", "flash_attn": True}, ["precision=fp32", "flash_attn=True", "--no-flash_attn"]),
        ({"precision": "fp16", "zero_stage": 0, "grad_accum_dtype": "fp32"}, ["zero_stage=0", "fp32"]),
        ({"precision": "fp16", "zero_stage": 1, "grad_accum_dtype": "fp32"}, ["zero_stage=1", "fp32"]),
        ({"loss_scale": -1.0}, ["loss_scale=-1.0", "0 (dynamic)"]),
        ({"loss_scale": math.nan}, ["loss_scale=nan"]),
        ({"initial_scale_power": 33}, ["initial_scale_power=33", "0 to 32"]),
        ({"loss_scale_window": 0}, ["loss_scale_window=0", "1 or more"]),
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
    scaler |= {"hysteresis": 2, "consecutive_hysteresis": False}  # DeepSpeed's documented defaults
    for given in ({}, {"hysteresis": 3}):
        sections = precision.deepspeed_sections(settled(precision="fp16", **given))
        assert sections == {"bf16": off, "fp16": {"enabled": True, **scaler, **given}}


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
        (65536.0, ".*float16.*65504.*precision=bf16_train_fp16_infer"),
    ],
)
def test_weight_that_fp16_cannot_represent_is_refused_by_name(value, words):
    weight = torch.tensor([1.0, value], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=rf"layers\.0\.w: {words}"):
        precision.on_the_wire("layers.0.w", weight, settled(precision="bf16_train_fp16_infer"))


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
    policy.global_steps, policy.fp16_enabled = 9, lambda: False
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
    counted = resumed(scaler(cur_hysteresis=1), scaler(delayed_shift=3)).optimizer.loss_scaler
    assert counted.cur_hysteresis == 1, "an overflow before the checkpoint counts"
    found.global_steps = 41  # skips before the checkpoint are not reported again
    learner = SimpleNamespace(model=SimpleNamespace(model=found))
    assert precision.scaler_metrics(learner)["train/skipped_steps"] == 0.0


def test_resumed_scale_is_at_least_min_loss_scale_and_a_fixed_one_the_runs_own(capsys):
    assert resumed(scaler(cur_scale=256.0), scaler(min_scale=512.0)).optimizer.loss_scaler.cur_scale == 512.0
    fixed = scaler(dynamic=False, cur_scale=64.0)
    assert resumed(fixed, scaler(dynamic=False, cur_scale=128.0)).optimizer.loss_scaler.cur_scale == 128.0
    configured = scaler()
    found = resumed(fixed, configured).optimizer
    assert found.loss_scaler is configured and configured.cur_scale == 65536.0 and found.dynamic_loss_scale is True
    assert "fixed loss scale of 64.0" in capsys.readouterr().out


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
    precision.report_precision(SimpleNamespace(strategy=SimpleNamespace(is_rank_0=lambda: False), save_path=tmp_path))
    assert not list(tmp_path.iterdir()), "other ranks write nothing"
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


@dataclass
class PPOArgs(mismatch.MismatchArgs):
    tis_c: float | None = None
    reinforce_update: bool = False


# Two responses, of two tokens and of one; values outside the mask must have no effect.
LOGPS = torch.tensor([[-1.0, -2.0, 9.0], [7.0, -0.5, math.nan]])
ACTOR = torch.tensor([[-1.5, -1.8, 0.0], [0.0, -2.5, 0.0]])
MASK = torch.tensor([[True, True, False], [False, True, False]])
LOSS = torch.tensor([[1.0, 2.0, 0.0], [0.0, 4.0, 0.0]])


@pytest.mark.parametrize(
    ("given", "weights"),
    [
        ({"rollout_is": "token", "rollout_is_threshold": math.inf}, [math.exp(0.5), math.exp(-0.2), math.exp(2.0)]),
        ({"rollout_is": "token"}, [math.exp(0.5), math.exp(-0.2), 2.0]),
        ({"rollout_is": "sequence"}, [math.exp(0.3), math.exp(0.3), 2.0]),
        ({"rollout_rs": "sequence", "rollout_rs_threshold": 3.0}, [1.0, 1.0, 0.0]),
        (
            {"rollout_is": "sequence", "rollout_rs": "sequence", "rollout_rs_threshold": 3.0},
            [math.exp(0.3), math.exp(0.3), 0.0],
        ),
    ],
)
def test_loss_is_multiplied_by_the_weights(given, weights):
    found = mismatch.reweigh(PPOArgs(**given), LOSS, LOGPS, ACTOR, MASK)[MASK]
    assert found.tolist() == pytest.approx((LOSS[MASK] * torch.tensor(weights)).tolist(), rel=1e-6)
    assert mismatch.reweigh(PPOArgs(), LOSS, LOGPS, ACTOR, MASK) is LOSS


def test_weight_is_clamped_to_finite_values():
    """An inf times a zero advantage, or times the zero of a masked response, would be NaN."""
    logps, actor, mask = torch.tensor([[0.0, 0.0]]), torch.full((1, 2), -200.0), torch.ones(1, 2, dtype=torch.bool)
    for level in ("token", "sequence"):
        args = PPOArgs(rollout_is=level, rollout_is_threshold=math.inf)
        found = mismatch.reweigh(args, torch.tensor([[0.0, 1.0]]), logps, actor, mask)
        assert found.tolist()[0] == pytest.approx([0.0, math.exp(20)])
    args = PPOArgs(rollout_rs="sequence", rollout_rs_threshold=2.0)
    loss = torch.full((1, 2), math.inf, requires_grad=True)
    left_out = mismatch.reweigh(args, loss, logps, actor, mask)
    left_out.sum().backward()
    assert not left_out.any() and not loss.grad.any()


def test_policy_gradient_treats_importance_weight_as_constant():
    """d/dtheta of -A w log pi is -A w: no gradient flows through the weight."""
    logps = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    actor, advantage = torch.tensor([[-1.5, -1.8]]), 3.0
    args = PPOArgs(reinforce_update=True, rollout_is="sequence", rollout_is_threshold=math.inf)
    mismatch.reweigh(args, -advantage * logps, logps, actor, torch.ones(1, 2, dtype=torch.bool)).sum().backward()
    assert logps.grad.tolist()[0] == pytest.approx([-advantage * math.exp(0.3)] * 2)


RATIOS = [0.5, -0.2, 2.0]
DIFFS = [abs(math.exp(actor) - math.exp(logp)) for actor, logp in zip(ACTOR[MASK], LOGPS[MASK], strict=True)]
BY_HAND = {
    "rollout_probs_diff_mean": sum(DIFFS) / 3,
    "rollout_probs_diff_max": max(DIFFS),
    "rollout_k3_kl": sum(math.exp(ratio) - 1 - ratio for ratio in RATIOS) / 3,
    "kl_sample_train_v1": -sum(RATIOS) / 3,
    "kl_sample_train_v2": 0.5 * sum(ratio**2 for ratio in RATIOS) / 3,
}


def test_metrics_match_those_by_hand():
    for threshold, left_out in ((8.0, 0.0), (3.0, 1 / 3), (1.2, 1.0)):
        args = PPOArgs(rollout_is="sequence", rollout_rs="sequence", rollout_rs_threshold=threshold)
        found = mismatch.mismatch_metrics(args, LOGPS, ACTOR, MASK)
        weights = {"rollout_is_mean": (2 * math.exp(0.3) + 2.0) / 3, "rollout_rs_masked_fraction": left_out}
        assert {name: value.item() for name, value in found.items()} == pytest.approx(BY_HAND | weights, rel=1e-5)


def rank(of: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=of, world_size=2)
    found = mismatch.mismatch_metrics(PPOArgs(), LOGPS[of : of + 1], ACTOR[of : of + 1], MASK[of : of + 1])
    torch.save({name: value.item() for name, value in found.items()}, f"{folder}/{of}")
    dist.destroy_process_group()


@pytest.mark.subprocess
def test_metrics_of_two_ranks_are_averaged_over_tokens(tmp_path):
    mp.spawn(rank, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / str(of)) for of in range(2))
    for name in ("rollout_probs_diff_mean", "rollout_probs_diff_max", "rollout_k3_kl"):
        assert first[name] == second[name] == pytest.approx(BY_HAND[name], rel=1e-5)
    # OAT computes its own metrics per rank and averages them.
    assert first["kl_sample_train_v1"] == pytest.approx(-0.15) and second["kl_sample_train_v1"] == pytest.approx(-2.0)


def test_rollout_logps_are_aligned_with_the_mask():
    found = mismatch.rollout_logps([[-1.5, -1.8], [-2.5]], MASK)
    assert torch.equal(found, ACTOR)
    found = mismatch.rollout_logps([None, None], MASK)  # a dry run
    assert found[MASK].isnan().all() and (found[~MASK] == 0).all()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rollout_is": "tokens"}, ["rollout_is=tokens", "token, sequence or None"]),
        ({"rollout_rs": "token", "rollout_rs_threshold": 2.0}, ["rollout_rs=token", "sequence or None"]),
        ({"rollout_is": "token", "rollout_is_threshold": 0.0}, ["rollout_is_threshold=0.0", "positive"]),
        ({"rollout_rs": "sequence"}, ["rollout_rs=sequence", "rollout_rs_threshold=None"]),
        ({"rollout_rs_threshold": 2.0}, ["rollout_rs=None", "rollout_rs_threshold=2.0"]),
        ({"rollout_rs": "sequence", "rollout_rs_threshold": -1.0}, ["rollout_rs_threshold=-1.0"]),
        ({"rollout_is": "token", "tis_c": 2.0}, ["rollout_is=token", "tis_c=2.0", "--tis_c None"]),
    ],
)
def test_invalid_settings_alone_are_refused(given, words):
    with pytest.raises(ValueError) as refused:
        mismatch.check_mismatch(PPOArgs(**given))
    message = str(refused.value)
    assert "\n" not in message and all(word in message for word in words), message
    mismatch.check_mismatch(PPOArgs(tis_c=2.0, rollout_is="sequence", reinforce_update=True))  # tis_c is not read there
    mismatch.check_mismatch(PPOArgs(tis_c=2.0, rollout_rs="sequence", rollout_rs_threshold=2.0))  # a mask is no weight
    mismatch.check_mismatch(object())  # DPO's arguments have no such keys
