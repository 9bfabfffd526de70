"""Cases of OAT: weight sync to the rollout, the files of a run, and the reported dtypes."""

import contextlib
import functools
import importlib
import json
import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from oat.algorithms import ppo
from oat.learners import base
from oat.utils import distributed
from oat_learner import FP16, PATCHED, PATHS, RANK, digest, made, name, new, rollout_dtype, transitions
from support.waiting import TIMEOUT_S


class Actor:
    """A proxy of an actor: each method of ``futures`` is called in ``oat_rollout``'s process."""

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
    """Return an actor of the rollout dtype, connected to the learner's rank 0 as in ``LearnerBase._init``."""
    actor = Actor(rollout_dtype(learner.args))
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
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    joined.result()
    learner.actors = [actor]
    return actor


def wire(*options: str) -> str:
    """Send weights in the rollout's dtype to the release's own worker; return the dtype, and whether they match."""
    learner = made(*options)
    outcome = [None]
    if RANK == 0:
        actor, dtype = wired(learner), getattr(torch, rollout_dtype(learner.args))
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
                    actor.result()  # the error that closed the connection
            outcome[0] = actor.errors[0] if actor.errors else str(error)
            dist.barrier()  # rank 1 waits there
    else:
        learner._broadcast_to_vllm()
    dist.broadcast_object_list(outcome)
    return outcome[0]


class Rounds(ppo.PPOLearner):
    """A learner whose ``run`` uses synthetic transitions in place of an actor's and syncs no weights."""

    def _init(self, args, actors) -> None:
        super()._init(args, [])
        self.collector = SimpleNamespace(collect_feedback=lambda *batch: (transitions(self.steps), {}))
        self._same_actor_group = None

    def sync_params_to_actors(self) -> None:
        pass


def ran(*options: str) -> Rounds:
    """Return a learner after the two rounds of its ``run`` on 8 prompts."""
    base.lp = SimpleNamespace(stop=lambda: None)
    learner = new(Rounds, "--max_train=8", "--debug", "--eval_steps=-1", *options)
    learner.run()
    return learner


def files() -> str:
    """Describe the metrics.jsonl and args.json that a run writes."""
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
            report = json.loads((folder / "args.json").read_text())
            facts.append(f"args.json of {report['precision']}, actor in {report['effective']['actor']['compute']}")
            facts.append("stamped" if report["stamp"] else "NO STAMP")
        found[0] = ", ".join(facts) or "nothing"
    dist.broadcast_object_list(found)
    return found[0]


def resumed() -> str:
    """Return scale, window and least scale after a resume with settings other than the checkpoint's."""
    saved = ran(*FP16, "--initial_scale_power=10", "--save_steps=1", "--save_ckpt")
    folder = [str(Path(saved.save_path) / "checkpoints")]
    dist.broadcast_object_list(folder)
    settings = ["--initial_scale_power=12", "--loss_scale_window=7", "--min_loss_scale=4"]
    one = ran(*FP16, *settings, f"--resume_dir={folder[0]}").model.model.optimizer.loss_scaler
    return f"scale {one.cur_scale:g}, window {one.scale_window}, least {one.min_scale:g}"


def reports(*options: str) -> str:
    """Return each role's ZeRO stage, computing dtype and masters as args.json reports them."""
    learner = made(*FP16, "--beta=0.1", "--no-use_fused_lm_head", *options)
    text = [None]
    if PATCHED:
        importlib.import_module("oat.utils.precision").report_precision(learner)
        if RANK == 0:
            roles = json.loads((Path(learner.save_path) / "args.json").read_text())["effective"]
            keys = ("strategy", "compute", "master")
            facts = {role: [str(one[key]) for key in keys if key in one] for role, one in sorted(roles.items())}
            text[0] = "; ".join(f"{role} {', '.join(fact)}" for role, fact in facts.items())
    dist.broadcast_object_list(text)
    return text[0] or "nothing"
