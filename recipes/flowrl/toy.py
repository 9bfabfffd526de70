"""What FlowRL is for, in seconds: a bandit with several good answers. FlowRL gives each the probability that its reward and
the reference policy make; GRPO ends on one.

  python -m recipes.flowrl.toy --out docs/results

writes flowrl-toy.csv and flowrl-toy.png. The losses are the trainer's own (:mod:`recipes.flowrl.objective`). All answers
can be listed, so that policies and target are compared exactly.
"""

import argparse
import csv
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter

import torch
from torch.nn.utils.rnn import pad_sequence

from recipes.flowrl.objective import group_log_z, mean_of_tokens, trajectory_balance

BETA, BATCH, SEEDS, EVERY = 3.0, 64, 4, 20
METHODS = {
    "FlowRL": {"log_z": "learned"},
    "FlowRL, 4 epochs": {"log_z": "learned", "epochs": 4},
    "log_z=group": {"log_z": "group"},
    "log_z=none": {"log_z": "none"},
    "GRPO": {"log_z": None},
}


class Toy:
    """A tree of tokens, and the answers that are its paths.

    Args:
        answers: tokens of each, numbers from 0; together all paths of the tree.
        reward: ``(answers,)``.
        reference: πref's logits ``(nodes, tokens)``; nodes are numbered as the answers come by them.
    """

    def __init__(self, answers: Iterable[tuple[int, ...]], reward: torch.Tensor, reference: torch.Tensor):
        answers, numbers = list(answers), {}
        nodes = [[numbers.setdefault(answer[:at], len(numbers)) for at in range(len(answer))] for answer in answers]
        self.nodes, self.tokens = (pad_sequence([torch.tensor(row) for row in rows], True) for rows in (nodes, answers))
        self.mask = pad_sequence([torch.ones(len(answer), dtype=torch.bool) for answer in answers], True)
        self.reward, self.reference = reward, reference

    def token_log_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """``(..., answers, tokens)`` of ``logits`` ``(..., nodes, tokens)``."""
        return logits.log_softmax(-1)[..., self.nodes, self.tokens]

    def log_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Of whole answers, ``(..., answers)``, in fp64."""
        return torch.where(self.mask, self.token_log_probs(logits.detach().double()), 0.0).sum(-1)

    def target(self) -> tuple[torch.Tensor, float]:
        """The fixed point ``log πref + |y|·(β·r − log Z)`` ``(answers,)``, and log Z, which makes it a distribution."""
        low, high = BETA * self.reward.min().item(), BETA * self.reward.max().item()
        for _ in range(60):
            log_z = (low + high) / 2
            log_target = self.log_probs(self.reference) + self.mask.sum(-1) * (BETA * self.reward.double() - log_z)
            low, high = (log_z, high) if log_target.logsumexp(-1) > 0 else (low, log_z)
        return log_target, log_z


def train(
    toy: Toy, log_z: str | None, *, epochs: int = 1, normalized: bool = False, steps: int = 3000, lr: float = 0.05
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Train ``SEEDS`` policies from πref on, each by samples of its own.

    Args:
        log_z: "learned", "group" or "none" as in the recipe's config, ``None`` for GRPO.
        epochs: steps that each batch serves.
        normalized: whether FlowRL's reward is GRPO's advantage.

    Returns:
        KL(π‖target) every ``EVERY`` steps ``(points, seeds)``, log π at the end ``(seeds, answers)``, learned log Z
        ``(seeds,)``.
    """
    torch.manual_seed(0)
    target, _ = toy.target()
    logits = toy.reference.expand(SEEDS, -1, -1).clone().requires_grad_()
    partition = torch.zeros(SEEDS, requires_grad=True)
    optimizer = torch.optim.Adam([logits, partition], lr)
    group = torch.arange(SEEDS).repeat_interleave(BATCH)
    kl = []
    for step in range(steps):
        if step % epochs == 0:
            drawn = toy.log_probs(logits).exp().multinomial(BATCH, replacement=True).flatten()
            old = toy.token_log_probs(logits.detach())[group, drawn]
            anchor, mask, reward = toy.token_log_probs(toy.reference)[drawn], toy.mask[drawn], toy.reward[drawn]
            rows = reward.view(SEEDS, BATCH)
            advantage = ((rows - rows.mean(1, keepdim=True)) / (rows.std(1, keepdim=True) + 1e-6)).flatten()
            reward = advantage if normalized else reward
        log_prob = toy.token_log_probs(logits)[group, drawn]
        if log_z is None:
            losses = -advantage * mean_of_tokens(log_prob, mask)
        else:
            z = partition[group] if log_z == "learned" else torch.zeros(len(group))
            z = group_log_z(old, anchor, reward, mask, group, beta=BETA) if log_z == "group" else z
            losses, _ = trajectory_balance(log_prob, old, anchor, reward, z, mask, beta=BETA, clip=(0.8, 1.28))
        optimizer.zero_grad()
        (losses.sum() / BATCH).backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            log_policy = toy.log_probs(logits)
            kl.append((log_policy.exp() * (log_policy - target)).sum(-1))
    return torch.stack(kl), log_policy, partition.detach()


