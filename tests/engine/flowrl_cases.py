"""Cases of FlowRL's worker on gloo ranks, compared with the same computation in plain torch."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from flowrl_reference import PLAIN_MODEL, batch, head_of, make_worker, reference_update, rollouts, set_loss
from fsdp_worker import (
    RANK,
    STRATEGY,
    gradients,
    merge,
    metrics_of,
    name_of,
    poison_gradient,
    same,
    scale_of,
    shared_directory,
    state,
    weights_of,
)
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from recipes.flowrl.config import FlowRLConfig, PartitionConfig
from recipes.flowrl.engine import FILE
from recipes.flowrl.partition import PartitionHead
from recipes.flowrl.worker import FlowRLTrainingWorker
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.checkpoint import manifest


def worker_update(worker: FlowRLTrainingWorker, data):
    """Return the worker's loss, means and gradients of a batch, as :func:`reference_update`; its weights are restored.

    The gradients are the updates by SGD at a learning rate of 1.
    """
    engine, partition = worker.engine, worker.engine.partition
    local = [p.to_local() if isinstance(p, DTensor) else p for p in engine.module.parameters()]
    kept, before = [p.detach().clone() for p in local], weights_of(worker)
    engine.optimizer = torch.optim.SGD(engine.module.parameters(), lr=1.0)
    object.__setattr__(engine.optimizer_config, "clip_grad", math.inf)
    taken = []
    if partition is not None:
        step, partition.step = (
            partition.step,
            lambda: taken.extend(p.grad.flatten() for p in head_of(worker).parameters()),
        )
    metrics = metrics_of(worker.train_batch(data))
    trunk = {name: before[name] - tensor for name, tensor in weights_of(worker).items()}
    with torch.no_grad():
        for parameter, value in zip(local, kept, strict=True):
            parameter.copy_(value)
    if partition is not None:
        partition.step = step
    means = {name: sum_of(value) for name, value in metrics.items() if name.startswith("flowrl/") or name == "pg_loss"}
    return means, trunk, torch.cat(taken) if taken else torch.zeros(0)


def sum_of(metric) -> float:
    """Aggregate a metric as verl's trainer does: the sum over micro-batches, the mean over ranks."""
    return metric[0].aggregate_dp(metric) if isinstance(metric, list) else metric


def relative_errors(update, expected) -> dict[str, float]:
    """Return the errors of an update relative to the expected one."""
    (means, trunk, head), (means_of, trunk_of, head_of_) = update, expected
    whole = torch.cat([tensor.flatten() for tensor in trunk_of.values()])
    difference = torch.cat([(trunk[name] - tensor).flatten() for name, tensor in trunk_of.items()])
    result = {
        "means": max(abs(means[name] - value) / (abs(value) + 1e-2) for name, value in means_of.items()),
        "trunk": (difference.norm() / whole.norm()).item(),
    }
    return result | ({"head": ((head - head_of_).norm() / head_of_.norm()).item()} if len(head_of_) else {})


def heads_state(worker: FlowRLTrainingWorker) -> list[torch.Tensor]:
    """Return clones of the head's weights and Adam state."""
    partition = worker.engine.partition
    moments = [value for entry in partition.optimizer.state.values() for value in entry.values()]
    return [tensor.detach().clone() for tensor in [*partition.head.parameters(), *moments]]


def everything(worker: FlowRLTrainingWorker) -> tuple[list[torch.Tensor], list]:
    engine = worker.engine
    schedules = [engine.lr_scheduler.state_dict(), engine.partition_schedule.state_dict()]
    for schedule in schedules:
        schedule.pop("lr_lambdas")
    return state(worker) + heads_state(worker), [*schedules, scale_of(worker)]


def alike(one: tuple, other: tuple) -> bool:
    return same(one[0], other[0]) and one[1] == other[1]


def first_of_head(worker: FlowRLTrainingWorker) -> list[torch.Tensor]:
    return [next(head_of(worker).parameters()).grad]


def first_of_both(worker: FlowRLTrainingWorker) -> list[torch.Tensor]:
    return gradients(worker)[:1] + first_of_head(worker)


def head_dtypes():
    """Train in fp16 and record the dtypes of weights, input, output and gradient in the head; then evaluate."""
    worker, dtypes_of = make_worker(dtype="float16"), {}

    def watch(module, args, output):
        dtypes = dtypes_of[module] = [name_of(tensor) for tensor in (module.weight, *args, output)]
        output.register_hook(lambda grad: dtypes.append(name_of(grad)))

    for name in ("0", "4", "8"):
        head_of(worker).layers.get_submodule(name).register_forward_hook(watch)
    data = batch(rollouts(0))
    worker.train_batch(data)
    adam = next(iter(worker.engine.partition.optimizer.state.values()))
    tu.assign_non_tensor(data, compute_loss=False)
    evaluated = sorted(worker.infer_batch(data).keys())
    return {"head": list(dtypes_of.values()), "adam": name_of(adam["exp_avg"]), "evaluated": evaluated}


