"""Report the effective dtypes of a running job: ``doctor --live`` reads them in its workers, through Ray.

Nothing of a worker is changed, and no collective is started: its engines' attributes are read between two of their
calls. A worker makes one call at a time, so the query waits for the one in progress.
"""

import json
import os
import re
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from verl_precision.doctor.resolver import KV_SPELLINGS
from verl_precision.errors import Refused

# verl's names of its actors: workers (single_controller/ray/base.py), alone, colocated or fused, and rollout servers.
WORKER = re.compile(r"(WorkerDict|FusedWorker\w*|[A-Z]\w*Worker)_\d+:\d+$")
SERVER = re.compile(r"^(vllm|sglang|trtllm)_?server_\d+_\d+|^async_llm_server_\d+$")
PROGRESS_EVERY_S = 15.0
KINDS = ("master", "base", "compute", "reduce", "optimizer", "autocast", "weights", "logits", "kv_cache")

# --- in the worker's process: these go there by value, and verl is that process's ------------------------------------


def actor_models(actor: Any) -> list[dict]:
    """Return the effective dtypes of each model of an actor of verl.

    Args:
        actor: a worker of any release, several of them in one ``WorkerDict``, or a vLLM server.
    """
    if hasattr(vars(actor).get("engine"), "vllm_config"):
        models = [server_dtypes(actor.engine.vllm_config)]
    else:
        workers = vars(actor).get("worker_dict") or vars(actor).get("fused_worker_dict") or {"": actor}
        models = [model for key, worker in workers.items() for model in worker_models(key, worker)]
    return [model | process_code() for model in models]


def process_code() -> dict:
    """Return the rank of this process, its verl and the stack on that."""
    import verl

    file = Path(verl.__path__[0]) / "utils/precision_stamp.json"
    stack = json.loads(file.read_text())["stack"] if file.exists() else None
    return {"rank": int(os.environ.get("RANK", 0)), "verl": verl.__version__, "stack": stack}


def server_dtypes(config: Any) -> dict:
    """Return the dtypes that a vLLM engine resolved, in which it builds the model and the cache."""
    computes, cache = dtype_text(config.model_config.dtype), dtype_text(config.cache_config.cache_dtype)
    return {
        "role": "rollout",
        "weights": config.model_config.quantization or computes,
        "logits": computes,
        "kv_cache": computes if cache == "auto" else cache,
        "deterministic": os.environ.get("VLLM_BATCH_INVARIANT") == "1",
    }


def worker_models(key: str, worker: Any) -> list[dict]:
    """Return the dtypes of the models of one worker, which a ``WorkerDict`` names ``key``."""
    attributes = vars(worker)
    models = []
    for attribute, role in {"actor": "actor", "ref": "ref", "ref_policy": "ref", "critic": "critic"}.items():
        part = attributes.get(attribute)
        if part is not None:  # up to 0.7.1 what computes for the worker, then a worker of an engine
            models.append(model_dtypes(role, vars(part).get("engine", part)))
    if "engine" in attributes:  # it is the worker of an engine itself, as the critic is
        models.append(model_dtypes(key if key in ("actor", "ref") else "critic", worker.engine))
    if "reward_module" in attributes:
        parameter = next(worker.reward_module.parameters())
        models.append({"role": "reward_model", "compute": dtype_text(parameter.dtype)})
    return models


