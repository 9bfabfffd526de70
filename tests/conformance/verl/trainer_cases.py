"""The cases of the trainer's own steps that compute log-probabilities and advantages, with the actor's worker."""

import ast
import functools
import inspect
import math
import textwrap
from types import CodeType

import numpy as np
import torch
from harness import PATCHED, Worker, batch, composed

from verl import DataProto
from verl.trainer.ppo import ray_trainer

REQUEST = ["+precision=bf16"] if PATCHED else []  # turns the driver's checks on
SHARE, K3 = "training/rollout_logprobs_equal_share", "rollout_corr/k3_kl"
MEASURED = {SHARE: "share", K3: "k3", "training/weight_sync_diff": "weight sync check"}


@functools.cache
def statements(first: str, end: str, inclusive: bool) -> CodeType:
    """Compile statements of the trainer's loop: those after the one that begins with ``first``, or with it, to ``end``.

    Args:
        end: what the last one begins with, or without ``inclusive`` the next.
        inclusive: whether both are among them.
    """
    loop = ast.parse(textwrap.dedent(inspect.getsource(ray_trainer.RayPPOTrainer.fit)))
    for body in (node.body for node in ast.walk(loop) if isinstance(getattr(node, "body", None), list)):
        texts = [ast.unparse(statement) for statement in body]
        starts = [place for place, text in enumerate(texts) if text.startswith(first)]
        if starts:
            (end_at,) = (place for place, text in enumerate(texts) if text.startswith(end))
            wanted = body[starts[0] : end_at + 1] if inclusive else body[starts[0] + 1 : end_at]
            return compile(ast.Module(wanted, []), ray_trainer.__file__, "exec")
    raise AssertionError(f"the trainer's loop has no {first}")


def log_prob_step() -> CodeType:
    """Return the code between the rewards and the reference policy."""
    return statements("with marked_timer('reward'", "if self.use_reference_policy:", inclusive=False)


def rewards_with_nan() -> DataProto:
    """Return two groups of two rows, with a NaN among the rewards of the second."""
    data = batch(0)
    data.batch["token_level_rewards"] = torch.zeros(4, 8)
    data.batch["token_level_rewards"][2, -1] = math.nan
    data.non_tensor_batch["uid"] = np.array(["a", "a", "b", "b"], dtype=object)
    return data


def advantages(data: DataProto, *overrides: str) -> DataProto:
    """Return a batch with the advantages of GRPO, as the trainer's loop computes them."""
    trainer = object.__new__(ray_trainer.RayPPOTrainer)
    trainer.config = composed("algorithm.adv_estimator=grpo", *overrides)
    names = {**vars(ray_trainer), "self": trainer, "batch": data}
    exec(statements("norm_adv_by_std_in_grpo =", "batch = compute_advantage(", inclusive=True), names)
    return names["batch"]


class Trainer:
    """A trainer of the release without its cluster, before its first batch, in bf16.

    ``sampled`` are the worker's own log-probabilities of the batch, ``(rows, response)``, fp32.
    """

    def __init__(self, *overrides: str):
        config = composed("actor_rollout_ref.rollout.name=vllm", *overrides)
        worker = Worker("actor", config)
        self.sampled = worker.forward(batch(0))
        self.trainer = object.__new__(ray_trainer.RayPPOTrainer)
        self.trainer.config, self.trainer.actor_rollout_wg = config, worker.worker
        self.trainer.use_legacy_worker_impl = "auto"  # read by 0.7.0 and 0.7.1

    def step(self, step: int, rollout: torch.Tensor) -> tuple[torch.Tensor, dict]:
        """Return the log-probabilities to train on, and the metrics, where the rollout's are ``rollout``."""
        data = batch(0)
        del data.batch["old_log_probs"]
        data.batch["rollout_log_probs"] = rollout.clone()
        self.trainer.global_steps = step
        names = {**vars(ray_trainer), "self": self.trainer, "batch": data, "metrics": {}, "timing_raw": {}}
        exec(log_prob_step(), names)
        return names["batch"].batch["old_log_probs"], names["metrics"]


def equal_share() -> str:
    """Return the share of equal log-probabilities of a rollout like the trainer, and of one with half of them moved."""
    trainer = Trainer(*REQUEST)
    moved = trainer.sampled.clone()
    moved[:, ::2] = torch.nextafter(moved[:, ::2], torch.zeros(1))
    shares = [trainer.step(1, each)[1].get(SHARE) for each in (trainer.sampled, moved)]
    return ", ".join("none" if share is None else f"{share:g}" for share in shares)


def bypass_mode() -> str:
    """Return what each of three steps in bypass mode measures, every second step."""
    trainer = Trainer("trainer.mismatch_freq=2", "++algorithm.rollout_correction.bypass_mode=true")
    facts = []
    for step in (1, 2, 3):
        rollout = trainer.sampled + 2.0**-12
        trained_on, metrics = trainer.step(step, rollout)
        measured = [short for key, short in MEASURED.items() if key in metrics]
        facts.append(f"step {step}: {', '.join(measured) or 'nothing'}")
        if not torch.equal(trained_on, rollout):
            facts.append("TRAINS ON OTHERS")
    return "; ".join(facts)
