"""What one release does, seen from its own workers on two gloo ranks; run by ``torchrun`` with the tree on PYTHONPATH.

    torchrun --nproc-per-node=2 cases.py RELEASE MODEL_DIR OUT_DIR [CASE ...]

Each case is a behaviour of ``behaviours.py`` and returns a short text of discrete facts, which rank r writes to
OUT_DIR/rank_r.json under each strategy's name. A text, not a verdict: a pristine tree runs the same cases, and what it
does instead is compared with what was predicted.
"""

import hashlib
import importlib
import json
import math
import os
import sys
import tempfile
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

RELEASE, MODEL, OUT = sys.argv[1], sys.argv[2], Path(sys.argv[3])
NUMBERS = tuple(map(int, RELEASE.split(".")))
LEGACY = NUMBERS < (0, 8)
importlib.import_module("recipes.cpu.legacy" if NUMBERS < (0, 9) else "recipes.cpu.platform")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: E402
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import verl  # noqa: E402
from verl import DataProto  # noqa: E402
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage  # noqa: E402

Worker = importlib.import_module("legacy_worker" if LEGACY else "engine_worker").Worker
VERL = Path(verl.__path__[0])
PATCHED = (VERL / "utils/precision.py").exists()
RANK = int(os.environ["RANK"])
STRATEGY = ""  # set by main

# Upstream builds its scaler for "cuda"; on a CPU torch then disables it and every fp16 case would only show that.
if not PATCHED:
    ShardedGradScaler.__init__.__defaults__ = ("cpu", *ShardedGradScaler.__init__.__defaults__[1:])

SCALER = "critic.model.fsdp_config" if LEGACY else "critic.fsdp"
ENGINE = {"actor": "actor_rollout_ref.actor.fsdp_config", "critic": SCALER, "ref": "actor_rollout_ref.ref.fsdp_config"}


def composed(*overrides: str):
    """The release's own ``ppo_trainer.yaml`` for the tiny model, with ``overrides`` as a user types them."""
    ours = [
        f"actor_rollout_ref.model.path={MODEL}",
        "actor_rollout_ref.model.use_remove_padding=false",
        f"actor_rollout_ref.actor.strategy={STRATEGY}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=50",
        "actor_rollout_ref.actor.optim.total_training_steps=100",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        f"critic.model.path={MODEL}",
        f"critic.strategy={STRATEGY}",
        "critic.ppo_mini_batch_size=8",
        "critic.ppo_micro_batch_size_per_gpu=2",
        "critic.optim.lr=1e-2",
        "critic.optim.lr_warmup_steps=50",
        "critic.optim.total_training_steps=100",
        "data.train_batch_size=8",
        "trainer.n_gpus_per_node=2",
    ]
    if LEGACY:
        ours += ["actor_rollout_ref.actor.use_torch_compile=false", "critic.model.use_remove_padding=false"]
    else:
        ours += [f"{engine}.use_torch_compile=false" for engine in ENGINE.values()]
        ours += ["actor_rollout_ref.rollout.name=vllm"]
    with initialize_config_dir(str(VERL / "trainer/config"), version_base=None):
        return compose("ppo_trainer", overrides=[*ours, *overrides])


def fp16(role: str, **scaler: float) -> Worker:
    """A worker in fp16 with settings of its scaler: by the keys where the tree is patched, and by what the release has
    where it is not, so that a pristine tree shows its own scaler."""
    if PATCHED:
        settings = [f"{ENGINE[role]}.grad_scaler.{key}={value}" for key, value in scaler.items()]
        return Worker(role, composed("+precision=fp16", *settings))
    if (0, 6, 1) <= NUMBERS < (0, 8):
        own = f"{ENGINE[role]}.dtype=float16"
    else:
        own = f"+{ENGINE[role]}.mixed_precision.param_dtype=fp16"
    worker = Worker(role, composed(own))
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


def poison(worker: Worker, value: float = math.inf, which: int = 0) -> None:
    """Before the next optimizer step, put ``value`` into one element of one gradient of rank 1, once."""
    step = getattr(worker.policy, worker.step_name)

    def poisoned(*args, **kwargs):
        setattr(worker.policy, worker.step_name, step)
        if RANK == 1:
            gradients = [parameter.grad for parameter in worker.module.parameters() if parameter.grad is not None]
            local(gradients[which]).view(-1)[0] = value
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
        print("ERROR", role, error)
        facts.append("log-probs as " + ("float32" if error < 1e-4 else "float16" if error < 0.02 else "bfloat16"))
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


def overflow(role: str) -> str:
    """One gradient of rank 1 is inf, then NaN: what becomes of weights, Adam state, scale, metrics and the LR?"""
    worker = fp16(role, init_scale=1024.0)
    worker.update(batch(0))
    facts = []
    for seed, value in enumerate((math.inf, math.nan), start=1):
        before, scale = state(worker), scale_of(worker)
        poison(worker, value)
        worker.update(batch(seed))
        facts.append("state kept" if same(before, state(worker)) else "STATE MOVED")
        facts.append("no scale" if scale is None else f"scale times {scale_of(worker) / scale:g}")
    before = state(worker)
    worker.update(batch(3))
    after = state(worker)
    moves = not same(before, after) and all(bool(tensor.isfinite().all()) for tensor in after)
    return ", ".join([*facts, "then moves on" if moves else "THEN DOES NOT MOVE ON"])


def overflow_actor() -> str:
    return overflow("actor")


def overflow_critic() -> str:
    return overflow("critic")


def metrics(role: str) -> str:
    worker = fp16(role, init_scale=1024.0)
    facts = []
    for kind in ("taken", "skipped"):
        if kind == "skipped":
            poison(worker)
        update = worker.update(batch(0))
        values = {key: numbers(update[key]) for key in ("skipped_steps", "loss_scale", "grad_norm") if key in update}
        if "grad_norm" in values:
            values["grad_norm"] = "finite" if all(map(math.isfinite, values["grad_norm"])) else "NOT FINITE"
        facts.append(f"{kind}: {values}")
    return "; ".join(facts)


def metrics_actor() -> str:
    return metrics("actor")


def metrics_critic() -> str:
    return metrics("critic")


CASES = [dtype_actor, dtype_ref, dtype_critic, overflow_actor, overflow_critic, metrics_actor, metrics_critic]


def main() -> None:
    global STRATEGY
    # A rank that waits for the other in vain says so, instead of waiting for half an hour.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    results: dict[str, dict[str, str]] = {}
    for STRATEGY in ("fsdp", "fsdp2"):
        results[STRATEGY] = {}
        for case in CASES:
            if case.__name__ in sys.argv[4:] or not sys.argv[4:]:
                results[STRATEGY][case.__name__] = attempt(case)
    (OUT / f"rank_{RANK}.json").write_text(json.dumps(results))


def attempt(case) -> str:
    """The outcome of a case; an error is an outcome too, on every rank alike, since some of it is predicted."""
    try:
        return case()
    except Exception as error:
        traceback.print_exc()
        return refusal(error)


if __name__ == "__main__":
    main()
