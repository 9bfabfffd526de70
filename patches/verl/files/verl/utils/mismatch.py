# Copyright 2026 the verl-precision authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Count the log-probabilities that rollout and trainer agree on, and decide when bypass mode measures the mismatch.

With ``algorithm.rollout_correction.bypass_mode=true`` the rollout's log-probabilities take the place of the trainer's,
which are not computed: the metrics of the mismatch and the check of the first weight sync are then absent. Every
``trainer.mismatch_freq`` steps the trainer's log-probabilities are computed only for these.

The module needs torch and :mod:`verl.utils.precision` only.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from verl.utils.precision import run_requests_precision

__all__ = ["both_sides", "equal_share", "measures_mismatch", "without_old_log_probs"]

logger = logging.getLogger(__name__)


def both_sides(batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the trainer's log-probabilities, the rollout's, and the response mask, as verl's metrics take them."""
    return batch["old_log_probs"], batch["rollout_log_probs"], batch["response_mask"]


def equal_share(trainer: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Return the share of response tokens whose log-probabilities are equal on both sides.

    Args:
        trainer, rollout: log-probabilities of the same tokens in nats, ``(rows, response tokens)``; compared as fp32.
        mask: bool of the same shape, true at response tokens.

    Returns:
        ``training/rollout_logprobs_equal_share``: 1 where both sides agree bitwise.
    """
    return {"training/rollout_logprobs_equal_share": (trainer.float() == rollout.float())[mask].double().mean().item()}


def measures_mismatch(trainer: Any) -> bool:
    """Return whether a step in bypass mode computes the trainer's log-probabilities; call it once for each batch.

    If ``trainer.mismatch_freq`` is on, the first batch after each start does, for the check of the weight sync, and
    every step that the key divides. If it is off, the first call logs what the run does without, where the run requests
    a precision.

    Args:
        trainer: a PPO trainer of verl, with its ``config`` and ``global_steps``. The first call sets ``_bypass_began``
            on it, because verl's trainers do not all call their base class's ``__init__``.

    Raises:
        ValueError: ``trainer.mismatch_freq`` is not a whole number.
    """
    freq = trainer.config.trainer.get("mismatch_freq", -1)
    if not isinstance(freq, int):
        raise ValueError(f"trainer.mismatch_freq={freq} must be a whole number of steps, or -1 to measure none")
    first = not hasattr(trainer, "_bypass_began")
    trainer._bypass_began = True
    if first and freq <= 0 and run_requests_precision(trainer.config):
        logger.warning(
            "algorithm.rollout_correction.bypass_mode=true: the trainer does not compute log-probabilities, so "
            "there is no training/rollout_probs_diff_mean and no check of the first weight sync. "
            "trainer.mismatch_freq=N measures both every N steps"
        )
    return freq > 0 and (first or trainer.global_steps % freq == 0)


def without_old_log_probs(batch: Any) -> Any:
    """Return a DataProto of verl with the fields of ``batch`` but ``old_log_probs``; adding fields leaves ``batch``."""
    kept = [name for name in batch.batch.keys() if name != "old_log_probs"]
    return batch.select(kept, list(batch.non_tensor_batch), list(batch.meta_info))
