"""The recurrent network, and its checkpoint."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from recipes.amp.checkpoint import InvalidCheckpointError, read_checkpoint
from recipes.amp.world_model.trajectories import Trajectories


class Prediction(NamedTuple):
    """Predicted observation, reward and end of the episode after each action."""

    observations: torch.Tensor  # (N, T, O)
    rewards: torch.Tensor  # (N, T)
    ends: torch.Tensor  # (N, T), logits from forward, probabilities from predict


class WorldModel(nn.Module):
    """Encoder, GRU and three heads; its input and its predictions are in the environment's own units.

    Args:
        observation_size: O.
        action_size: A.
        hidden: size of the recurrent state and of each head's hidden layer.
        latent: size of an encoded observation.
    """

    def __init__(self, observation_size: int, action_size: int, hidden: int = 128, latent: int = 32):
        super().__init__()
        self.sizes = {"observation_size": observation_size, "action_size": action_size}
        self.sizes |= {"hidden": hidden, "latent": latent}
        self.encoder = nn.Sequential(nn.Linear(observation_size, hidden), nn.SiLU(), nn.Linear(hidden, latent))
        self.unseen = nn.Parameter(torch.zeros(latent))
        self.dynamics = nn.GRU(latent + action_size, hidden, batch_first=True)
        outputs = {"observation": observation_size, "reward": 1, "end": 1}
        self.heads = nn.ModuleDict(
            {
                name: nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, size))
                for name, size in outputs.items()
            }
        )
        for name, size in (("observation", observation_size), ("action", action_size), ("reward", 1)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_std", torch.ones(size))

    def set_statistics(self, data: Trajectories) -> None:
        """Normalise by the mean and the standard deviation of these trajectories; a constant is not scaled."""
        valid = data.valid.bool()
        for name, values in (
            ("observation", data.observations[:, 1:][valid]),
            ("action", data.actions[valid]),
            ("reward", data.rewards[valid][:, None]),
        ):
            std, mean = torch.std_mean(values, 0, correction=0)
            getattr(self, f"{name}_mean").copy_(mean)
            getattr(self, f"{name}_std").copy_(torch.where(std > 1e-6 * (1 + mean.abs()), std, 1.0))

    def forward(self, observations: torch.Tensor, actions: torch.Tensor, context: int) -> Prediction:
        """Return normalised predictions in fp32, ends as logits.

        Args:
            observations: (N, at least context, O); those from ``context`` on are not read.
            actions: (N, T, A), T at least ``context``.
        """
        encoded = self.encoder((observations[:, :context] - self.observation_mean) / self.observation_std)
        unseen = self.unseen.to(encoded.dtype).expand(len(actions), actions.shape[1] - context, -1)
        taken = (actions - self.action_mean) / self.action_std
        states, _ = self.dynamics(torch.cat([torch.cat([encoded, unseen], 1), taken.to(encoded.dtype)], -1))
        observation, reward, end = (head(states).float() for head in self.heads.values())
        return Prediction(observation, reward.squeeze(-1), end.squeeze(-1))

    @torch.no_grad()
    def predict(self, observations: torch.Tensor, actions: torch.Tensor, context: int) -> Prediction:
        """Predict what follows each action, in the environment's units, ends as probabilities.

        Args:
            observations: (N, at least context, O); the first ``context`` are given to the model.
            actions: (N, T, A).

        Raises:
            ValueError: ``context`` is below 1 or above the number of steps.
        """
        steps = min(observations.shape[1], actions.shape[1])
        if not 1 <= context <= steps:
            raise ValueError(f"context={context} must be at least 1 and at most the {steps} steps given")
        observation, reward, end = self(observations, actions, context)
        return Prediction(
            observation * self.observation_std + self.observation_mean,
            reward * self.reward_std + self.reward_mean,
            end.sigmoid(),
        )

    @classmethod
    def load(cls, path: str | Path) -> "WorldModel":
        """Return the model of a checkpoint of this recipe, on the CPU.

        Raises:
            FileNotFoundError: there is no such file.
            InvalidCheckpointError: truncated, of another model, or from a newer version.
        """
        saved = read_checkpoint(path)
        if "sizes" not in saved["extra"]:
            raise InvalidCheckpointError(f"{path}: not a checkpoint of a world model")
        model = cls(**saved["extra"]["sizes"])
        model.load_state_dict(saved["model"])
        return model
