"""The cases without a precision key: whatever upstream does, a tree with the series ``precision`` does to the byte."""

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import harness
import numpy as np
import torch
from harness import ENGINE, LEGACY, RELEASE, REWARD_MODEL, VERL, Worker, batch, composed
from hydra import compose, initialize_config_dir
from inert import Seen, each_on, whole_folder
from mixed_dtype_cases import mixture
from observations import local, poison, spoil, watch
from omegaconf import OmegaConf
from rollout_cases import SAMPLED
from sft_cases import engine_sft_trainer, legacy_sft_trainer, sft_batch
from trainer_cases import Trainer
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from verl.trainer.ppo.ray_trainer import compute_advantage

ACTOR, MODEL_KEY = "actor_rollout_ref.actor", "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout.name=vllm"
LORA = f"{MODEL_KEY}.lora_rank=4"
EXPORTS = f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
# Of each update: what is put into a gradient before how many of its steps, its rows, and which of them are masked.
UPDATES = {
    "clean": (0.0, 0, 4, 0),
    "inf": (math.inf, 1, 4, 0),
    "nan": (math.nan, 1, 4, 0),
    "clean again": (0.0, 0, 4, 0),
    "one of two inf": (math.inf, 1, 8, 0),
    "two of two inf": (math.inf, 2, 8, 0),
    "half masked": (0.0, 0, 4, 2),
    "masked": (0.0, 0, 4, 4),
    "clean after": (0.0, 0, 4, 0),
}

FEW = ("clean", "inf", "clean again")


