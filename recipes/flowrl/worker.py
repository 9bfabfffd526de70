"""verl's actor with FlowRL's loss and engine."""

from dataclasses import replace
from functools import partial

import torch
from tensordict import TensorDict

from recipes.flowrl import engine as engine  # registers the engine
from recipes.flowrl.config import FlowRLActorConfig, FlowRLConfig
from recipes.flowrl.objective import mean_of_tokens, trajectory_balance
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.core_algos import kl_penalty
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.padding import no_padding_2_padding

# Fields of the batch, by token; the last two are optional.
FIELDS = ("response_mask", "old_log_probs", "advantages", "rm_scores", "ref_log_prob", "rollout_is_weights")


def answer_reward(fields: TensorDict, kind: str) -> torch.Tensor:
    """Return the reward of each answer ``(rows,)``: GRPO's "advantage", the same at each token, or the "score"."""
    if kind == "advantage":
        return mean_of_tokens(fields["advantages"], fields["response_mask"].bool())
    return fields["rm_scores"].float().sum(-1)


def flowrl_loss(config: FlowRLActorConfig, model_output: dict, data: TensorDict, dp_group=None):
    """Compute FlowRL's loss of a micro-batch and its metrics; replaces verl's ``ppo_loss``.

    Sums over rows are divided by the number of rows of the mini-batch, so its split into micro-batches and ranks has no
    effect.
    """
    flowrl = config.flowrl
    log_prob = no_padding_2_padding(model_output["log_probs"], data).float()
    share = data["dp_size"] / data["global_batch_size"]  # FSDP averages gradients over dp_size ranks
    fields = data.select(*(name for name in FIELDS if name in data)).to_padded_tensor()
    mask = fields["response_mask"].bool()
    if flowrl.log_z == "learned":
        log_z = model_output["log_z"]
    else:
        log_z = data["group_log_z"].flatten() if flowrl.log_z == "group" else torch.zeros_like(log_prob[:, 0])
    losses, metrics = trajectory_balance(
        log_prob,
        fields["old_log_probs"],
        fields["ref_log_prob" if flowrl.anchor == "ref" else "old_log_probs"],
        answer_reward(fields, flowrl.reward),
        log_z,
        mask,
        beta=flowrl.beta,
        level=flowrl.importance_weight,
        clip=flowrl.importance_clip,
        length_normalization=flowrl.length_normalization,
        rollout_weights=fields.get("rollout_is_weights"),
    )
    if "ref_log_prob" in fields:
        metrics["reference_kl"] = mean_of_tokens(
            kl_penalty(log_prob.detach(), fields["ref_log_prob"], "low_var_kl"), mask
        )
    loss = losses.sum() * share
    sums = torch.stack([values.sum() for values in metrics.values()]) * share
    means = {f"flowrl/{name}": mean for name, mean in zip(metrics, sums.tolist(), strict=True)}
    return loss, Metric.from_dict({"pg_loss": loss} | means, aggregation=AggregationType.SUM)


class FlowRLTrainingWorker(TrainingWorker):
    """verl's worker of one model with FlowRL's engine."""

    def __init__(self, config: TrainingWorkerConfig, flowrl: FlowRLConfig):
        super().__init__(replace(config, model_type="flowrl_model"))
        self.engine.flowrl = flowrl


class FlowRLWorker(ActorRolloutRefWorker):
    """verl's worker of actor, rollout and reference with FlowRL's loss."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        config: FlowRLActorConfig = omega_conf_to_dataclass(self.config.actor)
        self.actor_worker_cls = partial(FlowRLTrainingWorker, flowrl=config.flowrl)
        super().init_model()
        self.set_loss_fn(partial(flowrl_loss, config))