def model_dtypes(role: str, part: Any) -> dict:
    """Return the dtypes of one model and its optimizer, and its loss scaler.

    Args:
        part: an engine or, up to 0.7.1, a ``DataParallelPPOActor``.
    """
    attributes = vars(part)
    kind = "critic" if role == "critic" else "actor"
    module = attributes.get("module", attributes.get(f"{kind}_module"))
    optimizer = attributes.get("optimizer", attributes.get(f"{kind}_optimizer"))
    if isinstance(module, FullyShardedDataParallel):
        policy = module.mixed_precision
    elif hasattr(module, "_get_fsdp_state"):
        policy = module._get_fsdp_state()._mp_policy
    else:
        return {"role": role, "compute": f"unknown: {type(part).__name__} is not FSDP's"}
    by_training = {parameter.requires_grad: parameter.dtype for parameter in module.parameters()}
    states = optimizer.state.values() if optimizer else ()
    scaler = attributes.get("scaler")
    return {
        "role": role,
        "master": dtype_text(by_training.get(True)),
        "base": dtype_text(by_training.get(False)),  # below LoRA adapters
        "compute": dtype_text(policy.param_dtype),
        "reduce": dtype_text(policy.reduce_dtype),
        "autocast": autocast_dtype(attributes),
        "optimizer": ", ".join(sorted({dtype_text(state["exp_avg"].dtype) for state in states})) or None,
        "scaler": scaler_settings(scaler) if scaler else None,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def autocast_dtype(attributes: Mapping[str, Any]) -> str | None:
    """Return the dtype that the forward pass reads; None where it is fixed: up to 0.6.0, critics up to 0.7.1."""
    if "_autocast_dtype" in attributes:
        return dtype_text(attributes["_autocast_dtype"])
    if "precision" in attributes:
        return dtype_text(attributes["precision"].compute)
    return dtype_text(attributes.get("param_dtype"))


def scaler_settings(scaler: Any) -> dict:
    """Return a loss scaler's settings and its current scale; torch's has no ``config`` with the last three."""
    config = vars(scaler).get("config")
    return {
        "scale": scaler.get_scale(),
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "init_scale": config and config.init_scale,
        "min_scale": config and config.min_scale,
        "max_consecutive_skips": config and config.max_consecutive_skips,
    }


def dtype_text(dtype: torch.dtype | str | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


# --- in the asking process --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """The answers of a job's actors.

    Args:
        models: each model of each actor, as :func:`actor_models` returns it.
        silent: the actors that had not answered when the query was interrupted.
    """

    models: list[dict]
    silent: list[str]

    def ranks(self, kind: str) -> dict[str, dict[str, list[int]]]:
        """Return the ranks of each value of one kind, by role."""
        ranks: dict[str, dict[str, list[int]]] = {}
        for model in self.models:
            if model.get(kind) is not None:
                ranks.setdefault(model["role"], {}).setdefault(model[kind], []).append(model["rank"])
        return ranks

    @property
    def hops(self) -> dict[str, str]:
        """The effective dtypes by the doctor's names; where ranks differ, each value with its ranks.

        What exists during a call alone is absent: the wire, logits, the export.
        """
        return {f"{role}.{kind}": joined(ranks) for kind in KINDS for role, ranks in self.ranks(kind).items()}

    @property
    def scaler(self) -> dict[str, dict | None]:
        """The loss scalers of actor and critic; every rank has the same scale."""
        scalers = {model["role"]: model.get("scaler") for model in self.models if model["role"] in ("actor", "critic")}
        return {"actor": None, "critic": None} | scalers

    @property
    def deterministic(self) -> dict[str, bool]:
        """Whether full_determinism is on in every process of a model."""
        known = [(model["role"], model["deterministic"]) for model in self.models if "deterministic" in model]
        return {role: all(on for other, on in known if other == role) for role, _ in known}

    @property
    def code(self) -> dict[str, list[int]]:
        """The ranks by the release and stack that they run."""
        ranks: dict[str, list[int]] = {}
        for model in self.models:
            ranks.setdefault(f"{model['verl']}, stack {model['stack']}", []).append(model["rank"])
        return ranks

    @property
    def stacks(self) -> list[tuple[str, str | None]]:
        """Each release and stack that runs: more than one if a node has another verl."""
        return sorted({(model["verl"], model["stack"]) for model in self.models}, key=str)


SEVERAL = " (ranks "
OTHER = "the job runs another config, or another verl, than the one named here"
ONE = "one verl and one stack on every node: make status VERL=… there"


def diagnose_live(answers: Answers, hops: Iterable[str], static: dict | None) -> dict:
    """Return the diagnosis of a running job in the form of ``doctor --json``.

    Args:
        hops: the doctor's, in its order; null where no worker has them between two calls.
        static: the doctor's diagnosis of the config that the job should run; each difference is a finding.
    """
    dtypes = {hop: answers.hops.get(hop) for hop in (*hops, *(hop for hop in answers.hops if hop not in hops))}
    findings = [
        {
            "key": hop,
            "value": dtype,
            "effect": f"is {dtype} in the workers, {expected} by this config",
            "mend": OTHER,
        }
        for hop, dtype in dtypes.items()
        if static and dtype is not None and hop in static["hops"]
        if (expected := static["hops"][hop]) not in (dtype, KV_SPELLINGS.get(dtype, dtype))
    ]
    findings += [
        {
            "key": f"{part}'s full_determinism",
            "value": live,
            "effect": f"is {'on' if live else 'off'} in the workers, {'off' if live else 'on'} by this config",
            "mend": OTHER,
        }
        for part, live in answers.deterministic.items()
        if static and static["deterministic"].get(part, live) != live
    ]
    findings += [
        {"key": key, "value": value, "effect": "is not the same on all ranks", "mend": ONE}
        for key, value in {"verl": joined(answers.code), **answers.hops}.items()
        if SEVERAL in value
    ]
    trainer, rollout = dtypes["actor.autocast"], dtypes["rollout.weights"]
    if trainer is None and static and dtypes["actor.compute"] == static["hops"]["actor.compute"]:
        trainer = static["hops"]["actor.autocast"]  # where it is fixed in the forward pass
    if not trainer or not rollout or answers.silent:
        absent = ", ".join(answers.silent) or ("the actor's autocast" if rollout else "a rollout server of vLLM")
        verdict, sentence = "unknown", f"no answer of {absent}"
    elif findings or trainer != rollout:
        requested = not findings and static is not None and static["verdict"] == "asked"
        verdict = "asked" if requested else "differ"
        sentence = f"the trainer computes in {trainer}, the rollout in {rollout}"
        sentence += f"; {findings[0]['key']} {findings[0]['effect']}" if findings else ""
    else:
        verdict, sentence = "agree", f"trainer and rollout compute in {trainer}"
    return {
        "verl": [{"release": release, "stack": stack} for release, stack in answers.stacks],
        "hops": dtypes,
        "scaler": answers.scaler,
        "deterministic": answers.deterministic,
        "findings": findings,
        "refused": None,
        "verdict": verdict,
        "sentence": f"{len(answers.models)} models of the running job: {sentence}",
    }


def joined(ranks: Mapping[str, list[int]]) -> str:
    """Return the one value of all ranks, or each value with its ranks."""
    if len(ranks) == 1:
        return next(iter(ranks))
    return "; ".join(f"{value}{SEVERAL}{', '.join(map(str, sorted(set(each))))})" for value, each in ranks.items())


def query_job() -> Answers:
    """Query every worker and vLLM server of verl in the running cluster: RAY_ADDRESS, else this machine's.

    Progress goes to stderr. Ctrl-C returns the answers so far.

    Raises:
        Refused: no cluster or several, one of another Ray or Python, or no worker of verl in it.
    """
    where = cluster_address()
    # Ray hands this machine's token to a cluster that it finds by itself alone, and asks for one since 2.59.
    address = os.environ.get("RAY_ADDRESS") or "auto"
    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except (ConnectionError, RuntimeError) as error:  # of another Ray or Python, or without its token
        why = " ".join(str(error).split())
        advice = "a cluster that requires a token needs RAY_AUTH_MODE=token"
        raise Refused(f"--live: RAY_ADDRESS={where}: {why} ({advice})") from error
    try:
        named_actors = ray.util.list_named_actors(all_namespaces=True)
        spaces = {each["name"]: each["namespace"] for each in named_actors if is_verl_actor(each["name"])}
        if not spaces:
            count = len(named_actors)
            raise Refused(f"--live: RAY_ADDRESS={where}: none of the {count} named actors is a worker of verl")
        return query_actors({name: ray.get_actor(name, space) for name, space in sorted(spaces.items())})
    finally:
        ray.shutdown()


def cluster_address() -> str:
    """Return the address of the cluster to query: RAY_ADDRESS, else the one whose processes run on this machine.

    Raises:
        Refused: there is none, there are several, or nothing listens there (Ray would keep trying for an hour).
    """
    address = os.environ.get("RAY_ADDRESS")
    arguments = [word for process in psutil.process_iter(["cmdline"]) for word in process.info["cmdline"] or ()]
    running = {word.partition("=")[2] for word in arguments if word.startswith("--gcs-address=")}
    if not address and len(running) != 1:
        found = f"several clusters run here ({', '.join(sorted(running))})" if running else "no Ray cluster runs here"
        raise Refused(f"--live: {found}; set RAY_ADDRESS=host:port")
    where = address or running.pop()
    host, _, port = where.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError) as error:
        raise Refused(f"--live: RAY_ADDRESS={where}: no Ray cluster answers there ({error})") from error
    return where


def is_verl_actor(name: str) -> bool:
    return bool(WORKER.search(name) or SERVER.search(name))


def query_actors(actors: Mapping[str, Any]) -> Answers:
    """Query all actors at once; each answers when its current call ends."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    # By keyword: where verl cannot be imported here, Ray knows the names of an actor's methods alone.
    waiting = {actor.__ray_call__.remote(fn=actor_models): name for name, actor in actors.items()}
    models: list[dict] = []
    try:
        while waiting:
            answered, _ = ray.wait(list(waiting), timeout=PROGRESS_EVERY_S)
            if not answered:
                print(f"waiting for {', '.join(sorted(waiting.values())[:3])}, which are in a call", file=sys.stderr)
            for reference in answered:
                models += ray.get(reference)
                del waiting[reference]
    except KeyboardInterrupt:
        pass
    return Answers(models, sorted(waiting.values()))
