"""What one release does, seen from its own workers on two gloo ranks; run by ``torchrun`` with the tree on PYTHONPATH.

    torchrun --nproc-per-node=2 cases.py RELEASE MODEL_DIR OUT_DIR [CASE ...]

Each case is a behaviour of ``behaviours.py`` and returns a short text of discrete facts, which rank r writes to
OUT_DIR/rank_r.json under each strategy's name. A text, not a verdict: a pristine tree runs the same cases, and what it
does instead is compared with what was predicted.
"""

# ruff: noqa: E402 (what a CPU needs comes before verl)
import asyncio
import contextlib
import copy
import functools
import gc
import hashlib
import importlib
import io
import itertools
import json
import math
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

RELEASE, MODEL, OUT = sys.argv[1], sys.argv[2], Path(sys.argv[3])
NUMBERS = tuple(map(int, RELEASE.split(".")))
LEGACY = NUMBERS < (0, 8)
importlib.import_module("recipes.cpu.legacy" if NUMBERS < (0, 9) else "recipes.cpu.platform")
# 0.7.0's SFT imports it for images, of which there are none here; it needs torchvision, which has no CPU build on PyPI.
sys.modules.setdefault("qwen_vl_utils", SimpleNamespace(fetch_image=None, fetch_video=None))

import numpy as np
import peft.utils.save_and_load
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import verl
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage

if LEGACY:
    from legacy_worker import Worker
else:
    from engine_worker import Worker, infer
VERL = Path(verl.__path__[0])
PATCHED = (VERL / "utils/precision/__init__.py").exists()
RANK = int(os.environ["RANK"])
STRATEGY = ""  # set by main

# Upstream builds its scaler for "cuda"; on a CPU torch then disables it and every fp16 case would only show that.
if not PATCHED:
    ShardedGradScaler.__init__.__defaults__ = ("cpu", *ShardedGradScaler.__init__.__defaults__[1:])

# Where each role's FSDP engine has its keys.
ENGINE = {role: f"actor_rollout_ref.{role}.fsdp_config" for role in ("actor", "ref")}
ENGINE["critic"] = "critic.model.fsdp_config" if LEGACY else "critic.fsdp"

# fp16 as an unpatched release can be told it.
OWN_FP16 = [f"+{ENGINE[role]}.mixed_precision.param_dtype=fp16" for role in ("actor", "critic")]
if (0, 6, 1) <= NUMBERS < (0, 8):
    OWN_FP16[0] = f"{ENGINE['actor']}.dtype=float16"


def composed(*overrides: str) -> DictConfig:
    """The release's own ``ppo_trainer.yaml`` for the tiny model, with ``overrides`` as a user types them."""
    return copy.deepcopy(_composed(STRATEGY, *overrides))  # workers write into theirs


def usual(strategy: str) -> list[str]:
    """The overrides that every case has, for the tiny model on a CPU."""
    ours = [
        f"actor_rollout_ref.model.path={MODEL}",
        "actor_rollout_ref.model.use_remove_padding=false",
        f"actor_rollout_ref.actor.strategy={strategy}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.5",
        "actor_rollout_ref.actor.optim.total_training_steps=100",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        f"critic.model.path={MODEL}",
        f"critic.strategy={strategy}",
        "critic.ppo_mini_batch_size=8",
        "critic.ppo_micro_batch_size_per_gpu=2",
        "critic.optim.lr=1e-2",
        "critic.optim.lr_warmup_steps_ratio=0.5",
        "critic.optim.total_training_steps=100",
        "data.train_batch_size=8",
        "trainer.n_gpus_per_node=2",
    ]
    if LEGACY:
        return [*ours, "actor_rollout_ref.actor.use_torch_compile=false", "critic.model.use_remove_padding=false"]
    ours += [f"{engine}.use_torch_compile=false" for engine in ENGINE.values()]
    return [*ours, "actor_rollout_ref.rollout.name=vllm"]


@functools.cache
def _composed(strategy: str, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(VERL / "trainer/config"), version_base=None):
        return compose("ppo_trainer", overrides=[*usual(strategy), *overrides])


