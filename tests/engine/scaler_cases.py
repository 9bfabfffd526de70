"""Cases of verl's FSDP engine: overflows, skipped steps, storms, the cost of a step, and batches without a loss."""

import math
from functools import partial
from unittest import mock

import torch
from fsdp_worker import (
    PATCHED,
    POISONED,
    RANK,
    batch,
    composed,
    gradients,
    gradients_after_step,
    lr_of,
    make_worker,
    metrics_of,
    poison_gradient,
    poison_loss,
    poison_micro_batch,
    same,
    scale_of,
    settings,
    state,
)
from tensordict import NonTensorStack, TensorDict
from torch.profiler import ProfilerActivity, profile
from transfer_queue import KVBatchMeta

from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import Metric
from verl.workers.utils import losses

FAULTS = {
    "inf in the first micro-batch": partial(poison_micro_batch, which=0, value=math.inf),
    "NaN in the second micro-batch": partial(poison_micro_batch, which=1, value=math.nan),
    "inf in the last micro-batch": partial(poison_micro_batch, which=2, value=math.inf),
    # As after a loss that overflowed: torch's count of ranks with an overflow is then 2.
    "inf on every rank": partial(poison_gradient, ranks=range(POISONED + 1)),
    "a loss of NaN": poison_loss,
}

REQUEST = "actor_rollout_ref.actor.dtype=bfloat16"
FLASH_ATTENTION = {"override_config": {"attn_implementation": "flash_attention_2"}, "use_remove_padding": True}


def faults(role: str, adam: str, **config):
    """Overflow in a step of three micro-batches, on one rank or on all.

    Return whether the skipped step changes nothing, the metrics, and whether the next step is that of a worker without
    the overflow. ``adam`` is torch's implementation: "foreach" or "fused".
    """

    def make():
        torch.manual_seed(0)  # initializes the critic's head
        return make_worker(role, grad_scaler=settings(init_scale=1024.0), optimizer={adam: True}, warmup=50, **config)

    worker, spared = make(), make()
    for one in (worker, spared):  # initializes Adam's state
        one.train_batch(batch(0, size=6))
    outcomes = {}
    for seed, (name, poison) in enumerate(FAULTS.items(), start=1):
        before, lr_before, scale_before = state(worker), lr_of(worker), scale_of(worker)
        poison(worker)
        left = gradients_after_step(worker)
        metrics = metrics_of(worker.train_batch(batch(-seed, size=6)))
        outcome = {
            "unchanged": same(before, state(worker)),
            "gradients_cleared": left == [0],
            "scale_factor": scale_of(worker) / scale_before,
            "metrics": {key: metrics.get(key) for key in ("grad_norm", "skipped_steps", "loss_scale")},
            "lr_unchanged": lr_of(worker) == lr_before,
        }
        spared.engine.scaler.load_state_dict(worker.engine.scaler.state_dict())
        norms = [metrics_of(one.train_batch(batch(seed, size=6)))["grad_norm"] for one in (worker, spared)]
        outcome["next_step"] = norms[0] == norms[1] and same(state(worker), state(spared))
        outcome["moves_on"] = not same(before, state(worker))
        outcomes[name] = outcome
    return outcomes


def storm():
    """Overflow the last gradient of one rank in every step: scales, skips and the error that ends the run."""
    worker = make_worker(grad_scaler=settings(init_scale=8.0, min_scale=2.0, max_consecutive_skips=4))
    scales, skips = [], []
    try:
        for seed in range(8):
            poison_gradient(worker, of=lambda worker: gradients(worker)[-1:])
            skips.append(metrics_of(worker.train_batch(batch(seed))).get("skipped_steps"))
            scales.append(scale_of(worker))
    except RuntimeError as error:
        return {"scales": scales, "skips": skips, "error": str(error), "type": type(error).__name__}
    return {"scales": scales, "error": None}


def cost_of_a_step():
    """Count an optimizer step's all-reduces and device reads by the host, step counters excluded."""

    def cost(**overrides):
        worker = make_worker(grad_scaler=settings(init_scale=1024.0), **overrides)
        worker.train_batch(batch(1))  # the first step initializes Adam's state
        step, profiler = worker.engine.optimizer_step, profile(activities=[ProfilerActivity.CPU])

        def profiled():
            with profiler:
                return step()

        worker.engine.optimizer_step = profiled
        worker.train_batch(batch(2))
        names = [event.name for event in profiler.events() if not in_optimizer(event)]
        reduced = names.count("gloo:all_reduce") + names.count("nccl:all_reduce")
        return {"all_reduces": reduced, "host_reads": names.count("aten::_local_scalar_dense")}

    def in_optimizer(event) -> bool:
        return event is not None and ("Optimizer.step" in event.name or in_optimizer(event.cpu_parent))

    costs = {"bf16": cost(dtype="bfloat16"), "fp16": cost()}
    return costs | ({"fp16_fused": cost(optimizer={"fused": True})} if PATCHED else {})


