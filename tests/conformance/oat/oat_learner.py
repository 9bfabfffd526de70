"""OAT's learner on two gloo ranks, as the cases use it: its arguments, transitions, updates and tensors."""

import contextlib
import copy
import hashlib
import io
import itertools
import math
import os
import random
import re
import sys
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import oat
import torch
import torch.distributed as dist
from oat import interface, types
from oat.algorithms import ppo
from oat.args import default_args_validation, get_default_args
from oat.learners import base

PATCHED = (Path(oat.__path__[0]) / "utils/precision.py").exists()
RANK = int(os.environ["RANK"])
# 0.1.4 calls a transition a trajectory.
Transition = getattr(types, "TransitionData", None) or types.TrajectoryData
PATHS = SimpleNamespace()  # model, data, out, and the connection to the actor: set by run
FP16 = ["--no-bf16", "--fp16"]
# 0.1.4 and 0.2.0 have no truncated importance sampling of their own; later it is on by default.
TIS = hasattr(ppo.PPOArgs, "tis_c")
NO_TIS = ["--tis_c=None"] if TIS else []
# Each rank names its run's folder by its own clock, to the second: two ranks could name different folders.
base.datetime = SimpleNamespace(now=lambda: datetime(2026, 1, 1))


class Unparsed(Exception):
    """The release's parser refuses its arguments."""


def parsed(*options: str) -> ppo.PPOArgs:
    """Return the release's arguments, parsed and validated by the release, for the tiny model on two ranks."""
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
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            args = get_default_args(ppo.PPOArgs)
    except SystemExit:
        unknown = re.search(r"Unrecognized options:[\s│]*(--\w+)", output.getvalue())
        raise Unparsed(f"no {unknown[1]}" if unknown else output.getvalue()) from None
    args.algo = "PPO"
    return default_args_validation(args)


COUNT = itertools.count()  # of folders, the same on each rank


def new(learner: type[ppo.PPOLearner], *options: str) -> ppo.PPOLearner:
    """Return a learner of this class as OAT's launched program creates it, with nothing built yet."""
    args = parsed(*options)
    args.learner_gpus_per_group = 2  # by get_program
    return learner(2, RANK, 0, "127.0.0.1", "29500", False, args, [], None)


def made(*options: str) -> ppo.PPOLearner:
    """Return the release's learner with models and engines built and the attributes set that its ``run`` sets first."""
    learner = new(ppo.PPOLearner, *options)
    learner._init(learner.args, [])
    learner.steps, learner.start_time, learner.actor_info = 1, time.time(), {}
    learner.gradient_update_st = time.time()
    return learner


def transitions(seed: int, rows: int = 2, log_prob: float = -5.5) -> list:
    """Return ``rows`` synthetic answers to ``rows / 2`` prompts, different on each rank; one of each pair is right."""
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
    """Return the metrics of one round of ``learn`` on synthetic transitions."""
    learner.pi_buffer.clear()
    learner.process_feedback_data(transitions(seed, rows, **given))
    return learner.learn(seed + 1)


def state(engine) -> list[torch.Tensor]:
    """Return weights and Adam state of this rank, as clones."""
    tensors = [parameter.detach().clone() for parameter in engine.module.parameters()]
    for entry in engine.optimizer.optimizer.state.values():
        tensors += [value.detach().clone() for value in entry.values()]
    return tensors


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@contextlib.contextmanager
def poisoned(engine, value: float = math.inf):
    """Set one element of a gradient of rank 1 to ``value``."""
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
    """Return an fp16 learner whose scale starts at ``2**power`` and is halved at each overflow, down to ``least``.

    An unpatched release has no arguments for that: its own scaler is created with these values.
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
    """Return the metrics that rank 0 logs of one round of ``learn`` and ``eval_and_log``."""
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


def rollout_dtype(args) -> str:
    """Return the dtype that the actors' vLLM is started with, from the program that OAT passes to launchpad."""
    nodes = []
    program = SimpleNamespace(add_node=lambda node, label: nodes.append(node))

    def record(*node, **named):
        return node

    interface.lp = SimpleNamespace(Program=lambda name: program, CourierNode=record, PyClassNode=record)
    interface.local_multi_processing = SimpleNamespace(PythonProcess=record)
    interface.get_program(copy.copy(args), ppo.PPOLearner, ppo.PPOActor)
    (dtype,) = {node[2]["dtype"] for node in nodes if node[0] is ppo.PPOActor}
    return dtype


def digest(*tensors: torch.Tensor) -> str:
    flat = (tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(b"".join(flat)).hexdigest()