def fp16(role: str, **scaler: float) -> Worker:
    """A worker in fp16 with settings of its scaler: by the keys where the tree is patched, and by what the release has
    where it is not, so that a pristine tree shows its own scaler."""
    if PATCHED:
        settings = [f"{ENGINE[role]}.grad_scaler.{key}={value}" for key, value in scaler.items()]
        return Worker(role, composed("+precision=fp16", *settings))
    worker = Worker(role, composed(*OWN_FP16))
    if worker.scaler is not None and "init_scale" in scaler:
        worker.scaler._init_scale = scaler["init_scale"]
    return worker


def batch(seed: int, rows: int = 4) -> DataProto:
    """``rows`` sequences of 4 prompt and 8 response tokens, different on each rank."""
    draw = torch.Generator().manual_seed(10 * seed + RANK)
    ids = torch.randint(0, 256, (rows, 12), generator=draw)
    ones = torch.ones(rows, 12, dtype=torch.int64)
    tensors = {
        "input_ids": ids,
        "prompts": ids[:, :4],
        "responses": ids[:, 4:],
        "attention_mask": ones,
        "loss_mask": ones,
        "response_mask": ones[:, 4:],
        "position_ids": torch.arange(12).repeat(rows, 1),
        "old_log_probs": torch.full((rows, 8), -5.0),
        "ref_log_prob": torch.full((rows, 8), -5.0),
        "advantages": torch.randn(rows, 8, generator=draw),
        "values": torch.zeros(rows, 8),
        "returns": torch.ones(rows, 8),
    }
    meta = {"temperature": 1.0, "global_token_num": [12] * rows, "micro_batch_size": 2, "use_dynamic_bsz": False}
    return DataProto.from_dict(tensors, meta_info=meta)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state(worker: Worker) -> list[torch.Tensor]:
    """Weights and Adam state of this rank, as clones."""
    tensors = [local(parameter).detach().clone() for parameter in worker.module.parameters()]
    for entry in worker.optimizer.state.values():
        tensors += [local(value).detach().clone() for value in entry.values()]
    return tensors


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def poison(worker: Worker, value: float = math.inf, which: int = 0, times: int = 1) -> None:
    """Before each of the next ``times`` optimizer steps, put ``value`` into one element of a gradient of rank 1."""
    step, steps = getattr(worker.policy, worker.step_name), itertools.count(1)

    def poisoned(*args, **kwargs):
        if next(steps) == times:
            setattr(worker.policy, worker.step_name, step)
        if RANK == 1:
            gradients = [local(p.grad) for p in worker.module.parameters() if p.grad is not None]
            [gradient for gradient in gradients if gradient.numel()][which].view(-1)[0] = value
        return step(*args, **kwargs)

    setattr(worker.policy, worker.step_name, poisoned)


def scale_of(worker: Worker) -> float | None:
    return None if worker.scaler is None else worker.scaler.get_scale()


def numbers(value) -> list[float]:
    """All numbers in a metric, which a release gives as a number, a list or an object that has some."""
    if hasattr(value, "aggregate"):
        value = value.aggregate()
    return [float(value)] if not hasattr(value, "__iter__") else [n for each in value for n in numbers(each)]


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shared_folder() -> str:
    folder = [tempfile.mkdtemp(dir=OUT)]
    dist.broadcast_object_list(folder)
    return folder[0]


def refusal(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0]}"


# ---------------------------------------------------------------------------------------------------------------------


def watch(module: torch.nn.Module) -> dict[str, str]:
    """Filled in a forward pass: what the first block's up_proj computes in."""
    seen: dict[str, str] = {}

    def hook(linear, args, output):
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        seen.update(linear=name(output.dtype), autocast=name(autocast), weight=name(linear.weight.dtype))

    (linear,) = (part for path, part in module.named_modules() if path.endswith("mlp.up_proj") and ".0." in path)
    linear.register_forward_hook(hook)
    return seen


