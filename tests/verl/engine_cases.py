"""Cases for verl's real FSDP engine on gloo ranks; run by ``torchrun`` against the verl tree on PYTHONPATH.

    torchrun --nproc-per-node RANKS engine_cases.py STRATEGY MODEL_DIR OUT_DIR [CASE ...]

Without a name, all cases run. Each returns plain values, which rank r writes to OUT_DIR/rank_r.json; test_engine.py
asserts on them. The cases use what every verl 0.9.1 has, so that a pristine tree runs them too.
"""

import itertools
import json
import math
import os
import sys
import tempfile
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import peft.utils.save_and_load
import save_moments
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import verl
from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWorker, ColocatedCheckpointEngine
from verl.model_merger.base_model_merger import ModelMergerConfig
from verl.model_merger.fsdp_model_merger import FSDPModelMerger
from verl.protocol import DataProto
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage
from verl.trainer.ppo.utils import create_rl_sampler
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils import tensordict_utils as tu
from verl.utils.checkpoint import CheckpointHandler
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import Metric
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils import losses

STRATEGY, MODEL, OUT = sys.argv[1], sys.argv[2], Path(sys.argv[3])
PATCHED = "grad_scaler" in FSDPEngineConfig.__dataclass_fields__
RANK = int(os.environ["RANK"])

# Upstream builds its scaler for "cuda"; on a CPU torch then disables it and every fp16 case would only show that.
# The pristine tree gets the device it has on a GPU; `scaler_device` shows the defect by itself.
upstream_scaler_defaults = ShardedGradScaler.__init__.__defaults__
if not PATCHED:
    ShardedGradScaler.__init__.__defaults__ = ("cpu", *upstream_scaler_defaults[1:])


def make_worker(
    role="actor",
    dtype="float16",
    by_dtype_alone=False,
    model=None,
    checkpoint=None,
    optimizer=None,
    warmup=4,
    path=MODEL,
    lr=1e-2,
    **engine,
) -> TrainingWorker:
    """A worker with its engine built, in ``dtype`` where the tree honours it and by ``mixed_precision`` where not."""
    if not by_dtype_alone and not PATCHED:
        engine["mixed_precision"] = {"param_dtype": dtype}
    upstream_settings = engine.pop("grad_scaler", {}) if not PATCHED else {}
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="value_model" if role == "critic" else "language_model",
            model_config=HFModelConfig(
                path=path,
                use_remove_padding=False,
                override_config={"attn_implementation": "sdpa"},
                **(model or {}),
            ),
            engine_config=FSDPEngineConfig(
                strategy=STRATEGY,
                dtype=dtype,
                forward_only=role == "ref",
                use_dynamic_bsz=False,
                micro_batch_size_per_gpu=2,
                infer_micro_batch_size_per_gpu=2,
                use_torch_compile=False,
                **engine,
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
    )
    worker.reset()
    if "init_scale" in upstream_settings and worker.engine.scaler is not None:
        worker.engine.scaler._init_scale = upstream_settings["init_scale"]
    worker.set_loss_fn(value_loss if role == "critic" else token_loss)
    return worker


def batch(seed: int = 0, size: int = 4, distinct: bool = True):
    """``size`` sequences of 6 to 9 tokens, different on each rank, or ``size`` times the same one on every rank."""
    generator = torch.Generator().manual_seed(seed * 10 + (RANK if distinct else 0))
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


def poison_gradient(worker: TrainingWorker, value: float, rank: int = 1, which: int = 0):
    """After the backward pass, put ``value`` into one element of one gradient of one rank, once."""
    engine, forward_backward_batch = worker.engine, worker.engine.forward_backward_batch

    def poisoned(*args, **kwargs):
        output = forward_backward_batch(*args, **kwargs)
        if RANK == rank:
            gradients(worker)[which].view(-1)[0] = value
        engine.forward_backward_batch = forward_backward_batch
        return output

    engine.forward_backward_batch = poisoned


def poison_micro_batch(worker: TrainingWorker, which: int, value: float, rank: int = 1):
    """In the backward pass of micro-batch ``which`` of the next batch, one gradient of one rank is ``value``, once.

    It is the last weight's of the last linear layer (the head's), unsharded and in fp16, so it passes through the
    reduction and the accumulation as a real overflow does.
    """
    *_, head = (m for m in worker.engine.module.modules() if isinstance(m, torch.nn.Linear))
    micro_batch = itertools.count()

    def watch(module, args):
        if next(micro_batch) == which:
            forward.remove()
            if RANK == rank:
                backward.append(module.weight.register_hook(poisoned))

    def poisoned(gradient):
        backward.pop().remove()
        gradient = gradient.clone()
        gradient[-1, -1] = value
        return gradient

    backward = []
    forward = head.register_forward_pre_hook(watch)


def gradients_after_step(worker: TrainingWorker) -> list[int]:
    """A list that gets the number of gradients that the next ``optimizer_step`` leaves behind."""
    engine, optimizer_step, left = worker.engine, worker.engine.optimizer_step, []

    def counted():
        norm = optimizer_step()
        left.append(len(gradients(worker)))
        engine.optimizer_step = optimizer_step
        return norm

    engine.optimizer_step = counted
    return left


def gradients(worker: TrainingWorker) -> list[torch.Tensor]:
    grads = [p.grad for p in worker.engine.module.parameters() if p.grad is not None]
    return [g.to_local() if isinstance(g, DTensor) else g for g in grads]


