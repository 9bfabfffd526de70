"""What one release of OAT does, seen from its own learner on two gloo ranks; imported by ``oat_runner`` in each rank.

Each case is a behaviour of ``oat_behaviours`` and returns a short text of facts, no verdict: a pristine tree runs the
same cases, and what it does instead is compared with what was predicted.
"""

import contextlib
import copy
import functools
import hashlib
import importlib
import io
import itertools
import json
import math
import os
import random
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import oat
import torch
import torch.distributed as dist
from oat import interface, types
from oat.algorithms import ppo
from oat.args import default_args_validation, get_default_args
from oat.learners import base
from oat.utils import distributed

PATCHED = (Path(oat.__path__[0]) / "utils/precision.py").exists()
RANK = int(os.environ["RANK"])
# 0.1.4 calls a transition a trajectory.
Transition = getattr(types, "TransitionData", None) or types.TrajectoryData
PATHS = SimpleNamespace()  # model, data, out, and the connection to the actor: set by run
FP16 = ["--no-bf16", "--fp16"]
# 0.1.4 and 0.2.0 have no truncated importance sampling of their own; later it is on unless told otherwise.
TIS = hasattr(ppo.PPOArgs, "tis_c")
NO_TIS = ["--tis_c=None"] if TIS else []
# Each rank names its run's folder by its own clock, to the second: a border of seconds would part their checkpoints.
base.datetime = SimpleNamespace(now=lambda: datetime(2026, 1, 1))


class Unparsed(Exception):
    """The release's parser refuses its arguments."""


def parsed(*options: str) -> ppo.PPOArgs:
    """The release's own arguments, as typed and then validated, for the tiny model on two ranks."""
    usual = {
        "pretrain": PATHS.model,
        "prompt_data": PATHS.data,
        "save_path": f"{PATHS.out}/run-{next(COUNT)}",
        "gpus": 2,
        "num_samples": 2,
        "generate_max_length": 8,
        "prompt_max_length": 4,
        "train_batch_size": 4,
        "train_batch_size_per_device": 1,
        "rollout_batch_size": 4,
        "rollout_batch_size_per_device": 2,
        "learning_rate": 1e-2,
        "critic_learning_rate": 1e-2,
        "lr_warmup_ratio": 0.5,
        "beta": 0,
    }
    sys.argv = ["oat", "--no-flash_attn", "--collocate", *(f"--{key}={value}" for key, value in usual.items())]
    sys.argv += map(str, options)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            args = get_default_args(ppo.PPOArgs)
    except SystemExit:
        unknown = re.search(r"Unrecognized options:[\s│]*(--\w+)", said.getvalue())
        raise Unparsed(f"no {unknown[1]}" if unknown else said.getvalue()) from None
    args.algo = "PPO"
    return default_args_validation(args)


COUNT = itertools.count()  # of folders, the same on each rank


def new(learner: type[ppo.PPOLearner], *options: str) -> ppo.PPOLearner:
    """A learner of this class, which has built nothing yet, as the program that OAT launches makes it."""
    args = parsed(*options)
    args.learner_gpus_per_group = 2  # by get_program
    return learner(2, RANK, 0, "127.0.0.1", "29500", False, args, [], None)


def made(*options: str) -> ppo.PPOLearner:
    """The release's learner, its models and engines built; what its ``run`` sets before the first step is set."""
    learner = new(ppo.PPOLearner, *options)
    learner._init(learner.args, [])
    learner.steps, learner.start_time, learner.actor_info = 1, time.time(), {}
    learner.gradient_update_st = time.time()
    return learner


def transitions(seed: int, rows: int = 2, log_prob: float = -5.5) -> list:
    """``rows`` made answers to ``rows / 2`` prompts, different on each rank: one of each pair is right."""
    draw = random.Random(10 * seed + RANK)
    made = []
    for row in range(rows):
        response = [draw.randrange(256) for _ in range(5 + (row + RANK) % 3)]
        made.append(
            Transition(
                prompt="1+1=",
                prompt_ids=[draw.randrange(256) for _ in range(4)],
                response="2",
                response_ids=response,
                response_logprobs=[log_prob + draw.random() / 10 for _ in response],
                rewards=[0.0] * (len(response) - 1) + [float(row % 2)],
                info={},
            )
        )
    return made