def dtypes(role: str, *overrides: str) -> str:
    worker = Worker(role, composed(*overrides))
    seen = watch(worker.module)
    output = worker.forward(batch(0))
    facts = [f"{key} {value}" for key, value in seen.items()]
    if role != "critic":  # whose head is drawn anew
        error = (output - reference_log_probs()).abs().max().item()
        facts.append("log-probs as " + ("float32" if error < 1e-4 else "float16" if error < 0.005 else "bfloat16"))
    if role != "ref":
        for seed in range(4):  # at the first scale the first steps may overflow
            worker.update(batch(seed))
        facts.append(f"masters {name(next(worker.module.parameters()).dtype)}")
        adam = {name(entry["exp_avg"].dtype) for entry in worker.optimizer.state.values()}
        facts.append(f"Adam {', '.join(adam)}")
    facts.append("scaler" if worker.scaler is not None else "no scaler")
    return ", ".join(facts)


def reference_log_probs() -> torch.Tensor:
    """What an fp32 Hugging Face model gives the responses of ``batch(0)``."""
    data = batch(0).batch
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)(data["input_ids"]).logits
    return logits[:, 3:-1].log_softmax(-1).gather(-1, data["responses"][..., None])[..., 0]


def dtype_actor() -> str:
    return dtypes("actor", "+precision=fp16")


def dtype_ref() -> str:
    return dtypes("ref", "+precision=fp16")


def dtype_critic() -> str:
    return dtypes("critic", "+precision=fp16")


def flowrl(overlay: str, actor: str, ref: str, rollout: str) -> str:
    """FlowRL's own spelling of a regime: does it give what the overlay gives, in every key?"""
    roles = {"actor": actor, "ref": ref, "rollout": rollout}
    spelled = composed(*(f"actor_rollout_ref.{role}.dtype={dtype}" for role, dtype in roles.items()))
    ours, theirs = (
        OmegaConf.to_container(OmegaConf.masked_copy(config, ["actor_rollout_ref", "critic", "data"]), resolve=True)
        for config in (spelled, composed(f"+precision={overlay}"))
    )
    return "as the overlay" if ours == theirs else "ANOTHER CONFIG"


def flowrl_fp16() -> str:
    return flowrl("fp16", "float16", "float16", "float16")


def flowrl_bf16_train_fp16_infer() -> str:
    return flowrl("bf16_train_fp16_infer", "bfloat16", "bfloat16", "float16")


def overflow(role: str) -> str:
    """One gradient of rank 1 is inf, then NaN: what becomes of weights, Adam state and the scale?"""
    worker = fp16(role, init_scale=1024.0)
    worker.update(batch(0))
    facts = []
    for seed, value in enumerate((math.inf, math.nan), start=1):
        before, scale = state(worker), scale_of(worker)
        poison(worker, value)
        worker.update(batch(seed))
        facts.append("skipped" if same(before, state(worker)) else "STEPPED")
        facts.append("no scale" if scale is None else f"scale times {scale_of(worker) / scale:g}")
    before = state(worker)
    worker.update(batch(3))
    after = state(worker)
    moves = not same(before, after) and all(bool(tensor.isfinite().all()) for tensor in after)
    return ", ".join([*facts, "next step taken" if moves else "NEXT STEP NOT TAKEN"])


def scaler_keys(role: str) -> str:
    """The scale after two steps, two more, and an overflow, where every setting is given by its key."""
    given = {"init_scale": 1024, "growth_interval": 2, "growth_factor": 4, "backoff_factor": 0.25}
    keys = [f"{ENGINE[role]}.grad_scaler.{key}={value}" for key, value in given.items()]
    worker = Worker(role, composed("+precision=fp16", *keys))
    scales = []
    for seed in range(5):
        if seed == 4:
            poison(worker)
        worker.update(batch(seed))
        scales.append(f"{scale_of(worker):g}")
    return ", ".join(scales)


def metrics(role: str) -> str:
    """What a taken and a skipped update report."""
    worker = fp16(role, init_scale=1024.0)
    facts = []
    for kind in ("taken", "skipped"):
        if kind == "skipped":
            poison(worker)
        update = worker.update(batch(0))
        shown = [f"{key} {numbers(update[key])[0]:g}" for key in ("skipped_steps", "loss_scale") if key in update]
        if "grad_norm" in update:
            finite = all(map(math.isfinite, numbers(update["grad_norm"])))
            shown.append("grad_norm finite" if finite else "grad_norm NOT FINITE")
        facts.append(f"{kind}: {', '.join(shown)}")
    return "; ".join(facts)


