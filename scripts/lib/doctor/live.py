"""What the workers of a running job hold: ``doctor --live`` asks them through Ray, by Ray's own call into an actor.

Nothing of a worker is changed, and no collective is started: what its engines say of themselves is read between two of
their calls. A worker does one call at a time, so the question waits for the one that it is in.
"""

import json
import os
import re
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from lib.errors import Refused

# verl's names of its actors: workers (single_controller/ray/base.py), alone, colocated or fused, and rollout servers.
WORKER = re.compile(r"(WorkerDict|FusedWorker\w*|[A-Z]\w*Worker)_\d+:\d+$")
SERVER = re.compile(r"^(vllm|sglang|trtllm)_?server_\d+_\d+|^async_llm_server_\d+$")
TOLD_EVERY_S = 15.0  # who is still waited for

# --- in the worker's process: these go there by value, and verl is that process's ------------------------------------


def held_by(actor: Any) -> list[dict]:
    """Each model that an actor of verl has, and what holds for it.

    Args:
        actor: a worker of any release, several of them in one ``WorkerDict``, or a vLLM server.
    """
    if hasattr(vars(actor).get("engine"), "vllm_config"):
        found = [served(actor.engine.vllm_config)]
    else:
        workers = vars(actor).get("worker_dict") or vars(actor).get("fused_worker_dict") or {"": actor}
        found = [each for key, worker in workers.items() for each in trained(key, worker)]
    return [each | whose() for each in found]


def whose() -> dict:
    """The rank of this process, its verl and the stack on that."""
    import verl

    file = Path(verl.__path__[0]) / "utils/precision_stamp.json"
    stack = json.loads(file.read_text())["stack"] if file.exists() else None
    return {"rank": int(os.environ.get("RANK", 0)), "verl": verl.__version__, "stack": stack}


def served(config: Any) -> dict:
    """What a vLLM engine resolved: it builds the model and the cache in that."""
    weights, cache = named(config.model_config.dtype), named(config.cache_config.cache_dtype)
    return {"role": "rollout", "weights": weights, "kv_cache": weights if cache == "auto" else cache}


def trained(key: str, worker: Any) -> list[dict]:
    """The models of one worker, which a ``WorkerDict`` calls ``key``."""
    has = vars(worker)
    found = []
    for attribute, role in {"actor": "actor", "ref": "ref", "ref_policy": "ref", "critic": "critic"}.items():
        if has.get(attribute) is not None:  # up to 0.7.1 what computes for the worker, then a worker of an engine
            found.append(model(role, vars(has[attribute]).get("engine", has[attribute])))
    if "engine" in has:  # it is the worker of an engine itself, as the critic is
        found.append(model(key if key in ("actor", "ref") else "critic", worker.engine))
    if "reward_module" in has:
        found.append({"role": "reward_model", "compute": named(next(worker.reward_module.parameters()).dtype)})
    return found


def model(role: str, part: Any) -> dict:
    """What one model and its optimizer hold; ``part`` is an engine or, up to 0.7.1, a ``DataParallelPPOActor``."""
    has = vars(part)
    module = has.get("module", has.get("critic_module" if role == "critic" else "actor_module"))
    optimizer = has.get("optimizer", has.get("critic_optimizer" if role == "critic" else "actor_optimizer"))
    if isinstance(module, FullyShardedDataParallel):
        policy = module.mixed_precision
    elif hasattr(module, "_get_fsdp_state"):
        policy = module._get_fsdp_state()._mp_policy
    else:
        return {"role": role, "compute": f"unknown: {type(part).__name__} is not FSDP's"}
    states = optimizer.state.values() if optimizer else ()
    held = {
        "role": role,
        "master": named(next(module.parameters()).dtype),
        "compute": named(policy.param_dtype),
        "reduce": named(policy.reduce_dtype),
        "autocast": autocast(has),
        "optimizer": ", ".join(sorted({named(state["exp_avg"].dtype) for state in states})) or None,
    }
    return held | {"scaler": settings(has["scaler"]) if has.get("scaler") else None}


