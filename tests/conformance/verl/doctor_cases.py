"""The dtypes of one release's workers under each of ``doctor_configs``, on one rank with the tree on PYTHONPATH.

    doctor_cases.py RELEASE MODEL_DIR OUT_DIR CONFIG ...

Writes OUT_DIR/rank_0.json: for each configuration its overrides, the dtype of each observed hop (by the names of
``verl-precision doctor --json``), the settings of the loss scalers, the dtypes that the workers logged, and any
refusal: the error, and whether composing, the driver or which worker raised it.
"""

import contextlib
import gc
import io
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

import harness
import torch
import torch.distributed as dist
from cases import validate
from doctor_configs import CONFIGS, Given
from harness import OUT, RELEASE, REWARD_MODEL, VERL, Worker, batch, reward_worker, usual
from hydra import compose, initialize_config_dir
from observations import name, watch
from omegaconf import OmegaConf
from rollout_cases import leaves
from support.parsed_once import yaml_parsed_once
from torch.distributed.fsdp import FullyShardedDataParallel

LINE = "[verl-precision] "
ALONE = ("wire", "hf_export")  # hops of no role


class Refusal(Exception):
    """The release refuses a configuration; ``record`` contains the stage and the error."""

    def __init__(self, where: str, error: Exception):
        while error.__cause__ is not None:  # Hydra's instantiate wraps it
            error = error.__cause__
        super().__init__(where)
        self.record = {"where": where, "type": type(error).__name__, "text": str(error)}


@contextlib.contextmanager
def refused_in(where: str):
    try:
        yield
    except Exception as error:
        raise Refusal(where, error) from error


def reduced_in(module: torch.nn.Module) -> str:
    """Return the dtype in which FSDP reduces the gradients."""
    if isinstance(module, FullyShardedDataParallel):
        return name(module.mixed_precision.reduce_dtype)
    return name(module._get_fsdp_state()._mp_policy.reduce_dtype)


def settings(scaler) -> dict | None:
    """Return the settings of a loss scaler, read from it before its first step."""
    if scaler is None:
        return None
    own = getattr(scaler, "config", None)  # of the patched scaler
    return {
        "init_scale": scaler.get_scale(),
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "min_scale": own and own.min_scale,
        "max_consecutive_skips": own and own.max_consecutive_skips,
    }


def observe_role(role: str, given: Given, config) -> tuple[dict, dict | None]:
    """Return hops and scaler of one role's worker after a forward pass and, if the role is trained, a step."""
    if role == "reward_model":
        return {"reward_model.compute": scored_in(config)}, None
    torch.use_deterministic_algorithms(False)  # an engine of the previous configuration turned them on
    with refused_in(role):
        worker = made(role, config)
    by_training = {parameter.requires_grad: name(parameter.dtype) for parameter in worker.module.parameters()}
    hops = {"deterministic": torch.are_deterministic_algorithms_enabled()}
    hops |= {"master": by_training.get(True), "reduce": reduced_in(worker.module)}
    if role != "ref" and False in by_training:  # LoRA
        hops["base"] = by_training[False]
    scaler = settings(worker.scaler) if role != "ref" else None
    # Sharding managers import a vLLM that has no CPU build.
    if role == "actor" and not RELEASE.has("sharding_manager"):
        hops["wire"] = leaves(worker)
    observed = watch(worker.module)
    with refused_in(role):
        worker.forward(batch(0))
    hops |= hops_of(observed)
    if role != "ref":
        updates(role, worker, hops, scaler)
    if "saved" in given.more:
        saved(worker, hops, scaler)
    return {key if key in ALONE else f"{role}.{key}": value for key, value in hops.items()}, scaler


def hops_of(observed: dict[str, str]) -> dict[str, str]:
    """Return what ``watch`` observed by the doctor's names of the hops."""
    names = {"weight": "compute", "autocast": "autocast", "logits": "logits"}
    return {names[key]: value for key, value in observed.items() if key in names}


