"""The release under test, named on the command line: its workers, configurations and batches.

Imported by the scripts that run in the environment of workers, with RELEASE MODEL_DIR OUT_DIR as first arguments and
the tree, this repository, its scripts and its tests on PYTHONPATH.
"""

# ruff: noqa: E402 (the CPU platform must be loaded before verl)
import copy
import functools
import importlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

from verl_precision.patch.releases import find_release

RELEASE, MODEL, OUT = find_release(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
LEGACY = RELEASE.has("legacy_workers")
importlib.import_module("recipes.cpu.platform" if RELEASE.has("platforms") else "recipes.cpu.legacy")
# 0.7.0's SFT imports it for images, unused here; it requires torchvision, which has no CPU build on PyPI.
sys.modules.setdefault("qwen_vl_utils", SimpleNamespace(fetch_image=None, fetch_video=None))

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from transformers import AutoModelForCausalLM

import verl
from verl import DataProto

if LEGACY:
    from legacy_worker import Worker
else:
    from engine_worker import Worker
VERL = Path(verl.__path__[0])
PATCHED = importlib.util.find_spec("verl.utils.precision") is not None
RANK = int(os.environ["RANK"])
STRATEGY = ""  # fsdp or fsdp2, set by the script

# Upstream builds its scaler for "cuda"; on a CPU torch then disables it, which would mask every other fp16 defect.
if not PATCHED:
    ShardedGradScaler.__init__.__defaults__ = ("cpu", *ShardedGradScaler.__init__.__defaults__[1:])

# The prefix of the keys of each role's FSDP engine.
ENGINE = {role: f"actor_rollout_ref.{role}.fsdp_config" for role in ("actor", "ref")}
ENGINE["critic"] = "critic.model.fsdp_config" if LEGACY else "critic.fsdp"

REWARD_MODEL = [
    "reward_model.enable=true",
    f"reward_model.model.path={MODEL}",
    "reward_model.model.input_tokenizer=null",
    "reward_model.micro_batch_size_per_gpu=2",
]
# fp16 by the keys of an unpatched release.
OWN_FP16 = [f"+{ENGINE[role]}.mixed_precision.param_dtype=fp16" for role in ("actor", "critic")]
if LEGACY and RELEASE.has("engine_dtype"):
    OWN_FP16[0] = f"{ENGINE['actor']}.dtype=float16"


def composed(*overrides: str) -> DictConfig:
    """Return the release's own ``ppo_trainer.yaml`` for the tiny model, with ``overrides`` as a user types them."""
    return copy.deepcopy(_composed(STRATEGY, *overrides))  # a copy, since workers modify their config


def usual(strategy: str) -> list[str]:
    """Return the overrides that every case has, for the tiny model on a CPU."""
    trained = [
        f"strategy={strategy}",
        "ppo_mini_batch_size=8",
        "ppo_micro_batch_size_per_gpu=2",
        "optim.lr=1e-2",
        "optim.lr_warmup_steps_ratio=0.5",
        "optim.total_training_steps=100",
    ]
    ours = [f"{role}.{setting}" for role in ("actor_rollout_ref.actor", "critic") for setting in trained]
    ours += [f"actor_rollout_ref.{role}.log_prob_micro_batch_size_per_gpu=2" for role in ("ref", "rollout")]
    ours += [f"{owner}.model.path={MODEL}" for owner in ("actor_rollout_ref", "critic")]
    ours += ["actor_rollout_ref.model.use_remove_padding=false", "data.train_batch_size=8", "trainer.n_gpus_per_node=2"]
    if LEGACY:
        return [*ours, "actor_rollout_ref.actor.use_torch_compile=false", "critic.model.use_remove_padding=false"]
    ours += [f"{engine}.use_torch_compile=false" for engine in ENGINE.values()]
    return [*ours, "actor_rollout_ref.rollout.name=vllm"]


@functools.cache
def _composed(strategy: str, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(VERL / "trainer/config"), version_base=None):
        return compose("ppo_trainer", overrides=[*usual(strategy), *overrides])


def reward_worker(config: DictConfig):
    """Return the worker of a release that has one for reward models."""
    from verl.workers.fsdp_workers import RewardModelWorker

    worker = RewardModelWorker(config.reward_model)
    worker.init_model()
    return worker


def fp16(role: str, **scaler: float) -> Worker:
    """Return a worker in fp16 with settings of its scaler: by their keys on a patched tree, else by
    the release's own keys, so that a pristine tree runs its own scaler."""
    if PATCHED:
        settings = [f"{ENGINE[role]}.grad_scaler.{key}={value}" for key, value in scaler.items()]
        return Worker(role, composed("+precision=fp16", *settings))
    worker = Worker(role, composed(*OWN_FP16))
    if worker.scaler is not None and "init_scale" in scaler:
        worker.scaler._init_scale = scaler["init_scale"]
    return worker


def batch(seed: int, rows: int = 4) -> DataProto:
    """Return ``rows`` sequences of 4 prompt and 8 response tokens, different on each rank."""
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


def shared_folder() -> str:
    folder = [tempfile.mkdtemp(dir=OUT)]
    dist.broadcast_object_list(folder)
    return folder[0]


def reference_log_probs() -> torch.Tensor:
    """Return the log-probabilities of the responses of ``batch(0)`` by an fp32 model, ``(rows, response)``."""
    data = batch(0).batch
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)(data["input_ids"]).logits
    return logits[:, 3:-1].log_softmax(-1).gather(-1, data["responses"][..., None])[..., 0]