def learned(learner, seed: int, rows: int = 2, **given) -> dict:
    """The metrics of one round of ``learn`` on made transitions."""
    learner.pi_buffer.clear()
    learner.process_feedback_data(transitions(seed, rows, **given))
    return learner.learn(seed + 1)


def state(engine) -> list[torch.Tensor]:
    """Weights and Adam state of this rank, as clones."""
    tensors = [parameter.detach().clone() for parameter in engine.module.parameters()]
    for entry in engine.optimizer.optimizer.state.values():
        tensors += [value.detach().clone() for value in entry.values()]
    return tensors


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@contextlib.contextmanager
def poisoned(engine, value: float = math.inf):
    """One element of a gradient of rank 1 is ``value``."""
    parameter = next(engine.module.parameters())

    def poison(gradient):
        gradient = gradient.clone()
        gradient.view(-1)[0] = value
        return gradient

    handle = parameter.register_hook(poison) if RANK == 1 else None
    yield
    if handle:
        handle.remove()


def scale(engine) -> float:
    return engine.optimizer.loss_scale


def fp16(*options: str, power: int = 10, least: int = 1):
    """A learner in fp16 whose dynamic scale starts at ``2**power`` and is halved at each overflow, down to ``least``.

    An unpatched release has no arguments for that: it is given its own scaler with these values.
    """
    if PATCHED:
        settings = [f"--initial_scale_power={power}", "--hysteresis=1", f"--min_loss_scale={least}"]
        return made(*FP16, *settings, *options)
    learner = made(*FP16, *options)
    for engine in filter(None, (learner.model.model, learner.critic)):  # the critic is its engine
        engine.optimizer.loss_scaler.cur_scale = 2.0**power
        engine.optimizer.loss_scaler.min_scale = least
    return learner


def logged(learner, seed: int, **given) -> dict:
    """What a round of ``learn`` and then ``eval_and_log`` report, as rank 0 shows it."""
    shown = []
    learner.strategy.pprint = shown.append
    learner.eval_and_log(learned(learner, seed, **given))
    learner.steps += 1
    reported = [shown[-1] if shown else None]
    dist.broadcast_object_list(reported)
    return reported[0]


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def near(a: float, b: float, tolerance: float = 1e-3) -> bool:
    return abs(a - b) <= tolerance * abs(b)


# ---------------------------------------------------------------------------------------------------------------------


def dtypes(*options: str) -> str:
    """In what the learner's engines compute, and what the actors are asked for."""
    learner = made("--critic_type=ppo", "--beta=0.1", *options)
    facts = []
    for role, model in (("actor", learner.model), ("ref", learner.ref_model), ("critic", learner.critic)):
        facts.append(f"{role} {', '.join(sorted({name(p.dtype) for p in model.parameters()}))}")
    masters = {name(p.dtype) for group in learner.optimizer.param_groups for p in group["params"]}
    return ", ".join([*facts, f"rollout {asked(learner.args)}", f"masters {', '.join(masters)}"])


def asked(args) -> str:
    """The dtype that the actors' vLLM is asked for, by the program that OAT hands to launchpad."""
    nodes = []
    program = SimpleNamespace(add_node=lambda node, label: nodes.append(node))

    def record(*node, **named):
        return node

    interface.lp = SimpleNamespace(Program=lambda name: program, CourierNode=record, PyClassNode=record)
    interface.local_multi_processing = SimpleNamespace(PythonProcess=record)
    interface.get_program(copy.copy(args), ppo.PPOLearner, ppo.PPOActor)
    (dtype,) = {node[2]["dtype"] for node in nodes if node[0] is ppo.PPOActor}
    return dtype


def dtype_fp16() -> str:
    return dtypes(*FP16)


def dtype_bf16() -> str:
    return dtypes()


def dtype_fp32() -> str:
    return dtypes("--no-bf16")


