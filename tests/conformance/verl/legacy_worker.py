"""The workers of verl 0.4.1 to 0.7.1, ``workers/fsdp_workers.py``, as the conformance suite drives them."""

import torch
from omegaconf import DictConfig

from verl import DataProto
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker


class Worker:
    """One role's worker with its model built, as the trainer creates it.

    Args:
        role: actor, ref or critic.
        config: the composed ``ppo_trainer.yaml``.
    """

    step_name = "_optimizer_step"  # the method of ``policy`` that takes an optimizer step

    def __init__(self, role: str, config: DictConfig):
        self.role = role
        if role == "critic":
            # From 0.6.0 on the trainer passes the dataclass.
            dataclass = config.critic.get("_target_", "").startswith("verl.workers.config.")
            self.worker = CriticWorker(omega_conf_to_dataclass(config.critic) if dataclass else config.critic)
        else:
            self.worker = ActorRolloutRefWorker(config.actor_rollout_ref, role=role)
        self.worker.init_model()
        self.policy = getattr(self.worker, {"actor": "actor", "ref": "ref_policy", "critic": "critic"}[role])
        kind = "critic" if role == "critic" else "actor"
        self.module = getattr(self.policy, f"{kind}_module")
        self.optimizer = getattr(self.policy, f"{kind}_optimizer")

    @property
    def scaler(self):
        return vars(self.policy).get("scaler")  # upstream's critic, and actor before 0.6.1, has none

    def forward(self, batch: DataProto) -> torch.Tensor:
        """Return log-probabilities or values, ``(rows, response)``, fp32."""
        if self.role == "actor":
            return self.worker.compute_log_prob(batch).batch["old_log_probs"]
        if self.role == "ref":
            return self.worker.compute_ref_log_prob(batch).batch["ref_log_prob"]
        return self.worker.compute_values(batch).batch["values"]

    def update(self, batch: DataProto) -> dict:
        """Return the metrics of one update, without the role's prefix."""
        update = self.worker.update_critic if self.role == "critic" else self.worker.update_actor
        metrics = update(batch).meta_info["metrics"]
        return {name.removeprefix(f"{self.role}/"): value for name, value in metrics.items()}

    def save(self, folder: str) -> None:
        self.worker.save_checkpoint(folder, global_step=1)

    def load(self, folder: str) -> None:
        self.worker.load_checkpoint(folder, del_local_after_load=False)