def state(worker: TrainingWorker) -> list[torch.Tensor]:
    """Weights and Adam state of this rank, as clones."""
    local = lambda t: (t.to_local() if isinstance(t, DTensor) else t).detach().clone()  # noqa: E731
    tensors = [local(p) for p in worker.engine.module.parameters()]
    for entry in worker.engine.optimizer.state.values():
        tensors += [local(v) for v in entry.values()]
    return tensors


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def metrics_of(output) -> dict:
    return dict(tu.get(output, "metrics"))


def shared_directory() -> str:
    directory = [tempfile.mkdtemp(dir=OUT)]
    dist.broadcast_object_list(directory)
    return directory[0]


def lr_of(worker) -> float:
    return worker.engine.optimizer.param_groups[0]["lr"]


def scale_of(worker) -> float | None:
    return worker.engine.scaler.get_scale() if worker.engine.scaler is not None else None


# ---------------------------------------------------------------------------------------------------------------------


def dtype_per_hop(role="actor"):
    """What a worker told `dtype=float16` alone computes in."""
    worker = make_worker(role, by_dtype_alone=True)
    seen = {}

    def watch(name):
        def hook(module, args, kwargs, output):
            seen[name] = str(output.dtype).removeprefix("torch.")
            seen[name + ".weight"] = str(module.weight.dtype).removeprefix("torch.")

        return hook

    for name, module in worker.engine.module.named_modules():
        if name.endswith("layers.0.mlp.up_proj") or name.endswith("layers.0._fsdp_wrapped_module.mlp.up_proj"):
            module.register_forward_hook(watch("linear"), with_kwargs=True)
    if role == "ref":
        data = batch()
        tu.assign_non_tensor(data, compute_loss=False)
        worker.infer_batch(data)
    else:
        for seed in range(8):  # at the initial scale the first steps may overflow
            worker.train_batch(batch(seed))
    seen["scaler"] = worker.engine.scaler is not None
    seen["autocast"] = str(worker.engine._autocast_dtype).removeprefix("torch.")
    seen["master"] = str(next(worker.engine.module.parameters()).dtype).removeprefix("torch.")
    if role != "ref":
        entry = next(iter(worker.engine.optimizer.state.values()))
        seen["adam"] = str(entry["exp_avg"].dtype).removeprefix("torch.")
    return seen


def dtype_per_hop_critic():
    return dtype_per_hop("critic")


def dtype_per_hop_ref():
    return dtype_per_hop("ref")


def faults(role: str, adam: str):
    """One weight of rank 1 overflows in the backward pass of one micro-batch of three: the first, the middle, the last.

    Is the step skipped on both ranks, to the bit, what is reported, and is the next step that of a worker which never
    saw the overflow? ``adam`` is torch's implementation: "foreach" or "fused".
    """

    def make():
        torch.manual_seed(0)  # the critic's head
        return make_worker(role, grad_scaler=settings(init_scale=1024.0), optimizer={adam: True}, warmup=50)

    worker, spared = make(), make()
    for one in (worker, spared):  # Adam has its state from here on
        one.train_batch(batch(0, size=6))
    outcomes = {}
    for seed, (value, micro_batch) in enumerate(((v, m) for v in (math.inf, math.nan) for m in range(3)), start=1):
        before, lr_before, scale_before = state(worker), lr_of(worker), scale_of(worker)
        poison_micro_batch(worker, micro_batch, value)
        left = gradients_after_step(worker)
        metrics = metrics_of(worker.train_batch(batch(-seed, size=6)))
        outcome = {
            "unchanged": same(before, state(worker)),
            "gradients_cleared": left == [0],
            "scale_factor": scale_of(worker) / scale_before,
            "metrics": {k: metrics.get(k) for k in ("grad_norm", "skipped_steps", "loss_scale")},
            "lr_held": lr_of(worker) == lr_before,
        }
        spared.engine.scaler.load_state_dict(worker.engine.scaler.state_dict())
        norms = [metrics_of(one.train_batch(batch(seed, size=6)))["grad_norm"] for one in (worker, spared)]
        outcome["next_step"] = norms[0] == norms[1] and same(state(worker), state(spared))
        outcome["moves_on"] = not same(before, state(worker))
        outcomes[f"{value}, micro-batch {micro_batch}"] = outcome
    return outcomes


def faults_actor():
    return faults("actor", "foreach")


def faults_critic():
    return faults("critic", "foreach")


def faults_actor_fused():
    return faults("actor", "fused")


def faults_critic_fused():
    return faults("critic", "fused")


def overflow_on_all_ranks(adam: str):
    """Both ranks hold an overflow, as after a loss that overflowed: torch's count of ranks is then 2."""
    worker = make_worker(grad_scaler=settings(init_scale=1024.0), optimizer={adam: True})
    worker.train_batch(batch(0))
    before, scale_before = state(worker), scale_of(worker)
    poison_gradient(worker, math.inf, rank=RANK)
    worker.train_batch(batch(1))
    return {
        "unchanged": same(before, state(worker)),
        "finite": all(bool(t.isfinite().all()) for t in state(worker)),
        "scale_factor": scale_of(worker) / scale_before,
    }


def overflow_on_all_ranks_foreach():
    return overflow_on_all_ranks("foreach")


def overflow_on_all_ranks_fused():
    return overflow_on_all_ranks("fused")


def growth():
    """The scale after each of seven steps, of which the fourth overflows; ``growth_interval`` is 2."""
    worker = make_worker(grad_scaler=settings(init_scale=1024.0, growth_interval=2))
    scales = []
    for step in range(1, 8):
        if step == 4:
            poison_gradient(worker, math.inf)
        worker.train_batch(batch(step))
        scales.append(scale_of(worker))
    return scales


def composed(*overrides: str):
    """``ppo_trainer.yaml`` for a CPU, with the probe below as checkpoint engine."""
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
    ]
    with initialize_config_dir(f"{verl.__path__[0]}/trainer/config", version_base=None):
        return compose("ppo_trainer", overrides=[*base, *overrides])


