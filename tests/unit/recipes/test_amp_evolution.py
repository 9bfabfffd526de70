"""Evolution, its tasks in this process: replayed trajectories, members that learn from the best, the choice of fp16."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import gymnasium
import matplotlib.image
import numpy as np
import pytest
import ray
import torch
from amp_commands import records

from recipes.amp.checkpoint import read_checkpoint
from recipes.amp.evolution import generation as generation_module
from recipes.amp.evolution import population as population_module
from recipes.amp.evolution.config import EvolutionConfig
from recipes.amp.evolution.generation import run_generation
from recipes.amp.evolution.member import Member, cloning_loss, learn, mutated
from recipes.amp.evolution.metrics import generation_row
from recipes.amp.evolution.population import evolve, next_generation
from recipes.amp.evolution.ray_session import choose_device, ray_session
from recipes.amp.evolution.trajectory import Policy, Trajectory, branch, play, select
from recipes.amp.options import parse

TINY = EvolutionConfig(
    out="-", generations=3, population=3, episodes=2, revisions=2, recombinations=2, elites=6, replaced=1, hidden=8,
    device="cpu",
)  # fmt: skip


@pytest.fixture(scope="module")
def local():
    """Run the tasks of an evolution in this process, at once, on the CPU."""
    task = lambda function: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=function))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(population_module, "ray", SimpleNamespace(remote=task, put=lambda value: value, get=list))
        patch.setattr(population_module, "ray_session", lambda config: nullcontext("cpu"))
        yield


@pytest.fixture(scope="module")
def evolved(local, tmp_path_factory):
    """A run that learns CartPole in fp32, and its folder; the tests that need it are marked for its seconds."""
    out = tmp_path_factory.mktemp("evolved")
    config = EvolutionConfig(out=str(out), generations=5, population=5, seed=2)
    return config, evolve(config, "the driver"), out


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


def of_kind(rows, kind):
    return [row for row in rows if row["kind"] == kind]


@pytest.mark.subprocess
def test_evolution_raises_the_return(evolved):
    config, rows, out = evolved
    assert records(out) == rows
    summaries = of_kind(rows, "generation")
    assert [row["generation"] for row in summaries] == list(range(config.generations + 1))
    assert max(row["median"] for row in summaries) > 3 * summaries[0]["median"]
    assert all(row["worst"] <= row["median"] <= row["best"] for row in summaries)
    floors = [row["pool_worst"] for row in summaries]
    assert floors == sorted(floors), "the pool never gets worse"
    assert all(sum(row["pool"].values()) == config.elites for row in summaries[2:])
    assert all(sum(row[origin]["kept"] for row in summaries) > 0 for origin in ("revised", "recombined"))
    assert len(of_kind(rows, "member")) == config.population * (config.generations + 1)


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
    trained = [row for row in of_kind(rows, "member") if row["generation"]]
    assert {row["effective_dtype"] for row in trained} == {dtype}
    assert (sum(row["overflow_steps"] for row in trained) > 0) == (dtype == "float16")
    fallback = of_kind(rows, "generation")[1]["fallback"]
    assert fallback is None if dtype == "float16" else line in fallback
    assert line in capsys.readouterr().out


def test_pool_is_selected_from_the_newest_trajectories_first(local, tmp_path, monkeypatch):
    calls = []

    def recorded(trajectories, number):
        calls.append((trajectories, select(trajectories, number)))
        return calls[-1][1]

    monkeypatch.setattr(population_module, "select", recorded)
    evolve(replace(TINY, out=str(tmp_path), generations=1))
    (_, pool), (trajectories, _) = calls
    assert all(one is other for one, other in zip(trajectories[-len(pool) :], pool, strict=True))


def test_same_seed_repeats_the_evolution(local, tmp_path):
    def run(name, seed):
        rows = evolve(replace(TINY, out=str(tmp_path / name), seed=seed, generations=2))
        return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]

    one, two, other = (run(name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert one == two and one != other
    weights = [read_checkpoint(tmp_path / name / "best.pt")["model"] for name in "ab"]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


@pytest.mark.subprocess
def test_worst_members_are_replaced(evolved):
    config, rows, _ = evolved
    for generation in range(config.generations):
        members = [row for row in of_kind(rows, "member") if row["generation"] == generation]
        worst = sorted(members, key=lambda row: -row["return_mean"])[-config.replaced :]
        following = [row for row in of_kind(rows, "member") if row["generation"] == generation + 1]
        born = {row["member"] for row in following if row["born"] == generation + 1}
        assert born == {row["member"] for row in worst}


@pytest.mark.subprocess
def test_best_pt_is_the_best_member(evolved, env):
    config, rows, out = evolved
    saved = read_checkpoint(out / "best.pt")
    policy = Policy(env, config.hidden)
    policy.load_state_dict(saved["model"])
    last = [row for row in of_kind(rows, "member") if row["generation"] == config.generations]
    best = max(last, key=lambda row: row["return_mean"])
    assert saved["counters"]["training_steps"] == best["training_steps"]
    totals = [play(env, policy, seed, np.random.default_rng(seed)).total for seed in range(20)]
    assert np.mean(totals) > 0.5 * best["return_mean"]


@pytest.mark.subprocess
def test_figure_shows_the_returns(evolved):
    picture = (matplotlib.image.imread(evolved[2] / "evolution.png")[..., :3] * 255).round().astype(int)
    assert min(picture.shape[:2]) > 300
    for color in ((44, 160, 44), (31, 119, 180), (214, 39, 40), (255, 127, 14)):  # best, median, worst, recombined
        assert (np.abs(picture - color).sum(-1) < 12).sum() > 100


# --- trajectories and members


def test_seed_and_actions_replay_a_trajectory(env):
    torch.manual_seed(0)
    policy = Policy(env, 8)
    made = play(env, policy, 5, np.random.default_rng(0))
    same = play(env, pushing(env, 0), 5, np.random.default_rng(1), made.actions)
    assert np.array_equal(made.observations, same.observations) and made.total == same.total == len(made.actions)
    assert set(made.actions) == {0, 1}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [({"observed": np.nan}, "component 1 of the observation is nan"), ({"rewarded": np.inf}, "the reward is inf")],
)
def test_nonfinite_value_is_refused_by_seed_and_step(spoil, message):
    spoilt = gymnasium.make("Counter-v0", **spoil)
    with pytest.raises(ValueError, match=f"^env=Counter-v0, seed 7, step 5: {message}$"):
        play(spoilt, Policy(spoilt, 2), 7, np.random.default_rng(0))


def test_policy_samples_by_its_probabilities(env):
    policy, rng = pushing(env, 0), np.random.default_rng(0)
    policy[2].bias.data = torch.tensor([0.0, 1.0])
    taken = np.mean([policy.act(np.zeros(4, np.float32), rng) for _ in range(4000)])
    assert abs(taken - 1 / (1 + np.exp(-1))) < 0.03


def test_branch_replays_a_prefix(env):
    torch.manual_seed(0)
    policy, rng = Policy(env, 8), np.random.default_rng(0)
    parent = play(env, policy, 5, rng)
    cuts = set()
    for _ in range(20):
        made = branch(env, pushing(env, 1), parent, rng, "recombined")
        assert made.seed == 5 and made.origin == "recombined"
        assert play(env, policy, 5, rng, made.actions).total == made.total, "the trajectory's return must match"
        ours, theirs = made.actions, parent.actions
        cuts.add(next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours)))
    assert len(cuts) > 3
    for part in ("observations", "rewards"):
        wrong = replace(parent, **{part: getattr(parent, part) + 1e-3})
        with pytest.raises(ValueError, match="^env=CartPole-v1 is not deterministic: replaying seed 5 gave other"):
            branch(env, policy, wrong, np.random.default_rng(3), "revised")  # of a prefix of some steps


def test_recombination_uses_another_policy_and_keeps_improvements(env, monkeypatch):
    """Both members always push to one side: revisions change nothing, the other member's push improves the return."""
    used = set()

    def recorded(env, policy, parent, rng, origin):
        used.add((origin, int(policy[2].bias.argmax())))
        return branch(env, policy, parent, rng, origin)

    monkeypatch.setattr(generation_module, "branch", recorded)
    population = [Member(pushing(env, action).state_dict()) for action in (0, 1)]
    config = replace(TINY, population=2, hidden=2, episodes=3, revisions=10, recombinations=20)
    _, trajectories, row = run_generation(config, "test", "cpu", 0, 0, population, [])
    assert used == {("revised", 0), ("recombined", 1)}
    collected, rescued = trajectories[:3], trajectories[3:]
    assert all(each.origin == "collected" and not each.actions.any() for each in collected)
    assert row["revised"] == {"tried": 10, "kept": 0, "gained": 0}
    first = {each.seed: each.total for each in collected}
    assert row["recombined"]["tried"] == 20 and 0 < row["recombined"]["kept"] == len(rescued) < 20
    for each in rescued:
        assert each.origin == "recombined" and each.total > first[each.seed]
        assert each.actions[-1] == 1 and np.array_equal(each.actions, np.sort(each.actions)), "first theirs, then ours"
        assert play(env, Policy(env, 2), each.seed, np.random.default_rng(0), each.actions).total == each.total
    assert row["return_mean"] == np.mean(list(first.values()))