def dtype_bf16_train_fp16_infer() -> str:
    return dtypes("--precision=bf16_train_fp16_infer")


def one_key() -> str:
    """Does ``--precision`` say what OAT's pair of booleans says?"""
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
    """Which bad input is refused by one line that names keys and values."""
    facts = []
    for what, (options, said) in REFUSED.items():
        try:
            parsed(*options)
            facts.append(f"takes {what}")
        except Unparsed as error:
            facts.append(f"{what}: {error}")
        except Exception as error:
            if "\n" in str(error) or not all(part in str(error) for part in said):
                facts.append(f"{what}: {type(error).__name__}: {error}")
    return "; ".join(facts) or "refuses all"


def first_updates() -> str:
    """What becomes of the first four updates by default."""
    learner = made(*FP16)
    start, before = scale(learner.model.model), state(learner.model.model)
    for seed in range(4):
        learned(learner, seed)
    moved = "the weights move" if not same(before, state(learner.model.model)) else "THE WEIGHTS STAY"
    return f"scale starts at 2**{math.log2(start):g}, {learner.model.model.skipped_steps} of 4 skipped, {moved}"


@functools.cache
def story() -> list[dict]:
    """Six updates of actor and critic in fp16: of each, what is the same afterwards, scales, rates and metrics."""
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
                "held": rate.get_last_lr() == lr,
            }
        chapters.append(chapter)
    return chapters


def overflow(role: str) -> str:
    """An inf or NaN in one gradient of rank 1: weights and Adam state, and the scale."""
    facts = []
    for chapter in story():
        one = chapter[role]
        facts.append(
            f"{'skipped' if one['skipped'] else 'taken'}{'' if one['finite'] else ' NOT FINITE'} x{one['scale']:g}"
        )
    return ", ".join(facts)


def overflow_actor() -> str:
    return overflow("actor")


def overflow_critic() -> str:
    return overflow("critic")


def learning_rate() -> str:
    """Does the schedule advance after a skipped update?"""
    facts = []
    for role in ("actor", "critic"):
        taken = {chapter[role]["held"] for chapter in story() if not chapter[role]["skipped"]}
        skipped = {chapter[role]["held"] for chapter in story() if chapter[role]["skipped"]}
        facts.append(
            f"{role} {'held' if skipped == {True} else 'MOVES ON'}{' as where taken' if taken & skipped else ''}"
        )
    return ", ".join(facts)


def scaler_metrics() -> str:
    """What is reported of the loss scalers, update by update: scale, skipped steps, overflow."""
    facts = []
    for role, prefix in (("actor", "train/"), ("critic", "train/critic_")):
        keys = [f"{prefix}{key}" for key in ("loss_scale", "skipped_steps", "overflow")]
        seen = [chapter["metrics"] for chapter in story()]
        told = ["/".join(f"{one[key]:g}" if key in one else "-" for key in keys) for one in seen]
        facts.append(f"{role} {', '.join(told)}")
    return "; ".join(facts)


def norms(learner) -> str:
    """The norm that an fp16 learner reports, beside that of an fp32 learner with the same weights and transitions."""
    reference, facts = logged(made("--no-bf16"), 0)["train/policy_grad_norm"], []
    for what in ("taken", "skipped", "taken again"):
        with poisoned(learner.model.model) if what == "skipped" else contextlib.nullcontext():
            seen = logged(learner, 0).get("train/policy_grad_norm")
        if seen is None:
            facts.append(f"{what}: absent")
        elif not math.isfinite(seen):
            facts.append(f"{what}: NOT FINITE")
        elif what == "taken":
            as_in_fp32 = near(seen, reference, 0.02)
            facts.append(f"{what}: as in fp32" if as_in_fp32 else f"{what}: {seen / reference:.4g} TIMES")
        else:
            facts.append(f"{what}: finite")
    return ", ".join(facts)


def gradient_norm() -> str:
    return norms(fp16())


def gradient_norm_zero_0() -> str:
    return norms(made(*FP16, "--initial_scale_power=10", "--hysteresis=1", "--zero_stage=0"))


