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
"""Detect a rollout that samples from other weights than the trainer's, on the first batch after the weight sync.

A weight sync can go wrong without an error: vLLM's CPU build repacks expert weights and later loads plain ones into
them; an adapter arrives empty; a renamed parameter is skipped. The rollout then samples from another model, and the run
trains on. The log-probabilities that both sides give to the same tokens show it on any device and for any server, and
are in the trainer's hands already: the check costs a few sums over one batch.

The check is on where a run requests a precision, or by ``trainer.check_weight_sync=true``.

The module needs torch, :mod:`verl.utils.precision` and :mod:`verl.utils.mismatch` only.
"""

from collections.abc import Mapping
from typing import Any

import torch

from verl.utils.mismatch import equal_share
from verl.utils.precision import Precision, run_requests_precision, to_dtype

__all__ = ["WeightSyncCheck", "WeightSyncError", "check_weight_sync"]

# Unit roundoff of the dtype that a side computes in. fp32 products on a GPU may be TF32's, which has fp16's mantissa:
# torch's are not by default, those of Triton's attention are.
_ROUNDOFF = {torch.float32: 2**-11, torch.float16: 2**-11, torch.bfloat16: 2**-8}
# Limits in unit roundoffs of the coarser side. Measured in fp16, in units of the spread: 2 with a mixture of experts,
# 640 after its experts were scrambled.
_OF_SPREAD = 100  # of mean |difference|, in units of the spread of log p over the batch
_ABSOLUTE = 20  # of mean |difference| in nats: an almost deterministic policy has no spread to compare with


class WeightSyncError(RuntimeError):
    """The rollout does not sample from the trainer's weights, or one side's log-probabilities are not finite."""


def check_weight_sync(trainer: Any, batch: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Apply the trainer's own :class:`WeightSyncCheck` to ``batch``.

    Args:
        trainer: a PPO trainer of verl, with its ``config``; the check is kept on it, because verl's trainers do not all
            call their base class's ``__init__``.
        batch: as :meth:`WeightSyncCheck.__call__`.

    Returns:
        the metrics of the first comparison, and of every batch the share of equal log-probabilities
        (:func:`verl.utils.mismatch.equal_share`); nothing where the run neither requests a precision nor checks.

    Raises:
        WeightSyncError: the first comparison failed.
    """
    if not hasattr(trainer, "_weight_sync_check"):
        trainer._weight_sync_check = WeightSyncCheck(trainer.config)
    return trainer._weight_sync_check(batch)


class WeightSyncCheck:
    """Compare the log-probabilities of rollout and trainer on the first batch that has both.

    The check is off with ``trainer.check_weight_sync=false``, where that is not set and the run requests no precision,
    and where the two cannot be compared: see :func:`_comparable`.

    Args:
        config: of a PPO trainer: ``trainer``, ``actor_rollout_ref.actor`` and ``actor_rollout_ref.rollout`` are read.
    """

    def __init__(self, config: Mapping[str, Any]):
        actor, rollout = (config["actor_rollout_ref"][role] for role in ("actor", "rollout"))
        requested, wanted = run_requests_precision(config), config["trainer"].get("check_weight_sync")
        self._shares = requested or bool(wanted)
        self._pending = bool(requested if wanted is None else wanted) and _comparable(rollout)
        if self._pending:
            self._roundoff = max(_ROUNDOFF[dtype] for dtype in (_trainer_dtype(actor), _rollout_dtype(rollout)))

    def __call__(self, batch: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Compare the first ``batch`` that has a response token; on later ones return the share only.

        Args:
            batch: ``rollout_log_probs`` and ``old_log_probs``, the trainer's, in nats, and ``response_mask``: each
                ``(rows, response tokens)``.

        Returns:
            ``training/weight_sync_diff``, the mean absolute difference of log p over the response tokens, in nats, and
            ``training/weight_sync_spread``, the mean absolute deviation of the trainer's log p; on every call
            ``training/rollout_logprobs_equal_share``.

        Raises:
            WeightSyncError: the difference is far beyond what rounding to the regime's dtypes explains, or not finite.
        """
        if not self._shares or not (mask := batch["response_mask"].bool()).any():
            return {}
        share = equal_share(batch["old_log_probs"], batch["rollout_log_probs"], mask)
        if not self._pending:
            return share
        self._pending = False
        sides = {"rollout": "rollout_log_probs", "trainer": "old_log_probs"}
        sampled, trained = (batch[name][mask].double() for name in sides.values())
        for side, log_probs in zip(sides, (sampled, trained), strict=True):
            if not log_probs.isfinite().all():
                raise WeightSyncError(f"the {side}'s log-probabilities of the first batch are not finite: {_OFF}")
        diff = (sampled - trained).abs().mean().item()
        spread = (trained - trained.mean()).abs().mean().item()
        limit = max(_ABSOLUTE, _OF_SPREAD * spread) * self._roundoff
        if diff > limit:
            raise WeightSyncError(
                "the rollout does not sample from the trainer's weights: on the first batch after the weight sync "
                f"their log-probabilities differ by {diff:.2g} nats a token, where log p itself spreads by "
                f"{spread:.2g} and rounding explains {limit:.2g}. Look for parameters that the rollout server did not "
                f"load or changed after loading; {_OFF}"
            )
        return {"training/weight_sync_diff": diff, "training/weight_sync_spread": spread, **share}


_OFF = "trainer.check_weight_sync=false turns this check off"


def _trainer_dtype(actor: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that the actor computes in."""
    if actor["strategy"] in ("fsdp", "fsdp2"):
        return Precision.of_worker(actor.get("dtype"), actor["fsdp_config"], trained=True).compute
    engine = actor.get(actor["strategy"]) or {}
    return to_dtype(actor.get("dtype") or engine.get("dtype") or "bfloat16", "actor_rollout_ref.actor.dtype")


def _rollout_dtype(rollout: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that the server computes in; ``auto`` may be any, so it counts as the coarsest."""
    name = {"auto": "bfloat16", "half": "float16", "float": "float32"}.get(rollout["dtype"], rollout["dtype"])
    return to_dtype(name, "actor_rollout_ref.rollout.dtype")


def _comparable(rollout: Mapping[str, Any]) -> bool:
    """Return whether both sides' log-probabilities are those of the same distribution, up to rounding.

    They are not with quantized weights or a quantized KV cache; a ``top_p`` or ``top_k`` that cuts the distribution; a
    temperature that the server leaves out of its log-probabilities (all but vLLM under ``processed_logprobs``); several
    turns under SGLang (0.6 keeps one log-probability for each); servers other than vLLM, SGLang and hf.
    """
    name = rollout["name"]
    engine = (rollout.get("engine_kwargs") or {}).get(name) or {}
    quantized = (
        rollout.get("quantization")
        or engine.get("quantization")
        or (engine.get("kv_cache_dtype") or "auto") != "auto"
        or (rollout.get("qat") or {}).get("enable", False)
    )
    whole = rollout["top_p"] == 1 and rollout["top_k"] in (-1, 0)
    scaled = name == "vllm" and rollout.get("logprobs_mode") == "processed_logprobs"
    turns = name == "sglang" and (rollout.get("multi_turn") or {}).get("enable", False)
    known = name in ("vllm", "sglang", "hf")
    return known and not quantized and whole and (rollout["temperature"] == 1 or scaled) and not turns