def learning_rate(role: str) -> str:
    """Does the schedule advance after an update of two mini-batches, of which one is skipped, and then both?"""
    worker = fp16(role, init_scale=1024.0)
    facts = []
    for skips in (1, 2):
        before = worker.optimizer.param_groups[0]["lr"]
        poison(worker, times=skips)
        worker.update(batch(skips, rows=8))
        moved = worker.optimizer.param_groups[0]["lr"] != before
        facts.append(f"{skips} of 2 skipped: {'moves on' if moved else 'held'}")
    return ", ".join(facts)


def checkpoint(role: str) -> str:
    """Saved after an overflow and a clean step, loaded into a fresh worker; then loaded without its scaler's state."""
    folder = shared_folder()
    worker = fp16(role, init_scale=1024.0)
    worker.update(batch(0))
    poison(worker)
    worker.update(batch(1))
    worker.update(batch(2))
    saved, scale = state(worker), scale_of(worker)
    worker.save(folder)
    fresh = fp16(role, init_scale=1024.0)
    fresh.load(folder)
    facts = ["state comes back" if same(saved, state(fresh)) else "STATE LOST"]
    if scale is None:
        facts.append("no scale")
    else:
        facts.append(
            "scale comes back" if scale_of(fresh) == scale else f"scale {scale:g} resumes at {scale_of(fresh):g}"
        )
    for each in (worker, fresh):
        each.update(batch(3))
    facts.append("same next step" if same(state(worker), state(fresh)) else "ANOTHER NEXT STEP")

    extra = Path(folder) / f"extra_state_world_size_2_rank_{RANK}.pt"
    content = torch.load(extra, weights_only=False)
    content.pop("grad_scaler", None)
    torch.save(content, extra)
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fp16(role, init_scale=1024.0).load(folder)
    texts = [str(warning.message) for warning in caught if "loss scale" in str(warning.message)]
    warned = len(texts) == 1 and "holds no loss scale: starting at 1024" in texts[0]
    return ", ".join([*facts, "an older checkpoint warns" if warned else "an older checkpoint says nothing"])


def storm(role: str) -> str:
    """Every step overflows: does the run end, above the scale's floor, and say where?"""
    worker = fp16(role, init_scale=8.0, min_scale=2.0, max_consecutive_skips=3)
    for step in range(1, 6):
        poison(worker, which=-1)
        try:
            worker.update(batch(step))
        except RuntimeError as error:
            named = re.search(r"first non-finite gradient: \S+\.weight in the shard of rank 1,", str(error))
            where = "names the gradient and its rank" if named else "NAMES NO GRADIENT"
            return f"{type(error).__name__} in step {step}, scale {scale_of(worker):g}, {where}"
    return "goes on"


def digest(*seen: torch.Tensor | dict) -> str:
    """What tells two trees apart: a digest of tensors and metrics for each rank."""
    whole = hashlib.sha256()
    for each in seen:
        if isinstance(each, dict):
            left_out = ("skipped_steps", "mfu")  # the patches' own, and a measure of time
            kept = {key: numbers(each[key]) for key in sorted(each) if key not in left_out and "/" not in key}
            whole.update(json.dumps(kept).encode())
        else:
            whole.update(each.float().contiguous().numpy().tobytes())
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, whole.hexdigest())
    return " ".join(digests)


def bf16(role: str) -> str:
    """What two updates in bf16 leave: metrics, outputs, weights, Adam state, LR."""
    torch.manual_seed(0)  # the critic's head
    worker = Worker(role, composed())
    seen = []
    for seed in range(2):
        seen += [worker.update(batch(seed)), worker.forward(batch(9)), *state(worker)]
    return digest(*seen)


def bf16_ref() -> str:
    return digest(Worker("ref", composed()).forward(batch(9)))