def test_revision_is_kept_only_if_its_return_is_higher(env):
    torch.manual_seed(0)
    population = [Member(Policy(env, TINY.hidden).state_dict()) for _ in range(2)]
    config = replace(TINY, population=2, episodes=4, revisions=40, recombinations=0)
    _, trajectories, row = run_generation(config, "test", "cpu", 0, 1, population, [])
    first = {each.seed: each.total for each in trajectories if each.origin == "collected"}
    revised = [each for each in trajectories if each.origin == "revised"]
    assert 0 < len(revised) == row["revised"]["kept"] < 40
    assert all(each.total > first[each.seed] for each in revised) and row["revised"]["gained"] >= len(revised)


def trajectory(action: int, total: float, observation: float = 1.0, steps: int = 30) -> Trajectory:
    observations = np.full((steps, 4), observation, np.float32)
    return Trajectory(0, observations, np.full(steps, action), np.full(steps, total / steps))


def test_pool_keeps_the_best_and_prefers_the_newest():
    pool = [trajectory(0, total) for total in (3.0, 9.0, 9.0, 1.0, 5.0)]
    assert [each.total for each in select(pool, 3)] == pytest.approx([9.0, 9.0, 5.0])
    assert select(pool, 3)[0] is pool[1] and len(select(pool, 9)) == 5