def autocast(has: dict[str, Any]) -> str | None:
    """As the forward pass reads it; None up to 0.6.0, and for critics up to 0.7.1, where it is written into that."""
    if "precision" in has:
        return named(has["precision"].compute)
    return named(has.get("_autocast_dtype", has.get("param_dtype")))


def settings(scaler: Any) -> dict:
    """A loss scaler's settings, and its scale now; torch's has no settings of its own beside these."""
    own = vars(scaler).get("config")
    return {
        "scale": scaler.get_scale(),
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "init_scale": own and own.init_scale,
        "min_scale": own and own.min_scale,
        "max_consecutive_skips": own and own.max_consecutive_skips,
    }


def named(dtype: torch.dtype | str | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


# --- in the asking process --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """What was heard.

    Args:
        parts: each model of each actor, as :func:`held_by` tells it.
        silent: the actors that had not answered when asking was interrupted.
    """

    parts: list[dict]
    silent: list[str]

    def values(self, what: str) -> dict[str, dict[str, list[int]]]:
        """Which ranks hold which value, by role."""
        found: dict[str, dict[str, list[int]]] = {}
        for part in self.parts:
            if part.get(what) is not None:
                found.setdefault(part["role"], {}).setdefault(part[what], []).append(part["rank"])
        return found

    @property
    def hops(self) -> dict[str, str]:
        """By the doctor's names; where ranks differ, each value with its ranks.

        What nobody holds between two calls is absent: the wire, logits, the export.
        """
        kinds = ("master", "compute", "reduce", "optimizer", "autocast", "weights", "kv_cache")
        return {f"{role}.{kind}": joined(held) for kind in kinds for role, held in self.values(kind).items()}

    @property
    def scaler(self) -> dict[str, dict | None]:
        """The loss scalers of actor and critic; every rank has the same scale."""
        known = {part["role"]: part["scaler"] for part in self.parts if part["role"] in ("actor", "critic")}
        return {"actor": None, "critic": None} | known

    @property
    def code(self) -> dict[str, list[int]]:
        """The ranks of each code that runs."""
        found: dict[str, list[int]] = {}
        for part in self.parts:
            found.setdefault(f"{part['verl']}, stack {part['stack']}", []).append(part["rank"])
        return found

    @property
    def stacks(self) -> list[tuple[str, str | None]]:
        """The release and the stack of each code that runs: more than one is a node with another verl."""
        return sorted({(part["verl"], part["stack"]) for part in self.parts}, key=str)


def report(answers: Answers, hops: Iterable[str], static: dict | None) -> dict:
    """What the workers hold, in the form of ``doctor --json``, and where that is not what the config makes.

    Args:
        hops: the doctor's, in its order; null where nobody holds them between two calls.
        static: the doctor's diagnosis of the config that the job is said to run.
    """
    held = {hop: answers.hops.get(hop) for hop in (*hops, *(hop for hop in answers.hops if hop not in hops))}
    findings = [
        {"key": hop, "value": value, "effect": f"the workers hold {value}, this config makes {made}", "mend": OTHER}
        for hop, value in held.items()
        if static and value is not None and hop in static["hops"] and (made := static["hops"][hop]) != value
    ]
    findings += [
        {"key": what, "value": value, "effect": "is not the same on all ranks", "mend": ONE}
        for what, value in {"verl": joined(answers.code), **answers.hops}.items()
        if SEVERAL in value
    ]
    trainer, rollout = held["actor.autocast"], held["rollout.weights"]
    if trainer is None and static and held["actor.compute"] == static["hops"]["actor.compute"]:
        trainer = static["hops"]["actor.autocast"]  # where it is written into the forward pass
    if not trainer or not rollout or answers.silent:
        unheard = ", ".join(answers.silent) or ("the actor's autocast" if rollout else "a rollout server of vLLM")
        verdict, sentence = "unknown", f"not heard: {unheard}"
    elif findings or trainer != rollout:
        asked = not findings and static is not None and static["verdict"] == "asked"
        verdict = "asked" if asked else "differ"
        sentence = f"the trainer computes in {trainer}, the rollout in {rollout}"
        sentence += f"; {findings[0]['key']}: {findings[0]['effect']}" if findings else ""
    else:
        verdict, sentence = "agree", f"trainer and rollout compute in {trainer}"
    return {
        "verl": [{"release": release, "stack": stack} for release, stack in answers.stacks],
        "hops": held,
        "scaler": answers.scaler,
        "findings": findings,
        "refused": None,
        "verdict": verdict,
        "sentence": f"{len(answers.parts)} models of the running job asked: {sentence}",
    }


SEVERAL = " (ranks "
OTHER = "the job runs another config, or another verl, than the one named here"
ONE = "one verl and one stack on every node: make status VERL=… there"


def joined(held: dict[str, list[int]]) -> str:
    if len(held) == 1:
        return next(iter(held))
    return "; ".join(f"{value}{SEVERAL}{', '.join(map(str, sorted(set(ranks))))})" for value, ranks in held.items())


def ask() -> Answers:
    """Ask every worker and vLLM server of verl in the running cluster: RAY_ADDRESS, else this machine's.

    Says on stderr who is waited for. Ctrl-C gives the answers so far.

    Raises:
        Refused: no cluster or several, one of another Ray or Python, or none of verl's workers in it.
    """
    where = cluster()
    # Ray hands this machine's token to a cluster that it finds by itself alone, and asks for one since 2.59.
    found = os.environ.get("RAY_ADDRESS") or "auto"
    try:
        ray.init(address=found, logging_level="ERROR", log_to_driver=False)
    except (ConnectionError, RuntimeError) as error:  # of another Ray or Python, or without its token
        why = " ".join(str(error).split())
        raise Refused(
            f"--live: RAY_ADDRESS={where}: {why} (where a token is asked for: RAY_AUTH_MODE=token)"
        ) from error
    try:
        named_actors = ray.util.list_named_actors(all_namespaces=True)
        known = {each["name"]: each["namespace"] for each in named_actors if is_verls(each["name"])}
        if not known:
            raise Refused(
                f"--live: RAY_ADDRESS={where}: none of the {len(named_actors)} named actors is a worker of verl"
            )
        return heard_from({name: ray.get_actor(name, namespace) for name, namespace in sorted(known.items())})
    finally:
        ray.shutdown()


def cluster() -> str:
    """The address of the cluster to ask: RAY_ADDRESS, else the one whose processes run on this machine.

    Raises:
        Refused: there is none, there are several, or nothing listens there (Ray would go on trying for an hour).
    """
    given = os.environ.get("RAY_ADDRESS")
    arguments = [word for process in psutil.process_iter(["cmdline"]) for word in process.info["cmdline"] or ()]
    running = {word.partition("=")[2] for word in arguments if word.startswith("--gcs-address=")}
    if not given and len(running) != 1:
        found = f"several run on this machine: {', '.join(sorted(running))}" if running else "none runs on this machine"
        raise Refused(f"--live: which Ray cluster? {found}; name one, RAY_ADDRESS=host:port")
    where = given or running.pop()
    host, _, port = where.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError) as error:
        raise Refused(f"--live: RAY_ADDRESS={where}: no Ray cluster answers there ({error})") from error
    return where


def is_verls(name: str) -> bool:
    return bool(WORKER.search(name) or SERVER.search(name))


def heard_from(actors: dict[str, Any]) -> Answers:
    """Ask all at once; the answers come as each ends its call."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    # By keyword: where verl cannot be imported here, Ray knows the names of an actor's methods alone.
    waiting = {actor.__ray_call__.remote(fn=held_by): name for name, actor in actors.items()}
    parts: list[dict] = []
    try:
        while waiting:
            answered, _ = ray.wait(list(waiting), timeout=TOLD_EVERY_S)
            if not answered:
                print(f"waiting for {', '.join(sorted(waiting.values())[:3])}: in the midst of a call", file=sys.stderr)
            for reference in answered:
                parts += ray.get(reference)
                del waiting[reference]
    except KeyboardInterrupt:
        pass
    return Answers(parts, sorted(waiting.values()))