def made(role: str, config) -> Worker:
    """Return the worker that the release's ``main_ppo`` builds for this configuration."""
    if role != "critic" or config.trainer.get("use_legacy_worker_impl") != "disable":
        return Worker(role, config)
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.roles import CriticWorker  # of 0.6.0 and 0.6.1

    worker = CriticWorker(omega_conf_to_dataclass(config.critic))
    worker.init_model()  # ends in an AttributeError: the feature engine_critic_fails
    return worker


def updates(role: str, worker, hops: dict, scaler: dict | None) -> None:
    """Take steps until the optimizer has a state; the first may overflow at the initial scale."""
    for seed in range(8):
        with refused_in(role):
            metrics = worker.update(batch(seed, rows=8))
        dtypes = {name(entry["exp_avg"].dtype) for entry in worker.optimizer.state.values()}
        if dtypes:
            break
    hops["optimizer"] = ", ".join(sorted(dtypes))
    if scaler:
        scaler["reported"] = any(key.endswith("loss_scale") for key in metrics)


def saved(worker, hops: dict, scaler: dict | None) -> None:
    """Save a checkpoint; record whether it contains the scaler, and the dtype of the HF export's config."""
    folder = Path(tempfile.mkdtemp(dir=OUT))
    worker.save(str(folder))
    config = json.loads((folder / "huggingface/config.json").read_text())
    hops["hf_export"] = config.get("dtype") or config["torch_dtype"]
    if scaler:
        (extra,) = folder.glob("extra_state_*.pt")
        scaler["saved"] = "grad_scaler" in torch.load(extra, weights_only=False)


def scored_in(config) -> str:
    """Return the dtype in which the legacy reward model computes."""
    with refused_in("reward_model"):
        worker = reward_worker(config)
    observed = watch(worker.reward_module)
    worker.compute_rm_score(batch(0))
    compute, autocast = observed["weight"], observed["autocast"]
    return compute if compute == autocast else f"{compute}, autocast {autocast}"


def overrides(given: Given) -> list[str]:
    """Return all overrides of a configuration, for one process and a rollout that is never offloaded."""
    words = ["trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.free_cache_engine=false"]
    words += given.words(RELEASE.name)
    if "ref" in given.roles:
        words.append("actor_rollout_ref.actor.use_kl_loss=true")
    if "reward_model" in given.roles:
        words += REWARD_MODEL
        if RELEASE.has("reward_loop"):
            words.append("reward_model.use_reward_loop=false")  # else it would run as a server
    return [*usual(harness.STRATEGY), *words]


def observe(given: Given) -> dict:
    """Return the record of one configuration."""
    record = {"overrides": overrides(given), "hops": {}, "scaler": {}, "reports": [], "refused": []}
    try:
        with refused_in("compose"), initialize_config_dir(str(VERL / "trainer/config"), version_base=None):
            config = compose("ppo_trainer", overrides=record["overrides"])
            OmegaConf.resolve(config)  # as main_ppo does before it starts workers
        with refused_in("driver"):
            validate(config)
    except Refusal as refusal:
        record["refused"].append(refusal.record)
        return record
    printed = io.StringIO()
    for role in given.roles:
        try:
            with contextlib.redirect_stdout(printed):
                hops, record["scaler"][role] = observe_role(role, given, config)
            record["hops"] |= hops
        except Refusal as refusal:
            if os.environ.get("TRACE"):
                traceback.print_exc()
            record["refused"].append(refusal.record)
    lines = [line for line in printed.getvalue().splitlines() if line.startswith(LINE)]
    record["reports"] = [json.loads(line.removeprefix(LINE)) for line in lines]
    return record


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gc.freeze()  # verl calls gc.collect() often: exclude everything imported so far
    harness.STRATEGY = "fsdp"
    records = {}
    with yaml_parsed_once():
        for key in sys.argv[4:]:
            start = time.monotonic()
            records[key] = observe(CONFIGS[key])
            print(f"{key} {time.monotonic() - start:.2f} s", flush=True)
    (OUT / "rank_0.json").write_text(json.dumps(records))


if __name__ == "__main__":
    main()
