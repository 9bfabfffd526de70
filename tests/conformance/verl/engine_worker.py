"""The workers of verl 0.8.0 to 0.9.1, ``workers/engine_workers.py``, behind the interface of ``legacy_worker``."""

from collections.abc import Callable
from functools import partial

import torch
from omegaconf import DictConfig
from tensordict import TensorDict

from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import value_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding


def infer(compute: Callable[[TensorDict], TensorDict], batch: DataProto, output: str = "log_probs") -> torch.Tensor:
    """Return the ``output`` of a worker's ``compute`` for a padded batch, ``(rows, response)``, fp32."""
    data = left_right_2_no_padding(batch.to_tensordict())
    tu.assign_non_tensor(data, compute_loss=False, calculate_entropy=False)
    return no_padding_2_padding(tu.get(compute(data), output), data).float()


class Worker:
    """One role's worker with its model built, as the trainer creates it; see ``legacy_worker``."""

    step_name = "optimizer_step"

    def __init__(self, role: str, config: DictConfig):
        self.role = role
        if role == "critic":
            critic = omega_conf_to_dataclass(config.critic)
            for key in ("infer_max_token_len_per_gpu", "max_token_len_per_gpu", "micro_batch_size_per_gpu"):
                setattr(critic.engine, key, getattr(critic, f"ppo_{key}"))
            critic.engine.infer_micro_batch_size_per_gpu = critic.ppo_micro_batch_size_per_gpu
            self.worker = TrainingWorker(
                TrainingWorkerConfig(
                    model_type="value_model",
                    model_config=critic.model,
                    engine_config=critic.engine,
                    optimizer_config=critic.optim,
                    checkpoint_config=critic.checkpoint,
                )
            )
            self.worker.reset()
            self.worker.set_loss_fn(partial(value_loss, config=critic))
        else:
            self.worker = ActorRolloutRefWorker(config.actor_rollout_ref, role=role)
            self.worker.init_model()
        training_worker = self.worker if role == "critic" else getattr(self.worker, role)
        self.config = config.critic if role == "critic" else config.actor_rollout_ref.actor
        self.policy = training_worker.engine
        self.module = self.policy.module
        self.optimizer = self.policy.optimizer

    @property
    def scaler(self):
        return vars(self.policy).get("scaler")  # the engine of 0.7.0 and 0.7.1 has none

    def forward(self, batch: DataProto) -> torch.Tensor:
        compute = {"actor": "compute_log_prob", "ref": "compute_ref_log_prob", "critic": "infer_batch"}[self.role]
        return infer(getattr(self.worker, compute), batch, "values" if self.role == "critic" else "log_probs")

    def update(self, batch: DataProto) -> dict:
        data = left_right_2_no_padding(batch.to_tensordict())
        tu.assign_non_tensor(
            data,
            calculate_entropy=False,
            global_batch_size=self.config.ppo_mini_batch_size,
            mini_batch_size=self.config.ppo_mini_batch_size,
            epochs=1,
            seed=1,
            dataloader_kwargs={"shuffle": False},
            compute_loss=True,
        )
        update = self.worker.train_mini_batch if self.role == "critic" else self.worker.update_actor
        return dict(tu.get(update(data), "metrics"))

    def save(self, folder: str) -> None:
        self.worker.save_checkpoint(folder, global_step=1)

    def load(self, folder: str) -> None:
        self.worker.load_checkpoint(folder)
