"""Cases of verl's FSDP engine and trainers: batches without a loss, a reward of NaN."""

import math
from functools import partial

import numpy as np
import torch
from fsdp_worker import (
    RANK,
    batch,
    composed,
    make_worker,
    metrics_of,
    scale_of,
    settings,
)

from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import Metric
from verl.workers.utils import losses

MASKED = [("all", "sft_loss"), ("all", "ppo_loss"), ("all", "value_loss"), ("rank", "ppo_loss"), ("micro", "ppo_loss")]


def masked(where: str, loss: str):
    """Train with verl's own ``loss`` where no token of one micro-batch, of one rank or of all is in the loss mask."""
    worker = make_worker("critic" if loss == "value_loss" else "actor", grad_scaler=settings(init_scale=1024.0))
    config = composed().critic if loss == "value_loss" else composed().actor_rollout_ref.actor
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
    if loss == "sft_loss":  # covers whole sequences, as in verl's SFT data
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
    """Return all numbers in nested lists of metrics."""
    if isinstance(values, Metric):
        values = values.aggregate()
    return [float(values)] if not hasattr(values, "__iter__") else [n for value in values for n in numbers(value)]


def nan_reward():
    """Compute the legacy and the v1 trainer's advantages of four rewards, one of them NaN: errors, or rows with NaN."""

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


CASES = {
    "masked_batches": lambda: {f"{where} {loss}": masked(where, loss) for where, loss in MASKED},
    "nan_reward": nan_reward,
}