def settings(**overrides):
    """Settings of the loss scaler; upstream can be given ``init_scale`` alone."""
    if not PATCHED:
        return overrides
    from verl.utils.precision import GradScalerConfig

    return GradScalerConfig(**overrides)


def partly_skipped_update():
    """Two mini-batches an update, of which the first overflows: what becomes of the LR and of the metrics?"""
    worker = make_worker(grad_scaler=settings(init_scale=1024.0))
    data = batch(1, size=8)
    tu.assign_non_tensor(data, mini_batch_size=8, epochs=1, seed=1, dataloader_kwargs={"shuffle": False})
    lr_before = worker.engine.optimizer.param_groups[0]["lr"]
    poison_gradient(worker, float("inf"))
    metrics = metrics_of(worker.train_mini_batch(data))
    return {k: metrics.get(k) for k in ("grad_norm", "skipped_steps", "loss_scale")} | {
        "lr_advanced": worker.engine.optimizer.param_groups[0]["lr"] != lr_before
    }


def accumulation():
    """Eight equal micro-batches whose scaled fp16 gradients reach 30,000 each: their sum fits into fp32 alone."""

    def grad_norm(weight: float, deferred: bool, **engine):
        worker = make_worker(use_no_sync_for_gradient_accumulation=deferred, **engine)
        worker.engine_config.micro_batch_size_per_gpu = 1
        data = batch(5, size=8, distinct=False)
        data["weight"] = torch.full((8,), weight)
        largest = {}
        step = worker.engine.optimizer_step

        def measured_step():
            largest["grad"] = max(g.abs().max().item() for g in gradients(worker))
            return step()

        worker.engine.optimizer_step = measured_step
        norm = metrics_of(worker.train_batch(data)).get("grad_norm")
        return largest["grad"], norm

    total = torch.tensor(grad_norm(1.0, False, dtype="float32")[0])
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    weight = 30_000 * 8 / (total.item() * 1024.0)
    scaler = settings(init_scale=1024.0)
    return {
        "synced": grad_norm(weight, False, grad_scaler=scaler)[1],
        "deferred": grad_norm(weight, True, grad_scaler=scaler)[1],
        "fp32": grad_norm(weight, True, dtype="float32")[1],
    }


def checkpoint():
    """Save after two overflows and a clean step, load into a fresh worker: do weights, Adam, LR and scale come back?"""
    directory = shared_directory()
    worker = make_worker()
    for seed in (1, 2):
        poison_gradient(worker, float("inf"))
        worker.train_batch(batch(seed))
    worker.train_batch(batch(3))
    saved, scale, lr = state(worker), scale_of(worker), worker.engine.optimizer.param_groups[0]["lr"]
    tracker = worker.engine.scaler._get_growth_tracker()
    worker.save_checkpoint(directory, global_step=1)
    fresh = make_worker()
    fresh.load_checkpoint(directory)
    config = json.loads((Path(directory) / "fsdp_config.json").read_text())
    result = {
        "state": same(saved, state(fresh)),
        "scale": [scale, scale_of(fresh)],
        "tracker": [tracker, fresh.engine.scaler._get_growth_tracker()],
        "lr": [lr, fresh.engine.optimizer.param_groups[0]["lr"]],
        "recorded_dtype": config.get("dtype"),
    }
    # The next step is the step that would have come.
    worker.train_batch(batch(4))
    fresh.train_batch(batch(4))
    result["next_step"] = same(state(worker), state(fresh))

    extra = Path(directory) / f"extra_state_world_size_{dist.get_world_size()}_rank_{RANK}.pt"
    old = torch.load(extra, weights_only=False)
    old.pop("grad_scaler", None)
    torch.save(old, extra)
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_worker().load_checkpoint(directory)
    result["old_checkpoint_warnings"] = [str(w.message) for w in caught if "loss scale" in str(w.message)]
    return result


def storm(value=float("inf")):
    """The last gradient of rank 1 overflows in every step: does the run end with a name, the scale above its floor?"""
    worker = make_worker(grad_scaler=settings(init_scale=8.0, min_scale=2.0, max_consecutive_skips=4))
    scales, skips = [], []
    try:
        for seed in range(8):
            poison_gradient(worker, value, which=-1)
            skips.append(metrics_of(worker.train_batch(batch(seed))).get("skipped_steps"))
            scales.append(scale_of(worker))
    except RuntimeError as error:
        return {"scales": scales, "skips": skips, "error": str(error), "type": type(error).__name__}
    return {"scales": scales, "error": None}


def storm_nan():
    return storm(float("nan"))


def trajectory(dtype: str, **engine):
    """Three steps; the weights' sum and grad norms, to compare two trees."""
    worker = make_worker(dtype=dtype, grad_scaler=settings(init_scale=1024.0), **engine)
    norms = [metrics_of(worker.train_batch(batch(seed)))["grad_norm"] for seed in range(3)]
    return {
        "norms": norms,
        "sum": sum(t.double().sum().item() for t in state(worker)),
        "lr": worker.engine.optimizer.param_groups[0]["lr"],
    }


def trajectory_bf16():
    return trajectory("bfloat16")


def trajectory_fp32():
    return trajectory("float32")


def trajectory_fp16():
    return trajectory("float16")


def trajectory_fp16_fused():
    try:
        return trajectory("float16", optimizer={"fused": True})
    except RuntimeError as error:  # on every rank alike
        return {"error": str(error)}