def test_row_of_a_generation_by_hand():
    tries = {"revised": {"tried": 4, "kept": 1, "gained": 2.0}, "recombined": {"tried": 3, "kept": 2, "gained": 5.0}}
    worker = {"host": "a", "fallback": None, "overflow_steps": 1, **tries}
    members = [
        worker | {"return_mean": value, "pid": pid, "effective_dtype": dtype}
        for value, pid, dtype in ((9.0, 1, "float16"), (1.0, 2, None), (2.0, 1, "float32"))
    ]
    row = generation_row(3, members, select([trajectory(0, 4.0), replace(trajectory(0, 6.0), origin="revised")], 2))
    assert (row["best"], row["median"], row["worst"], row["pool_worst"]) == (9.0, 2.0, 1.0, pytest.approx(4.0))
    assert row["pool"] == {"collected": 1, "revised": 1, "recombined": 0}
    assert row["revised"] == {"tried": 12, "kept": 3, "gained": 6.0}
    assert row["recombined"] == {"tried": 9, "kept": 6, "gained": 15.0}
    assert (row["overflow_steps"], row["effective_dtypes"], row["workers"]) == (3, ["float16", "float32"], 2)


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


def test_loss_scale_outlives_a_generation(env):
    config = replace(TINY, fp16_training=True, epochs=10, loss_scale=2.0**30)
    member = Member(Policy(env, config.hidden).state_dict())
    pool = [trajectory(action, 100.0, value) for action, value in ((0, 1.0), (1, -1.0), (0, -1.0))] * 8
    member, first = learn(config, torch.device("cpu"), Policy(env, config.hidden), member, pool, seed=0)
    _, second = learn(config, torch.device("cpu"), Policy(env, config.hidden), member, pool, seed=1)
    assert first["overflow_steps"] > 0 == second["overflow_steps"]
    assert first["loss_scale"] == second["loss_scale"] == 2.0**30 / 2.0 ** first["overflow_steps"]