def replicated():
    """Train two replicas of two shards each (HSDP); return their norm, and the skip after an overflow on one rank."""
    sharded = metrics_of(make_worker(grad_scaler=settings(init_scale=1024.0)).train_batch(batch(1)))["grad_norm"]
    worker = make_worker(fsdp_size=2, grad_scaler=settings(init_scale=1024.0))
    result = {"sharded": sharded, "replicated": metrics_of(worker.train_batch(batch(1)))["grad_norm"]}
    before = state(worker)
    poison_gradient(worker)
    metrics = metrics_of(worker.train_batch(batch(2)))
    return result | {"unchanged": same(before, state(worker)), "skipped": metrics.get("skipped_steps")}


def masked(where: str, loss: str):
    """Train with verl's own ``loss`` where no token of one micro-batch, of one rank or of all is in the loss mask."""
    worker = make_worker("critic" if loss == "value_loss" else "actor", grad_scaler=settings(init_scale=1024.0))
    config = composed().critic if loss == "value_loss" else composed().actor_rollout_ref.actor
    config = None if loss == "sft_loss" else omega_conf_to_dataclass(config)
    worker.set_loss_fn(partial(getattr(losses, loss), config=config))

    data = batch(1)
    rows = data["input_ids"].unbind()
    left_out = {"all": range(4), "rank": range(4) if RANK == POISONED else [], "micro": range(2)}[where]

    def nested(make):
        return torch.nested.as_nested_tensor([make(i, row) for i, row in enumerate(rows)], layout=torch.jagged)

    def response(value):
        return nested(lambda i, row: torch.full((len(row) - 2,), value))

    def mask(prompt_length: int):
        return nested(lambda i, row: torch.full((len(row) - prompt_length,), int(i not in left_out)))

    data["prompts"], data["responses"] = nested(lambda i, row: row[:2]), nested(lambda i, row: row[2:])
    data["response_mask"] = data["loss_mask"] = mask(2)
    if loss == "sft_loss":  # covers whole sequences, as in verl's SFT data
        data["loss_mask"] = mask(0)
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
    """Return all numbers in nested lists of metrics."""
    if isinstance(values, Metric):
        values = values.aggregate()
    return [float(values)] if not hasattr(values, "__iter__") else [n for value in values for n in numbers(value)]


MASKED = [("all", "sft_loss"), ("all", "ppo_loss"), ("all", "value_loss"), ("rank", "ppo_loss"), ("micro", "ppo_loss")]


def nan_reward_v1():
    """Compute the v1 trainer's advantages of two rewards, one of them NaN, by the run's keys.

    Return its refusal, or whether the rows that it writes have a NaN. A dictionary of rows stands for TransferQueue,
    which needs Ray.
    """
    nested = lambda *rows: torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)  # noqa: E731
    rows = TensorDict(
        {
            "uid": NonTensorStack("a", "a"),
            "data_source": NonTensorStack("sum", "product"),
            "response_mask": nested([1, 1], [1, 1, 1]),
            "rm_scores": nested([0.0, 1.0], [0.0, 0.0, math.nan]),
        },
        batch_size=2,
    )
    written, outcomes = {}, {}
    queue = {
        "kv_batch_get": lambda select_fields, **_: rows.select(*select_fields, strict=False),
        "kv_batch_put": lambda fields, **_: written.update(fields.items()),
    }
    trainer = object.__new__(PPOTrainerSync)
    for keys in ("", "trainer.check_rewards=true", REQUEST, f"{REQUEST} trainer.check_rewards=false"):
        if keys and not PATCHED:
            continue
        trainer.config = composed("algorithm.adv_estimator=grpo", *keys.split())
        with mock.patch.multiple(trainer_base.tq, **queue):
            try:
                batch_of_two = KVBatchMeta(keys=["a_0_0", "a_1_0"], partition_id="train", tags=[{}, {}])
                trainer._compute_advantage(batch_of_two, {})
                outcomes[keys] = [bool(row.isnan().any()) for row in written["advantages"].unbind()]
            except ValueError as error:
                outcomes[keys] = str(error)
    return outcomes


CASES = {
    "faults_actor": partial(faults, "actor", "foreach"),
    "faults_critic": partial(faults, "critic", "foreach"),
    "faults_actor_fused": partial(faults, "actor", "fused"),
    "faults_flash_attention": partial(faults, "actor", "fused", model=FLASH_ATTENTION),
    "storm": storm,
    "cost_of_a_step": cost_of_a_step,
    "replicated": replicated,
    "nan_reward_v1": nan_reward_v1,
    "masked_batches": lambda: {f"{where} {loss}": masked(where, loss) for where, loss in MASKED},
}
