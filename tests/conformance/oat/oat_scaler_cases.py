"""Cases of OAT: the regimes' dtypes, refused arguments, the loss scaler and its checkpoints."""

import contextlib
import functools
import math
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from oat.algorithms.ppo import PPOLearner
from oat_learner import (
    FP16,
    NO_TIS,
    RANK,
    TIS,
    Unparsed,
    fp16,
    learned,
    logged,
    made,
    name,
    near,
    parsed,
    poisoned,
    rollout_dtype,
    same,
    scale,
    state,
)


def dtypes(*options: str) -> str:
    """Return the dtypes in which the learner's engines compute, and the one requested of the actors."""
    learner = made("--critic_type=ppo", "--beta=0.1", *options)
    facts = []
    for role, model in (("actor", learner.model), ("ref", learner.ref_model), ("critic", learner.critic)):
        facts.append(f"{role} {', '.join(sorted({name(p.dtype) for p in model.parameters()}))}")
    masters = {name(p.dtype) for group in learner.optimizer.param_groups for p in group["params"]}
    return ", ".join([*facts, f"rollout {rollout_dtype(learner.args)}", f"masters {', '.join(masters)}"])


def one_key() -> str:
    """Compare the arguments that ``--precision`` sets with those of OAT's pair of booleans."""
    spellings = {"fp16": FP16, "bf16": [], "fp32": ["--no-bf16"]}
    facts = []
    for regime, pair in spellings.items():
        ours, theirs = (given(*options) for options in ([f"--precision={regime}"], pair))
        facts.append(f"{regime} {'as the pair' if ours == theirs else 'OTHERWISE'}")
    return ", ".join(facts)


def given(*options: str) -> dict:
    args = vars(parsed(*options))
    return {key: value for key, value in args.items() if key != "save_path"}


REFUSED = {
    "both": (["--bf16", "--fp16"], ["bf16", "fp16"]),
    "precision and fp16": (["--precision=bf16", "--fp16"], ["precision", "fp16", "bf16"]),
    "precision and bf16": (["--precision=bf16", "--no-bf16"], ["precision", "bf16"]),
    "initial_scale_power": ([*FP16, "--initial_scale_power=99"], ["initial_scale_power", "99", "32"]),
    "loss_scale": ([*FP16, "--loss_scale=-1"], ["loss_scale", "-1", "0"]),
    "min_loss_scale": (
        [*FP16, "--min_loss_scale=1024", "--initial_scale_power=2"],
        ["min_loss_scale", "1024", "initial_scale_power", "2"],
    ),
    "fp32 with flash attention": (["--no-bf16", "--flash_attn"], ["fp32", "flash_attn=True", "--no-flash_attn"]),
    "rollout_rs without threshold": (["--rollout_rs=sequence", *NO_TIS], ["rollout_rs", "rollout_rs_threshold"]),
}
if TIS:
    REFUSED["two weights"] = (["--rollout_is=token"], ["tis_c", "rollout_is"])


def refusals() -> str:
    """Return the bad input that is not refused by one line that names keys and values."""
    facts = []
    for what, (options, words) in REFUSED.items():
        try:
            parsed(*options)
            facts.append(f"takes {what}")
        except Unparsed as error:
            facts.append(f"{what}: {error}")
        except Exception as error:
            if "\n" in str(error) or not all(word in str(error) for word in words):
                facts.append(f"{what}: {type(error).__name__}: {error}")
    return "; ".join(facts) or "refuses all"


def first_updates() -> str:
    """Return the first scale, and the number of skips in the first four updates, by default."""
    learner = made(*FP16)
    start, before = scale(learner.model.model), state(learner.model.model)
    for seed in range(4):
        learned(learner, seed)
    moved = "the weights move" if not same(before, state(learner.model.model)) else "THE WEIGHTS STAY"
    return f"scale starts at 2**{math.log2(start):g}, {learner.model.model.skipped_steps} of 4 skipped, {moved}"


@functools.cache
def story() -> list[dict]:
    """Run six fp16 updates of actor and critic; record for each what changed, the scales, rates and metrics."""
    learner = fp16("--critic_type=ppo")
    roles = {
        "actor": (learner.model.model, learner.scheduler),
        "critic": (learner.critic, learner.critic_scheduler),
    }
    chapters = []
    for seed, (role, value) in enumerate(
        [(None, None), ("actor", math.inf), (None, None), ("critic", math.nan), ("actor", math.nan), (None, None)]
    ):
        before = {key: (state(engine), scale(engine), rate.get_last_lr()) for key, (engine, rate) in roles.items()}
        with poisoned(roles[role][0], value) if role else contextlib.nullcontext():
            metrics = logged(learner, seed)
        chapter = {"metrics": metrics}
        for key, (engine, rate) in roles.items():
            tensors, old, lr = before[key]
            chapter[key] = {
                "skipped": same(tensors, state(engine)),
                "finite": all(bool(tensor.isfinite().all()) for tensor in state(engine)),
                "scale": scale(engine) / old,
                "lr_unchanged": rate.get_last_lr() == lr,
            }
        chapters.append(chapter)
    return chapters


