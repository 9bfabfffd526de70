"""Create, train, poison and inspect a worker with verl's FSDP engine on a rank.

Import it on a rank whose arguments are STRATEGY MODEL_DIR OUT_DIR, against the verl on PYTHONPATH.
"""

import copy
import functools
import itertools
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from safetensors.torch import load_file
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor

import verl
from verl.model_merger.base_model_merger import ModelMergerConfig
from verl.model_merger.fsdp_model_merger import FSDPModelMerger
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker

STRATEGY, MODEL, OUT = sys.argv[1], sys.argv[2], Path(sys.argv[3])
PATCHED = "grad_scaler" in FSDPEngineConfig.__dataclass_fields__
REQUESTED = {"precision_requested": True} if PATCHED else {}  # of an engine whose role's dtype is set, to any value
RANK = int(os.environ["RANK"])
NUMBERS = itertools.count()  # of the folders that ranks share
POISONED = int(os.environ["WORLD_SIZE"]) - 1  # the rank that faults are put into: the last, which is 1 of 2

# Upstream builds its scaler for "cuda"; on a CPU torch then disables it, which would mask every other fp16 defect.
# The pristine tree gets an enabled scaler, as on a GPU.
if not PATCHED:
    ShardedGradScaler.__init__.__defaults__ = ("cpu", *ShardedGradScaler.__init__.__defaults__[1:])


def settings(**overrides):
    """Return settings of the loss scaler; on the pristine tree only ``init_scale`` can be set."""
    if not PATCHED:
        return overrides
    from verl.utils.precision import GradScalerConfig

    return GradScalerConfig(**overrides)