LAYOUTS = {
    "micro-batches of 4": {"micro": 4},
    "packed, by tokens": {"packed": True, "use_dynamic_bsz": True},
    "offloaded": {"param_offload": True, "optimizer_offload": True},
    "without the prompt's last token": {"drop_last_prompt_token": True},
    "fp16": {"dtype": "float16"},
}


def beside_plain_torch():
    """Compare layouts and splits of a batch, some of whose rows are padding, with plain torch."""
    rows, errors = rollouts(1, right=(1, 2, 3, 0)), {}
    for number, row in enumerate(rows):
        row["real"] = number % 5 != 2
    for name, layout in LAYOUTS.items():
        layout = dict(layout)
        head = PartitionConfig(zero_init=False, drop_last_prompt_token=layout.pop("drop_last_prompt_token", False))
        flowrl = FlowRLConfig(partition=head)
        worker = make_worker(flowrl, **layout)
        errors[name] = relative_errors(worker_update(worker, batch(rows)), reference_update(worker, rows, flowrl))
        assert worker.engine._hidden is None, "a hidden state is kept after the step"
    detached = reference_update(worker, rows, flowrl, detached=True)
    return {"errors": errors, "detached": relative_errors(detached, reference_update(worker, rows, flowrl))["trunk"]}


def variants():
    """Compare every variant of the objective with plain torch."""
    head = PartitionConfig(zero_init=False)
    worker, without_head = make_worker(), make_worker(FlowRLConfig(log_z="none"))
    rows, errors = rollouts(2), {}
    for settings_ in (
        {"anchor": "old"},
        {"importance_weight": "token"},
        {"importance_weight": "none"},
        {"importance_clip": None},
        {"importance_clip": 1.01},
        {"reward": "score"},
        {"length_normalization": False},
        {"beta": 3.0},
        {"log_z": "group"},
        {"log_z": "none"},
    ):
        flowrl = FlowRLConfig(partition=head, **settings_)
        used = worker if flowrl.log_z == "learned" else without_head
        set_loss(used, flowrl)
        ((name, value),) = settings_.items()
        errors[f"{name}={value}"] = relative_errors(
            worker_update(used, batch(rows, flowrl)), reference_update(used, rows, flowrl)
        )
    set_loss(worker, FlowRLConfig())
    weighted = [row | {"rollout_is_weights": torch.linspace(0.5, 1.5, len(row["answer"]))} for row in rows]
    padded = [row | {"real": number % 2 == 0} for number, row in enumerate(rows)]
    for name, rows in {"rollout weights": weighted, "rank 1 has only padding": padded}.items():
        errors[name] = relative_errors(
            worker_update(worker, batch(rows)), reference_update(worker, rows, FlowRLConfig(partition=head))
        )
    return {"errors": errors, "head": without_head.engine.partition is not None}


def clipped():
    """Step a head whose gradient may have a norm of 1e-3, and compare the heads of both ranks bit by bit.

    Adam's first moment is a tenth of the gradient after one step.
    """
    worker = make_worker(FlowRLConfig(partition=PartitionConfig(zero_init=False, clip_grad=1e-3)))
    norm = metrics_of(worker.train_batch(batch(rollouts(0))))["flowrl/partition_grad_norm"]
    moments = [entry["exp_avg"].flatten() for entry in worker.engine.partition.optimizer.state.values()]
    result = {"reported": norm, "applied": 10 * torch.cat(moments).norm().item()}
    before = heads_state(worker)[0]
    worker.train_batch(batch(rollouts(1)))  # the first of the warm-up has a learning rate of 0
    mine = torch.cat([tensor.flatten().float() for tensor in heads_state(worker)])
    both = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(both, mine)
    return result | {"same": torch.equal(*both), "moved": not torch.equal(before, heads_state(worker)[0])}


def overflows(dtype: str):
    """Overflow a trunk gradient, a head gradient, or both; record the weights that changed, and the next step."""
    worker, spared = make_worker(dtype=dtype), make_worker(dtype=dtype)
    for one in (worker, spared):
        for seed in (20, 21):  # the first of the warm-up has a rate of 0
            one.train_batch(batch(rollouts(seed)))
    outcomes = {}
    for name, where in {
        "trunk": {},
        "head": {"of": first_of_head},
        "both": {"of": first_of_both, "ranks": (0, 1)},
    }.items():
        (tensors, others), scale = everything(worker), scale_of(worker)
        poison_gradient(worker, **where)
        metrics = metrics_of(worker.train_batch(batch(rollouts(30))))
        after, others_after = everything(worker)
        outcomes[name] = {
            "unchanged": same(tensors, after),
            "schedules": others[:2] == others_after[:2],
            "scale": [scale, scale_of(worker)],
            "metrics": {key: metrics.get(key) for key in ("grad_norm", "skipped_steps")},
            "head_norm": metrics.get("flowrl/partition_grad_norm"),
        }
        if scale is not None:
            spared.engine.scaler.load_state_dict(worker.engine.scaler.state_dict())
        for one in (worker, spared):
            one.train_batch(batch(rollouts(40)))
        outcomes[name]["next_step"] = alike(everything(worker), everything(spared))
        outcomes[name]["moves_on"] = not same(tensors, everything(worker)[0])
    return outcomes