def gradient_norm_zero_1() -> str:
    return norms(made(*FP16, "--initial_scale_power=10", "--hysteresis=1", "--zero_stage=1"))


def storm() -> str:
    """Overflow upon overflow, down to the least scale."""
    learner = fp16(power=10, least=256)
    for update in range(1, 6):
        try:
            with poisoned(learner.model.model):
                learned(learner, update)
        except Exception as error:
            return f"ends in update {update}: {str(error).splitlines()[0]}"
    return f"goes on at scale {scale(learner.model.model):g}"


def scaler_keys() -> str:
    """The scalers where every setting is given by its argument, then where the scale is fixed."""
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
    """Saved by ``eval_and_log`` after an overflow and a taken update, loaded by a new learner as ``run`` does it."""
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


def by_hand(learner, rows: list) -> list[dict[str, torch.Tensor]]:
    """Of each made transition: the actor's and the learner's log-probabilities of its response, fp32, and gradients."""
    model = learner.model.model.module
    answers = []
    for row in rows:
        ids = torch.tensor([list(row.prompt_ids) + list(row.response_ids)])
        logits = model(ids).logits[0, :-1].float()
        taken = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        answers.append({"learner": taken[len(row.prompt_ids) - 1 :], "actor": torch.tensor(row.response_logprobs)})
    return answers


def mismatch() -> str:
    """The reported mismatch, beside one computed by hand from the same weights and transitions."""
    learner = made("--no-bf16", "--no-use_fused_lm_head")
    with torch.no_grad():
        answers = by_hand(learner, transitions(0))
    ours, theirs = (torch.cat([answer[side] for answer in answers]) for side in ("learner", "actor"))
    ratio = ours - theirs
    reduce = learner.strategy.all_reduce

    def over_all_tokens(values: torch.Tensor) -> float:
        return (reduce(values.sum(), "sum") / reduce(torch.tensor(float(len(values))), "sum")).item()

    expected = {
        "rollout_probs_diff_mean": over_all_tokens((ours.exp() - theirs.exp()).abs()),
        "rollout_probs_diff_max": reduce((ours.exp() - theirs.exp()).abs().max(), "max").item(),
        "rollout_k3_kl": over_all_tokens(ratio.exp() - 1 - ratio),
        "kl_sample_train_v1": reduce(-ratio.mean()).item(),  # OAT's own: each rank's, then the mean of ranks
        "kl_sample_train_v2": reduce(0.5 * (ratio**2).mean()).item(),
    }
    seen = logged(learner, 0)
    facts = []
    for key, value in expected.items():
        found = seen.get(f"train/{key}")
        facts.append(
            f"{key} {'absent' if found is None else 'as by hand' if near(found, value) else f'{found} NOT {value}'}"
        )
    return ", ".join(facts)


def objective(weigh: Callable[[torch.Tensor], torch.Tensor], *options: str) -> str:
    """Loss and gradient of one update, beside those by hand with ``weigh`` of the log-ratios of one response."""
    options = [
        "--no-bf16",
        "--no-use_fused_lm_head",
        "--critic_type=drgrpo",
        "--train_batch_size_per_device=2",
        *options,
    ]
    learner = made(*options)
    rows = drifted(0)
    answers = by_hand(learner, rows)
    reinforce = learner.args.reinforce_update
    losses = []
    for row, answer in zip(rows, answers, strict=True):
        advantage = row.rewards[-1] - 0.5
        old = answer["learner"].detach()
        weights = weigh(old - answer["actor"])
        policy = answer["learner"] if reinforce else (answer["learner"] - old).exp()
        losses.append((-advantage * policy * weights).sum() / learner.args.generate_max_length)
    loss = torch.stack(losses).mean()
    gradients = torch.autograd.grad(loss, list(learner.model.model.module.parameters()))
    gradients = [learner.strategy.all_reduce(gradient) for gradient in gradients]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
    loss = learner.strategy.all_reduce(loss.detach()).item()
    learner.pi_buffer.clear()
    learner.process_feedback_data(rows)
    seen = learner.learn(1)
    found = learner.strategy.all_reduce(seen["train/pg_loss"])
    facts = ["loss as by hand" if near(found, loss) else f"loss {found:.4g} NOT {loss:.4g}"]
    found = seen["train/policy_grad_norm"]
    facts.append("gradient as by hand" if near(found, norm) else f"gradient {found:.4g} NOT {norm:.4g}")
    return ", ".join(facts)


