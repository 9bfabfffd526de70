"""The cases without a precision key: whatever upstream does, a tree with the series ``precision`` does bitwise."""

import asyncio
import contextlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from unittest import mock

import harness
import torch
from harness import ENGINE, LEGACY, REWARD_MODEL, Worker, batch, composed, shared_folder
from inert import Seen, each_on
from mixed_dtype_cases import mixture
from observations import local, poison, watch
from rollout_cases import SAMPLED
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel

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


def update(seen: Seen, label: str, worker: Worker, seed: int, rows: int = 4, masked: int = 0) -> None:
    """Add the metrics of an update, what it prints and the state after it; one of masked rows may fail."""
    data = batch(seed, rows)
    data.batch["response_mask"][:masked] = 0
    seen.metrics(label, (seen.attempt if masked else seen.run)(label, lambda: worker.update(data)))
    seen.state(label, worker.module, worker.optimizer)


def trained(name: str, role: str, *keys: str, updates: Iterable[str] = UPDATES) -> str:
    """Follow a role over updates."""
    seen = Seen(name)
    follow(seen, seen.run("build", lambda: Worker(role, composed(*keys))), updates)
    return seen.outcome()


def follow(seen: Seen, worker: Worker, updates: Iterable[str]) -> None:
    """Add the outputs of a worker, and if it is trained its updates and the outputs after them."""
    observed = watch(worker.module)
    seen.note("output", worker.forward(batch(9)))
    seen.note("dtypes", observed)
    if worker.role == "ref":
        seen.state("ref", worker.module, None)
        return
    for seed, label in enumerate(updates):
        value, times, rows, masked = UPDATES[label]
        if times:
            poison(worker, value, times=times)
        update(seen, label, worker, seed, rows, masked)
    seen.note("output after", worker.forward(batch(9)))


def inert(role: str) -> str:
    return trained(f"inert_{role}", role)


def inert_accumulation() -> str:
    """Reduce gradients after the last micro-batch only, which FSDP1 adds up in the dtype that it computes in."""
    return trained("inert_accumulation", "actor", f"{ENGINE['actor']}.use_no_sync_for_gradient_accumulation=true")


def inert_engine() -> str:
    """Train the actor on the model engine of a release whose default workers are others."""
    from engine_worker import Worker as EngineWorker

    keys = ["trainer.use_legacy_worker_impl=disable", f"++{ENGINE['actor']}.use_torch_compile=false"]
    seen = Seen("inert_engine")
    worker = seen.run("build", lambda: EngineWorker("actor", composed(*keys, ROLLOUT)))
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


def inert_lora_critic() -> str:
    """Train adapters of a critic over a base in 16 bits, whose buffers upstream rounds."""
    adapters = ["critic.model.lora_rank=4", "critic.model.target_modules=[q_proj,v_proj]"]  # the score is a linear, too
    # peft takes this method from every model; transformers has given it to all until 4.50, and peft does not call it.
    with mock.patch.object(PreTrainedModel, "prepare_inputs_for_generation", None, create=True):
        return trained("inert_lora_critic", "critic", *adapters, f"++{ENGINE['critic']}.model_dtype=bf16", updates=FEW)


def inert_fp32(role: str) -> str:
    """Set upstream's own key for the dtype to fp32, with upstream's dtype of the weights and without."""
    seen, key = Seen(f"inert_fp32_{role}"), f"++{ENGINE[role]}.mixed_precision={{param_dtype:fp32}}"
    for keys in ([key], [key, f"++{ENGINE[role]}.model_dtype=null"]):
        if worker := seen.attempt("build", lambda keys=keys: Worker(role, composed(*keys))):  # a critic needs both
            follow(seen, worker, FEW[:2])
    return seen.outcome()


def inert_listed() -> str:
    """Train a mixture whose class lists its norms as fp32."""
    eager = f"+{MODEL_KEY}.override_config.attn_implementation=eager"  # it has no sdpa
    seen = Seen("inert_listed")
    worker = seen.run("build", lambda: Worker("actor", composed(mixture("gpt_oss"), eager)))
    for seed, label in enumerate(("first", "second")):
        update(seen, label, worker, seed)
    return seen.outcome()


def inert_checkpoint(role: str) -> str:
    """Save, export and load; load a checkpoint that lacks a file, and one with a file that was cut."""
    seen, folder = Seen(f"inert_checkpoint_{role}"), Path(shared_folder())
    config = composed(*[EXPORTS] if role == "actor" else [])
    worker, fresh = (Worker(role, config) for _ in range(2))
    update(seen, "trained", worker, 0)
    seen.run("save", lambda: worker.save(str(folder)))
    seen.files("saved", folder)
    if role == "actor":
        merged = folder.with_name(f"{folder.name}-merged")
        each_on(0, lambda: seen.run("merge", lambda: merge(folder, merged)))
        seen.files("merged", merged)
    seen.run("load", lambda: fresh.load(str(folder)))
    seen.state("loaded", fresh.module, fresh.optimizer)
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
    kinds["fp32"] = [f"++{ENGINE['actor']}.mixed_precision={{param_dtype:fp32}}"]
    kinds["adapters over bf16"] = [LORA, f"++{ENGINE['actor']}.model_dtype=bf16"]
    if not LEGACY:
        kinds |= {
            f"merged {kind}": [*kinds[kind], f"++{MODEL_KEY}.lora.merge=true"]
            for kind in list(kinds)
            if "adapters" in kind
        }
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
    methods = ("rollout_mode", "update_weights", "wake_up")  # of legacy workers, of the model engine, of 0.7.0's
    sync = next(getattr(actor, method) for method in methods if hasattr(actor, method))
    for synced in (False, True) if "adapters" in label else (True,):
        actor.base_sync_done = synced
        seen.run(f"{label} sent", lambda: asyncio.run(sync()))
    if hasattr(worker.policy, "get_per_tensor_param_shard") and "adapters" not in label:
        shards, _ = worker.policy.get_per_tensor_param_shard()
        seen.note(f"{label} shards", {path: shard for path, shard, _ in shards})


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


def inert_reward_model() -> str:
    """Score by the reward model, with upstream's own key for the dtype, too."""
    seen, key = Seen("inert_reward_model"), "++reward_model.model.fsdp_config.mixed_precision={param_dtype:fp32}"
    for label, keys in {"plain": [], "fp32": [key]}.items():
        worker = seen.run(f"{label} build", lambda keys=keys: harness.reward_worker(composed(*REWARD_MODEL, *keys)))
        observed = watch(worker.reward_module)
        scores = seen.run(f"{label} score", lambda worker=worker: worker.compute_rm_score(batch(0)))
        seen.note(f"{label} scores", dict(scores.batch))
        seen.note(f"{label} dtypes", observed)
    return seen.outcome()


def inert_hf_rollout() -> str:
    """Sample from the actor's module."""
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    seen = Seen("inert_hf_rollout")
    for dtype in ("bfloat16", "auto"):
        keys = ["actor_rollout_ref.rollout.name=hf", f"actor_rollout_ref.rollout.dtype={dtype}", *SAMPLED]
        worker = ActorRolloutRefWorker(composed(*keys).actor_rollout_ref, role="actor_rollout")
        seen.run("build", worker.init_model)
        observed, prompts = watch(worker.actor_module_fsdp), batch(0)
        prompts = prompts.select(["input_ids", "attention_mask", "position_ids"])
        torch.manual_seed(0)
        sampled = seen.run("sample", lambda worker=worker, prompts=prompts: worker.generate_sequences(prompts))
        seen.note("sampled", dict(sampled.batch))
        seen.note("dtypes", observed)
    return seen.outcome()
