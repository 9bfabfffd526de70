"""Train ``recipes.arithmetic`` with OAT: its reward as an oracle for OAT's own PPO.

launchpad starts a process per node, which imports this module, and with it the CPU adaptations, to unpickle its class.
"""

import json
from pathlib import Path
from typing import Any

import recipes.oat_cpu.host  # noqa: F401

# isort: split
import numpy as np
import torch
from oat.algorithms.ppo import PPOActor, PPOArgs, PPOLearner
from oat.oracles.base import PreferenceOracleBase, RewardOracleBase

from recipes.arithmetic import addition


class AdditionOracle(RewardOracleBase, PreferenceOracleBase):
    """The reward of ``recipes.arithmetic.addition``; the reference of a prompt is its sum."""

    def get_reward(
        self, inputs: list[str], responses: list[str], references: list[str], batch_size: int = 4
    ) -> tuple[torch.Tensor, dict]:
        """Return the rewards, (responses,), and an empty dict."""
        pairs = zip(responses, references, strict=True)
        return torch.tensor([addition.compute_score("", *pair) for pair in pairs]), {}

    def compare(
        self, inputs: list[str], candidates_A: list[str], candidates_B: list[str], **further: Any
    ) -> tuple[np.ndarray, dict]:
        """Return the rewards of ``candidates_A``: OAT evaluates with this method, and passes the references as B."""
        rewards, info = self.get_reward(inputs, candidates_A, candidates_B)
        return rewards.numpy(), info


class AdditionActor(PPOActor):
    """Sets the oracle, as ``oat.experiment.run_math_rl`` does for one that is not among OAT's own."""

    def init(self, actor_id: int, save_path: str) -> None:
        """Start vLLM."""
        super().init(actor_id, save_path)
        self.oracle = AdditionOracle()


class JsonlLogger:
    """Replaces wandb, the only logger of unpatched releases, by ``logged.jsonl``; adds DeepSpeed's own counts."""

    def __init__(self, learner: PPOLearner):
        self.learner, self.path = learner, Path(learner.save_path, "logged.jsonl")

    def log(self, metrics: dict[str, Any]) -> None:
        """Append a line in the format of verl's file logger."""
        engine = self.learner.model.model
        counts = {
            "deepspeed/loss_scale": engine.optimizer.cur_scale,
            "deepspeed/skipped_steps": engine.skipped_steps,
            "deepspeed/global_steps": engine.global_steps,
        }
        with self.path.open("a") as file:
            file.write(json.dumps({"step": self.learner.steps, "data": metrics | counts}) + "\n")

    def finish(self) -> None:
        """Do nothing: every line is written already."""


class AdditionLearner(PPOLearner):
    """OAT's learner with a ``JsonlLogger``."""

    def _init(self, args: PPOArgs, actors: list[PPOActor]) -> None:
        super()._init(args, actors)
        if self.strategy.is_rank_0():
            self._wandb = JsonlLogger(self)