ACTOR = "actor_rollout_ref.actor"
# What: the key-value pairs that are bad together, and what the refusal has to say.
REFUSED = {
    "an unknown dtype": ([f"++{ACTOR}.dtype=banana"], ["dtype=banana", "float16"]),
    "keys that contradict": (
        [f"++{ACTOR}.dtype=bfloat16", f"++{ACTOR}.fsdp_config.dtype=float16"],
        ["dtype=bfloat16", "dtype=float16", "contradict"],
    ),
    "fp16 masters": (
        ["+precision=fp16", f"++{ACTOR}.fsdp_config.model_dtype=fp16"],
        ["model_dtype=fp16", "model_dtype=fp32"],
    ),
    "an unknown rollout dtype": (["actor_rollout_ref.rollout.dtype=banana"], ["dtype=banana", "bfloat16"]),
}
if NUMBERS < (0, 6):  # it samples from the trained module, whose weights FSDP2 gathers in the training dtype
    REFUSED["fp16 from an hf rollout of bf16"] = (
        ["actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.dtype=float16"],
        ["dtype=float16", "name=hf", "dtype=bfloat16"],
    )
# The model engine of these autocasts in bf16 and scales no loss.
MODEL_ENGINE = ["+precision=fp16", "trainer.use_legacy_worker_impl=disable"]


def validate(config) -> None:
    """What the driver asks before it starts a worker."""
    if NUMBERS >= (0, 6):
        from verl.utils.config import validate_config

        validate_config(config, use_reference_policy=True, use_critic=True)
    else:
        trainer = object.__new__(RayPPOTrainer)
        trainer.config, trainer.use_reference_policy, trainer.use_critic = config, True, True
        trainer._validate_config()


def taken(check: Callable[[], None], said: list[str]) -> str | None:
    """``None`` where ``check`` refuses by one line that has all of ``said``; else the error's type, or nothing."""
    try:
        check()
    except Exception as error:
        while error.__cause__ is not None:  # Hydra's instantiate puts its own around it
            error = error.__cause__
        whole = "\n" not in str(error) and all(part in str(error) for part in said)
        return None if whole else f" ({type(error).__name__})"
    return ""


def refusals() -> str:
    """Which bad input the driver refuses by one line with key, value and what is allowed."""
    validate(composed())
    validate(composed("+precision=fp16"))
    checks = {
        what: taken(lambda overrides=overrides: validate(composed(*overrides)), said)
        for what, (overrides, said) in REFUSED.items()
    }
    if (0, 6, 1) <= NUMBERS < (0, 8):
        said = ["float16", MODEL_ENGINE[1], "bfloat16"]
        checks["fp16 on the model engine"] = taken(lambda: validate(composed(*MODEL_ENGINE)), said)
        checks["fp16 in its SFT"] = taken(lambda: engine_sft_trainer("+precision=fp16"), ["float16", "SFT", "bfloat16"])
    accepted = [f"{what}{error}" for what, error in checks.items() if error is not None]
    return f"takes {', '.join(accepted)}" if accepted else "refuses all"


class Recorder:
    """A rollout that keeps the dtypes of the weights it is sent."""

    def __init__(self):
        self.dtypes: set[str] = set()

    async def update_weights(self, weights, **kwargs) -> None:
        self.dtypes |= {name(tensor.dtype) for _, tensor in weights}


def wire() -> str:
    """In what dtype do weights leave the trainer for an fp16 rollout?"""
    return leaves(Worker("actor", composed(*WIRE)))


def leaves(worker: Worker) -> str:
    """In what dtype do an actor's weights leave for the rollout, by the release's own way?"""
    if hasattr(worker.policy, "get_per_tensor_param"):  # an engine
        return sent(worker.policy.get_per_tensor_param()[0])
    recorder = worker.worker.rollout = Recorder()
    worker.worker.base_sync_done, worker.worker.gen_random_states = True, torch.get_rng_state()
    asyncio.run(worker.worker.rollout_mode())
    return ", ".join(sorted(recorder.dtypes))


def wire_merged_lora() -> str:
    """The same of adapters that are merged into the weights."""
    lora = ["actor_rollout_ref.model.lora_rank=4", "++actor_rollout_ref.model.lora.merge=true"]
    return sent(Worker("actor", composed(*WIRE, *lora)).policy.get_per_tensor_param()[0])


