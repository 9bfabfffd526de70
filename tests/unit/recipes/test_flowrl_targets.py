"""What FlowRL converges to, on tasks whose answers can be enumerated, trained with the trainer's own losses."""

import itertools
from typing import NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from recipes.flowrl.objective import group_log_z, mean_of_tokens, trajectory_balance

BETA, BATCH, SEEDS = 3.0, 64, 4


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
    task: PrefixTree, log_z: str | None, *, epochs: int = 1, normalized: bool = False, steps: int = 1500
) -> tuple[torch.Tensor, torch.Tensor]:
    """Train ``SEEDS`` policies from πref, each on its own samples.

    Args:
        log_z: "learned", "group" or "none" as in the recipe's config, ``None`` for GRPO.
        epochs: steps per batch.
        normalized: whether FlowRL's reward is GRPO's advantage.

    Returns:
        The final log π ``(seeds, answers)``, and the learned log Z ``(seeds,)``.
    """
    torch.manual_seed(0)
    logits = task.reference.expand(SEEDS, -1, -1).clone().requires_grad_()
    partition = torch.zeros(SEEDS, requires_grad=True)
    optimizer = torch.optim.Adam([logits, partition], lr=0.05)
    group = torch.arange(SEEDS).repeat_interleave(BATCH)
    for step in range(steps):
        if step % epochs == 0:
            drawn = task.log_probs(logits).exp().multinomial(BATCH, replacement=True).flatten()
            old = task.token_log_probs(logits.detach())[group, drawn]
            anchor = task.token_log_probs(task.reference)[drawn]
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
    return task.log_probs(logits), partition.detach()


def bandit() -> tuple[PrefixTree, torch.Tensor, float]:
    """Return 16 arms with four modes, two of reward 1 and two of 0.9; the log target ``(arms,)``; and log Z."""
    arms = torch.arange(16)
    reward = torch.tensor([1.0, 0.9, 1.0, 0.9])[arms // 4] * torch.exp(-((arms % 4 - 2.0) ** 2))
    task = PrefixTree(torch.zeros(16, 1).long(), arms[:, None], torch.ones(16, 1).bool(), reward, -arms[None] / 16)
    unnormalized = task.log_probs(task.reference) + BETA * reward.double()
    log_z = unnormalized.logsumexp(0).item()
    return task, unnormalized - log_z, log_z


@pytest.mark.subprocess  # seconds of training
@pytest.mark.parametrize(
    ("log_z", "epochs"), [("learned", 1), ("learned", 4), ("group", 1), ("none", 1), (None, 1)], ids=str
)
def test_flowrl_matches_the_bandits_target_and_others_do_not(log_z, epochs):
    """The numbers of docs/results/flowrl-toy.csv: four policies, 1500 steps."""
    task, target, true_log_z = bandit()
    log_policy, learned = train(task, log_z, epochs=epochs)
    kl = (log_policy.exp() * (log_policy - target)).sum(-1)
    if log_z in ("learned", "group"):
        assert kl.abs().max() < 1e-4
    if log_z == "learned":
        assert (learned - true_log_z).abs().max() < 1e-3
    if log_z == "none":
        assert kl.min() > 1e-4 and kl.max() < 0.1, "noise remains"
    if log_z is None:
        assert kl.min() > 0.5, "GRPO collapses"


def test_training_reaches_the_length_normalised_fixed_point():
    """The policy ``πref·exp(|y|·(β·r − log Z))``, of answers of one to three tokens: 0 ends one, 1 and 2 go on."""
    torch.manual_seed(1)
    answers = [(0,), (1, 0), (2, 0), *itertools.product((1, 2), (1, 2), (0, 1, 2))]
    prefixes = {}
    nodes = [[prefixes.setdefault(answer[:at], len(prefixes)) for at in range(len(answer))] for answer in answers]
    ones = [[True] * len(answer) for answer in answers]
    tensors = (pad_sequence([torch.tensor(row) for row in rows], True) for rows in (nodes, answers, ones))
    task = PrefixTree(*tensors, torch.rand(len(answers)), torch.randn(len(prefixes), 3))
    reference = task.log_probs(task.reference)
    low, high = -10.0, 10.0
    for _ in range(60):  # the log Z that normalizes the policy
        true_log_z = (low + high) / 2
        target = reference + task.mask.sum(-1) * (BETA * task.reward.double() - true_log_z)
        low, high = (true_log_z, high) if target.logsumexp(0) > 0 else (low, true_log_z)
    log_policy, log_z = train(task, "learned", steps=2000)
    assert (log_policy.exp() * (log_policy - target)).sum(-1).max() < 1e-4 and (log_z - true_log_z).abs().max() < 1e-3
    summed = (reference + BETA * task.reward).log_softmax(0)
    distance = (log_policy.exp() * (log_policy - summed)).sum(-1)
    assert distance.min() > 0.05, "it differs from the target of summed log-probabilities"


def test_group_normalised_reward_keeps_the_references_odds_among_the_best_answers():
    """Once all answers of a batch are right, every reward is 0: FlowRL keeps πref's odds, GRPO loses them."""
    task, _, _ = bandit()
    right = torch.tensor([2, 5, 6, 10, 14])
    task = task._replace(reward=torch.zeros(16).index_fill(0, right, 1.0))
    wanted = task.log_probs(task.reference)[right].log_softmax(0)
    for log_z in ("learned", "group", None):
        log_policy, _ = train(task, log_z, normalized=True, steps=800)
        assert log_policy[:, right].logsumexp(-1).exp().min() > 0.999
        distance = (wanted.exp() * (wanted - log_policy[:, right].log_softmax(-1))).sum(-1)
        assert distance.min() > 0.2 if log_z is None else distance.max() < 1e-3
