"""The fixed points of FlowRL, on tasks whose answers can be enumerated, and the bandit's results."""

import csv
import itertools
import sys

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from recipes.flowrl import toy


@pytest.fixture(scope="module")
def bandit(tmp_path_factory) -> dict[str, list[dict[str, float]]]:
    """Return the results of ``python -m recipes.flowrl.toy`` by method, one per seed."""
    out = tmp_path_factory.mktemp("toy") / "made"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["toy", "--out", str(out)])
        toy.main()
    assert (out / "flowrl-toy.png").stat().st_size > 10_000
    results = {}
    with open(out / "flowrl-toy.csv") as file:
        for row in csv.DictReader(file):
            numbers = {name: float(value) for name, value in row.items() if name not in ("method", "seed")}
            results.setdefault(row["method"], []).append(numbers)
    return results


@pytest.mark.subprocess  # the whole command: seconds of training
def test_flowrl_matches_the_target_and_others_do_not(bandit):
    (target,) = bandit["target"]
    for method in ("FlowRL", "FlowRL, 4 epochs", "log_z=group"):
        for seed in bandit[method]:
            assert abs(seed["kl"]) < 1e-4 and abs(seed["entropy"] - target["entropy"]) < 1e-3
            if "FlowRL" in method:
                assert abs(seed["log_z"] - target["log_z"]) < 1e-3
    assert bandit["FlowRL, 4 epochs"] != bandit["FlowRL"], "four epochs train on older samples"
    assert all(1e-4 < seed["kl"] < 0.1 for seed in bandit["log_z=none"]), "noise remains"
    assert all(seed["kl"] > 0.5 and seed["entropy"] < 1.0 for seed in bandit["GRPO"]), "it collapses"


def test_training_reaches_the_length_normalised_fixed_point():
    """The policy ``πref·exp(|y|·(β·r − log Z))``, of answers of one to three tokens: 0 ends one, 1 and 2 go on."""
    torch.manual_seed(1)
    answers = [(0,), (1, 0), (2, 0), *itertools.product((1, 2), (1, 2), (0, 1, 2))]
    prefixes = {}
    nodes = [[prefixes.setdefault(answer[:at], len(prefixes)) for at in range(len(answer))] for answer in answers]
    ones = [[True] * len(answer) for answer in answers]
    tensors = (pad_sequence([torch.tensor(row) for row in rows], True) for rows in (nodes, answers, ones))
    task = toy.PrefixTree(*tensors, torch.rand(len(answers)), torch.randn(len(prefixes), 3))
    reference = task.log_probs(task.reference)
    low, high = -10.0, 10.0
    for _ in range(60):  # the log Z that normalizes the policy
        true_log_z = (low + high) / 2
        target = reference + task.mask.sum(-1) * (toy.BETA * task.reward.double() - true_log_z)
        low, high = (true_log_z, high) if target.logsumexp(0) > 0 else (low, true_log_z)
    kl, log_policy, log_z = toy.train(task, target, "learned", steps=2000)
    assert kl[-1].max() < 1e-4 and (log_z - true_log_z).abs().max() < 1e-3
    summed = (reference + toy.BETA * task.reward).log_softmax(0)
    distance = (log_policy.exp() * (log_policy - summed)).sum(-1)
    assert distance.min() > 0.05, "it differs from the target of summed log-probabilities"


def test_group_normalised_reward_keeps_the_references_odds_among_the_best_answers():
    """Once all answers of a batch are right, every reward is 0: FlowRL keeps πref's odds, GRPO loses them."""
    task, target, _ = toy.bandit()
    right = torch.tensor([2, 5, 6, 10, 14])
    task = task._replace(reward=torch.zeros(16).index_fill(0, right, 1.0))
    wanted = task.log_probs(task.reference)[right].log_softmax(0)
    for log_z in ("learned", "group", None):
        _, log_policy, _ = toy.train(task, target, log_z, normalized=True, steps=800)
        assert log_policy[:, right].logsumexp(-1).exp().min() > 0.999
        distance = (wanted.exp() * (wanted - log_policy[:, right].log_softmax(-1))).sum(-1)
        assert distance.min() > 0.2 if log_z is None else distance.max() < 1e-3