def empty_adapter() -> str:
    """What becomes of a LoRA adapter of which peft returns no tensors, as 0.21.2 does of a nested FSDP1 model."""
    worker = Worker("actor", composed(*WIRE, "actor_rollout_ref.model.lora_rank=4"))
    with mock.patch.object(peft.utils.save_and_load, "get_peft_model_state_dict", lambda *args, **kwargs: {}):
        try:
            if LEGACY:
                leaves(worker)
            else:
                list(worker.policy.get_per_tensor_param(base_sync_done=True)[0])
        except ValueError as error:
            return "refused" if "returned an empty adapter" in str(error) else str(error)
    return "sent"


WIRE = ["actor_rollout_ref.rollout.dtype=float16", "actor_rollout_ref.rollout.free_cache_engine=false"]


def sent(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    return ", ".join(sorted({name(tensor.dtype) for _, tensor in weights}))


def hf_samples(overlay: str) -> str:
    """What the hf rollout computes in, which samples from the trained module itself."""
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    keys = ["name=hf", "dtype=float16", "response_length=2", "tensor_model_parallel_size=1"]
    config = composed(f"+precision={overlay}", *(f"actor_rollout_ref.rollout.{key}" for key in keys))
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor_rollout")
    worker.init_model()
    seen = watch(worker.actor_module_fsdp)
    worker.generate_sequences(batch(0).select(["input_ids", "attention_mask", "position_ids"]))
    return ", ".join(f"{key} {value}" for key, value in seen.items())


def hf_rollout_fp16() -> str:
    return hf_samples("fp16")


def hf_rollout_bf16_train_fp16_infer() -> str:
    return hf_samples("bf16_train_fp16_infer")


def made_reward_model(*overrides: str):
    from verl.workers.fsdp_workers import RewardModelWorker

    given = ["enable=true", f"model.path={MODEL}", "model.input_tokenizer=null", "micro_batch_size_per_gpu=2"]
    worker = RewardModelWorker(composed(*overrides, *(f"reward_model.{key}" for key in given)).reward_model)
    worker.init_model()
    return worker


def reward_model() -> str:
    """What the reward model scores in."""
    worker = made_reward_model("+precision=fp16")
    seen = watch(worker.reward_module)
    worker.compute_rm_score(batch(0))
    return ", ".join(f"{key} {value}" for key, value in seen.items())


def bf16_reward_model() -> str:
    torch.manual_seed(0)  # its head
    return digest(made_reward_model().compute_rm_score(batch(0)).batch["rm_scores"])


def export() -> str:
    """A model whose weights fp16 holds and bf16 does not: what do the HF export and the model merger keep?"""
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    folder = Path(shared_folder())
    contents = f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
    own = ["+precision=fp16"] if PATCHED else OWN_FP16
    worker = Worker("actor", composed(*own, contents))
    with torch.no_grad():
        for parameter in worker.module.parameters():
            parameter.copy_(parameter.half().float())
    weights = {path: tensor.full_tensor() for path, tensor in worker.module.state_dict().items()}
    worker.save(str(folder))
    outcome = [""]
    if RANK == 0:
        exported = folder / "huggingface"
        merger = ModelMergerConfig(
            operation="merge",
            backend="fsdp",
            local_dir=str(folder),
            target_dir=str(folder / "merged"),
            hf_model_config_path=str(exported),
        )
        FSDPModelMerger(merger).merge_and_save()
        models = {"exported": exported, "merged": folder / "merged"}
        kept = {key: AutoModelForCausalLM.from_pretrained(path, dtype="auto") for key, path in models.items()}
        outcome[0] = ", ".join(
            f"{key} as {name(model.dtype)} "
            + (
                "exactly"
                if all(torch.equal(t.float(), weights[p]) for p, t in model.state_dict().items())
                else "ROUNDED"
            )
            for key, model in kept.items()
        )
    dist.broadcast_object_list(outcome)
    return outcome[0]


def sft() -> str:
    """What SFT trains in, told by the same overlay."""
    return (legacy_sft if LEGACY else engine_sft)("+precision=fp16")


def composed_sft(file: str, *overrides: str):
    with initialize_config_dir(str(VERL / "trainer/config"), version_base=None):
        device = ["trainer.device=cpu"] if NUMBERS >= (0, 5) else []  # no such key before
        return compose(file, overrides=[*device, "trainer.total_training_steps=1", *overrides])


def legacy_sft_trainer(*overrides: str):
    from verl.trainer.fsdp_sft_trainer import FSDPSFTTrainer

    given = [
        f"model.partial_pretrain={MODEL}",
        f"model.strategy={STRATEGY}",
        "model.enable_gradient_checkpointing=false",
        "data.train_batch_size=8",
        "data.micro_batch_size_per_gpu=2",
        f"trainer.default_local_dir={OUT}/sft",
    ]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    ulysses = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "sp"))
    config = composed_sft("sft_trainer", *given, *overrides)
    data = [dict(row) for row in sft_batch(0)]
    return FSDPSFTTrainer(config, mesh, ulysses, AutoTokenizer.from_pretrained(MODEL), data, data)