def worker_config(
    role="actor",
    dtype="float16",
    path=MODEL,
    model=None,
    checkpoint=None,
    optimizer=None,
    lr=1e-2,
    warmup=4,
    **engine,
) -> TrainingWorkerConfig:
    return TrainingWorkerConfig(
        model_type="value_model" if role == "critic" else "language_model",
        model_config=HFModelConfig(
            path=path,
            **{"override_config": {"attn_implementation": "sdpa"}, "use_remove_padding": False, **(model or {})},
        ),
        engine_config=FSDPEngineConfig(
            strategy=STRATEGY,
            dtype=dtype,
            forward_only=role == "ref",
            infer_micro_batch_size_per_gpu=2,
            use_torch_compile=False,
            **{"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, **engine},
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=lr,
            lr_warmup_steps=warmup,
            total_training_steps=100,
            clip_grad=1.0,
            override_optimizer_config=optimizer,
        ),
        checkpoint_config=checkpoint or CheckpointConfig(),
    )


def make_worker(role="actor", dtype="float16", by_dtype_alone=False, **config) -> TrainingWorker:
    """Return a worker with its engine built, in ``dtype``, set by ``mixed_precision`` if the tree ignores ``dtype``."""
    upstream_settings = {}
    if not PATCHED:
        upstream_settings = config.pop("grad_scaler", {})
        if not by_dtype_alone:
            config["mixed_precision"] = {"param_dtype": dtype}
    worker = TrainingWorker(worker_config(role, dtype, **config))
    worker.reset()
    if "init_scale" in upstream_settings and worker.engine.scaler is not None:
        worker.engine.scaler._init_scale = upstream_settings["init_scale"]
    worker.set_loss_fn(value_loss if role == "critic" else token_loss)
    return worker


@functools.cache
def compose_once(*overrides: str) -> DictConfig:
    base = [
        f"actor_rollout_ref.model.path={MODEL}",
        "actor_rollout_ref.model.use_remove_padding=false",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"actor_rollout_ref.actor.strategy={STRATEGY}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
        "actor_rollout_ref.actor.optim.total_training_steps=1",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=probe",
        f"critic.model.path={MODEL}",
        "critic.ppo_micro_batch_size_per_gpu=1",
    ]
    with initialize_config_dir(f"{verl.__path__[0]}/trainer/config", version_base=None):
        return compose("ppo_trainer", overrides=[*base, *overrides])


def composed(*overrides: str) -> DictConfig:
    """Compose ``ppo_trainer.yaml`` for a CPU, with the probe of wire_cases.py as checkpoint engine."""
    return copy.deepcopy(compose_once(*overrides))


def batch(seed: int = 0, size: int = 4, distinct: bool = True, rank: int = RANK):
    """Return ``size`` sequences of 6 to 9 tokens, different on each ``rank``, or one sequence repeated on all ranks."""
    generator = torch.Generator().manual_seed(seed * 10 + (rank if distinct else 0))
    rows = [torch.randint(0, 64, (6 + i % 4,), generator=generator) for i in range(size if distinct else 1)]
    rows = rows if distinct else rows * size
    nested = lambda make: torch.nested.as_nested_tensor([make(r) for r in rows], layout=torch.jagged)  # noqa: E731
    return tu.get_tensordict(
        {
            "input_ids": nested(lambda r: r),
            "position_ids": nested(lambda r: torch.arange(len(r))),
            "loss_mask": nested(lambda r: torch.ones(len(r))),
            "weight": torch.ones(size),
        },
        non_tensor_dict={"temperature": 1.0, "update_lr_scheduler": True},
    )


def token_loss(model_output, data, dp_group=None):
    rows = torch.stack([row.float().sum() for row in model_output["log_probs"].unbind()])
    return -(rows * data["weight"]).sum() / data["batch_num_tokens"] * data["dp_size"], {}


def value_loss(model_output, data, dp_group=None):
    rows = torch.stack([(row.float() - 1).square().sum() for row in model_output["values"].unbind()])
    return (rows * data["weight"]).sum() / data["batch_num_tokens"] * data["dp_size"], {}


def poison_gradient(
    worker: TrainingWorker,
    value: float = float("inf"),
    ranks: Collection[int] = (POISONED,),
    of: Callable[[TrainingWorker], list[torch.Tensor]] = lambda worker: gradients(worker)[:1],
):
    """Put ``value`` into one element of each gradient that ``of`` returns, after the next backward pass."""
    engine, forward_backward_batch = worker.engine, worker.engine.forward_backward_batch

    def poisoned(*args, **kwargs):
        output = forward_backward_batch(*args, **kwargs)
        if RANK in ranks:
            for gradient in of(worker):
                gradient.view(-1)[0] = value
        engine.forward_backward_batch = forward_backward_batch
        return output

    engine.forward_backward_batch = poisoned


def poison_micro_batch(worker: TrainingWorker, which: int, value: float):
    """Put ``value`` into one gradient of rank POISONED in the backward pass of micro-batch ``which`` of the next batch.

    It is the last weight's of the last linear layer (the head's), unsharded and in fp16, so it passes through the
    reduction and the accumulation as a real overflow does.
    """
    *_, head = (m for m in worker.engine.module.modules() if isinstance(m, torch.nn.Linear))
    micro_batch = itertools.count()

    def watch(module, args):
        if next(micro_batch) == which:
            forward.remove()
            if RANK == POISONED:
                backward.append(module.weight.register_hook(poisoned))

    def poisoned(gradient):
        backward.pop().remove()
        gradient = gradient.clone()
        gradient[-1, -1] = value
        return gradient

    backward = []
    forward = head.register_forward_pre_hook(watch)


def poison_loss(worker: TrainingWorker):
    """Return NaN for the loss of the first micro-batch of rank POISONED in the next batch."""
    loss_fn, micro_batch = worker.loss_fn, itertools.count()

    def poisoned(*args, **kwargs):
        loss, metrics = loss_fn(*args, **kwargs)
        return (loss * float("nan") if RANK == POISONED and next(micro_batch) == 0 else loss), metrics

    worker.set_loss_fn(poisoned)


def gradients(worker: TrainingWorker) -> list[torch.Tensor]:
    grads = [p.grad for p in worker.engine.module.parameters() if p.grad is not None]
    return [g.to_local() if isinstance(g, DTensor) else g for g in grads]


def gradients_after_step(worker: TrainingWorker) -> list[int]:
    """Return a list that the next ``optimizer_step`` extends by the number of gradients that it leaves."""
    engine, optimizer_step, left = worker.engine, worker.engine.optimizer_step, []

    def counted():
        norm = optimizer_step()
        left.append(len(gradients(worker)))
        engine.optimizer_step = optimizer_step
        return norm

    engine.optimizer_step = counted
    return left


def state(worker: TrainingWorker) -> list[torch.Tensor]:
    """Return weights and Adam state of this rank, as clones."""
    local = lambda t: (t.to_local() if isinstance(t, DTensor) else t).detach().clone()  # noqa: E731
    tensors = [local(p) for p in worker.engine.module.parameters()]
    for entry in worker.engine.optimizer.state.values():
        tensors += [local(v) for v in entry.values()]
    return tensors


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def name_of(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def metrics_of(output) -> dict:
    return dict(tu.get(output, "metrics"))


def lr_of(worker) -> float:
    return worker.engine.optimizer.param_groups[0]["lr"]


def scale_of(worker) -> float | None:
    return worker.engine.scaler.get_scale() if worker.engine.scaler is not None else None


def weights_of(worker: TrainingWorker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker.engine.get_per_tensor_param()[0]}


def merge(folder: Path, huggingface: Path) -> dict[str, torch.Tensor]:
    """Merge the shards in ``folder`` by verl's model merger and return the tensors."""
    config = ModelMergerConfig(
        operation="merge",
        backend="fsdp",
        local_dir=str(folder),
        target_dir=str(folder / "merged"),
        hf_model_config_path=str(huggingface),
    )
    FSDPModelMerger(config).merge_and_save()
    return load_file(folder / "merged/model.safetensors")


def shared_directory() -> str:
    """Return a new folder, the same on all ranks. It is numbered, because outcomes that are recorded name it."""
    directory = OUT / f"shared_{next(NUMBERS)}"
    if RANK == 0:
        directory.mkdir()
    dist.barrier()
    return str(directory)