def state(seen: Seen, label: str, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Add weights and buffers by name, Adam state and LR."""
    for kind in ("parameters", "buffers"):
        named = getattr(module, f"named_{kind}")()
        seen.note(f"{label} {kind}", {name: local(tensor) for name, tensor in named})
    if optimizer is not None:
        seen.note(f"{label} Adam", list(optimizer.state.values()))
        seen.note(f"{label} LR", [group["lr"] for group in optimizer.param_groups])


def update(seen: Seen, label: str, worker: Worker, seed: int, rows: int = 4, masked: int = 0) -> None:
    """Add the metrics of an update, what it prints and the state after it."""
    data = batch(seed, rows)
    data.batch["response_mask"][:masked] = 0
    seen.metrics(label, seen.attempt(label, lambda: worker.update(data)))
    state(seen, label, worker.module, worker.optimizer)


def trained(name: str, role: str, *keys: str, updates: Iterable[str] = UPDATES) -> str:
    """Follow a role over updates."""
    seen = Seen(name)
    worker = seen.attempt("build", lambda: Worker(role, composed(*keys)))
    if worker is not None:
        follow(seen, worker, updates)
    return seen.outcome()


def follow(seen: Seen, worker: Worker, updates: Iterable[str]) -> None:
    """Add the outputs of a worker, and if it is trained its updates and the outputs after them."""
    observed = watch(worker.module)
    seen.note("output", worker.forward(batch(9)))
    seen.note("dtypes", observed)
    if worker.role == "ref":
        state(seen, "ref", worker.module, None)
        return
    for seed, label in enumerate(updates):
        value, times, rows, masked = UPDATES[label]
        if times:
            poison(worker, value, times=times)
        update(seen, label, worker, seed, rows, masked)
    seen.note("output after", worker.forward(batch(9)))


def inert(role: str) -> str:
    return trained(f"inert_{role}", role)


def inert_engine() -> str:
    """Train the actor on the model engine of a release whose default workers are others."""
    from engine_worker import Worker as EngineWorker

    keys = ["trainer.use_legacy_worker_impl=disable", f"++{ENGINE['actor']}.use_torch_compile=false"]
    seen = Seen("inert_engine")
    worker = seen.attempt("build", lambda: EngineWorker("actor", composed(*keys, ROLLOUT)))
    with on_the_cpu():
        follow(seen, worker, UPDATES)
    for rollout in ("bfloat16", "auto"):
        send(seen, rollout, [f"actor_rollout_ref.rollout.dtype={rollout}", *keys, ROLLOUT], EngineWorker)
    return seen.outcome()


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Name the CPU to an engine of 0.7, which recipes.cpu.legacy has looked up under another device."""
    if not LEGACY:
        yield
        return
    from verl.utils.device import get_device_name
    from verl.workers.engine import base

    with mock.patch.object(base, "get_device_name", get_device_name):
        yield


def inert_lora(base: str) -> str:
    keys = [LORA, f"++{ENGINE['actor']}.model_dtype={base}"]
    return trained(f"inert_lora_{base}", "actor", *keys, updates=FEW)


def inert_fp32(role: str) -> str:
    """Set upstream's own key for the dtype to fp32, which asks for no other than upstream's."""
    key = f"++{ENGINE[role]}.mixed_precision={{param_dtype:fp32}}"
    return trained(f"inert_fp32_{role}", role, key, updates=("clean", "inf"))


def inert_listed() -> str:
    """Train a mixture whose class lists its norms as fp32."""
    eager = f"+{MODEL_KEY}.override_config.attn_implementation=eager"  # it has no sdpa
    seen = Seen("inert_listed")
    worker = seen.attempt("build", lambda: Worker("actor", composed(mixture("gpt_oss"), eager)))
    for seed, label in enumerate(("first", "second")):
        update(seen, label, worker, seed)
    return seen.outcome()


def inert_checkpoint(role: str) -> str:
    """Save, export and load; load a checkpoint that lacks a file, and one with a file that was cut."""
    seen, folder = Seen(f"inert_checkpoint_{role}"), whole_folder()
    config = composed(*[EXPORTS] if role == "actor" else [])
    worker, fresh = (Worker(role, config) for _ in range(2))
    update(seen, "trained", worker, 0)
    seen.attempt("save", lambda: worker.save(str(folder)))
    seen.files("saved", folder)
    if role == "actor":
        merged = folder.with_name(f"{folder.name}-merged")
        each_on(0, lambda: seen.attempt("merge", lambda: merge(folder, merged)))
        seen.files("merged", merged)
    seen.attempt("load", lambda: fresh.load(str(folder)))
    state(seen, "loaded", fresh.module, fresh.optimizer)
    for each in (worker, fresh):
        update(seen, "next", each, 1)
    for kind in ("extra_state", "optim", "model"):
        (own,) = folder.glob(f"{kind}_world_size_2_rank_{harness.RANK}.pt")
        whole = own.read_bytes()
        own.write_bytes(whole[: len(whole) // 2])
        seen.attempt(f"load half of {kind}", lambda: fresh.load(str(folder)))
        own.unlink()
        seen.attempt(f"load without {kind}", lambda: fresh.load(str(folder)))
        own.write_bytes(whole)
    return seen.outcome()


def merge(folder: Path, target: Path) -> None:
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    huggingface = folder / "huggingface"
    given = {"local_dir": folder, "target_dir": target, "hf_model_config_path": huggingface}
    given = {key: str(path) for key, path in given.items()}
    FSDPModelMerger(ModelMergerConfig(operation="merge", backend="fsdp", **given)).merge_and_save()


class Receiver:
    """A rollout that adds what it receives to the observations."""

    def __init__(self, seen: Seen, label: str):
        self.seen, self.label = seen, label

    async def update_weights(self, weights, **kwargs) -> None:
        self.seen.note(f"{self.label} weights", dict(weights))
        self.seen.note(f"{self.label} arguments", {key: kwargs[key] for key in sorted(kwargs)})


@torch.no_grad()
def fill_adapters(module: torch.nn.Module) -> None:
    """Draw adapters, since the first ones add nothing to the base."""
    for path, parameter in module.named_parameters():
        if "lora_" in path:
            local(parameter).normal_()


def inert_wire() -> str:
    """Follow the weights to the rollout, plain, with adapters and with adapters merged."""
    seen = Seen("inert_wire")
    kinds = {"plain": [], "auto": ["actor_rollout_ref.rollout.dtype=auto"], "adapters": [LORA]}
    kinds["adapters over bf16"] = [LORA, f"++{ENGINE['actor']}.model_dtype=bf16"]
    if not LEGACY:
        kinds |= {f"merged {kind}": [*kinds[kind], f"++{MODEL_KEY}.lora.merge=true"] for kind in list(kinds)[2:]}
    for label, keys in kinds.items():
        send(seen, label, keys, Worker)
    return seen.outcome()


def send(seen: Seen, label: str, keys: list[str], kind: type[Worker]) -> None:
    """Add what leaves an actor for the rollout; of one with adapters the base first, then the adapters."""
    worker = kind("actor", composed("actor_rollout_ref.rollout.free_cache_engine=false", *keys))
    fill_adapters(worker.module)
    actor = worker.worker
    actor.rollout, actor.layered_summon, actor.peft_merge = Receiver(seen, label), False, "merged" in label
    actor.gen_random_states = torch.get_rng_state()
    sync = actor.rollout_mode if hasattr(actor, "rollout_mode") else actor.update_weights
    for synced in (False, True) if "adapters" in label else (True,):
        actor.base_sync_done = synced
        seen.attempt(f"{label} sent", lambda: asyncio.run(sync()))


def inert_attention() -> str:
    """Record how the critic's model is asked for, with another attention in its config, too."""
    seen = Seen("inert_attention")
    eager = "+critic.model.override_config.attn_implementation=eager"
    for kind in (AutoModelForTokenClassification, AutoModelForCausalLM):
        load = kind.from_pretrained

        def loaded(*args, kind=kind, load=load, **kwargs):
            asked = {key: kwargs.get(key) for key in ("attn_implementation", "torch_dtype", "dtype")}
            seen.note(f"{kind.__name__}", asked)
            return load(*args, **kwargs)

        mock.patch.object(kind, "from_pretrained", loaded).start()
    try:
        for label, keys in {"plain": [], "eager": [eager]}.items():
            worker = Worker("critic", composed(*keys))
            seen.note(f"{label} is", worker.module.config._attn_implementation)
            seen.note(f"{label} values", worker.forward(batch(9)))
    finally:
        mock.patch.stopall()
    return seen.outcome()


# Keys that the project adds, wherever they are, and beneath these nodes.
ADDED = ("grad_scaler", "keep_fp32_modules", "check_weight_sync", "mismatch_freq")
WITH_DTYPE = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", "reward_model", "")
CONFIGS = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine")


def without_added(node: dict, path: str = "") -> dict:
    """Return a configuration without the keys that the project adds."""
    own = [*ADDED, *["dtype"] * (path in WITH_DTYPE)]
    if path.endswith("fsdp_config") and (not RELEASE.has("engine_dtype") or path == "model.fsdp_config"):
        own.append("dtype")
    below = {key: value for key, value in node.items() if key not in own}
    for key, value in below.items():
        if isinstance(value, dict):
            below[key] = without_added(value, f"{path}.{key}".removeprefix("."))
    return below


def inert_config() -> str:
    """Compose the release's own configurations."""
    seen = Seen("inert_config")
    for name in (name for name in CONFIGS if (VERL / f"trainer/config/{name}.yaml").exists()):
        with initialize_config_dir(str(VERL / "trainer/config"), version_base=None):
            whole = compose(name, overrides=["critic.model.path=x"] if "ppo" in name else [])
        seen.note(name, OmegaConf.to_yaml(without_added(OmegaConf.to_container(whole, resolve=True))))
    return seen.outcome()


def inert_driver(validate: Callable) -> str:
    """Check configurations of upstream's own keys as the driver does before it starts a worker."""
    seen = Seen("inert_driver")
    for keys in (
        [],
        ["actor_rollout_ref.rollout.dtype=banana"],
        ["actor_rollout_ref.rollout.dtype=auto"],
        *([f"++{ENGINE[role]}.mixed_precision={{param_dtype:bf16}}"] for role in ENGINE),
        *([f"++{ENGINE[role]}.mixed_precision={{param_dtype:fp32}}"] for role in ENGINE),
        [f"++{ENGINE['actor']}.mixed_precision={{param_dtype:bf16,reduce_dtype:bf16}}"],
        [f"++{ENGINE['actor']}.mixed_precision={{param_dtype:bf16,reduce_dtype:banana}}"],
        *([f"++{ENGINE[role]}.model_dtype=bf16"] for role in ENGINE),
        [LORA, f"++{ENGINE['actor']}.model_dtype=bf16"],
    ):
        seen.attempt(f"{keys}", lambda keys=keys: validate(composed(*keys)))
    return seen.outcome()


def inert_trainer() -> str:
    """Compute advantages of a NaN, and log-probabilities as the trainer's loop does, in bypass mode, too."""
    seen, data = Seen("inert_trainer"), batch(0)
    data.batch["token_level_rewards"] = torch.zeros(4, 8)
    data.batch["token_level_rewards"][2, -1] = math.nan
    data.non_tensor_batch["uid"] = np.array(["a", "a", "b", "b"], dtype=object)
    config = composed().algorithm
    done = seen.attempt("reward", lambda: compute_advantage(data, adv_estimator="grpo", config=config))
    seen.note("advantages", dict(done.batch) if done else None)
    modes = {"plain": []}
    if RELEASE.has("bypass_mode"):
        modes["bypass"] = ["++algorithm.rollout_correction.bypass_mode=true"]
    for mode, keys in modes.items():
        trainer = Trainer(*keys)
        for step, moved in enumerate((0.0, 2.0**-12), start=1):
            label = f"{mode} {step}"
            rollout = trainer.sampled + moved
            result = seen.attempt(label, lambda t=trainer, s=step, r=rollout: t.step(s, r))
            seen.note(f"{label} log-probs", result[0] if result else None)
            seen.metrics(label, result[1] if result else None)
    return seen.outcome()


def inert_reward_model() -> str:
    """Score by the reward model."""
    seen = Seen("inert_reward_model")
    worker = seen.attempt("build", lambda: harness.reward_worker(composed(*REWARD_MODEL)))
    scores = seen.attempt("score", lambda: worker.compute_rm_score(batch(0)))
    seen.note("scores", dict(scores.batch))
    return seen.outcome()


def inert_sft() -> str:
    """Train SFT by its own trainer, over an inf, and save."""
    seen = Seen("inert_sft")
    trainer = seen.attempt("build", legacy_sft_trainer)
    backward = trainer._compute_loss_and_backward

    def poisoned(*args, **kwargs):
        loss = backward(*args, **kwargs)
        spoil(trainer.fsdp_model, math.inf)
        return loss

    for seed, label in enumerate(FEW):
        trainer._compute_loss_and_backward = poisoned if label == "inf" else backward
        seen.metrics(label, seen.attempt(label, lambda seed=seed: trainer.training_step(sft_batch(seed))))
        state(seen, label, trainer.fsdp_model, trainer.optimizer)
    if hasattr(trainer, "checkpoint_manager"):  # 0.4.1 saves the weights alone
        folder = whole_folder()
        seen.attempt("save", lambda: trainer.checkpoint_manager.save_checkpoint(str(folder), global_step=1))
        seen.files("saved", folder)
    return seen.outcome()


def inert_engine_sft() -> str:
    """Train SFT on the model engine, over an inf."""
    from engine_worker import infer

    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    seen = Seen("inert_engine_sft")
    trainer = seen.attempt("config", lambda: engine_sft_trainer("engine.use_torch_compile=false"))
    sizes = {"micro_batch_size_per_gpu": 2, "infer_micro_batch_size_per_gpu": 2, "use_dynamic_bsz": False}
    for key, size in sizes.items():
        setattr(trainer.engine_config, key, size)
    trainer.optimizer_config.total_training_steps = 10
    seen.attempt("build", trainer._build_engine)
    seen.attempt("start", trainer.training_client.reset)
    engine = trainer.engine
    worker = SimpleNamespace(policy=engine, module=engine.module, step_name="optimizer_step")
    for seed, label in enumerate(FEW):
        data = left_right_2_no_padding(batch(seed).to_tensordict())
        data["loss_mask"] = torch.nested.as_nested_tensor([torch.ones(12)] * 4, layout=torch.jagged)
        tu.assign_non_tensor(data, update_lr_scheduler=True, global_token_num=[12] * 4, global_batch_size=8)
        if label == "inf":
            poison(worker)
        with on_the_cpu():
            output = seen.attempt(label, lambda data=data: trainer.training_client.train_batch(data=data))
        seen.metrics(label, tu.get(output, "metrics") if output is not None else None)
        state(seen, label, engine.module, engine.optimizer)
    with on_the_cpu():
        seen.note("log-probs", infer(trainer.training_client.infer_batch, batch(0)))
    return seen.outcome()


def inert_hf_rollout() -> str:
    """Sample from the actor's module."""
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    seen = Seen("inert_hf_rollout")
    for dtype in ("bfloat16", "auto"):
        keys = ["actor_rollout_ref.rollout.name=hf", f"actor_rollout_ref.rollout.dtype={dtype}", *SAMPLED]
        worker = ActorRolloutRefWorker(composed(*keys).actor_rollout_ref, role="actor_rollout")
        seen.attempt("build", worker.init_model)
        observed, prompts = watch(worker.actor_module_fsdp), batch(0)
        prompts = prompts.select(["input_ids", "attention_mask", "position_ids"])
        torch.manual_seed(0)
        sampled = seen.attempt("sample", lambda worker=worker, prompts=prompts: worker.generate_sequences(prompts))
        seen.note("sampled", dict(sampled.batch) if sampled else None)
        seen.note("dtypes", observed)
    return seen.outcome()
