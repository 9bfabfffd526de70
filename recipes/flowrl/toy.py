"""Train FlowRL and GRPO on a bandit with several good answers, in seconds.

FlowRL matches the distribution of reward and reference policy over all answers; GRPO collapses to the best ones.

  python -m recipes.flowrl.toy --out docs/results

writes flowrl-toy.csv and flowrl-toy.png. The losses are the trainer's own (:mod:`recipes.flowrl.objective`). All
answers can be enumerated, so policy and target are compared exactly.
"""

import argparse
import csv
from pathlib import Path
from typing import NamedTuple

import torch

from recipes.flowrl.objective import group_log_z, mean_of_tokens, trajectory_balance

BETA, BATCH, SEEDS, EVERY = 3.0, 64, 4, 20
METHODS = {
    "FlowRL": {"log_z": "learned"},
    "FlowRL, 4 epochs": {"log_z": "learned", "epochs": 4},
    "log_z=group": {"log_z": "group"},
    "log_z=none": {"log_z": "none"},
    "GRPO": {"log_z": None},
}


class PrefixTree(NamedTuple):
    """All answers of a task; the policy chooses a token at each node of a tree of prefixes."""

    nodes: torch.Tensor  # (answers, tokens), int64: the node at which each token is chosen
    tokens: torch.Tensor  # (answers, tokens), int64
    mask: torch.Tensor  # (answers, tokens), bool
    reward: torch.Tensor  # (answers,)
    reference: torch.Tensor  # (nodes, vocabulary): πref's logits

    def token_log_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities ``(..., answers, tokens)`` from ``logits`` ``(..., nodes, vocabulary)``."""
        return logits.log_softmax(-1)[..., self.nodes, self.tokens]

    def log_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities of whole answers, ``(..., answers)``, in fp64."""
        return (self.token_log_probs(logits.detach().double()) * self.mask).sum(-1)


def train(
    task: PrefixTree,
    target: torch.Tensor,
    log_z: str | None,
    *,
    epochs: int = 1,
    normalized: bool = False,
    steps: int = 1500,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Train ``SEEDS`` policies from πref, each on its own samples.

    Args:
        target: log-probabilities ``(answers,)`` to compare the policies with.
        log_z: "learned", "group" or "none" as in the recipe's config, ``None`` for GRPO.
        epochs: steps per batch.
        normalized: whether FlowRL's reward is GRPO's advantage.

    Returns:
        KL(π‖target) every ``EVERY`` steps ``(points, seeds)``, the final log π ``(seeds, answers)``, and the learned
        log Z ``(seeds,)``.
    """
    torch.manual_seed(0)
    logits = task.reference.expand(SEEDS, -1, -1).clone().requires_grad_()
    partition = torch.zeros(SEEDS, requires_grad=True)
    optimizer = torch.optim.Adam([logits, partition], lr=0.05)
    group, kl = torch.arange(SEEDS).repeat_interleave(BATCH), []
    for step in range(steps):
        if step % epochs == 0:
            drawn = task.log_probs(logits).exp().multinomial(BATCH, replacement=True).flatten()
            old, anchor = (
                task.token_log_probs(logits.detach())[group, drawn],
                task.token_log_probs(task.reference)[drawn],
            )
            mask, rewards = task.mask[drawn], task.reward[drawn].view(SEEDS, BATCH)
            advantage = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
            reward = (advantage if normalized or log_z is None else rewards).flatten()
            fixed = group_log_z(old, anchor, reward, mask, group, beta=BETA) if log_z == "group" else 0 * reward
        log_prob = task.token_log_probs(logits)[group, drawn]
        if log_z is None:
            losses = -reward * mean_of_tokens(log_prob, mask)
        else:
            z = partition[group] if log_z == "learned" else fixed
            losses, _ = trajectory_balance(log_prob, old, anchor, reward, z, mask, beta=BETA, clip=(0.8, 1.28))
        optimizer.zero_grad()
        (losses.sum() / BATCH).backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            log_policy = task.log_probs(logits)
            kl.append((log_policy.exp() * (log_policy - target)).sum(-1))
    return torch.stack(kl), log_policy, partition.detach()


def bandit() -> tuple[PrefixTree, torch.Tensor, float]:
    """Return 16 arms with four modes, two of reward 1 and two of 0.9; the log target ``(arms,)``; and log Z."""
    arms = torch.arange(16)
    reward = torch.tensor([1.0, 0.9, 1.0, 0.9])[arms // 4] * torch.exp(-((arms % 4 - 2.0) ** 2))
    task = PrefixTree(torch.zeros(16, 1).long(), arms[:, None], torch.ones(16, 1).bool(), reward, -arms[None] / 16)
    unnormalized = task.log_probs(task.reference) + BETA * reward.double()
    log_z = unnormalized.logsumexp(0).item()
    return task, unnormalized - log_z, log_z


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for flowrl-toy.csv and flowrl-toy.png")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    torch.set_num_threads(1)  # more threads are many times slower on tensors this small
    task, target, true_log_z = bandit()
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    left.bar(range(16), target.exp().tolist(), color="lightgrey", label="target, πref·exp(βr)/Z")
    rows = []
    print(f"{'':<18}{'KL(π‖target)':>14}{'entropy':>9}{'largest π':>11}{'log Z':>9}   means of {SEEDS} seeds")
    for (name, method), marker in zip(METHODS.items(), "oxs^v", strict=True):
        kl, log_policy, log_z = train(task, target, **method)
        entropy, largest = -(log_policy.exp() * log_policy).sum(-1), log_policy.exp().amax(-1)
        log_z = log_z if method["log_z"] == "learned" else log_z * torch.nan
        columns = torch.stack([kl[-1], entropy, largest, log_z], 1)
        rows += [(name, seed, *row) for seed, row in enumerate(columns.tolist())]
        print("{:<18}{:14.2e}{:9.4f}{:11.4f}{:9.5f}".format(name, *columns.mean(0).tolist()), flush=True)
        left.plot(range(16), log_policy[0].exp(), marker, label=name, fillstyle="none")
        right.plot(range(EVERY, EVERY * len(kl) + 1, EVERY), kl.clamp(min=1e-12).mean(1), label=name)
    row = 0.0, -(target.exp() * target).sum().item(), target.exp().max().item(), true_log_z
    rows.append(("target", "", *row))
    print("{:<18}{:14.2e}{:9.4f}{:11.4f}{:9.5f}".format("target", *row))
    with open(out / "flowrl-toy.csv", "w", newline="") as file:
        csv.writer(file).writerows([("method", "seed", "kl", "entropy", "largest_probability", "log_z"), *rows])
    left.set(title="probability of each arm after 1500 steps, seed 0", xlabel="arm")
    right.set(title=f"KL(π‖target), mean of {SEEDS} seeds", xlabel="step", yscale="log")
    left.legend()
    figure.savefig(out / "flowrl-toy.png", dpi=120)


if __name__ == "__main__":
    main()
