"""Evolution, its tasks in this process: replayed trajectories, members that learn from the best, the choice of fp16."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest
import ray
import torch
from amp_commands import records

from recipes.amp.checkpoint import read_checkpoint
from recipes.amp.evolution import __main__ as evolution
from recipes.amp.evolution import member as member_module
from recipes.amp.evolution.__main__ import evolve, generation_row, next_generation, select, start_ray
from recipes.amp.evolution.member import (
    EvolutionConfig,
    Member,
    Policy,
    Trajectory,
    branch,
    learn,
    mutated,
    play,
    run_generation,
)

TINY = EvolutionConfig(
    out="-", generations=3, population=3, episodes=2, revisions=2, recombinations=2, elites=6, replaced=1, hidden=8,
    device="cpu",
)  # fmt: skip


@pytest.fixture
def local(monkeypatch):
    """Run the tasks of an evolution in this process, at once, on the CPU."""
    task = lambda function: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=function))
    monkeypatch.setattr(evolution, "ray", SimpleNamespace(remote=task, put=lambda value: value, get=list))
    monkeypatch.setattr(evolution, "start_ray", lambda config: "cpu")


@pytest.fixture
def env():
    return gymnasium.make("CartPole-v1")


def pushing(env, action: int) -> Policy:
    """A policy that always takes one action."""
    policy = Policy(env, 2)
    for parameter in policy.parameters():
        torch.nn.init.zeros_(parameter)
    policy[2].bias.data[action] = 100.0
    return policy


@pytest.mark.subprocess
def test_evolution_raises_the_return(local, tmp_path):
    """In fp32. The best member is saved."""
    config = EvolutionConfig(out=str(tmp_path), generations=5, population=5, seed=2)
    rows = evolve(config, "the driver")
    assert records(tmp_path) == rows
    summaries = [row for row in rows if row["kind"] == "generation"]
    assert [row["generation"] for row in summaries] == list(range(config.generations + 1))
    assert max(row["median"] for row in summaries) > 3 * summaries[0]["median"]
    floors = [row["pool_worst"] for row in summaries]
    assert floors == sorted(floors), "the pool never gets worse"
    assert all(sum(row[origin]["kept"] for row in summaries) > 0 for origin in ("revised", "recombined"))
    last = [row for row in rows if row["kind"] == "member"][-config.population :]
    best = max(last, key=lambda row: row["return_mean"])
    saved = read_checkpoint(tmp_path / "best.pt")
    assert saved["counters"]["training_steps"] == best["training_steps"]
    env = gymnasium.make(config.env)
    policy = Policy(env, config.hidden)
    policy.load_state_dict(saved["model"])
    totals = [play(env, policy, seed, np.random.default_rng(seed)).total for seed in range(20)]
    assert np.mean(totals) > 0.5 * best["return_mean"]


@pytest.mark.parametrize(
    "device, dtype, line",
    [
        ("cpu", "float16", "fp16_training=True by command line, float16"),
        ("auto", "float32", "training in float32, not float16"),
    ],
)
def test_effective_dtype_and_fallback_are_reported(device, dtype, line, local, tmp_path, capsys):
    config = replace(TINY, out=str(tmp_path), fp16_training=True, loss_scale=2.0**30, device=device, generations=1)
    rows = evolve(config, "command line")
    *members, summary = rows[config.population + 1 :]
    assert {row["effective_dtype"] for row in members} == {dtype}
    assert (sum(row["overflow_steps"] for row in members) > 0) == (dtype == "float16")
    assert summary["fallback"] is None if dtype == "float16" else line in summary["fallback"]
    assert line in capsys.readouterr().out


def test_pool_is_selected_from_the_newest_trajectories_first(local, tmp_path, monkeypatch):
    recorded = Mock(side_effect=select)
    monkeypatch.setattr(evolution, "select", recorded)
    evolve(replace(TINY, out=str(tmp_path), generations=1))
    first, second = (call.args for call in recorded.call_args_list)
    pool = select(*first)
    assert all(one is other for one, other in zip(second[0][-len(pool) :], pool, strict=True))


def test_same_seed_repeats_the_evolution(local, tmp_path):
    def run(name, seed):
        rows = evolve(replace(TINY, out=str(tmp_path / name), seed=seed, generations=1))
        return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]

    one, two, other = (run(name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert one == two and one != other


def test_nonfinite_reward_is_refused_by_seed_and_step():
    spoilt = gymnasium.make("Counter-v0", rewarded=np.inf)
    with pytest.raises(
        ValueError, match="^env=Counter-v0, seed 7, step 5: the observation or the reward, inf, is not finite$"
    ):
        play(spoilt, Policy(spoilt, 2), 7, np.random.default_rng(0))


def test_branch_replays_a_prefix(env):
    torch.manual_seed(0)
    policy, rng = Policy(env, 8), np.random.default_rng(0)
    parent = play(env, policy, 5, rng)
    cuts = set()
    for _ in range(20):
        made = branch(env, pushing(env, 1), parent, rng)
        assert made.seed == 5
        assert play(env, policy, 5, rng, made.actions).total == made.total, "the trajectory's return must match"
        steps = min(len(made.actions), len(parent.actions))
        cuts.add(int((made.actions[:steps] == parent.actions[:steps]).cumprod().sum()))  # equal ones before the first
    assert len(cuts) > 3
    for part in ("observations", "rewards"):
        wrong = replace(parent, **{part: getattr(parent, part) + 1e-3})
        with pytest.raises(ValueError, match="^env=CartPole-v1 must be deterministic: replaying seed 5 gave other"):
            branch(env, policy, wrong, np.random.default_rng(3))  # of a prefix of some steps


def test_recombination_uses_another_policy_and_keeps_improvements(env, monkeypatch):
    """Both members always push to one side: revisions change nothing, the other member's push improves the return."""
    used = []

    def recorded(env, policy, parent, rng):
        used.append(int(policy[2].bias.argmax()))
        return branch(env, policy, parent, rng)

    monkeypatch.setattr(member_module, "branch", recorded)
    population = [Member(pushing(env, action).state_dict()) for action in (0, 1)]
    config = replace(TINY, population=2, hidden=2, episodes=3, revisions=10, recombinations=20)
    _, trajectories, row = run_generation(config, "cpu", 0, 0, population, [])
    assert used == [0] * 10 + [1] * 20
    collected, rescued = trajectories[:3], trajectories[3:]
    assert not any(each.actions.any() for each in collected)
    assert row["revised"] == {"tried": 10, "kept": 0, "gained": 0}
    first = {each.seed: each.total for each in collected}
    assert row["recombined"]["tried"] == 20 and 0 < row["recombined"]["kept"] == len(rescued) < 20
    for each in rescued:
        assert each.total > first[each.seed]
        assert each.actions[-1] == 1 and np.array_equal(each.actions, np.sort(each.actions)), "first theirs, then ours"
    assert row["return_mean"] == np.mean(list(first.values()))