def overflow(role: str) -> str:
    """Return whether each update with an inf or NaN in a gradient of rank 1 was skipped, and the scale's factor."""
    facts = []
    for chapter in story():
        one = chapter[role]
        facts.append(
            f"{'skipped' if one['skipped'] else 'taken'}{'' if one['finite'] else ' NOT FINITE'} x{one['scale']:g}"
        )
    return ", ".join(facts)


def learning_rate() -> str:
    """Return whether the schedule advances after a skipped update."""
    facts = []
    for role in ("actor", "critic"):
        taken = {chapter[role]["lr_unchanged"] for chapter in story() if not chapter[role]["skipped"]}
        skipped = {chapter[role]["lr_unchanged"] for chapter in story() if chapter[role]["skipped"]}
        facts.append(
            f"{role} {'held' if skipped == {True} else 'MOVES ON'}{' as where taken' if taken & skipped else ''}"
        )
    return ", ".join(facts)


def scaler_metrics() -> str:
    """Return the reported scale, skipped steps and overflow of each update."""
    facts = []
    for role, prefix in (("actor", "train/"), ("critic", "train/critic_")):
        keys = [f"{prefix}{key}" for key in ("loss_scale", "skipped_steps", "overflow")]
        metrics = [chapter["metrics"] for chapter in story()]
        texts = ["/".join(f"{one[key]:g}" if key in one else "-" for key in keys) for one in metrics]
        facts.append(f"{role} {', '.join(texts)}")
    return "; ".join(facts)


def norms(make: Callable[[], PPOLearner]) -> str:
    """Compare an fp16 learner's reported norm with that of an fp32 learner of the same weights and transitions."""
    learner, facts = make(), []
    reference = logged(made("--no-bf16"), 0)["train/policy_grad_norm"]
    for what in ("taken", "skipped", "taken again"):
        with poisoned(learner.model.model) if what == "skipped" else contextlib.nullcontext():
            norm = logged(learner, 0).get("train/policy_grad_norm")
        if norm is None:
            facts.append(f"{what}: absent")
        elif not math.isfinite(norm):
            facts.append(f"{what}: NOT FINITE")
        elif what == "taken":
            as_in_fp32 = near(norm, reference, 0.02)
            facts.append(f"{what}: as in fp32" if as_in_fp32 else f"{what}: {norm / reference:.4g} TIMES")
        else:
            facts.append(f"{what}: finite")
    return ", ".join(facts)


def storm() -> str:
    """Overflow in every update, down to the least scale."""
    learner = fp16(power=10, least=256)
    for update in range(1, 6):
        try:
            with poisoned(learner.model.model):
                learned(learner, update)
        except Exception as error:
            return f"ends in update {update}: {str(error).splitlines()[0]}"
    return f"goes on at scale {scale(learner.model.model):g}"


def scaler_keys() -> str:
    """Return the scalers' settings where each is set by its argument, then where the scale is fixed."""
    dynamic = {"initial_scale_power": 12, "loss_scale_window": 7, "hysteresis": 3, "min_loss_scale": 4}
    learner = made(*FP16, "--critic_type=ppo", "--consecutive_hysteresis", *(f"--{k}={v}" for k, v in dynamic.items()))
    facts = []
    for role, engine in (("actor", learner.model.model), ("critic", learner.critic)):
        one = engine.optimizer.loss_scaler
        names = ("cur_scale", "scale_window", "delayed_shift", "consecutive_hysteresis", "min_scale")
        facts.append(f"{role} {', '.join(f'{getattr(one, key):g}' for key in names)}")
    fixed = made(*FP16, "--loss_scale=128").model.model.optimizer.loss_scaler
    return "; ".join([*facts, f"fixed {fixed.cur_scale:g}, {'dynamic' if fixed.dynamic else 'not dynamic'}"])


def checkpoint() -> str:
    """Save by ``eval_and_log`` after an overflow and a taken update; load into a new learner as ``run`` does."""
    saving = ["--save_steps=1", "--save_ckpt", "--eval_steps=-1"]
    learner = fp16(*saving)
    learned(learner, 0)
    with poisoned(learner.model.model):
        learned(learner, 1)
    learner.eval_and_log(learned(learner, 2), save=True)
    folder = [str(next(Path(learner.save_path).glob("checkpoints"), ""))] if RANK == 0 else [None]
    dist.broadcast_object_list(folder)
    fresh = fp16(*saving)
    fresh.strategy.load_ckpt(fresh.model.model, folder[0], None)
    facts = ["state comes back" if same(state(learner.model.model), state(fresh.model.model)) else "STATE LOST"]
    ours, theirs = scale(learner.model.model), scale(fresh.model.model)
    facts.append("scale comes back" if ours == theirs else f"scale {ours:g} resumes at {theirs:g}")
    for each in (learner, fresh):
        learned(each, 3)
    facts.append(
        "same next step" if same(state(learner.model.model), state(fresh.model.model)) else "ANOTHER NEXT STEP"
    )
    return ", ".join(facts)