def drifted(seed: int) -> list:
    """Transitions whose actor is far from the learner, further up for the right answer than down for the wrong."""
    rows = transitions(seed)
    for row, shift in zip(rows, (-0.6, 0.4), strict=True):
        row.response_logprobs = [each + shift * (1 + index % 3) for index, each in enumerate(row.response_logprobs)]
    return rows


def truncated(log_ratio: torch.Tensor, threshold: float) -> torch.Tensor:
    return log_ratio.exp().clamp(max=threshold)


def weights_tis_c() -> str:
    return objective(lambda log_ratio: truncated(log_ratio, 2.0))


def weights_none() -> str:
    return objective(torch.ones_like, *NO_TIS)


def weights_token() -> str:
    given = ["--rollout_is=token", "--rollout_is_threshold=1.5", *NO_TIS]
    return objective(lambda r: truncated(r, 1.5), *given)


def weights_sequence() -> str:
    given = ["--rollout_is=sequence", "--rollout_is_threshold=3", *NO_TIS]
    return objective(lambda r: truncated(r.sum(), 3.0) * torch.ones_like(r), *given)


def weights_masked() -> str:
    given = ["--rollout_is=sequence", "--rollout_is_threshold=inf", "--rollout_rs=sequence"]
    given += ["--rollout_rs_threshold=3", *NO_TIS]
    return objective(lambda r: (r.sum().exp() * (r.sum().exp() <= 3)) * torch.ones_like(r), *given)


def weights_reinforce() -> str:
    """Policy gradient with a sequence's weight, the paper's."""
    given = ["--reinforce_update", "--rollout_is=sequence", "--rollout_is_threshold=inf"]
    return objective(lambda r: r.sum().exp() * torch.ones_like(r), *given)


def reinforce() -> str:
    return objective(torch.ones_like, "--reinforce_update")


def head(*options: str) -> str:
    """Are log-probabilities of the fused head, OAT's default, fp32 numbers or 16-bit ones?"""
    learner, facts = made(*options), []
    ids = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, entropy = learner.get_batch_logps(learner.model, ids, torch.ones_like(ids), compute_entropy=True)
    dtype = next(learner.model.parameters()).dtype
    for what, tensor in (("log-probs", found), ("entropy", entropy)):
        rounded = torch.equal(tensor, tensor.to(dtype).float())
        facts.append(f"{what} {f'ROUNDED to {name(dtype)}' if rounded else 'fp32'}")
    return ", ".join(facts)


def head_bf16() -> str:
    return head()


def head_fp16() -> str:
    return head(*FP16)


def reference(*options: str) -> str:
    """Do two rounds train beside a reference model, by OAT's two ways of staying close to it, with the fused head?"""
    facts = []
    for key in ("beta", "kl_penalty_coef"):
        learner = made(f"--{key}=0.1", *options)
        before = state(learner.model.model)
        learned(learner, 0)
        metrics = learned(learner, 1)
        moved = not same(before, state(learner.model.model)) and math.isfinite(metrics["train/pg_loss"])
        facts.append(f"{key} {'trains' if moved else 'DOES NOT TRAIN'}")
    return ", ".join(facts)


def reference_bf16() -> str:
    return reference()


def reference_fp16() -> str:
    return reference(*FP16)


def head_batch() -> str:
    """Does the fused head give its hidden states a gradient where a device has two rows?"""
    norms = [
        learned(made("--no-bf16", "--train_batch_size_per_device=2", *options), 0)["train/policy_grad_norm"]
        for options in (["--no-use_fused_lm_head"], [])
    ]
    return "as without it" if near(norms[1], norms[0]) else f"gradient {norms[1]:.4g} NOT {norms[0]:.4g}"