def cost_of_a_step():
    """All-reduces of an optimizer step, and values that the host reads in it (its own step counters aside)."""

    def cost(**overrides):
        worker = make_worker(grad_scaler=settings(init_scale=1024.0), **overrides)
        worker.train_batch(batch(1))  # Adam's state is made in the first step
        step, profiler = worker.engine.optimizer_step, profile(activities=[ProfilerActivity.CPU])

        def profiled():
            with profiler:
                return step()

        worker.engine.optimizer_step = profiled
        worker.train_batch(batch(2))
        outside = [e for e in profiler.events() if not any("Optimizer.step" in parent for parent in ancestry(e))]
        names = [event.name for event in outside]
        return {"all_reduces": names.count("gloo:all_reduce"), "host_reads": names.count("aten::_local_scalar_dense")}

    def ancestry(event):
        return [event.name, *(ancestry(event.cpu_parent) if event.cpu_parent else [])]

    costs = {"bf16": cost(dtype="bfloat16"), "fp16": cost()}
    return costs | ({"fp16_fused": cost(optimizer={"fused": True})} if PATCHED else {})


def replicated():
    """Two replicas of two shards each (HSDP): the same norm, and an overflow of one rank skips the step on all."""
    sharded = metrics_of(make_worker(grad_scaler=settings(init_scale=1024.0)).train_batch(batch(1)))["grad_norm"]
    worker = make_worker(fsdp_size=2, grad_scaler=settings(init_scale=1024.0))
    result = {"sharded": sharded, "replicated": metrics_of(worker.train_batch(batch(1)))["grad_norm"]}
    before = state(worker)
    poison_gradient(worker, float("inf"))
    metrics = metrics_of(worker.train_batch(batch(2)))
    return result | {"unchanged": same(before, state(worker)), "skipped": metrics.get("skipped_steps")}


@CheckpointEngineRegistry.register("probe")
class ProbeCheckpointEngine(ColocatedCheckpointEngine):
    """Takes ``rollout_dtype`` as the kimi, mooncake and delta engines do, whose transports need a GPU."""

    def __init__(self, rollout_dtype: torch.dtype = torch.bfloat16, **kwargs):
        super().__init__(**kwargs)
        self.rollout_dtype = rollout_dtype


def wire():
    """The dtypes in which weights leave the engine: full tensors and, from FSDP2, delta shards and merged LoRA.

    And what verl's own two sides tell a checkpoint engine where ``rollout.dtype`` is float16.
    """

    def dtypes(tensors):
        return sorted({str(entry[1].dtype).removeprefix("torch.") for entry in tensors})

    worker = make_worker()
    config = composed("actor_rollout_ref.rollout.dtype=float16").actor_rollout_ref
    sender = ActorRolloutRefWorker(config, role="actor")
    sender.init_model()
    rollout = omega_conf_to_dataclass(config.rollout)
    receiver = CheckpointEngineWorker(rollout, omega_conf_to_dataclass(config.model), server_adapter=object())
    result = {
        "full": dtypes(worker.engine.get_per_tensor_param()[0]),
        "sender": str(sender.checkpoint_engine.rollout_dtype),
        "receiver": str(receiver.checkpoint_engine.rollout_dtype),
    }
    if STRATEGY == "fsdp2":
        worker.engine.wire_dtype = torch.float16  # what the delta checkpoint engine sets before it sends
        result["delta"] = dtypes(worker.engine.get_per_tensor_param_shard()[0])
        merged = make_worker(model={"lora_rank": 4, "lora": {"merge": True}})
        result["merged_lora"] = dtypes(merged.engine.get_per_tensor_param()[0])
    return result


def export():
    """Export a model whose weights fp16 holds and bf16 does not: what do the HF export and the model merger keep?

    FSDP2 alone: torch cannot gather FSDP1's full state dict from CPU parameters (it frees their storage).
    """
    directory = shared_directory()
    contents = ["model", "optimizer", "extra", "hf_model"]
    worker = make_worker(checkpoint=CheckpointConfig(save_contents=contents, load_contents=contents))
    with torch.no_grad():
        for parameter in worker.engine.module.parameters():
            parameter.copy_(parameter.half().float())
    weights = {name: tensor.clone() for name, tensor in worker.engine.get_per_tensor_param()[0]}
    worker.save_checkpoint(directory, global_step=1)
    if RANK != 0:
        return {}

    def lossless(tensors):
        return all(torch.equal(tensors[name].float(), weight) for name, weight in weights.items())

    huggingface = Path(directory) / "huggingface"
    exported = AutoModelForCausalLM.from_pretrained(huggingface, dtype="auto").state_dict()
    config = json.loads((huggingface / "config.json").read_text())
    result = {"config": config["dtype"], "export_lossless": lossless(exported)}
    merged = str(Path(directory) / "merged")
    config = ModelMergerConfig(
        operation="merge",
        backend="fsdp",
        local_dir=directory,
        target_dir=merged,
        hf_model_config_path=str(huggingface),
    )
    FSDPModelMerger(config).merge_and_save()
    tensors = load_file(Path(merged) / "model.safetensors")
    result["merged"] = sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values()})
    result["merged_lossless"] = lossless(tensors)
    return result


def scaler_device():
    """Does the scaler of a CPU worker work at all? Upstream's default device is "cuda"."""
    defaults = ShardedGradScaler.__init__.__defaults__
    ShardedGradScaler.__init__.__defaults__ = upstream_scaler_defaults
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        worker = make_worker()
    ShardedGradScaler.__init__.__defaults__ = defaults
    poison_gradient(worker, float("inf"))
    worker.train_batch(batch(1))
    return {
        "enabled": worker.engine.scaler.is_enabled(),
        "weights_finite": all(bool(t.isfinite().all()) for t in state(worker)),
    }


# Resuming with other settings, and what a save leaves on the disk.


