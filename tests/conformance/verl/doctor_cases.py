"""The dtypes of one release's workers under each of ``doctor_configs``, in one process with the tree on PYTHONPATH.

    doctor_cases.py RELEASE MODEL_DIR OUT_DIR [CONFIG ...]

Writes OUT_DIR/records.json: for each configuration its overrides, the dtype of each observed hop (by the names of
``scripts/doctor.py --json``), the settings of the loss scalers, the dtypes that the workers logged, and any
refusal: the error, and whether composing, the driver or which worker raised it.
"""

# ruff: noqa: E402 (the variables of a one-rank process group must be set before the imports)
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

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # read, but not used, by verl's workers

import harness
import torch
import torch.distributed as dist
from cases import validate
from doctor_configs import CONFIGS, Given, parse_yaml_once
from harness import MODEL, OUT, PATCHED, RELEASE, VERL, Worker, batch, name, usual
from hydra import compose, initialize_config_dir
from rollout_cases import leaves
from torch.distributed.fsdp import FullyShardedDataParallel

LINE = "[verl-precision] "
ALONE = ("wire", "hf_export")  # hops of no role
# The hf rollout samples from the actor's module.
SAMPLED = ["actor_rollout_ref.rollout.response_length=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"]


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


def watch(module: torch.nn.Module) -> dict[str, str]:
    """Return a dict that a forward pass fills: dtypes of weights and autocast inside, and of the head's output."""
    observed: dict[str, str] = {}

    def inside(linear, args, output):
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        observed.update(compute=name(linear.weight.dtype), autocast=name(autocast))

    def head(linear, args, output):
        observed.update(logits=name(output.dtype))

    parts = dict(module.named_modules())
    linear = [part for path, part in parts.items() if ".0." in path and "mlp.up_proj" in path]
    next(part for part in linear if isinstance(part, torch.nn.Linear)).register_forward_hook(inside)
    for path, part in parts.items():
        if path.endswith("lm_head"):
            part.register_forward_hook(head)
    return observed


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
    with refused_in(role):
        worker = made(role, config)
    hops = {"master": name(next(worker.module.parameters()).dtype), "reduce": reduced_in(worker.module)}
    scaler = settings(worker.scaler) if role != "ref" else None
    if role == "actor" and sends_weights(given):
        hops["wire"] = leaves(worker)
    observed = watch(worker.module)
    with refused_in(role):
        worker.forward(batch(0))
    hops |= observed
    if role != "ref":
        updates(role, worker, hops, scaler)
    if "saved" in given.more:
        saved(worker, hops, scaler)
    if "hf" in given.more:
        hops["rollout.weights"], hops["rollout.logits"] = sampled(config)
    return {key if key in ALONE or "." in key else f"{role}.{key}": value for key, value in hops.items()}, scaler


def made(role: str, config) -> Worker:
    """Return the worker that the release's ``main_ppo`` builds for this configuration."""
    on_engine = config.trainer.get("use_legacy_worker_impl") == "disable" and role == "critic"
    return RolesCritic(config) if on_engine else Worker(role, config)


class RolesCritic:
    """The critic of 0.6.0 and 0.6.1 on the model engine; actor and ref stay legacy workers there."""

    def __init__(self, config):
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.roles import CriticWorker

        self.worker = CriticWorker(omega_conf_to_dataclass(config.critic))
        self.worker.init_model()
        self.module, self.optimizer = self.worker.engine.module, self.worker.engine.optimizer
        self.scaler = vars(self.worker.engine).get("scaler")

    def forward(self, data):
        return self.worker.compute_values(data).batch["values"]

    def update(self, data) -> dict:
        return self.worker.update_critic(data).meta_info["metrics"]


def sends_weights(given: Given) -> bool:
    """Return whether the release can send weights here; sharding managers import a vLLM without a CPU build."""
    return not RELEASE.has("sharding_manager") and "hf" not in given.more


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
    """Save a checkpoint; return whether it contains the scaler, and the dtype of the HF export's config."""
    folder = Path(tempfile.mkdtemp(dir=OUT))
    worker.save(str(folder))
    config = json.loads((folder / "huggingface/config.json").read_text())
    hops["hf_export"] = config.get("dtype") or config["torch_dtype"]
    if scaler:
        (extra,) = folder.glob("extra_state_*.pt")
        scaler["saved"] = "grad_scaler" in torch.load(extra, weights_only=False)


def scored_in(config) -> str:
    """Return the dtype in which the legacy reward model computes."""
    from verl.workers.fsdp_workers import RewardModelWorker

    with refused_in("reward_model"):
        worker = RewardModelWorker(config.reward_model)
        worker.init_model()
    observed = watch(worker.reward_module)
    worker.compute_rm_score(batch(0))
    compute, autocast = observed["compute"], observed["autocast"]
    return compute if compute == autocast else f"{compute}, autocast {autocast}"


def sampled(config) -> tuple[str, str]:
    """Return the dtypes of weights and logits of the hf rollout, which samples from the trained module."""
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor_rollout")
    worker.init_model()
    observed = watch(worker.actor_module_fsdp)
    worker.generate_sequences(batch(0).select(["input_ids", "attention_mask", "position_ids"]))
    return observed["compute"], observed["logits"]


def observe(given: Given) -> dict:
    # One process, and a rollout that only receives weights and is never offloaded.
    words = [
        "trainer.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.free_cache_engine=false",
        *given.words(RELEASE.name),
    ]
    if "ref" in given.roles:
        words.append("actor_rollout_ref.actor.use_kl_loss=true")
    if "reward_model" in given.roles:
        own = ["enable=true", f"model.path={MODEL}", "model.input_tokenizer=null", "micro_batch_size_per_gpu=2"]
        words += [f"reward_model.{key}" for key in own]
        if RELEASE.has("reward_loop"):
            words.append("reward_model.use_reward_loop=false")  # else it would run as a server
    if "hf" in given.more:
        words += SAMPLED
    record = {"overrides": [*usual(harness.STRATEGY), *words], "roles": given.roles}
    record |= {"hops": {}, "scaler": {}, "reports": [], "refused": []}
    printed = io.StringIO()
    try:
        with refused_in("compose"), initialize_config_dir(str(VERL / "trainer/config"), version_base=None):
            config = compose("ppo_trainer", overrides=record["overrides"])
        with refused_in("driver"):
            validate(config)
    except Refusal as refusal:
        record["refused"].append(refusal.record)
        return record
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
    parse_yaml_once()
    gc.freeze()  # verl calls gc.collect() often: exclude everything imported so far
    harness.STRATEGY = "fsdp"
    wanted = {key: given for key, given in CONFIGS.items() if RELEASE.name in given.releases}
    if sys.argv[4:]:
        wanted = {key: wanted[key] for key in sys.argv[4:]}
    records = {}
    for key, given in wanted.items():
        start = time.monotonic()
        records[key] = observe(given)
        print(f"{key} {time.monotonic() - start:.2f} s", flush=True)
    (OUT / "records.json").write_text(json.dumps({"patched": PATCHED, "configs": records}, indent=1))


if __name__ == "__main__":
    main()
