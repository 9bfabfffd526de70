"""``recipes.arithmetic`` under OAT: its reward as an oracle, and OAT's own PPO with it.

launchpad starts a process a node, which imports this module to unpickle its class, and so the CPU with it.
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
        """Return the rewards, (responses,), and nothing further."""
        pairs = zip(responses, references, strict=True)
        return torch.tensor([addition.compute_score("", *pair) for pair in pairs]), {}

    def compare(
        self, inputs: list[str], candidates_A: list[str], candidates_B: list[str], **further: Any
    ) -> tuple[np.ndarray, dict]:
        """Return the rewards of ``candidates_A``: OAT evaluates by this, and hands in the references as B."""
        rewards, info = self.get_reward(inputs, candidates_A, candidates_B)
        return rewards.numpy(), info


class AdditionActor(PPOActor):
    """An oracle that is not among OAT's own is set here, as ``oat.experiment.run_math_rl`` does."""

    def init(self, actor_id: int, save_path: str) -> None:
        """Start vLLM."""
        super().init(actor_id, save_path)
        self.oracle = AdditionOracle()


class Log:
    """In wandb's place, which unpatched releases log to alone: ``logged.jsonl``, with DeepSpeed's own counts."""

    def __init__(self, learner: PPOLearner):
        self.learner, self.path = learner, Path(learner.save_path, "logged.jsonl")

    def log(self, metrics: dict[str, Any]) -> None:
        """Append a line, in the format of verl's file logger."""
        engine = self.learner.model.model
        counts = {
            "deepspeed/loss_scale": engine.optimizer.cur_scale,
            "deepspeed/skipped_steps": engine.skipped_steps,
            "deepspeed/global_steps": engine.global_steps,
        }
        with self.path.open("a") as file:
            file.write(json.dumps({"step": self.learner.steps, "data": metrics | counts}) + "\n")

    def finish(self) -> None:
        """Nothing: every line is written."""


class AdditionLearner(PPOLearner):
    """OAT's, which keeps what it logs."""

    def _init(self, args: PPOArgs, actors: list[PPOActor]) -> None:
        super()._init(args, actors)
        if self.strategy.is_rank_0():
            self._wandb = Log(self)
