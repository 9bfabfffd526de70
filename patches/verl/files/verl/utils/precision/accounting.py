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
"""Account for optimizer steps that were taken or skipped, and save a run that skips too many."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Optional

import torch
from torch.distributed.tensor import DTensor

from .dtypes import UNREQUESTED, Precision
from .scaler import GradScalerConfig, LossScaleError, LossScaler, storm_message


class StepAccounting:
    """Mixin of verl's ``BaseEngine`` that counts the taken and skipped optimizer steps of an update.

    Without a request for a precision nothing is counted, and the methods change nothing.

    An update is everything between two advances of the LR schedule (in PPO: every mini-batch of every epoch). Class
    attributes are the defaults, because tests make engines without calling ``__init__``.
    """

    precision: Precision = UNREQUESTED
    _taken = 0
    _skipped = 0
    _skips_in_a_row = 0  # of an optimizer with its own loss scaler
    _loss_scale: Optional[float] = None
    _update_metrics: Mapping[str, float] = {}

    def account_step(self, grad_norm: float | torch.Tensor, scaler: Optional[LossScaler]) -> Optional[float]:
        """Record a step that was just taken or skipped; clear the gradients of a skipped one.

        Args:
            grad_norm: 0-d, before clipping, the same on every rank.
            scaler: after its step; ``None`` where the loss is not scaled.

        Returns:
            The gradient norm, or ``None`` (no metric at all) where it is not finite or the step was skipped: one NaN
            would spread to the means of a whole training step.
        """
        if isinstance(grad_norm, DTensor):  # FSDP2's norm, in older torch a part of it on each rank
            grad_norm = grad_norm.full_tensor()
        norm = float(grad_norm)
        return self._account(math.isfinite(norm), norm, scaler.get_scale() if scaler is not None else None)

    def account_reported_step(
        self, stepped: bool, grad_norm: Optional[float], loss_scale: Optional[float], config: GradScalerConfig
    ) -> Optional[float]:
        """Do as :meth:`account_step` for an optimizer with its own loss scaler, which reports what it did (Megatron's).

        Args:
            stepped: whether the weights were updated, the same on every rank.
            grad_norm: before clipping; ``None`` where the step was skipped.
            loss_scale: after the step; ``None`` where the loss is not scaled.
            config: only ``max_consecutive_skips`` is read; the optimizer has the rest.

        Returns:
            The gradient norm, or ``None`` where it is not finite or the step was skipped.

        Raises:
            LossScaleError: ``max_consecutive_skips`` steps in a row were skipped; the weights are those of the last
                step that was taken.
        """
        self._skips_in_a_row = 0 if stepped else self._skips_in_a_row + 1
        reported = self._account(stepped, grad_norm, loss_scale)
        if self._skips_in_a_row >= config.max_consecutive_skips:
            raise LossScaleError(storm_message(config, 1.0 if loss_scale is None else loss_scale))
        return reported

    def _account(self, stepped: bool, grad_norm: Optional[float], loss_scale: Optional[float]) -> Optional[float]:
        self._loss_scale = loss_scale
        if not stepped:
            self._skipped += 1
            self.optimizer_zero_grad()
            return None
        self._taken += 1
        return float(grad_norm) if math.isfinite(grad_norm) else None

    def optimizer_zero_grad(self) -> None:
        """Clear the gradients of a skipped step.

        Engines override it; a worker that does not clears its gradients before each mini-batch.
        """

    def close_update(self) -> bool:
        """End an update, before the LR schedule advances.

        Returns:
            Whether the schedule should advance: not where every optimizer step of the update was skipped.
        """
        taken, skipped = self._taken, self._skipped
        self._taken = self._skipped = 0
        if taken == skipped == 0:  # nothing requested, or an engine whose own optimizer_step does not account
            return True
        self._update_metrics = {"skipped_steps": float(skipped)}
        if self._loss_scale is not None:
            self._update_metrics["loss_scale"] = self._loss_scale
        return taken > 0

    def update_metrics(self) -> Mapping[str, float]:
        """Return ``skipped_steps`` and, where the loss is scaled, ``loss_scale`` of the last closed update."""
        return self._update_metrics


@contextmanager
def save_after_storm(save: Callable[[], None]) -> Iterator[None]:
    """Save a checkpoint where the body raises a :class:`LossScaleError` (a storm), then re-raise that error.

    The checkpoint has the last good state under the number of the unfinished step, as if that step had been skipped:
    its batch is used up. Skipped steps changed nothing; earlier parts of the step (mini-batches that did not overflow,
    the critic's update before the actor's storm) are in it. A checkpoint of that number exists only where the run was
    resumed from an earlier one, and is then overwritten as every later checkpoint is.

    Args:
        save: the trainer's own method; where it fails, its error is chained to the storm's.

    Raises:
        LossScaleError: the storm's, whether or not the checkpoint was saved.
    """
    try:
        yield
    except LossScaleError as storm:
        try:
            save()
        except Exception as failed:
            raise storm from failed
        raise
