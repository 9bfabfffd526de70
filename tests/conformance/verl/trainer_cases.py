"""The cases of the trainer's own step that computes log-probabilities, with the actor's worker."""

import ast
import functools
import inspect
import textwrap
from types import CodeType

import torch
from harness import Worker, batch, composed

from verl.trainer.ppo import ray_trainer

SHARE, K3 = "training/rollout_logprobs_equal_share", "rollout_corr/k3_kl"
MEASURED = {SHARE: "share", K3: "k3", "training/weight_sync_diff": "weight sync check"}


@functools.cache
def log_prob_step() -> CodeType:
    """Compile the statements of the trainer's loop between the rewards and the reference policy."""
    loop = ast.parse(textwrap.dedent(inspect.getsource(ray_trainer.RayPPOTrainer.fit)))
    for body in (node.body for node in ast.walk(loop) if isinstance(getattr(node, "body", None), list)):
        texts = [ast.unparse(statement) for statement in body]
        starts = [place for place, text in enumerate(texts) if text.startswith("with marked_timer('reward'")]
        if starts:
            ends = [place for place, text in enumerate(texts) if text.startswith("if self.use_reference_policy:")]
            return compile(ast.Module(body[starts[0] + 1 : ends[0]], []), ray_trainer.__file__, "exec")
    raise AssertionError("the trainer's loop computes no rewards")


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
    trainer = Trainer()
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
