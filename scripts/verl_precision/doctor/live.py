"""Report the effective dtypes of a running job: ``doctor --live`` reads them in its workers, through Ray.

Nothing of a worker is changed, and no collective is started: its engines' attributes are read between two of their
calls. A worker makes one call at a time, so the query waits for the one in progress.
"""

import contextlib
import json
import os
import re
import socket
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ray
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from verl_precision.doctor.findings import Finding
from verl_precision.doctor.resolver import KV_SPELLINGS, TRAINED
from verl_precision.errors import Refused

# verl's names of its actors: workers (single_controller/ray/base.py), single, colocated or fused, and rollout servers.
ACTOR = re.compile(
    r"(WorkerDict|FusedWorker\w*|[A-Z]\w*Worker)_\d+:\d+$|^(vllm|sglang|trtllm)_?server_\d+_\d+|^async_llm_server_\d+$"
)
PROGRESS_EVERY_S = 15.0
KINDS = ("master", "base", "compute", "reduce", "optimizer", "autocast", "weights", "logits", "kv_cache")

# --- in the worker's process: pickled by value; `verl` is the worker's ------------------------------------------------


def actor_models(actor: Any) -> list[dict]:
    """Return dtypes, rank, verl and stack of each model of an actor: a worker, a ``WorkerDict``, or a vLLM server."""
    import verl

    file = Path(verl.__path__[0]) / "utils/precision_stamp.json"
    stack = json.loads(file.read_text())["stack"] if file.exists() else None
    code = {"rank": int(os.environ.get("RANK", 0)), "verl": verl.__version__, "stack": stack}
    if hasattr(vars(actor).get("engine"), "vllm_config"):  # what vLLM resolved, and builds the model and the cache in
        config = actor.engine.vllm_config
        computes, cache = dtype_text(config.model_config.dtype), dtype_text(config.cache_config.cache_dtype)
        head = getattr(config.model_config, "head_dtype", config.model_config.dtype)  # absent in earlier versions
        dtypes = {"weights": config.model_config.quantization or computes, "logits": dtype_text(head)}
        return [code | dtypes | {"role": "rollout", "kv_cache": computes if cache == "auto" else cache}]
    workers = vars(actor).get("worker_dict") or vars(actor).get("fused_worker_dict") or {"": actor}
    return [model | code for key, worker in workers.items() for model in worker_models(key, worker)]


def worker_models(key: str, worker: Any) -> list[dict]:
    """Return the dtypes of the models of one worker, which a ``WorkerDict`` names ``key``."""
    attributes = vars(worker)
    models = []
    for attribute, role in {"actor": "actor", "ref": "ref", "ref_policy": "ref", "critic": "critic"}.items():
        part = attributes.get(attribute)
        if part is not None:  # up to 0.7.1 what computes for the worker, then a worker of an engine
            models.append(model_dtypes(role, vars(part).get("engine", part)))
    if "engine" in attributes:  # an engine's worker, as the critic is
        models.append(model_dtypes(key if key in ("actor", "ref") else "critic", worker.engine))
    if "reward_module" in attributes:
        parameter = next(worker.reward_module.parameters())
        models.append({"role": "reward_model", "compute": dtype_text(parameter.dtype)})
    return models


def model_dtypes(role: str, part: Any) -> dict:
    """Return dtypes and loss scaler of a model: ``part`` is its engine or, up to 0.7.1, a ``DataParallelPPOActor``."""
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
    # What the forward pass reads; None where it is fixed: up to 0.6.0, critics up to 0.7.1.
    autocast = attributes.get("_autocast_dtype", attributes.get("param_dtype"))
    if "precision" in attributes:  # of a patched legacy worker
        autocast = attributes.get("_autocast_dtype", attributes["precision"].compute)
    settings = None
    if scaler := attributes.get("scaler"):
        settings = {"scale": scaler.get_scale()}
        for name in ("growth_factor", "backoff_factor", "growth_interval"):
            settings[name] = getattr(scaler, f"get_{name}")()
        for name in ("init_scale", "min_scale", "max_consecutive_skips"):  # of a patched tree's scaler
            settings[name] = getattr(vars(scaler).get("config"), name, None)
    return {
        "role": role,
        "master": dtype_text(by_training.get(True)),
        "base": dtype_text(by_training.get(False)),  # below LoRA adapters
        "compute": dtype_text(policy.param_dtype),
        "reduce": dtype_text(policy.reduce_dtype),
        "autocast": dtype_text(autocast),
        "optimizer": ", ".join(sorted({dtype_text(state["exp_avg"].dtype) for state in states})) or None,
        "scaler": settings,
    }