def bandit() -> Toy:
    """16 arms with four modes, two of reward 1 and two of 0.9; πref prefers the first arms."""
    arm = torch.arange(16)
    reward = torch.tensor([1.0, 0.9, 1.0, 0.9])[arm // 4] * torch.exp(-((arm % 4 - 2.0) ** 2))
    return Toy([(token,) for token in range(16)], reward, -arm[None] / 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for flowrl-toy.csv and flowrl-toy.png")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    toy = bandit()
    target, true_log_z = toy.target()
    figure, (arms, curves) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    arms.bar(range(16), target.exp(), color="lightgrey", label="target, πref·exp(βr)/Z")
    table = [("method", "seed", "kl", "entropy", "largest_probability", "log_z", "true_log_z")]
    print(f"{'method':<18}{'KL(π‖target)':>14}{'entropy':>9}{'largest':>9}{'log Z':>10}{'seconds':>9}   worst of {SEEDS} seeds")
    for (name, method), marker in zip(METHODS.items(), "oxs^v", strict=True):
        start = perf_counter()
        kl, log_policy, log_z = train(toy, **method)
        entropy, largest = -(log_policy.exp() * log_policy).sum(-1), log_policy.exp().amax(-1)
        log_z = log_z.tolist() if method["log_z"] == "learned" else [""] * SEEDS
        columns = (kl[-1].tolist(), entropy.tolist(), largest.tolist(), log_z)
        table += [(name, seed, *row, true_log_z) for seed, row in enumerate(zip(*columns, strict=True))]
        arms.plot(range(16), log_policy[0].exp(), marker, label=name, fillstyle="none")
        curves.plot(range(EVERY, EVERY * len(kl) + 1, EVERY), kl.clamp(min=1e-9).mean(1), label=name)
        print(f"{name:<18}{kl[-1].max():14.2e}{entropy.min():9.4f}{largest.max():9.4f}", end="")
        print(f"{max(log_z, key=lambda x: abs(x - true_log_z)):10.5f}" if log_z[0] else " " * 10, end="")
        print(f"{perf_counter() - start:9.1f}", flush=True)
    print(f"{'target':<18}{0:14}{-(target.exp() * target).sum():9.4f}{target.exp().max():9.4f}{true_log_z:10.5f}")
    arms.set(title="probability of each arm, one seed", xlabel="arm")
    curves.set(title=f"KL(π‖target), mean of {SEEDS} seeds", xlabel="step", yscale="log")
    arms.legend()
    figure.savefig(out / "flowrl-toy.png", dpi=120)
    with open(out / "flowrl-toy.csv", "w", newline="") as file:
        csv.writer(file).writerows(table)


if __name__ == "__main__":
    main()
