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
"""Check rewards before they become gradients, where a run requests a precision."""

from collections.abc import Mapping
from typing import Any

import torch

from .roles import run_requests_precision


def checks_rewards(config: Mapping[str, Any]) -> bool:
    """Return whether a PPO run refuses rewards that are not finite: ``trainer.check_rewards``, by default whether it
    requests a precision."""
    wanted = config["trainer"].get("check_rewards")
    return run_requests_precision(config) if wanted is None else wanted


def label_fields(config: Mapping[str, Any]) -> list[str]:
    """Return the fields to fetch for the message of :func:`check_rewards`, beside those that the trainer fetches."""
    return ["data_source"] if checks_rewards(config) else []


def check_rewards(config: Mapping[str, Any], rewards: torch.Tensor, labels: Mapping[str, Any]) -> None:
    """Refuse a batch with a reward that is inf or NaN: the loss scaler would take its gradients for an overflow.

    Args:
        config: of a PPO trainer; see :func:`checks_rewards`.
        rewards: ``(rows, tokens)``, any float dtype.
        labels: ``rows`` values per name; the message quotes ``data_source`` and ``uid`` where they are present.

    Raises:
        ValueError: the message gives the number of such rows and names the first three.
    """
    if not checks_rewards(config):
        return
    bad = (~rewards.isfinite()).any(dim=-1).nonzero().flatten().tolist()
    if bad:
        shown = [name for name in ("data_source", "uid") if name in labels]
        rows = (", ".join([f"row {row}", *(f"{name}={labels[name][row]}" for name in shown)]) for row in bad[:3])
        raise ValueError(
            f"{len(bad)} of {len(rewards)} rewards are not finite (the reward function's, or the KL penalty's where "
            f"algorithm.use_kl_in_reward is set): {'; '.join(rows)}{' …' if len(bad) > 3 else ''}; "
            "trainer.check_rewards=false turns this check off"
        )
