# Copyright 2026 the verl-precision authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#      http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""How far the learner's log-probabilities are from those that the actors sampled with: measured, weighed in the loss.

The module needs torch and the standard library alone. The metrics have verl's names and definitions
(``verl/utils/debug/metrics.py``, ``verl/trainer/ppo/rollout_corr_helper.py``), the weights verl's names
(``rollout_correction``). Of them are made, as in Qi et al. 2025 (arXiv 2510.26788), truncated (TIS) and masked (MIS)
importance sampling, and policy gradients with importance weights (PG): ``reinforce_update`` with ``rollout_is``.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, Optional, Sequence

import torch
import torch.distributed as dist

__all__ = ["MismatchArgs", "check_mismatch", "mismatch_metrics", "reweigh", "rollout_logps"]


@dataclass
class MismatchArgs:
    """What every ``PPOArgs`` has for the mismatch. pi is the learner's policy before the update (the current one with
    reinforce_update), mu what the actors sampled with."""

    # Weigh the policy loss by pi/mu: of each token, or of the whole response. --tis_c must be None then.
    rollout_is: Optional[Literal["token", "sequence"]] = None
    # rollout_is: weights above this become this; with inf none below exp(20), which is verl's bound.
    rollout_is_threshold: float = 2.0
    # Leave responses out of the policy loss whose pi/mu is above rollout_rs_threshold.
    rollout_rs: Optional[Literal["sequence"]] = None
    # rollout_rs needs one.
    rollout_rs_threshold: Optional[float] = None


def check_mismatch(args: Any) -> None:
    """Refuse weights that cannot be meant; arguments without any (of learners that weigh nothing) pass.

    Raises:
        ValueError: one line with the keys, their values and what is allowed.
    """
    if not isinstance(args, MismatchArgs):
        return
    for name, allowed in (("rollout_is", (None, "token", "sequence")), ("rollout_rs", (None, "sequence"))):
        if getattr(args, name) not in allowed:
            raise ValueError(f"{name}={getattr(args, name)}: must be {', '.join(map(str, allowed[1:]))} or None")
    if not args.rollout_is_threshold > 0:
        raise ValueError(f"rollout_is_threshold={args.rollout_is_threshold}: must be a positive number, or inf")
    given = args.rollout_rs_threshold
    if (args.rollout_rs is None) != (given is None) or (given is not None and not 0 < given < math.inf):
        raise ValueError(
            f"rollout_rs={args.rollout_rs} rollout_rs_threshold={given}: "
            "must be --rollout_rs sequence with a positive number, or both None"
        )
    tis_c = getattr(args, "tis_c", None)  # before 0.2.1.post1 there is none
    if args.rollout_is is not None and tis_c is not None and not args.reinforce_update:
        raise ValueError(
            f"rollout_is={args.rollout_is} tis_c={tis_c}: both weigh the loss by pi/mu; "
            "must be --rollout_is None, or --tis_c None"
        )


def rollout_logps(sampled: Sequence[Optional[list[float]]], response_mask: torch.Tensor) -> torch.Tensor:
    """What the actors sampled with, laid out like the learner's log-probabilities; for releases that do not have it.

    Args:
        sampled: of each response the log-probabilities of its tokens; None in a dry run.
        response_mask: bool, shape (batch, tokens - 1).

    Returns:
        fp32, shape (batch, tokens - 1); 0 outside of the response, NaN where nothing was recorded.
    """
    logps = torch.zeros_like(response_mask, dtype=torch.float32)
    for row, values in enumerate(sampled):
        logps[row, response_mask[row]] = math.nan if values is None else torch.tensor(values, device=logps.device)
    return logps