def resume():
    """Save and take two steps; load into a fresh worker and take the same two; then load invalid heads."""
    directory = shared_directory()
    flowrl = FlowRLConfig(partition=PartitionConfig(zero_init=False, dropout=0.1, weight_decay=0.1))
    contents = ["model", "optimizer", "extra"] + (["hf_model"] if STRATEGY == "fsdp2" else [])
    checkpoint = CheckpointConfig(save_contents=contents, load_contents=["model", "optimizer", "extra"])
    worker = make_worker(flowrl, "float16", checkpoint=checkpoint)
    file = Path(directory) / "actor" / FILE
    if RANK == 0:
        manifest.begin(directory)
    worker.train_batch(batch(rollouts(50)))
    poison_gradient(worker, of=first_of_both)
    worker.train_batch(batch(rollouts(51)))  # the scale differs from the initial one
    worker.save_checkpoint(str(file.parent), global_step=1)
    result = {"there": file.exists()}
    if RANK == 0:  # as the trainer does after its workers have saved
        manifest.finish(directory, 1)
        manifest.check_whole(directory)
        result["listed"] = f"actor/{FILE}" in json.loads((Path(directory) / "manifest.json").read_text())["files"]
    dist.barrier()
    saved = everything(worker)
    for seed in (52, 53):
        worker.train_batch(batch(rollouts(seed)))
    expected = everything(worker)
    fresh = make_worker(flowrl, "float16", checkpoint=checkpoint)
    fresh.load_checkpoint(str(file.parent))
    result["loaded"] = alike(saved, everything(fresh))
    for seed in (52, 53):
        fresh.train_batch(batch(rollouts(seed)))
    result["steps"] = alike(expected, everything(fresh))
    result["moved"] = not same(saved[0], expected[0])
    fresh = make_worker(flowrl, "float16", checkpoint=replace(checkpoint, load_contents=["model"]))
    fresh.load_checkpoint(str(file.parent))
    parameters = len(list(head_of(fresh).parameters()))
    result["weights_alone"] = {
        "head": same(saved[0][-len(heads_state(worker)) :][:parameters], heads_state(fresh)),
        "adam": len(fresh.engine.partition.optimizer.state),
        "updates": [schedule.last_epoch for schedule in (fresh.engine.lr_scheduler, fresh.engine.partition_schedule)],
    }

    def refusal() -> list:
        dist.barrier()
        before = everything(fresh)
        try:
            fresh.load_checkpoint(str(file.parent))
        except ValueError as error:
            return [str(error), alike(before, everything(fresh))]

    result["file"] = str(file)
    if RANK == 0:
        content = torch.load(file)
        narrow = PartitionHead(64, 0.0, True).state_dict()
        torch.save(content | {"head": narrow}, file)
    result["width"] = refusal()
    if RANK == 0:
        file.unlink()
    result["missing"] = refusal()
    return result | exported_names(worker, file.parent)


def exported_names(worker: FlowRLTrainingWorker, folder: Path) -> dict:
    """Compare the names of the tensors that leave the engine with the model's own."""
    names = set(PLAIN_MODEL.state_dict())
    result = {
        "rollout": set(weights_of(worker)) == names,
        "state_dict": {name.replace("_fsdp_wrapped_module.", "") for name in worker.engine.module.state_dict()}
        == names,
    }
    if STRATEGY == "fsdp2" and RANK == 0:  # torch cannot gather FSDP1's full state dict on a CPU
        huggingface = folder / "huggingface"
        result["merged"] = set(merge(folder, huggingface)) == names
        result["export"] = set(load_file(huggingface / "model.safetensors")) == names
    return result


def lora():
    """Train LoRA adapters with and without the gradient of log Z through the trunk."""
    flowrl, rows = FlowRLConfig(partition=PartitionConfig(zero_init=False)), rollouts(7)
    worker, detached = (make_worker(flowrl, model={"lora_rank": 4}) for _ in range(2))
    head_of(detached).register_forward_pre_hook(lambda module, args: args[0].detach())
    expected = reference_update(worker, rows, flowrl)[0]
    metrics = [metrics_of(one.train_batch(batch(rows))) for one in (worker, detached)]
    return {
        "log_z": [sum_of(metrics[0]["flowrl/log_z"]), expected["flowrl/log_z"]],
        "losses": [metrics[0]["loss"], metrics[1]["loss"], expected["pg_loss"]],
        "grad_norms": [one["grad_norm"] for one in metrics],
    }


CASES = {
    "overflows_fp16": partial(overflows, "float16"),
    "overflows_bf16": partial(overflows, "bfloat16"),
}
CASES |= {case.__name__: case for case in (head_dtypes, beside_plain_torch, variants, clipped, resume, lora)}