def trajectory(action: int, total: float, observation: float = 1.0, steps: int = 30) -> Trajectory:
    observations = np.full((steps, 4), observation, np.float32)
    return Trajectory(0, observations, np.full(steps, action), np.full(steps, total / steps))


def test_row_of_a_generation_by_hand():
    tries = {"revised": {"tried": 4, "kept": 1, "gained": 2.0}, "recombined": {"tried": 3, "kept": 2, "gained": 5.0}}
    worker = {"fallback": None, "overflow_steps": 1, **tries}
    members = [
        worker | {"return_mean": value, "effective_dtype": dtype}
        for value, dtype in ((9.0, "float16"), (1.0, None), (2.0, "float32"))
    ]
    row = generation_row(3, members, select([trajectory(0, 4.0), trajectory(0, 6.0)], 2))
    assert (row["best"], row["median"], row["worst"], row["pool_worst"]) == (9.0, 2.0, 1.0, pytest.approx(4.0))
    assert row["revised"] == {"tried": 12, "kept": 3, "gained": 6.0}
    assert row["recombined"] == {"tried": 9, "kept": 6, "gained": 15.0}
    assert (row["overflow_steps"], row["effective_dtypes"]) == (3, ["float16", "float32"])


@pytest.mark.parametrize("fp16", [False, True])
def test_members_clone_the_better_trajectories(env, fp16):
    """Where one trajectory pushes left and returns more, and another pushes right; and everywhere else they agree."""
    pool = [trajectory(0, 100.0), trajectory(1, 10.0), trajectory(1, 100.0, -1.0), trajectory(1, 100.0, -1.0)] * 4
    config = replace(TINY, fp16_training=fp16, epochs=20, batch_size=64, temperature=0.3, loss_scale=1024.0)
    torch.manual_seed(0)
    before = Member(Policy(env, config.hidden).state_dict())
    kept = {name: value.clone() for name, value in before.weights.items()}
    after, statistics = learn(config, torch.device("cpu"), Policy(env, config.hidden), before, pool, seed=0)
    assert statistics["effective_dtype"] == ("float16" if fp16 else "float32") and statistics["overflow_steps"] == 0
    assert all(value.dtype == torch.float32 and not value.equal(kept[name]) for name, value in after.weights.items())
    assert all(value.equal(kept[name]) for name, value in before.weights.items()), "the member before is another"
    policy = Policy(env, config.hidden)
    policy.load_state_dict(after.weights)
    left, right = policy(torch.ones(4)).softmax(-1)[0], policy(-torch.ones(4)).softmax(-1)[1]
    assert left > 0.9 and right > 0.9
    _, more = learn(config, torch.device("cpu"), Policy(env, config.hidden), after, pool, seed=1)
    assert more["training_steps"] == 2 * statistics["training_steps"], "training must continue from the checkpoint"