def regime_change(saved_in: str, resumed_in: str):
    """Save in one dtype, resume in another, take a step: which warnings, and what of weights and Adam state?"""
    directory = shared_directory()
    worker = make_worker(dtype=saved_in, grad_scaler=settings(init_scale=1024.0))
    worker.train_batch(batch(1))
    saved = state(worker)
    worker.save_checkpoint(directory, global_step=1)
    fresh = make_worker(dtype=resumed_in, grad_scaler=settings(init_scale=1024.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fresh.load_checkpoint(directory)
    result = {
        "warnings": [str(w.message) for w in caught if "loss scale" in str(w.message)],
        "state": same(saved, state(fresh)),
    }
    for seed in range(2, 10):  # the pristine tree starts at a scale at which the first steps overflow
        fresh.train_batch(batch(seed))
    moved = state(fresh)
    result["trains"] = not same(saved, moved) and all(bool(t.isfinite().all()) for t in moved)
    return result


def bf16_to_fp16():
    return regime_change("bfloat16", "float16")


def fp16_to_bf16():
    return regime_change("float16", "bfloat16")


def foreign_checkpoints():
    """What is said of a scaler state of another shape, and of the shards of another number of workers?"""
    directory = shared_directory()
    worker = make_worker()
    worker.save_checkpoint(directory, global_step=1)
    extra = Path(directory) / f"extra_state_world_size_{dist.get_world_size()}_rank_{RANK}.pt"
    content = torch.load(extra, weights_only=False)
    torch.save(content | {"grad_scaler": {"scale": 1024.0, "hysteresis": 2}}, extra)

    def refusal():
        try:
            worker.load_checkpoint(directory)
        except Exception as error:
            return {"type": type(error).__name__, "message": str(error)}

    result = {"scaler": refusal(), "extra": str(extra), "directory": directory}
    dist.barrier()
    for shard in Path(directory).glob(f"*_rank_{RANK}.pt"):
        shard.rename(str(shard).replace("world_size_2", "world_size_4"))
    dist.barrier()
    result["world_size"] = refusal()
    return result


KEPT = {  # of actor and critic
    "all": "trainer.max_actor_ckpt_to_keep=null trainer.max_critic_ckpt_to_keep=null",
    "one": "trainer.max_actor_ckpt_to_keep=1 trainer.max_critic_ckpt_to_keep=1",
    "two": "trainer.max_actor_ckpt_to_keep=2 trainer.max_critic_ckpt_to_keep=2",
    "three": "trainer.max_actor_ckpt_to_keep=3 trainer.max_critic_ckpt_to_keep=3",
    "one and three": "trainer.max_actor_ckpt_to_keep=1 trainer.max_critic_ckpt_to_keep=3",
    "one, async": "+trainer.remove_previous_ckpt_in_save=true actor_rollout_ref.actor.checkpoint.async_save=true",
}


def kept_ppo(trainer_class):
    """What a PPO trainer's saves leave of actor and critic; rank 0, which removes, alone has a disk to look at."""
    workers = {"actor_rollout_wg": make_worker(), "critic_wg": make_worker("critic")}
    result = {}
    for name, overrides in KEPT.items():
        root = Path(shared_directory()) / str(RANK)
        trainer = trainer_class.__new__(trainer_class)
        trainer.config = composed(f"trainer.default_local_dir={root}", *overrides.split())
        trainer.use_critic, trainer.trainer_mode = True, "sync"
        trainer.checkpoint_callback = build_checkpoint_callback(trainer.config)
        trainer.train_dataloader = StatefulDataLoader(list(range(6)), batch_size=2)
        for attribute, worker in workers.items():
            setattr(trainer, attribute, worker)

        def save(step, trainer=trainer):
            trainer.global_steps = step
            trainer._save_checkpoint()

        result[name] = save_moments.watch(save, root, watched=RANK == 0)
    return result if RANK == 0 else None


def kept_v1():
    return kept_ppo(PPOTrainerSync)


def kept_legacy():
    return kept_ppo(RayPPOTrainer)


def kept_sft():
    """The same of the SFT trainers' handler."""
    worker, result = make_worker(), {}
    for name, keep in {"all": None, "one": 1, "two": 2, "three": 3}.items():
        root = Path(shared_directory())
        loader = StatefulDataLoader(list(range(6)), batch_size=2)
        handler = CheckpointHandler(worker.engine, loader, default_local_dir=str(root), max_ckpt_to_keep=keep)
        result[name] = save_moments.watch(handler.save_checkpoint, root, watched=RANK == 0)
    return result if RANK == 0 else None


def sft_checkpoints():
    """The SFT trainers' handler saves an epoch of three steps: what is resumed, with which data, and if one is torn?"""
    directory = shared_directory()
    worker = make_worker()

    def handler():
        sampler = DistributedSampler(list(range(6)), num_replicas=1, rank=0)
        loader = StatefulDataLoader(sampler.dataset, batch_size=2, sampler=sampler)
        return CheckpointHandler(worker.engine, loader, default_local_dir=directory)

    def epoch(loader, number: int) -> list:
        loader.sampler.set_epoch(number)
        return [rows.tolist() for rows in loader]

    first = handler()
    for step, _ in enumerate(first.train_dataloader, 1):
        worker.train_batch(batch(step))
        first.save_checkpoint(step)
        if step == 2:
            saved = state(worker)
    resumed, expected = handler(), epoch(first.train_dataloader, 1)
    result = {"resumed": resumed.load_checkpoint(), "data": epoch(resumed.train_dataloader, 1) == expected}
    dist.barrier()
    if RANK == 0:
        (Path(directory) / "global_step_3" / "data_1.pt").unlink()
    dist.barrier()
    return result | {"resumed_of_torn": handler().load_checkpoint(), "state": same(saved, state(worker))}


def ppo_checkpoints(trainer_class):
    """The same of a PPO trainer's own methods; each rank is a driver that sees its own disk alone."""
    directory = Path(shared_directory()) / str(RANK)
    worker = make_worker()

    def trainer(*overrides):
        made = trainer_class.__new__(trainer_class)
        made.config = composed(f"trainer.default_local_dir={directory}", *overrides)
        made.global_steps = 0
        made.use_critic, made.trainer_mode, made.actor_rollout_wg = False, "sync", worker
        made.checkpoint_callback = build_checkpoint_callback(made.config)
        sampler = create_rl_sampler(made.config.data, list(range(6)))
        made.train_dataloader = StatefulDataLoader(list(range(6)), batch_size=2, sampler=sampler)
        return made

    def next_epoch(made) -> list:
        """What the trainer would take: v1 starts an epoch where the saved one is used up."""
        passes = 2 if trainer_class is PPOTrainerSync else 1
        return next(filter(None, ([rows.tolist() for rows in made.train_dataloader] for _ in range(passes))), [])

    first = trainer()
    for step, _ in enumerate(first.train_dataloader, 1):
        worker.train_batch(batch(step))
        first.global_steps = step
        first._save_checkpoint()
        if step == 2:
            saved = state(worker)
    resumed, expected = trainer(), next_epoch(first)
    resumed._load_checkpoint()
    result = {"resumed": resumed.global_steps, "data": next_epoch(resumed) == expected}
    (directory / "global_step_3" / "data.pt").unlink()
    torn = trainer()
    torn._load_checkpoint()
    result |= {"resumed_of_torn": torn.global_steps, "state": same(saved, state(worker))}

    (directory / "latest_checkpointed_iteration.txt").write_text("9")
    for manifest in directory.glob("*/manifest.json"):
        manifest.unlink()
    lost = trainer()
    try:
        lost._load_checkpoint()
        result["resumed_of_lost"] = lost.global_steps
    except RuntimeError as error:
        result["resumed_of_lost"] = type(error).__name__
    named = trainer("trainer.resume_mode=resume_path", f"trainer.resume_from_path={directory}/global_step_1")
    named._load_checkpoint()
    return result | {"resumed_by_path": named.global_steps}


def ppo_checkpoints_v1():
    return ppo_checkpoints(PPOTrainerSync)


def ppo_checkpoints_legacy():
    return ppo_checkpoints(RayPPOTrainer)


def storm_checkpoint():
    """A worker that offloads, saved after its storm: are the weights the last good ones, and what scale is taken up?"""
    directory = shared_directory()
    scaler = settings(init_scale=8.0, min_scale=2.0, max_consecutive_skips=2)
    worker = make_worker(grad_scaler=scaler, param_offload=True, optimizer_offload=True)
    for seed in (1, 2):  # the first of the warm-up has a learning rate of 0
        worker.train_batch(batch(seed))
    good, lr, outcome = state(worker), worker.engine.optimizer.param_groups[0]["lr"], None
    try:
        for seed in range(4):
            poison_gradient(worker, float("nan"))
            worker.train_batch(batch(seed))
    except RuntimeError as error:
        outcome = type(error).__name__
    worker.save_checkpoint(directory, global_step=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fresh = make_worker(grad_scaler=settings(init_scale=64.0))
        fresh.load_checkpoint(directory)
    return {
        "outcome": outcome,
        "good": same(good, state(fresh)),
        "lr_held": fresh.engine.optimizer.param_groups[0]["lr"] == lr,
        "scale": scale_of(fresh),
        "warnings": [str(w.message) for w in caught if "loss scale" in str(w.message)],
        "next_step": metrics_of(fresh.train_batch(batch(5))).get("grad_norm"),
    }


def masked(where: str, loss: str):
    """Train with verl's own ``loss`` where no token of one micro-batch, of one rank or of all is in the loss mask."""
    worker = make_worker("critic" if loss == "value_loss" else "actor", grad_scaler=settings(init_scale=1024.0))
    role = composed(f"critic.model.path={MODEL}", "critic.ppo_micro_batch_size_per_gpu=1")
    config = role.critic if loss == "value_loss" else role.actor_rollout_ref.actor
    config = None if loss == "sft_loss" else omega_conf_to_dataclass(config)
    worker.set_loss_fn(partial(getattr(losses, loss), config=config))

    data = batch(1)
    rows = data["input_ids"].unbind()
    nested = lambda make: torch.nested.as_nested_tensor([make(r) for r in rows], layout=torch.jagged)  # noqa: E731
    keep = [not (where == "all" or (where == "rank" and RANK == 1) or (where == "micro" and i < 2)) for i in range(4)]
    response = lambda value: nested(lambda r: torch.full((len(r) - 2,), value))  # noqa: E731
    data["prompts"], data["responses"] = nested(lambda r: r[:2]), nested(lambda r: r[2:])
    data["response_mask"] = torch.nested.as_nested_tensor(
        [torch.full((len(r) - 2,), int(k)) for r, k in zip(rows, keep, strict=True)], layout=torch.jagged
    )
    data["loss_mask"] = data["response_mask"]
    if loss == "sft_loss":  # of whole sequences, as verl's SFT data are
        data["loss_mask"] = torch.nested.as_nested_tensor(
            [torch.full((len(r),), int(k)) for r, k in zip(rows, keep, strict=True)], layout=torch.jagged
        )
    data["old_log_probs"], data["advantages"] = response(-4.0), response(1.0)
    data["values"], data["returns"] = response(0.0), response(1.0)
    tu.assign_non_tensor(data, global_batch_size=8)
    metrics = metrics_of(worker.train_batch(data))
    return {
        "finite": all(math.isfinite(number) for number in numbers(metrics.values())),
        "loss": metrics["loss"],
        "grad_norm": metrics.get("grad_norm"),
        "skipped": metrics.get("skipped_steps"),
        "scale": scale_of(worker),
    }


def numbers(values) -> list[float]:
    """All numbers in nested lists of metrics."""
    if isinstance(values, Metric):
        values = values.aggregate()
    return [float(values)] if not hasattr(values, "__iter__") else [n for value in values for n in numbers(value)]


def masked_batches():
    return {f"{where} {loss}": masked(where, loss) for where, loss in MASKED}


def learning_rate_of_zero():
    worker = make_worker(lr=0.0)
    parameters = len(list(worker.engine.module.parameters()))
    before = state(worker)[:parameters]
    metrics = [metrics_of(worker.train_batch(batch(seed))) for seed in range(2)]
    after = state(worker)
    return {
        "weights_unchanged": same(before, after[:parameters]),
        "finite": all(bool(t.isfinite().all()) for t in after),
        "lr": [m["lr"] for m in metrics],
        "grad_norm": [m["grad_norm"] for m in metrics],
    }


def nan_reward():
    """One of four rewards is NaN: what do the legacy trainer's and the v1 trainer's advantages make of it?"""

    def advantages(v1: bool, estimator: str):
        tensors = {name: torch.zeros(4, 3) for name in ("token_level_rewards", "values")}
        tensors["response_mask"] = torch.ones(4, 3, dtype=torch.int64)
        tensors["token_level_rewards"][2, -1] = math.nan
        labels = {"uid": ["a", "a", "b", "b"], "data_source": ["sum"] * 4}
        data = DataProto.from_dict(tensors, {name: np.array(values, dtype=object) for name, values in labels.items()})
        arguments = {"adv_estimator": AdvantageEstimator(estimator), "config": composed().algorithm}
        try:
            if v1:
                keys = ["a_0_0", "a_1_0", "b_0_0", "b_1_0"]
                data = compute_advantage_for_multi_trajectories(data, keys, **arguments)
            else:
                data = compute_advantage(data, **arguments)
        except ValueError as error:
            return str(error)
        return int(data.batch["advantages"].isnan().any(dim=-1).sum())

    return {f"{t} {e}": advantages(t == "v1", e) for t in ("legacy", "v1") for e in ("gae", "grpo")}


MASKED = [("all", "sft_loss"), ("all", "ppo_loss"), ("all", "value_loss"), ("rank", "ppo_loss"), ("micro", "ppo_loss")]


def lora_adapter():
    """The matrices of an adapter that leave for the rollout, and what leaves where peft returns nothing."""
    engine = make_worker(model={"lora_rank": 4}).engine

    def sent() -> list[str]:
        return [name for name, _ in engine.get_per_tensor_param(base_sync_done=True)[0]]

    result = {"whole": sent()}
    # As peft 0.21.2 does of a nested FSDP1 model.
    with mock.patch.object(peft.utils.save_and_load, "get_peft_model_state_dict", lambda *args, **kwargs: {}):
        try:
            result["empty"] = sent()
        except ValueError as error:
            result["empty"] = str(error)
    return result


CASES = [
    dtype_per_hop,
    dtype_per_hop_critic,
    dtype_per_hop_ref,
    faults_actor,
    faults_critic,
    overflow_on_all_ranks_foreach,
    growth,
    partly_skipped_update,
    accumulation,
    checkpoint,
    storm,
    storm_nan,
    trajectory_bf16,
    trajectory_fp32,
    trajectory_fp16,
    trajectory_fp16_fused,
    cost_of_a_step,
    wire,
    lora_adapter,
    scaler_device,
    bf16_to_fp16,
    fp16_to_bf16,
    foreign_checkpoints,
    kept_v1,
    kept_legacy,
    kept_sft,
    sft_checkpoints,
    ppo_checkpoints_v1,
    ppo_checkpoints_legacy,
    storm_checkpoint,
    masked_batches,
    learning_rate_of_zero,
    nan_reward,
]
if PATCHED:  # upstream's first fused step raises, see trajectory_fp16_fused
    CASES += [faults_actor_fused, faults_critic_fused, overflow_on_all_ranks_fused]
if STRATEGY == "fsdp2":
    CASES.append(export)
if os.environ["WORLD_SIZE"] == "1":  # FSDP1 shards nothing then
    CASES = [accumulation, trajectory_bf16]
if os.environ["WORLD_SIZE"] == "4":
    CASES = [replicated]


# ---------------------------------------------------------------------------------------------------------------------
# keep_fp32_modules: patched trees alone, upstream has no such key.


def overflowing_model() -> str:
    """A copy of MODEL in whose first block gate * up exceeds 65504, and down brings it back; all else stays small."""
    directory = shared_directory()
    if RANK == 0:
        model = AutoModelForCausalLM.from_pretrained(MODEL)
        mlp = model.model.layers[0].mlp
        with torch.no_grad():
            mlp.gate_proj.weight *= 1000
            mlp.up_proj.weight *= 1000
            mlp.down_proj.weight /= 1e6
        model.save_pretrained(directory)
        AutoTokenizer.from_pretrained(MODEL).save_pretrained(directory)
    dist.barrier()
    return directory


def hf_name(name: str) -> str:
    parts = [part for part in name.split(".") if part != "_fsdp_wrapped_module"]
    return ".".join(parts).removeprefix("base_model.model.")


def watch_dtypes(worker: TrainingWorker, *names: str) -> dict[str, list[str]]:
    """Filled in a forward pass: for each module its weight's dtype (if it has one), its input's and its output's."""
    seen: dict[str, list[str]] = {}

    def hook_of(name):
        def hook(module, args, kwargs, output):
            tensors = [getattr(module, "weight", None), *args, *kwargs.values(), output]
            dtypes = [t.dtype for t in tensors if torch.is_tensor(t) and t.is_floating_point()]
            seen[name] = [str(dtype).removeprefix("torch.") for dtype in dtypes]

        return hook

    for name, module in worker.engine.module.named_modules():
        if hf_name(name) in names and not isinstance(module, FullyShardedDataParallel):
            module.register_forward_hook(hook_of(hf_name(name)), with_kwargs=True)
    return seen


def weights_of(worker: TrainingWorker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker.engine.get_per_tensor_param()[0]}


def keep_fp32():
    """The overflowing model in fp16, with modules kept in fp32, and all in fp32: dtypes, updates, exported names."""
    model = overflowing_model()
    # down_proj is in a kept module already.
    patterns = ["lm_head", "model.layers.0.mlp", "*.0.mlp.down_proj"]
    inside = ("model.layers.0.mlp.down_proj", "model.layers.0.mlp", "model.layers.1.mlp.down_proj", "lm_head")
    result, updates = {}, {}
    for case, engine in {
        "float16": {},
        "kept": {"keep_fp32_modules": patterns},
        "float32": {"dtype": "float32"},
    }.items():
        worker = make_worker(path=model, **engine)
        # An update by SGD is the clipped gradient; the rate lifts it above the rounding of the weights.
        worker.engine.optimizer = torch.optim.SGD(worker.engine.module.parameters(), lr=1e9)
        before = weights_of(worker)
        seen = watch_dtypes(worker, *inside)
        metrics = metrics_of(worker.train_batch(batch(1)))
        updates[case] = {name: tensor - before[name] for name, tensor in weights_of(worker).items()}
        result[case] = {
            "grad_norm": metrics.get("grad_norm"),
            "skipped": metrics["skipped_steps"],
            "dtypes": seen,
            "exported": sorted((name, str(tensor.dtype)) for name, tensor in before.items()),
            "kept": list(worker.engine.kept_in_fp32),
        }
    difference = {name: (updates["kept"][name] - u).norm() / u.norm() for name, u in updates["float32"].items()}
    result["update_error"] = {name: value.item() for name, value in difference.items()}
    return result


def keep_fp32_critic():
    """A kept head and a kept projection of a critic: dtypes, and whether it trains."""
    worker = make_worker("critic", keep_fp32_modules=["score", "*.q_proj"], grad_scaler=settings(init_scale=1024.0))
    seen = watch_dtypes(worker, "score", "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj")
    return {"dtypes": seen, "grad_norm": metrics_of(worker.train_batch(batch(1)))["grad_norm"]}


def keep_fp32_ref():
    """The same of a ref, whose parameters are offloaded: its dtypes in a forward pass, and whose list it follows."""
    worker = make_worker("ref", keep_fp32_modules=["lm_head", "*.q_proj"])
    seen = watch_dtypes(worker, "lm_head", "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj")
    data = batch()
    tu.assign_non_tensor(data, compute_loss=False)
    worker.infer_batch(data)
    follows = composed("actor_rollout_ref.actor.fsdp_config.keep_fp32_modules=[lm_head]").actor_rollout_ref.ref
    return {"dtypes": seen, "follows": list(follows.fsdp_config.keep_fp32_modules)}


def keep_fp32_lora():
    """A kept Linear with its adapter: dtypes, whether it trains, and what leaves for the rollout."""
    exported, result = [], {}
    for patterns in ([], ["model.layers.0.mlp.down_proj"]):
        worker = make_worker(model={"lora_rank": 4}, keep_fp32_modules=patterns)
        seen = watch_dtypes(worker, *(f"model.layers.{i}.mlp.down_proj.base_layer" for i in (0, 1)))
        result = {"grad_norm": metrics_of(worker.train_batch(batch(1)))["grad_norm"], "dtypes": seen}
        exported.append({(name, tensor.dtype) for name, tensor in worker.engine.get_per_tensor_param()[0]})
    return result | {"same_exports": exported[0] == exported[1]}


def keep_fp32_checkpoint():
    """Does a checkpoint of a worker with kept modules come back, and is the next step the one that would have come?"""
    directory = shared_directory()
    kept = {"keep_fp32_modules": ["lm_head", "*.mlp"], "grad_scaler": settings(init_scale=1024.0)}
    worker = make_worker(**kept)
    worker.train_batch(batch(1))
    worker.save_checkpoint(directory, global_step=1)
    fresh = make_worker(**kept)
    fresh.load_checkpoint(directory)
    result = {"state": same(state(worker), state(fresh))}
    before = state(worker)
    for each in (worker, fresh):
        each.train_batch(batch(2))
    return result | {"next_step": same(state(worker), state(fresh)), "stepped": not same(before, state(worker))}


if PATCHED and os.environ["WORLD_SIZE"] == "2":
    CASES += [keep_fp32, keep_fp32_critic, keep_fp32_ref, keep_fp32_lora, keep_fp32_checkpoint]


def main() -> None:
    # A rank that waits for the other in vain says so, instead of waiting for half an hour.
    dist.init_process_group("gloo", timeout=timedelta(seconds=90))
    # A case that raises ends the run: its rank would leave the other one waiting in a collective.
    results = {case.__name__: case() for case in CASES if case.__name__ in sys.argv[4:] or not sys.argv[4:]}
    (OUT / f"rank_{RANK}.json").write_text(json.dumps(results, default=str))


if __name__ == "__main__":
    main()
