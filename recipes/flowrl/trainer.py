"""verl's synchronous trainer for FlowRL: ``trainer.v1.trainer_mode=flowrl``, with ``configs/recipe/flowrl.yaml``.

Registered in every process by ``VERL_USE_EXTERNAL_MODULES=recipes.flowrl.trainer``.
"""

from collections import defaultdict

import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from recipes.flowrl.objective import group_log_z
from recipes.flowrl.worker import FIELDS, FlowRLWorker, answer_reward
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync


def diversity(data: TensorDict, uids: list[str], real: list[bool]) -> dict[str, float]:
    """Return the mean number of distinct right answers per prompt, and the share of right answers (reward above 0).

    Answers are compared by the ``answer`` that the reward function returns beside its score, else by their tokens.

    Args:
        uids: the prompt of each row.
        real: whether each row is an answer, not padding.
    """
    right = data["rm_scores"].to_padded_tensor(0.0).sum(-1) > 0
    distinct = defaultdict(set)
    for row in range(len(uids)):
        if real[row]:
            answers = distinct[uids[row]]
            if right[row]:
                extra = data["extra_fields"][row].get("reward_extra_info", {})
                answers.add(str(extra.get("answer", data["responses"][row].tolist())))
    return {
        "flowrl/distinct_right_answers": sum(map(len, distinct.values())) / len(distinct),
        "flowrl/right_answers": right[torch.tensor(real)].float().mean().item(),
    }


@register_trainer("flowrl")
class FlowRLTrainer(PPOTrainerSync):
    """The synchronous trainer with FlowRL's worker, log Z of groups, and diversity metrics."""

    def __init__(self, config: DictConfig):
        if "flowrl" not in config.actor_rollout_ref.actor:
            raise ValueError("trainer.v1.trainer_mode=flowrl: FlowRL's settings are missing; add +recipe=flowrl")
        config.trainer.v1.trainer_mode = "sync"  # verl treats FlowRL as synchronous from here on
        super().__init__(config)
        self.flowrl = config.actor_rollout_ref.actor.flowrl

    def _init_resource_pool_mgr(self):
        super()._init_resource_pool_mgr()
        for role in {Role.ActorRollout, Role.ActorRolloutRef} & self.role_worker_mapping.keys():
            self.role_worker_mapping[role] = ray.remote(FlowRLWorker)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        batch = super()._compute_advantage(batch, metrics)
        names = ["uid", "responses", "extra_fields", *(FIELDS if self.flowrl.log_z == "group" else ["rm_scores"])]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        uids = list(data["uid"])
        metrics.update(diversity(data, uids, [not tag.get("is_padding", False) for tag in batch.tags]))
        if self.flowrl.log_z == "group":
            padded = data.select(*(name for name in FIELDS if name in data)).to_padded_tensor()
            numbers = {uid: number for number, uid in enumerate(dict.fromkeys(uids))}
            log_z = group_log_z(
                padded["old_log_probs"],
                padded["ref_log_prob" if self.flowrl.anchor == "ref" else "old_log_probs"],
                answer_reward(padded, self.flowrl.reward),
                padded["response_mask"].bool(),
                torch.tensor([numbers[uid] for uid in uids]),
                beta=self.flowrl.beta,
                length_normalization=self.flowrl.length_normalization,
            )
            fields = TensorDict({"group_log_z": log_z}, batch_size=len(batch))
            batch = tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        batch = super()._update_actor(batch, metrics)
        mean, square = metrics["actor/flowrl/delta"], metrics.pop("actor/flowrl/delta_square")
        metrics["actor/flowrl/delta_std"] = max(square - mean**2, 0.0) ** 0.5
        weight, square = metrics["actor/flowrl/weight"], metrics.pop("actor/flowrl/weight_square")
        metrics["actor/flowrl/effective_samples"] = weight**2 / square
        return batch