def dtype_text(dtype: torch.dtype | str | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


# --- in the asking process --------------------------------------------------------------------------------------------


def diagnose_live(models: list[dict], silent: list[str], hops: Iterable[str], static: dict | None) -> dict:
    """Return the diagnosis of a running job in the form of ``doctor --json``.

    Args:
        models: of each actor that answered, as :func:`actor_models` returns them.
        silent: the actors that had not answered when the query was interrupted.
        hops: the doctor's, in its order; null where no worker has them between two calls: wire, logits, export.
        static: the doctor's diagnosis of the config that the job should run; each difference is a finding.
    """
    ranks: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))  # by what is reported and its value
    for model in models:
        ranks["verl"][f"{model['verl']}, stack {model['stack']}"].append(model["rank"])
        for kind in KINDS:
            if model.get(kind) is not None:
                ranks[f"{model['role']}.{kind}"][model[kind]].append(model["rank"])
    live = {key: joined(values) for key, values in ranks.items()}
    dtypes = dict.fromkeys(hops) | {key: value for key, value in live.items() if key != "verl"}
    findings, expected = [], static["hops"] if static else {}
    fix = "the job runs another config, or another verl, than the one named here"
    for key, value in live.items():
        if key in expected and expected[key] not in (value, KV_SPELLINGS.get(value, value)):
            findings.append(Finding(key, value, f"in the workers, {expected[key]} by this config", fix))
    for key, values in ranks.items():
        if len(values) > 1:
            advice = "one verl and one stack on every node: make status VERL=… there"
            findings.append(Finding(key, live[key], "on different ranks", advice))
    trainer, rollout = dtypes["actor.autocast"], dtypes["rollout.weights"]
    if trainer is None and static and dtypes["actor.compute"] == static["hops"]["actor.compute"]:
        trainer = static["hops"]["actor.autocast"]  # where it is fixed in the forward pass
    if not trainer or not rollout or silent:
        absent = ", ".join(silent) or ("the actor's autocast" if rollout else "a rollout server of vLLM")
        verdict, sentence = "unknown", f"no answer of {absent}"
    elif findings or trainer != rollout:
        requested = not findings and static is not None and static["verdict"] == "asked"
        verdict = "asked" if requested else "differ"
        sentence = f"the trainer computes in {trainer}, the rollout in {rollout}"
        sentence += f"; {findings[0].sentence}" if findings else ""
    else:
        verdict, sentence = "agree", f"trainer and rollout compute in {trainer}"
    stacks = sorted({(model["verl"], model["stack"]) for model in models}, key=str)
    scalers = {model["role"]: model["scaler"] for model in models if model.get("scaler")}  # equal on all ranks
    return {
        "verl": [{"release": release, "stack": stack} for release, stack in stacks],
        "hops": dtypes,
        "scaler": {role: scalers.get(role) for role in TRAINED},
        "findings": [finding.json() for finding in findings],
        "refused": None,
        "verdict": verdict,
        "sentence": f"{len(models)} models of the running job: {sentence}",
    }


def joined(ranks: Mapping[str, list[int]]) -> str:
    """Return the one value of all ranks, or each value with its ranks."""
    if len(ranks) == 1:
        return next(iter(ranks))
    return "; ".join(f"{value} (ranks {', '.join(map(str, sorted(set(of))))})" for value, of in ranks.items())


def query_job() -> tuple[list[dict], list[str]]:
    """Query every worker and vLLM server of verl in the cluster of RAY_ADDRESS, or in this machine's.

    Progress goes to stderr. Ctrl-C returns the answers so far: the models, and the names of the other actors.

    Raises:
        Refused: no cluster, one of another Ray or Python, or no worker of verl in it.
    """
    address = os.environ.get("RAY_ADDRESS", "auto")
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=5).close()  # Ray would keep trying for an hour
        except (OSError, ValueError) as error:
            raise Refused(f"--live: RAY_ADDRESS={address}: no Ray cluster answers there ({error})") from error
    try:
        # Ray sends this machine's token, which 2.59 requires, only to a cluster that it found itself: "auto".
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except (ConnectionError, RuntimeError) as error:  # none, of another Ray or Python, or without its token
        why = " ".join(str(error).split())
        advice = "a cluster that requires a token needs RAY_AUTH_MODE=token"
        raise Refused(f"--live: RAY_ADDRESS={address}: {why} ({advice})") from error
    try:
        named_actors = ray.util.list_named_actors(all_namespaces=True)
        spaces = {each["name"]: each["namespace"] for each in named_actors if ACTOR.search(each["name"])}
        if not spaces:
            count = len(named_actors)
            raise Refused(f"--live: RAY_ADDRESS={address}: none of the {count} named actors is a worker of verl")
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        actors = {name: ray.get_actor(name, space) for name, space in sorted(spaces.items())}
        # By keyword: where verl cannot be imported here, Ray knows no signatures of an actor's methods.
        waiting = {actor.__ray_call__.remote(fn=actor_models): name for name, actor in actors.items()}
        models: list[dict] = []
        with contextlib.suppress(KeyboardInterrupt):
            while waiting:  # each answers when its current call ends
                answered, _ = ray.wait(list(waiting), timeout=PROGRESS_EVERY_S)
                if not answered:
                    names = ", ".join(sorted(waiting.values())[:3])
                    print(f"waiting for {names}, which are in a call", file=sys.stderr)
                for reference in answered:
                    models += ray.get(reference)
                    del waiting[reference]
        return models, sorted(waiting.values())
    finally:
        ray.shutdown()