def sft_batch(seed: int) -> TensorDict:
    return batch(seed).select(["input_ids", "attention_mask", "position_ids", "loss_mask"]).batch


def legacy_sft(*overrides: str) -> str:
    trainer = legacy_sft_trainer(*overrides)
    seen = watch(trainer.fsdp_model)
    trainer.training_step(sft_batch(0))
    return sft_facts(seen, vars(trainer).get("scaler"))


def sft_state(trainer) -> list[torch.Tensor]:
    return state(SimpleNamespace(module=trainer.fsdp_model, optimizer=trainer.optimizer))


def overflow_sft() -> str:
    """One gradient of rank 1 is inf: weights and Adam state, the scale, the learning rate and the metric."""
    scaler = ["model.fsdp_config.grad_scaler.init_scale=1024"] if PATCHED else []
    trainer = legacy_sft_trainer("+precision=fp16", *scaler)
    trainer.training_step(sft_batch(0))
    backward = trainer._compute_loss_and_backward

    def poisoned(*args, **kwargs):
        loss = backward(*args, **kwargs)
        if RANK == 1:
            gradients = [local(p.grad) for p in trainer.fsdp_model.parameters() if p.grad is not None]
            next(gradient for gradient in gradients if gradient.numel()).view(-1)[0] = math.inf
        return loss

    before, lr = sft_state(trainer), trainer.optimizer.param_groups[0]["lr"]
    trainer._compute_loss_and_backward = poisoned
    metrics = trainer.training_step(sft_batch(1))
    scaler = vars(trainer).get("scaler")
    return ", ".join(
        [
            "skipped" if same(before, sft_state(trainer)) else "STEPPED",
            "no scale" if scaler is None else f"scale {scaler.get_scale():g}",
            f"LR {'held' if trainer.optimizer.param_groups[0]['lr'] == lr else 'moves on'}",
            f"skipped_steps {metrics.get('train/skipped_steps')}",
        ]
    )


def bf16_sft() -> str:
    trainer = legacy_sft_trainer()
    losses = [torch.tensor(trainer.training_step(sft_batch(seed))["train/loss"]) for seed in range(2)]
    return digest(*losses, *sft_state(trainer))


def engine_sft_trainer(*overrides: str):
    """The trainer with its configs made, which is before its engine and its data."""
    from verl.trainer.sft_trainer import SFTTrainer

    given = [f"model.path={MODEL}", "model.use_remove_padding=false", f"engine.strategy={STRATEGY}"]
    trainer = object.__new__(SFTTrainer)
    trainer.config = composed_sft("sft_trainer_engine", *given, *overrides)
    trainer._build_config()
    return trainer


def engine_sft(*overrides: str) -> str:
    trainer = engine_sft_trainer("engine.use_torch_compile=false", *overrides)
    trainer.engine_config.infer_micro_batch_size_per_gpu = 2
    trainer.engine_config.use_dynamic_bsz = False
    trainer.optimizer_config.total_training_steps = 1
    trainer._build_engine()
    trainer.training_client.reset()
    seen = watch(trainer.engine.module)
    infer(trainer.training_client.infer_batch, batch(0))
    return sft_facts(seen, trainer.engine.scaler)