class Actor:
    """An actor as the learner sees it: each method of ``futures`` is called in ``oat_rollout``'s process."""

    def __init__(self, dtype: str):
        self.futures, self.errors = self, []
        self.call("start", dtype)

    def call(self, method: str, *args, **kwargs):
        self.begin(method, *args, **kwargs)
        return self.result()

    def begin(self, method: str, *args, **kwargs) -> SimpleNamespace:
        PATHS.connection.send((method, args, kwargs))
        return SimpleNamespace(result=self.result)

    def result(self):
        answer, error = PATHS.connection.recv()
        if error:
            self.errors.append(error)
            raise RuntimeError(error)
        return answer

    def __getattr__(self, method: str):
        return functools.partial(self.begin, method)


def wired(learner) -> Actor:
    """An actor of the asked dtype, joined to the learner's rank 0 as ``LearnerBase._init`` does it."""
    actor = Actor(asked(learner.args))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = f"oat-{port}"
    joined = actor.init_process_group("127.0.0.1", port, 1, 2, group, backend="gloo")
    learner._model_update_group = distributed.init_process_group(
        backend="gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        world_size=2,
        rank=0,
        group_name=group,
        timeout=timedelta(seconds=30),
    )
    joined.result()
    learner.actors = [actor]
    return actor


def wire(*options: str) -> str:
    """Do weights leave in the dtype that the actors are asked for, and does the release's own worker take them?"""
    learner = made(*options)
    outcome = [None]
    if RANK == 0:
        actor, dtype = wired(learner), getattr(torch, asked(learner.args))
        expected = {
            path: f"{dtype} {digest(weight.detach().to(dtype))}"
            for path, weight in learner.model.model.module.named_parameters()
        }
        try:
            learner._broadcast_to_vllm()
            found = actor.call("received")
            outcome[0] = f"{name(dtype)}, {'exactly' if found == expected else 'OTHERS'}"
        except RuntimeError as error:
            if not actor.errors:
                with contextlib.suppress(RuntimeError):
                    actor.result()  # why it closed the connection
            outcome[0] = actor.errors[0] if actor.errors else str(error)
            dist.barrier()  # rank 1 waits there
    else:
        learner._broadcast_to_vllm()
    dist.broadcast_object_list(outcome)
    return outcome[0]


def wire_fp16() -> str:
    return wire(*FP16)


def wire_fp32() -> str:
    return wire("--no-bf16")


def wire_bf16_train_fp16_infer() -> str:
    return wire("--precision=bf16_train_fp16_infer")


class Rounds(ppo.PPOLearner):
    """The learner in its own ``run``, with made transitions in place of an actor's, to which nothing is sent."""

    def _init(self, args, actors) -> None:
        super()._init(args, [])
        self.collector = SimpleNamespace(collect_feedback=lambda *batch: (transitions(self.steps), {}))
        self._same_actor_group = None

    def sync_params_to_actors(self) -> None:
        pass


def ran(*options: str) -> Rounds:
    """A learner after the two rounds of its ``run``, of 8 prompts."""
    base.lp = SimpleNamespace(stop=lambda: None)
    learner = new(Rounds, "--max_train=8", "--debug", "--eval_steps=-1", *options)
    learner.run()
    return learner


def files() -> str:
    """What a run leaves in its folder for others to read."""
    folder = Path(ran("--no-bf16").save_path)
    found = [None]
    if RANK == 0:
        facts = []
        if (folder / "metrics.jsonl").exists():
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            facts.append(f"metrics.jsonl of steps {', '.join(str(line['step']) for line in lines)}")
            facts.append(
                "with pg_loss" if all("train/pg_loss" in line["data"] for line in lines) else "WITHOUT pg_loss"
            )
        if (folder / "args.json").exists():
            said = json.loads((folder / "args.json").read_text())
            facts.append(f"args.json of {said['precision']}, actor in {said['effective']['actor']['compute']}")
            facts.append("stamped" if said["stamp"] else "NO STAMP")
        found[0] = ", ".join(facts) or "nothing"
    dist.broadcast_object_list(found)
    return found[0]