def test_mutation_has_the_requested_size(env):
    torch.manual_seed(0)
    member = Member(Policy(env, 256).state_dict(), b"trained")
    mutant, other = (mutated(member, 0.1, seed) for seed in (1, 2))
    assert mutant.checkpoint is None
    assert not any(mutant.weights[name].equal(other.weights[name]) for name in member.weights)
    noise = mutant.weights["0.weight"] - member.weights["0.weight"]
    assert noise.std() / member.weights["0.weight"].std() == pytest.approx(0.1, rel=0.1)


def test_mutated_copies_of_the_best_replace_the_worst(env):
    members = [Member(pushing(env, 0).state_dict(), bytes([place])) for place in range(4)]
    best, following = next_generation(replace(TINY, population=4, replaced=2), 0, members, [5.0, 1.0, 9.0, 3.0])
    assert best is members[2]
    assert [each is member for each, member in zip(following, members, strict=True)] == [True, False, True, False]
    assert [each.checkpoint for each in following] == [b"\0", None, b"\2", None]
    _, following = next_generation(replace(TINY, population=4, replaced=0), 0, members, [5.0, 1.0, 9.0, 3.0])
    assert following == members


def test_address_without_a_cluster_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ValueError, match="^RAY_ADDRESS=127.0.0.1:1 must be HOST:PORT of a Ray cluster: .*refused$"):
        start_ray(TINY)


@pytest.mark.parametrize(
    "device, gpus, chosen",
    [("auto", 0, "cpu"), ("auto", 2, "cuda"), ("cpu", 2, "cpu"), ("cuda", 2, "cuda"), ("cuda", 0, None)],
)
def test_device_is_one_that_a_task_can_have(device, gpus, chosen, monkeypatch):
    resources = {"CPU": 2.0, "GPU": float(gpus)} if gpus else {"CPU": 2.0}
    monkeypatch.setattr(evolution, "ray", Mock(cluster_resources=lambda: resources))
    if chosen is None:
        with pytest.raises(ValueError, match="^device=cuda must be auto or cpu: Ray has no GPU here$"):
            start_ray(replace(TINY, device=device))
    else:
        assert start_ray(replace(TINY, device=device)) == chosen
