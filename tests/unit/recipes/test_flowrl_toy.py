"""The fixed points of FlowRL, on tasks whose answers can be enumerated, and the bandit's results."""

import csv
import itertools
import math
import sys

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from recipes.flowrl import toy
from recipes.flowrl.objective import trajectory_balance

# Answers of four tokens; and of one to three, where 0 ends an answer, with 1 and 2 as the other tokens.
ANSWERS = {
    "one length": list(itertools.product((0, 1), repeat=4)),
    "three lengths": [(0,), (1, 0), (2, 0), *itertools.product((1, 2), (1, 2), (0, 1, 2))],
}


@pytest.fixture(scope="module")
def bandit(tmp_path_factory) -> dict[str, list[dict[str, float]]]:
    """Return the results of ``python -m recipes.flowrl.toy`` by method, one per seed."""
    out = tmp_path_factory.mktemp("toy") / "made"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["toy", "--out", str(out)])
        toy.main()
    assert (out / "flowrl-toy.png").stat().st_size > 10_000
    with open(out / "flowrl-toy.csv") as file:
        rows = list(csv.DictReader(file))
    results = {row["method"]: [] for row in rows}
    for row in rows:
        results[row.pop("method")].append({name: float(value) for name, value in row.items() if name != "seed"})
    return results


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


def test_target_matches_the_formula(bandit):
    modes, heights = [math.exp(-4), math.exp(-1), 1.0, math.exp(-1)], [1.0, 0.9, 1.0, 0.9]
    weights = [math.exp(-arm / 16 + 3.0 * heights[arm // 4] * modes[arm % 4]) for arm in range(16)]
    log_z = math.log(sum(weights) / sum(math.exp(-arm / 16) for arm in range(16)))
    shares = [weight / sum(weights) for weight in weights]
    (target,) = bandit["target"]
    assert target["log_z"] == pytest.approx(log_z, abs=1e-6)
    assert target["entropy"] == pytest.approx(-sum(p * math.log(p) for p in shares), abs=1e-6)
    assert target["largest_probability"] == pytest.approx(max(shares), abs=1e-6)


def tree(answers: list[tuple[int, ...]]) -> toy.PrefixTree:
    """Random rewards and a random πref over ``answers``, which are all paths of their tree."""
    torch.manual_seed(1)
    numbers = {}
    nodes = [[numbers.setdefault(answer[:at], len(numbers)) for at in range(len(answer))] for answer in answers]
    ones = [[True] * len(answer) for answer in answers]
    nodes, tokens, mask = (pad_sequence([torch.tensor(row) for row in rows], True) for rows in (nodes, answers, ones))
    made = toy.PrefixTree(
        nodes, tokens, mask, torch.rand(len(answers)), torch.randn(len(numbers), 1 + int(tokens.max()))
    )
    assert made.log_probs(made.reference).logsumexp(0).abs() < 1e-12  # they are all paths
    return made


def fixed_point(task: toy.PrefixTree) -> tuple[torch.Tensor, float]:
    """Return ``log πref + |y|·(β·r − log Z)``, and the log Z that normalizes it."""
    low, high = -10.0, 10.0
    for _ in range(60):
        log_z = (low + high) / 2
        log_policy = task.log_probs(task.reference) + task.mask.sum(-1) * (toy.BETA * task.reward.double() - log_z)
        low, high = (log_z, high) if log_policy.logsumexp(0) > 0 else (low, log_z)
    return log_policy, log_z


@pytest.mark.parametrize("answers", ANSWERS.values(), ids=list(ANSWERS))
def test_training_reaches_the_length_normalised_fixed_point(answers):
    task = tree(answers)
    target, true_log_z = fixed_point(task)
    kl, log_policy, log_z = toy.train(task, target, "learned", steps=2000)
    assert kl[-1].max() < 1e-4 and (log_z - true_log_z).abs().max() < 1e-3
    # It differs from the target of summed log-probabilities.
    summed = task.log_probs(task.reference) + toy.BETA * task.reward
    assert (log_policy.exp() * (log_policy - summed.log_softmax(0))).sum(-1).min() > 0.05


@pytest.mark.parametrize("mean", [True, False], ids=["mean", "sum"])
@pytest.mark.parametrize("answers", ANSWERS.values(), ids=list(ANSWERS))
def test_residual_is_zero_at_the_fixed_point(answers, mean):
    task = tree(answers)
    reference = task.log_probs(task.reference)
    log_policy, log_z = fixed_point(task)
    if not mean:
        log_policy = reference + toy.BETA * task.reward
        log_z = log_policy.logsumexp(0).item()
        log_policy = log_policy - log_z
    mask = task.mask
    policy, anchor = ((whole / mask.sum(-1))[:, None].expand(mask.shape) for whole in (log_policy, reference))
    log_zs = torch.full(task.reward.shape, log_z)
    _, metrics = trajectory_balance(
        policy, policy, anchor, task.reward, log_zs, mask, beta=toy.BETA, length_normalization=mean
    )
    assert metrics["delta"].abs().max() < 2e-6


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