def mismatch_metrics(
    args: MismatchArgs, logps: torch.Tensor, actor_logps: torch.Tensor, response_mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The mismatch of a batch before it is learnt from: a collective call.

    Args:
        logps: the learner's log-probabilities, shape (batch, tokens - 1).
        actor_logps: those that the actors sampled with.
        response_mask: bool, of the same shape.

    Returns:
        Over the responses' tokens of all ranks: ``rollout_probs_diff_mean`` and ``_max``, of
        ``|exp(actor) - exp(learner)|``; ``rollout_k3_kl``, the k3 estimate of KL(actor, learner); with ``rollout_is``
        the weights' mean, ``rollout_is_mean``; with ``rollout_rs`` the part of the tokens that is left out,
        ``rollout_rs_masked_fraction``. Of this rank, as OAT has them from 0.2.3 on: ``kl_sample_train_v1`` and ``v2``,
        the means of ``actor - learner`` and of half its square.
    """
    mask = response_mask.bool()
    logps, actor_logps = logps.detach().float(), actor_logps.float()
    learner, actor = logps[mask], actor_logps[mask]
    diff = (actor.exp() - learner.exp()).abs()
    ratio = learner - actor
    sums = {
        "rollout_probs_diff_mean": diff.sum(),
        "rollout_k3_kl": (ratio.expm1() - ratio).sum(),
    }
    if args.rollout_is is not None:
        weights = _weights(args, logps, actor_logps, mask).expand_as(logps)
        sums["rollout_is_mean"] = weights[mask].sum()
    if args.rollout_rs is not None:
        sums["rollout_rs_masked_fraction"] = (mask & ~_kept(args, logps, actor_logps, mask)).sum()
    totals = torch.stack([value.float() for value in sums.values()] + [diff.new_tensor(diff.numel())])
    largest = diff.max() if diff.numel() else diff.new_tensor(0.0)
    if dist.is_initialized():
        dist.all_reduce(totals)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    metrics = dict(zip(sums, totals[:-1] / totals[-1]))  # noqa: B905, for Python 3.9
    metrics["rollout_probs_diff_max"] = largest
    metrics["kl_sample_train_v1"] = -ratio.mean()
    metrics["kl_sample_train_v2"] = 0.5 * ratio.square().mean()
    return metrics


def reweigh(
    args: MismatchArgs,
    loss: torch.Tensor,
    logps: torch.Tensor,
    actor_logps: torch.Tensor,
    response_mask: torch.Tensor,
) -> torch.Tensor:
    """The loss of each token by ``rollout_is`` and ``rollout_rs``; as it is without them.

    A response that is left out still counts where losses are averaged over responses, as in the paper's MIS. Nothing
    is differentiated through a weight.

    Args:
        loss: shape (batch, tokens - 1).
        logps: log pi, of the same shape.
        actor_logps: log mu.
        response_mask: bool, of the same shape.
    """
    logps = logps.detach()
    if args.rollout_is is not None:
        loss = loss * _weights(args, logps, actor_logps, response_mask)
    if args.rollout_rs is not None:
        loss = torch.where(_kept(args, logps, actor_logps, response_mask), loss, torch.zeros_like(loss))
    return loss


def _log_ratio(logps: torch.Tensor, actor_logps: torch.Tensor, mask: torch.Tensor, level: str) -> torch.Tensor:
    """log(pi/mu), 0 outside of the responses, shape (batch, tokens - 1); of the sequence, shape (batch, 1)."""
    ratio = torch.where(mask.bool(), logps - actor_logps, torch.zeros_like(logps))
    return ratio.sum(-1, keepdim=True) if level == "sequence" else ratio


def _weights(args: MismatchArgs, logps: torch.Tensor, actor_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """pi/mu, truncated; at most exp(20) in any case, as in verl: an inf would make NaN of an advantage of 0."""
    weights = _log_ratio(logps, actor_logps, mask, args.rollout_is).clamp(max=20.0).exp()
    return weights.clamp(max=args.rollout_is_threshold)


def _kept(args: MismatchArgs, logps: torch.Tensor, actor_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Whether a response stays in the loss, bool, shape (batch, 1)."""
    return _log_ratio(logps, actor_logps, mask, "sequence") <= math.log(args.rollout_rs_threshold)
