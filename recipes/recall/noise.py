"""Add noise to the log-probabilities of a rollout: a mismatch of a given size in any regime.

Enabled by ``configs/rollouts/noise.yaml``, for verl's v1 trainers. Each log-probability gets independent normal noise
of mean k3 and variance 2·k3, where k3 is ``rollouts.k3``. Importance weights keep a mean of 1, and the expected k3
between rollout and trainer increases by ``rollouts.k3``. The tokens stay the same.
"""

import random
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class NoisyAgentLoop(SingleTurnAgentLoop):
    """verl's single-turn agent loop with noise on the log-probabilities, determined by seed, step and answer.

    Raises:
        ValueError: ``rollouts.k3`` is negative.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        if self.config.rollouts.k3 < 0:
            raise ValueError(f"rollouts.k3={self.config.rollouts.k3}: must not be negative")

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, **kwargs)
        k3 = self.config.rollouts.k3
        rng = random.Random(f"{self.config.data.seed} {kwargs['global_steps']} {output.response_ids}")
        output.response_logprobs = [each + rng.gauss(k3, (2 * k3) ** 0.5) for each in output.response_logprobs]
        return output