def test_cloning_loss_by_hand(env):
    policy = pushing(env, 0)
    policy[2].bias.data = torch.tensor([np.log(3.0), 0.0]).float()
    batch = [torch.zeros(2, 4), torch.tensor([0, 1]), torch.tensor([1.5, 0.5])]
    loss = cloning_loss(policy, batch)
    torch.testing.assert_close(loss.item(), -(1.5 * np.log(0.75) + 0.5 * np.log(0.25)) / 2)


def test_mutation_has_the_requested_size(env):
    torch.manual_seed(0)
    member = Member(Policy(env, 256).state_dict(), b"trained")
    mutant, same, other = (mutated(member, 0.1, seed, 3) for seed in (1, 1, 2))
    assert mutant.checkpoint is None and mutant.born == 3
    for name, value in member.weights.items():
        assert mutant.weights[name].equal(same.weights[name]) and not mutant.weights[name].equal(other.weights[name])
    noise = mutant.weights["0.weight"] - member.weights["0.weight"]
    assert noise.std() / member.weights["0.weight"].std() == pytest.approx(0.1, rel=0.1)
    unchanged = mutated(member, 0.0, 1, 3).weights
    assert all(unchanged[name].equal(value) for name, value in member.weights.items())


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
    with pytest.raises(ValueError, match="^address=127.0.0.1:1 must be a Ray cluster: .*refused$"):
        ray_session(replace(TINY, address="127.0.0.1:1")).__enter__()


NO_CPU = "address=None must be a Ray cluster with at least one CPU"
NO_GPU = "device=cuda must be auto or cpu: Ray has no GPU here"
TOO_MANY = "gpus=4.0 must be at most 2, the GPUs of one node of this Ray cluster"


@pytest.mark.parametrize(
    "settings, nodes, chosen",
    [
        ({}, [{"CPU": 2}], "cpu"),
        ({}, [{"CPU": 2}, {"CPU": 8, "GPU": 2}], "cuda"),
        ({"device": "cpu"}, [{"CPU": 2, "GPU": 2}], "cpu"),
        ({"device": "cpu", "gpus": 4.0}, [{"CPU": 2, "GPU": 2}], "cpu"),
        ({"gpus": 4.0}, [{"CPU": 2, "GPU": 2}, {"CPU": 2, "GPU": 2}], TOO_MANY),
        ({"device": "cuda"}, [{"CPU": 2}, {"GPU": 2}], NO_GPU),
        ({}, [{"GPU": 2}], NO_CPU),
    ],
)
def test_device_is_one_that_a_task_can_have(settings, nodes, chosen):
    config = EvolutionConfig(out="-", **settings)
    if chosen in ("cpu", "cuda"):
        assert choose_device(config, nodes) == chosen
    else:
        with pytest.raises(ValueError, match=f"^{chosen}$"):
            choose_device(config, nodes)


@pytest.mark.parametrize(
    "words, chosen, source",
    [([], False, "environment (ENABLE_FP16_TRAINING)"), (["--fp16-training"], True, "command line")],
)
def test_variable_chooses_fp16_between_config_and_command_line(words, chosen, source, monkeypatch, tmp_path):
    on = tmp_path / "on.yaml"
    on.write_text("fp16_training: true\n")
    monkeypatch.setenv("ENABLE_FP16_TRAINING", "0")
    config, sources = parse(EvolutionConfig, "evolution", "", ["--out=x", f"--config={on}", *words])
    assert (config.fp16_training, config.trainer.enabled, sources["fp16_training"]) == (chosen, chosen, source)