def sft_facts(seen: dict[str, str], scaler) -> str:
    facts = [f"{key} {value}" for key, value in seen.items()]
    return ", ".join([*facts, "scaler" if scaler is not None else "no scaler"])


def nan_reward() -> str:
    """One of four rewards is NaN: what do the advantages make of it?"""
    data = batch(0)
    data.batch["token_level_rewards"] = torch.zeros(4, 8)
    data.batch["token_level_rewards"][2, -1] = math.nan
    data.non_tensor_batch["uid"] = np.array(["a", "a", "b", "b"], dtype=object)
    try:
        data = compute_advantage(data, adv_estimator="grpo", config=composed().algorithm)
    except ValueError as error:
        return str(error).partition(" (")[0]
    return f"trains on {int(data.batch['advantages'].isnan().any(-1).sum())} rows of NaN"


def reports() -> str:
    """What each worker says of itself when it is built."""
    facts = []
    for role in ("actor", "ref", "critic"):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            Worker(role, composed("+precision=fp16"))
        lines = [line for line in printed.getvalue().splitlines() if line.startswith("[verl-precision] ")]
        said = [json.loads(line.removeprefix("[verl-precision] ")) for line in lines]
        assert all(one["strategy"] == STRATEGY and one["rank"] == RANK for one in said), said
        facts += [f"{one['role']} {one['compute']}" for one in said]
    return ", ".join(facts) or "nothing"


def of_trained_roles(*cases: Callable[[str], str]) -> list[Callable[[], str]]:
    """Each case for the actor and for the critic, named after both."""
    made = []
    for case, role in itertools.product(cases, ("actor", "critic")):
        made.append(functools.partial(case, role))
        made[-1].__name__ = f"{case.__name__}_{role}"
    return made


BF16 = [*of_trained_roles(bf16), bf16_ref]
CASES = [
    *(dtype_actor, dtype_ref, dtype_critic, reports),
    *of_trained_roles(overflow, scaler_keys, metrics, learning_rate, storm, checkpoint),
]
# Under FSDP2 alone: they do not depend on it, or gather all weights, for which torch frees FSDP1's storage on a CPU.
ONCE = [flowrl_fp16, flowrl_bf16_train_fp16_infer, refusals, nan_reward, export]
if NUMBERS < (0, 6):
    CASES += [hf_rollout_fp16, hf_rollout_bf16_train_fp16_infer]
else:
    ONCE += [wire, empty_adapter]
if not LEGACY:
    ONCE.append(wire_merged_lora)
if NUMBERS < (0, 7, 1):
    CASES += [reward_model, overflow_sft]
    BF16 += [bf16_reward_model, bf16_sft]
if NUMBERS != (0, 7, 1):
    CASES.append(sft)
CASES += BF16


def main() -> None:
    global STRATEGY
    # A rank that waits for the other in vain says so, instead of waiting for half an hour.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    gc.freeze()  # verl collects garbage at every turn, which would go through all that was imported
    results = {}
    for STRATEGY in ("fsdp", "fsdp2"):
        # An unpatched tree shows what it does instead under FSDP2; bf16 is compared with it under both.
        cases = CASES + ONCE if STRATEGY == "fsdp2" else CASES if PATCHED else BF16
        wanted = [case for case in cases if case.__name__ in sys.argv[4:] or not sys.argv[4:]]
        results[STRATEGY] = {case.__name__: attempt(case) for case in wanted}
    (OUT / f"rank_{RANK}.json").write_text(json.dumps(results))


def attempt(case) -> str:
    """The outcome of a case; an error is an outcome too, on every rank alike, since some of it is predicted."""
    start = time.monotonic()
    try:
        outcome = case()
        if RANK == 0:
            print(f"{STRATEGY} {case.__name__} {time.monotonic() - start:.1f} s", flush=True)
        return outcome
    except Exception as error:
        traceback.print_exc()
        return refusal(error)


if __name__ == "__main__":
    main()