def resumed() -> str:
    """A run that goes on from another's checkpoint with other settings: whose scale, window and least scale hold?"""
    saved = ran(*FP16, "--initial_scale_power=10", "--save_steps=1", "--save_ckpt")
    folder = [str(Path(saved.save_path) / "checkpoints")]
    dist.broadcast_object_list(folder)
    settings = ["--initial_scale_power=12", "--loss_scale_window=7", "--min_loss_scale=4"]
    one = ran(*FP16, *settings, f"--resume_dir={folder[0]}").model.model.optimizer.loss_scaler
    return f"scale {one.cur_scale:g}, window {one.scale_window}, least {one.min_scale:g}"


def reports(*options: str) -> str:
    """What the engines are said to have, in args.json: each role's stage, computing dtype and masters."""
    learner = made(*FP16, "--beta=0.1", "--no-use_fused_lm_head", *options)
    said = [None]
    if PATCHED:
        importlib.import_module("oat.utils.precision").report_precision(learner)
        if RANK == 0:
            roles = json.loads((Path(learner.save_path) / "args.json").read_text())["effective"]
            keys = ("strategy", "compute", "master")
            facts = {role: [str(one[key]) for key in keys if key in one] for role, one in sorted(roles.items())}
            said[0] = "; ".join(f"{role} {', '.join(fact)}" for role, fact in facts.items())
    dist.broadcast_object_list(said)
    return said[0] or "nothing"


def reports_zero_2() -> str:
    return reports("--critic_type=ppo")


def reports_zero_3() -> str:
    return reports("--zero_stage=3")


def digest(*tensors: torch.Tensor) -> str:
    flat = (tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(b"".join(flat)).hexdigest()


def bf16() -> str:
    """Weights, masters, Adam state and losses of actor and critic after two updates, without the fused head."""
    learner = made("--critic_type=ppo", "--no-use_fused_lm_head", "--beta=0.1")
    metrics = [learned(learner, seed) for seed in range(2)]
    kept = [torch.tensor([one[f"train/{key}"]]) for one in metrics for key in ("pg_loss", "critic_loss", "entropy")]
    mine = digest(*kept, *state(learner.model.model), *state(learner.critic))
    both = [None, None]
    dist.all_gather_object(both, mine)
    return " ".join(both)


CASES = [
    *(dtype_fp16, dtype_bf16, dtype_fp32, dtype_bf16_train_fp16_infer, one_key, refusals),
    *(first_updates, scaler_keys, overflow_actor, overflow_critic, learning_rate, scaler_metrics),
    *(gradient_norm, gradient_norm_zero_0, gradient_norm_zero_1, reference_bf16, reference_fp16),
    *(storm, checkpoint, mismatch, head_bf16, head_fp16, head_batch, reinforce),
    *(wire_fp16, wire_fp32, wire_bf16_train_fp16_infer),
    *(weights_none, weights_token, weights_sequence, weights_masked, weights_reinforce, files, resumed, bf16),
    reports_zero_2,
]
if TIS:
    CASES.append(weights_tis_c)
CASES.append(reports_zero_3)  # the last: transformers remembers ZeRO-3


def run(wanted: list[str], model: str, data: str, out: Path, connection: Connection) -> dict[str, str]:
    """The outcome of each case, or of those that are wanted; an error is an outcome too, since some is predicted."""
    vars(PATHS).update(model=model, data=data, out=out, connection=connection)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{out}/store", rank=RANK, world_size=2, timeout=timedelta(seconds=60)
    )
    return {case.__name__: attempt(case) for case in CASES if case.__name__ in wanted or not wanted}


def attempt(case: Callable[[], str]) -> str:
    start, cpu = time.monotonic(), time.process_time()
    try:
        outcome = case()
    except Exception as error:
        traceback.print_exc()
        outcome = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    print(
        f"CASE {case.__name__} {time.monotonic() - start:.1f} s, cpu {time.process_time() - cpu:.1f} s: {outcome}",
        flush=True,
    )
    return outcome
