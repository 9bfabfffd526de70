"""Vectorised PPO: each requirement on its AMP path, its arithmetic by hand, what it refuses, and that it learns.

docs/results/amp-ppo.* are written by  pytest -m slow tests/recipes/test_amp_ppo_command.py -k solves --write-results
"""

import csv
import json
import math
import platform
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from recipes.amp.checkpoint import read_checkpoint
from recipes.amp.ppo import algorithm as recipe
from recipes.amp.ppo.algorithm import PPO, PPOConfig, Refused

DTYPES = ("float32", "float16", "bfloat16")
SMALL = {"num_envs": 4, "num_steps": 8, "total_steps": 96, "hidden": 16, "epochs": 2, "minibatches": 2, "device": "cpu"}
WORDS = [f"--{key.replace('_', '-')}={value}" for key, value in SMALL.items()] + ["--eval-episodes=2"]


def config(dtype: str = "float32", **settings) -> PPOConfig:
    """A small run in ``dtype``, on the CPU."""
    amp = {} if dtype == "float32" else {"use_amp": True, "dtype": dtype}
    return PPOConfig(**{**SMALL, **amp, **settings})


class Hand(gymnasium.Env):
    """Episodes of three steps that terminate, and of two that are cut off, by turns; step t is rewarded by t + 1.

    The observation is (t, whether the episode will be cut off).
    """

    observation_space = Box(0.0, 10.0, (2,))
    action_space = Discrete(2)
    cut_off = True

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.cut_off = 0, not self.cut_off
        return self._observation(), {}

    def step(self, action):
        self.t += 1
        terminated, truncated = not self.cut_off and self.t == 3, self.cut_off and self.t == 2
        return self._observation(), float(self.t), terminated, truncated, {}

    def _observation(self):
        return np.array([self.t, self.cut_off], dtype=np.float32)


class Factors(Hand):
    """Three policy heads; what each chooses is rewarded. Actions start at 1, 0 and 5."""

    observation_space = Discrete(4, start=3)
    action_space = MultiDiscrete([3, 2, 4], start=[1, 0, 5])

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        return self._observation(), float(action[0] - action[1] + action[2]), self.t == 3, False, {}

    def _observation(self):
        return 3 + self.t


class Broken(Hand):
    """Every second one that is made shows, at step 3, what it was told to; episodes do not end."""

    made = 0

    def __init__(self, shown: float = 0.0, rewarded: float = 0.0, allowed: int = 1):
        Broken.made += 1
        self.breaks, self.shown, self.rewarded, self.allowed = Broken.made % 2 == 0, shown, rewarded, allowed

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, dtype=np.float32), {"action_mask": np.ones(2, dtype=np.int8)}

    def step(self, action):
        self.t += 1
        now = self.breaks and self.t == 3
        mask = np.full(2, self.allowed if now else 1, dtype=np.int8)
        observation = np.full(2, self.shown if now else 0.0, dtype=np.float32)
        return observation, self.rewarded if now else 0.0, False, False, {"action_mask": mask}


class Masked(Hand):
    """One action is allowed at each step, by turns; an episode's length is two to four steps, by its seed."""

    def reset(self, *, seed=None, options=None):
        self.t, self.length = 0, 2 + (seed or 0) % 3
        return self._observation(), self._mask()

    def step(self, action):
        assert action == self.t % 2, "it is not allowed"
        self.t += 1
        return self._observation(), 1.0, self.t == self.length, False, self._mask()

    def _mask(self):
        return {"action_mask": np.eye(2, dtype=np.int8)[self.t % 2]}


class Keyed(Hand):
    observation_space = Dict(x=Box(0.0, 1.0, (1,)))


gymnasium.register("Hand-v0", Hand)
gymnasium.register("Factors-v0", Factors)
gymnasium.register("Keyed-v0", Keyed)
gymnasium.register("Masked-v0", Masked)
for name, broken in {
    "Nan": {"shown": math.nan},
    "Large": {"shown": 1e5},
    "NanReward": {"rewarded": math.nan},
    "NoAction": {"allowed": 0},
    "Endless": {},
}.items():
    gymnasium.register(f"{name}-v0", Broken, kwargs=broken)


@pytest.fixture(autouse=True)
def no_switch(monkeypatch):
    monkeypatch.delenv(recipe.KILL_SWITCH, raising=False)


def weights(ppo: PPO) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in ppo.agent.state_dict().items()}


def same(one, other) -> bool:
    """Whether two nests of state hold the same, bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


# --- AMP: off unless asked for, and turned off by the environment


def test_amp_is_off_by_default():
    told = PPO(PPOConfig(**SMALL)).iterate()
    assert (told["amp_enabled"], told["effective_dtype"], told["amp_source"]) == (False, "float32", "default")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_dtype_that_was_asked_for_is_the_one_observed(dtype):
    told = PPO(config(dtype), {"use_amp": "command line"}).iterate()
    assert told["effective_dtype"] == dtype and told["effective_dtype_share"] == {dtype: 1.0}
    assert (told["amp_enabled"], told["amp_source"]) == (dtype != "float32", "command line")


@pytest.mark.parametrize(
    "value, dtype", [("1", "float32"), ("true", "float32"), ("0", "float16"), ("FALSE", "float16")]
)
def test_the_kill_switch_overrules_the_command_line(value, dtype, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("DISABLE_AMP", value)
    recipe.main([*WORDS, "--use-amp", f"--out={tmp_path / 'run'}"])
    told = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    off = dtype == "float32"
    source = "environment (DISABLE_AMP)" if off else "command line"
    assert (told["effective_dtype"], told["amp_enabled"], told["amp_source"]) == (dtype, not off, source)
    assert f"AMP {'off' if off else 'on'} ({source})" in capsys.readouterr().out.splitlines()[0]


def test_on_a_cpu_that_was_not_named_it_falls_back_and_says_so():
    if torch.cuda.is_available():
        pytest.skip("auto is CUDA here")
    with pytest.warns(UserWarning, match="training in float32"):
        told = PPO(config("float16", device="auto")).iterate()
    assert (told["amp_enabled"], told["effective_dtype"]) == (False, "float32")
    assert told["fallback"].startswith("the model is on the CPU: training in float32, not float16")


# --- AMP: where autocast begins and ends, and what is fp32


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_is_in_autocast_and_backward_is_not(dtype):
    ppo, seen = PPO(config(dtype)), {"forward": set(), "backward": set()}
    batch = ppo.collect()
    head = ppo.agent.policy_heads[0]
    head.register_forward_hook(lambda *_: seen["forward"].add(torch.is_autocast_enabled("cpu")))
    head.weight.register_hook(lambda _: seen["backward"].add(torch.is_autocast_enabled("cpu")))
    ppo.learn(batch)
    assert seen == {"forward": {dtype != "float32"}, "backward": {False}}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_dtype_is_observed_in_the_update(dtype, monkeypatch):
    """A rollout alone says nothing of it, and an update without autocast would be told."""
    ppo = PPO(config(dtype))
    batch = ppo.collect()
    assert ppo.precision()["effective_dtype"] is None
    loss = ppo.loss

    def in_fp32(agent, batch):
        with torch.autocast("cpu", enabled=False):
            return loss(agent, batch)

    monkeypatch.setattr(ppo, "loss", in_fp32)
    ppo.learn(batch)
    assert ppo.precision()["effective_dtype"] == "float32"


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_follows_the_networks_is_fp32(dtype):
    ppo, heads, losses = PPO(config(dtype)), set(), set()
    for head in (*ppo.agent.policy_heads, ppo.agent.value_head):
        head.register_forward_hook(lambda *passed: heads.add(passed[-1].dtype))
    batch = ppo.collect()
    with ppo.trainer.autocast():
        loss = ppo.loss(ppo.agent, batch)
    losses.add(loss.dtype)
    losses |= {value.dtype for value in ppo._seen[-1].values()}
    assert heads == {getattr(torch, dtype)} and losses == {torch.float32}
    floats = [each for each in batch if each.is_floating_point()]
    assert {each.dtype for each in floats} == {torch.float32} and len(floats) == 4
    if dtype != "float32":  # not fp32 in name alone: 16 bits cannot hold these
        rounded = batch.log_probs.to(getattr(torch, dtype)).float()
        assert (rounded != batch.log_probs).float().mean() > 0.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_are_finite_in_every_dtype(dtype):
    assert torch.tensor(-1e9).half().isinf(), "the mistake that is meant here"
    logits = torch.randn(5, 6).to(getattr(torch, dtype)).requires_grad_()
    allowed = torch.zeros(5, 6, dtype=torch.bool)
    allowed[torch.arange(5), torch.arange(5)] = True
    allowed[0] = True
    (log_probs,) = recipe.log_softmax(logits.float(), allowed, [6])
    probabilities = log_probs.exp()
    assert log_probs.isfinite().all() and (probabilities[~allowed] == 0).all()
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(5))
    entropy = -(probabilities * log_probs).sum()
    (entropy + log_probs[allowed].sum()).backward()
    assert logits.grad.isfinite().all() and logits.grad[0].count_nonzero() and entropy > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_masked_action_is_never_taken(dtype):
    ppo = PPO(config(dtype, env="Taxi-v4", num_steps=32, total_steps=384))
    for _ in range(3):
        batch = ppo.collect()
        assert batch.allowed.gather(-1, batch.actions).all() and not batch.allowed.all()
        assert all(map(math.isfinite, ppo.learn(batch).values()))
    assert all(tensor.isfinite().all() for tensor in ppo.agent.state_dict().values())


def test_an_evaluation_is_one_episode_of_each_environment_and_heeds_masks():
    ppo = PPO(config(env="Masked-v0"))
    ppo.iterate()
    assert ppo.evaluate(6) == [2 + (1 + 2**31 + index) % 3 for index in range(6)]


@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_unscaled_gradients_are_clipped(dtype, loss_scale):
    """Adam's first moment after its first step is a tenth of the gradient that it was given."""
    ppo = PPO(config(dtype, loss_scale=loss_scale, epochs=1, minibatches=1, max_grad_norm=0.01))
    ppo.learn(ppo.collect())
    assert ppo.trainer.overflow_steps == 0 and 0.01 < ppo.trainer.grad_norm < 100
    given = torch.cat([state["exp_avg"].flatten() for state in ppo.trainer.optimizer.state.values()])
    assert given.norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_head_gets_a_gradient(dtype):
    ppo = PPO(config(dtype, env="Factors-v0"))  # without an entropy bonus, which reaches them by another way
    first = weights(ppo)
    for _ in range(3):  # the first loss scale overflows some times
        ppo.iterate()
    assert ppo.trainer.overflow_steps < ppo.trainer.training_steps
    assert len(ppo.agent.policy_heads) == 3
    for name, parameter in ppo.agent.named_parameters():
        assert ppo.trainer.optimizer.state[parameter]["exp_avg"].count_nonzero(), name
        assert not torch.equal(parameter, first[name]), name


# --- the ratio of new to old probabilities


def deviation(ppo: PPO, rollout: str) -> float:
    """Of the ratio from 1 at equal weights, after a rollout in a dtype of its own."""
    acts = PPO(replace(ppo.config, use_amp=rollout != "float32", dtype="bfloat16" if rollout == "float32" else rollout))
    acts.agent.load_state_dict(ppo.agent.state_dict())
    return ppo.learn(acts.collect())["ratio_deviation"]


@pytest.fixture
def sharp() -> dict[str, PPO]:
    """Policies that are as sure of their actions as trained ones: rounding shows in their logits."""
    made = {dtype: PPO(config(dtype, num_envs=16, num_steps=16, total_steps=256)) for dtype in DTYPES}
    for ppo in made.values():
        with torch.no_grad():
            ppo.agent.policy_heads[0].weight.mul_(300)
    return made


@pytest.mark.parametrize("dtype", DTYPES)
def test_at_equal_weights_the_ratio_is_one(dtype, sharp):
    assert deviation(sharp[dtype], dtype) < {"float32": 1e-6, "float16": 3e-5, "bfloat16": 1e-4}[dtype]  # measured: 0


@pytest.mark.parametrize("dtype, least", [("float16", 1e-4), ("bfloat16", 5e-4)])
def test_a_rollout_in_fp32_shows_in_the_ratio(dtype, least, sharp):
    """What the test above is worth: it would notice. Measured: 2.9e-4 and 1.2e-3."""
    assert deviation(sharp[dtype], "float32") > least


# --- episodes and advantages


def test_first_weights_are_orthogonal():
    agent, gains = PPO(config(env="Factors-v0")).agent, {"policy_heads": 0.01, "value_head": 1.0}
    for name, weight in agent.named_parameters():
        if weight.ndim == 1:
            assert not weight.count_nonzero(), name
            continue
        products = weight @ weight.T if weight.shape[0] <= weight.shape[1] else weight.T @ weight
        expected = gains.get(name.split(".")[0], 2**0.5) ** 2 * torch.eye(len(products))
        torch.testing.assert_close(products, expected, rtol=1e-4, atol=1e-5)


def test_a_discrete_observation_is_one_hot():
    envs = recipe.Environments("Factors-v0", 2, "auto", torch.device("cpu"))
    assert (envs.inputs, envs.factors) == (4, [3, 2, 4])
    assert envs.reset(0).observations.tolist() == [[1, 0, 0, 0]] * 2
    assert envs.step(torch.zeros(2, 3, dtype=torch.int64))[0].observations.tolist() == [[0, 1, 0, 0]] * 2


def test_the_loss_by_hand():
    """Two choices of equal logits: the new probability is 1/2, the old ones make ratios of 1.5, 1.5, 0.5 and 0.5."""
    ratio, advantages = torch.tensor([1.5, 1.5, 0.5, 0.5]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    batch = recipe.Batch(
        observations=torch.zeros(4, 1),
        allowed=torch.ones(4, 2, dtype=torch.bool),
        actions=torch.zeros(4, 1, dtype=torch.int64),
        log_probs=(0.5 / ratio).log(),
        advantages=advantages,
        returns=torch.tensor([1.0, 2.0, 3.0, 4.0]),
    )
    settings = config(clip=0.2, value_coefficient=0.25, entropy_coefficient=0.1)
    loss, seen = recipe.ppo_loss(torch.zeros(4, 2), torch.zeros(4), batch, [2], settings)
    policy = -(1.2 - 1.5 + 0.5 - 0.8) / 4  # gains are cut off at 1.2, and losses that ended at 0.8 count no less
    assert seen["policy_loss"].item() == pytest.approx(policy)
    assert seen["value_loss"].item() == pytest.approx((1 + 4 + 9 + 16) / 4)
    assert seen["entropy"].item() == pytest.approx(math.log(2))
    assert seen["approx_kl"].item() == pytest.approx((2 * (0.5 - math.log(1.5)) + 2 * (-0.5 - math.log(0.5))) / 4)
    assert (seen["clip_fraction"], seen["ratio_deviation"]) == (1.0, 0.5)
    assert loss.item() == pytest.approx(policy + 0.25 * 7.5 - 0.1 * math.log(2))


def test_advantages_by_hand():
    """γ = 0.5, λ = 0.5. Left: terminates at the second step, so that the value 100 is not read; the third is a reset.
    Right: cut off at the first, worth 8 there; after the reset one that the rollout ends in."""
    rewards = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 4.0]])
    values = torch.tensor([[2.0, 1.0], [4.0, 8.0], [100.0, 6.0], [10.0, 2.0]])
    terminated = torch.tensor([[False, False], [True, False], [False, False]])
    ended = torch.tensor([[False, True], [True, False], [False, False]])
    found = recipe.generalised_advantages(rewards, values, terminated, ended, 0.5, 0.5)
    assert found[0].tolist() == [1 + 0.5 * 4 - 2 + 0.25 * (3 - 4), 2 + 0.5 * 8 - 1]
    assert found[1, 0].item() == 3 - 4
    assert found[2, 1].item() == 4 + 0.5 * 2 - 6


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_returns_of_a_rollout_by_hand(mode):
    """Every step of every episode: rewards to come, and the value of the last observation where it was cut off."""
    gamma, lam, steps = 0.9, 0.8, 13
    settings = {"env": "Hand-v0", "num_envs": 2, "num_steps": steps, "total_steps": 26, "minibatches": 1}
    ppo = PPO(config(**settings, vectorize=mode, gamma=gamma, gae_lambda=lam))
    batch = ppo.collect()
    ppo.envs.vector.close()

    @torch.no_grad()
    def value(t: int, cut_off: bool) -> float:
        return ppo.agent(torch.tensor([[float(t), float(cut_off)]]))[1].item()

    def returns(length: int, cut_off: bool, seen: int) -> list[float]:
        """Of an episode of which the rollout sees the first steps."""
        found = []
        for start in range(seen):
            advantage = 0.0
            for t in range(start, seen):
                bootstraps = cut_off or t + 1 < length
                delta = t + 1 + gamma * value(t + 1, cut_off) * bootstraps - value(t, cut_off)
                advantage += (gamma * lam) ** (t - start) * delta
            found.append(advantage + value(start, cut_off))
        return found

    # 3 steps, a reset, 2 steps, a reset, 3, reset, 2, and the reset: 13 of which 10 are learned from, of each.
    one = [*returns(3, False, 3), *returns(2, True, 2)] * 2
    expected = torch.tensor(one).repeat_interleave(2)
    assert batch.observations[::2].tolist() == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1]] * 2
    torch.testing.assert_close(batch.returns, expected, rtol=1e-5, atol=1e-5)
    assert list(ppo.returns) == [6.0, 6.0, 3.0, 3.0] * 2 and ppo.episodes == 8
    assert batch.advantages.mean().abs() < 1e-6
    assert batch.advantages.std(correction=0).item() == pytest.approx(1, rel=1e-4)


def test_a_reset_between_two_rollouts_is_not_learned_from():
    ppo = PPO(config(env="Hand-v0", num_envs=2, num_steps=3, total_steps=6, minibatches=1))
    assert len(ppo.collect().actions) == 6
    assert ppo.collect().observations.tolist() == [[0, 1], [0, 1], [1, 1], [1, 1]]


def test_processes_give_what_one_process_gives():
    batches = []
    for mode in ("sync", "async"):
        ppo = PPO(config(vectorize=mode, num_envs=2, num_steps=64, total_steps=128))
        batches.append(ppo.collect())
        ppo.envs.vector.close()
    assert same(list(batches[0]), list(batches[1])) and len(batches[0].actions) < 128


def test_native_cartpole_is_the_single_one():
    """From equal states by equal actions: observations, rewards, both kinds of end, and when the reset comes."""
    native = recipe.Environments("CartPole-v1", 8, "auto", torch.device("cpu"))
    single = recipe.Environments("CartPole-v1", 8, "sync", torch.device("cpu"))
    assert (native.mode, single.mode) == ("native", "sync")
    native.reset(0)
    single.reset(0)
    generator, ended, ends = torch.Generator().manual_seed(0), np.zeros(8, dtype=bool), np.zeros(2, dtype=int)
    was_reset = np.ones(8, dtype=bool)
    for step in range(1100):
        state = native.vector.unwrapped.state
        for index in np.flatnonzero(was_reset):  # each has its own first states
            single.vector.envs[index].unwrapped.state = state[:, index].copy()
        # Half of them push to the side that the pole falls to, and last; the others push at random.
        good = torch.from_numpy((state[2] + state[3] / 4 > 0).astype(np.int64))
        random = torch.randint(0, 2, (8,), generator=generator)
        actions = torch.where(torch.arange(8) < 4, good, random)[:, None]
        was_reset = ended
        (shown, *outcome), (expected, *same_outcome) = native.step(actions), single.step(actions)
        for one, other in zip(outcome, same_outcome, strict=True):
            assert np.array_equal(one, other), step
        rewards, terminated, truncated = outcome
        assert np.array_equal(rewards, np.where(was_reset, 0.0, 1.0)), step
        torch.testing.assert_close(
            shown.observations[~was_reset], expected.observations[~was_reset], rtol=1e-5, atol=1e-6
        )
        assert (shown.observations[was_reset].abs() <= 0.05).all()
        ended = terminated | truncated
        ends += [terminated.sum(), truncated.sum()]
    assert ends.min() >= 4, ends


# --- runs: seeds, telemetry, checkpoints


def untimed(record: dict) -> dict:
    return {name: value for name, value in record.items() if "second" not in name}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_seed_repeats(dtype):
    runs = [PPO(config(dtype, seed=seed)) for seed in (1, 1, 2)]
    one, again, other = ([untimed(ppo.iterate()) for _ in range(3)] for ppo in runs)
    assert one == again != other
    assert same(weights(runs[0]), weights(runs[1]))


def test_the_learning_rate_falls_to_zero():
    rates = {anneal: [] for anneal in (True, False)}
    for anneal, seen in rates.items():
        ppo = PPO(config(anneal=anneal, learning_rate=0.003))
        for _ in range(3):
            seen.append(ppo.iterate()["learning_rate"])
            assert ppo.trainer.optimizer.param_groups[0]["lr"] == seen[-1]
    assert rates[True] == pytest.approx([0.003, 0.002, 0.001]) and rates[False] == [0.003] * 3


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """What the command leaves of a small run in float16."""
    out = tmp_path_factory.mktemp("ppo") / "run"
    recipe.main([*WORDS, "--use-amp", "--seed=3", f"--out={out}"])
    return out


def records(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_telemetry(run):
    found, board = records(run), EventAccumulator(str(run)).Reload()
    assert [record["update"] for record in found] == [1, 2, 3]
    assert [record["steps"] for record in found] == [32, 64, 96]
    words = {"amp_enabled": True, "amp_source": "command line", "effective_dtype": "float16", "fallback": None}
    words["effective_dtype_share"] = {"float16": 1.0}
    numbers = {"overflow_steps", "overflow_rate", "loss_scale", "return_mean", "episodes", "approx_kl", "entropy"}
    numbers |= {"ratio_deviation", "steps_per_second", "policy_loss", "value_loss", "clip_fraction", "learning_rate"}
    for record in found:
        assert words.items() <= record.items() and numbers <= record.keys()
    for name in (*numbers, "amp_enabled"):
        told = {record["steps"]: float(record[name]) for record in found if record[name] is not None}
        seen = {event.step: event.value for event in board.Scalars(name)}
        assert seen == pytest.approx(told, rel=1e-6), name
    assert [event.value for event in board.Scalars("effective_dtype_share/float16")] == [1.0] * 3
    for name in ("amp_source", "effective_dtype"):
        texts = [event.tensor_proto.string_val[0].decode() for event in board.Tensors(f"{name}/text_summary")]
        assert texts == [words[name]] * 3
    assert (run / "curves.png").stat().st_size > 20_000


def test_a_number_that_is_not_finite_is_null(tmp_path):
    board = SummaryWriter(tmp_path)
    recipe.write({"steps": 1, "loss": math.nan, "kl": math.inf, "good": 1.0}, tmp_path / "m.jsonl", board)
    board.close()
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"steps": 1, "loss": None, "kl": None, "good": 1.0}


def test_provenance_of_a_checkpoint(run):
    extra = read_checkpoint(run / "checkpoint.pt")["extra"]
    assert extra["config"]["seed"] == 3 and extra["config"]["use_amp"] is True
    assert (extra["sources"]["use_amp"], extra["sources"]["gamma"]) == ("command line", "default")
    assert extra["env"]["id"] == "CartPole-v1" and extra["env"]["max_episode_steps"] == 500
    assert extra["env"]["actions"] == "Discrete(2)" and extra["env"]["mode"] == "native"
    assert extra["precision"]["effective_dtype"] == "float16" and extra["precision"]["amp_enabled"] is True
    assert extra["versions"].keys() == {"torch", "gymnasium", "python"}
    assert extra["versions"]["gymnasium"] == gymnasium.__version__
    if (Path(recipe.__file__).parents[3] / ".git").exists():
        assert len(extra["commit"]) == 40
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert evaluation["episodes"] == 2 and evaluation["config"] == extra["config"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_resume_takes_up_all_but_the_environments(dtype, tmp_path):
    made = PPO(config(dtype, total_steps=192))
    for _ in range(3):
        made.iterate()
    made.save(tmp_path / "checkpoint.pt")
    taken = PPO(config(dtype, total_steps=192))
    taken.load(tmp_path / "checkpoint.pt")
    for one, other in ((made, taken),):
        assert same(weights(one), weights(other))
        assert same(one.trainer.optimizer.state_dict(), other.trainer.optimizer.state_dict())
        assert torch.equal(one.generator.get_state(), other.generator.get_state())
        assert (one.updates, one.episodes, list(one.returns)) == (other.updates, other.episodes, list(other.returns))
        assert one.trainer.training_steps == other.trainer.training_steps == 12
        if dtype == "float16":
            assert one.trainer.scaler.state_dict() == other.trainer.scaler.state_dict()
    assert not torch.equal(taken._state.observations, PPO(config(dtype))._state.observations), "the first states again"
    assert taken.iterate()["update"] == 4


def test_resume_in_another_dtype_is_said(tmp_path, capsys, monkeypatch):
    out, titles = tmp_path / "run", []
    monkeypatch.setattr("matplotlib.figure.Figure.suptitle", lambda figure, title: titles.append(title))
    recipe.main([*WORDS, f"--out={out}"])
    recipe.main([*WORDS, f"--out={out}", "--resume", "--total-steps=128", "--use-amp", "--dtype=bfloat16"])
    assert "going on after step 96 in bfloat16, before in float32; the environments" in capsys.readouterr().out
    assert titles == ["CartPole-v1, float32, seed 1", "CartPole-v1, float32 then bfloat16, seed 1"]


def test_resume_goes_on_by_the_same_command(tmp_path, capsys):
    out = tmp_path / "run"
    recipe.main([*WORDS, f"--out={out}"])
    before = records(out)
    with (out / "metrics.jsonl").open("a") as file:  # of an update that no checkpoint knows
        file.write(json.dumps({**before[-1], "update": 4, "steps": 128}) + "\n")
    capsys.readouterr()
    recipe.main([*WORDS, f"--out={out}", "--resume", "--total-steps=192"])
    assert "going on after step 96; the environments start anew" in capsys.readouterr().out
    after = records(out)
    assert after[:3] == before and [record["update"] for record in after] == [1, 2, 3, 4, 5, 6]
    board = EventAccumulator(str(out)).Reload()
    assert [event.step for event in board.Scalars("approx_kl")] == [32, 64, 96, 128, 160, 192]


def test_it_stops_at_a_return(tmp_path, capsys):
    words = ["--env=Hand-v0", "--num-envs=16", "--num-steps=16", "--total-steps=25600", "--eval-episodes=0"]
    recipe.main([*words, "--device=cpu", "--stop-at=4", f"--out={tmp_path / 'run'}"])
    assert "the return has reached --stop-at 4" in capsys.readouterr().out
    last = records(tmp_path / "run")[-1]
    assert last["return_mean"] >= 4 and last["episodes"] >= 100 and last["steps"] < 2560
    assert (tmp_path / "run/checkpoint.pt").exists()


def test_factors_are_learned():
    """The best action is (last, first, last), of the factors' own starts: worth 3 - 0 + 8 a step, 33 an episode."""
    ppo = PPO(config(env="Factors-v0", num_envs=16, num_steps=16, total_steps=256 * 40, epochs=8, learning_rate=0.01))
    while ppo.updates < ppo.config.updates:
        ppo.iterate()
    assert ppo.evaluate(3) == [33.0] * 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_learns(dtype):
    """With the defaults, a ninth of their steps, from the 22 of an untrained policy on."""
    ppo = PPO(replace(PPOConfig(), total_steps=32_768, device="cpu", use_amp=dtype != "float32", dtype=amp(dtype)))
    first = ppo.iterate()["return_mean"]
    while ppo.updates < ppo.config.updates:
        last = ppo.iterate()
    assert last["effective_dtype"] == dtype
    assert first < 40 and last["return_mean"] > 80, (first, last["return_mean"])
    assert last["overflow_rate"] < 0.05


def amp(dtype: str) -> str:
    return "float16" if dtype == "float32" else dtype


# --- what is refused: one line, exit code 1, nothing on disk


@pytest.mark.parametrize(
    "words, said",
    [
        (["--env=CartPle-v1"], "env=CartPle-v1 is unknown to Gymnasium; near it: CartPole-v1"),
        (["--env=nowhere:X-v0"], "env=nowhere:X-v0 cannot be made: No module named 'nowhere'"),
        (["--env=Pendulum-v1"], "env=Pendulum-v1: actions are Box(-2.0, 2.0, (1,), float32), must be Discrete or Mul"),
        (
            ["--env=Keyed-v0"],
            "env=Keyed-v0: observations are Dict('x': Box(0.0, 1.0, (1,), float32)), must be Box or D",
        ),
        (["--env=Hand-v0", "--vectorize=native"], "vectorize=native must be auto, sync or async with env=Hand-v0"),
        (["--vectorize=threads"], "vectorize=threads must be auto, native, sync or async"),
        (["--dtype=float32"], "dtype=float32 must be float16 or bfloat16"),
        (["--dtype=int8", "--use-amp"], "dtype=int8 must be float16 or bfloat16"),
        (["--device=tpu"], "device=tpu must be auto, cpu or cuda"),
        (["--minibatches=5"], "minibatches=5 must be a divisor of num_envs * num_steps = 32 into parts of"),
        (["--minibatches=16"], "minibatches=16 must be a divisor of num_envs * num_steps = 32 into parts of"),
        (["--minibatches=0"], "minibatches=0 must be at least 1"),
        (["--num-steps=1"], "num_steps=1 must be at least 2"),
        (["--num-envs=0"], "num_envs=0 must be at least 1"),
        (["--total-steps=31"], "total_steps=31 must be at least num_envs * num_steps = 32"),
        (["--gamma=1.1"], "gamma=1.1 must be between 0 and 1"),
        (["--gae-lambda=-0.1"], "gae_lambda=-0.1 must be between 0 and 1"),
        (["--clip=0"], "clip=0.0 must be between 0 and 1"),
        (["--learning-rate=nan"], "learning_rate=nan must be positive"),
        (["--learning-rate=fast"], "argument --learning-rate: invalid float value: 'fast'"),
        (["--max-grad-norm=0"], "max_grad_norm=0.0 must be "),
        (["--loss-scale=0"], "loss_scale=0.0 must be positive"),
        (["--seed=-1"], "seed=-1 must be at least 0"),
        (["--stop-at=nan"], "stop_at=nan must be a finite number"),
        (["--steps=3"], "--steps=3 is unknown; near it: "),
        (["--resume"], "checkpoint.pt: there is no such checkpoint to resume from"),
    ],
)
def test_bad_settings(words, said, tmp_path):
    with pytest.raises(SystemExit) as refused:
        recipe.main([*WORDS, f"--out={tmp_path / 'run'}", *words])
    assert said in str(refused.value.code) and "\n" not in str(refused.value.code)
    assert not (tmp_path / "run").exists()


def test_a_malformed_switch(tmp_path, monkeypatch):
    monkeypatch.setenv("DISABLE_AMP", "yes")
    with pytest.raises(
        SystemExit, match="^recipes.amp.ppo: DISABLE_AMP='yes' in the environment must be 1, 0, true or false"
    ):
        recipe.main([*WORDS, f"--out={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_cuda_where_there_is_none(tmp_path):
    with pytest.raises(SystemExit, match="device=cuda must be auto or cpu"):
        recipe.main([*WORDS, f"--out={tmp_path / 'run'}", "--device=cuda"])


def test_no_folder():
    with pytest.raises(SystemExit, match="--out is missing"):
        recipe.main([])


@pytest.mark.parametrize("result", ["metrics.jsonl", "checkpoint.pt"])
def test_a_folder_with_results(result, run, tmp_path):
    (tmp_path / result).write_bytes((run / result).read_bytes())
    with pytest.raises(SystemExit, match="must be a folder without results"):
        recipe.main([*WORDS, f"--out={tmp_path}"])
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [(run / result).read_bytes()]


@pytest.mark.parametrize("line", ["no json", "[1]", '{"steps": 3}'])
def test_metrics_that_are_none(line, run, tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes((run / "checkpoint.pt").read_bytes())
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(SystemExit, match="metrics.jsonl: a line is no record of an update"):
        recipe.main([*WORDS, "--seed=3", "--use-amp", f"--out={tmp_path}", "--resume"])
    assert (tmp_path / "metrics.jsonl").read_text() == line + "\n"


def test_a_finished_run_whose_metrics_are_gone(run, tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes((run / "checkpoint.pt").read_bytes())
    recipe.main([*WORDS, "--seed=3", "--use-amp", f"--out={tmp_path}", "--resume"])
    assert json.loads((tmp_path / "evaluation.json").read_text())["steps"] == 96 and records(tmp_path) == []


@pytest.mark.parametrize(
    "env, dtype, said",
    [
        ("Nan-v0", "float32", "observation[0] of environment 1 (of 4) at step 3 is nan: must be finite"),
        ("Nan-v0", "float16", "observation[0] of environment 1 (of 4) at step 3 is nan: must be finite"),
        (
            "Large-v0",
            "float16",
            "observation[0] of environment 1 (of 4) at step 3 is 100000.0: must be finite and at most 65504",
        ),
        ("NanReward-v0", "float32", "reward of environment 1 (of 4) at step 3 is nan: must be finite"),
        (
            "NoAction-v0",
            "float32",
            "number of actions that action_mask allows of environment 1 (of 4) at step 3 is 0: must be 1 at least",
        ),
    ],
)
def test_what_an_environment_may_not_show(env, dtype, said):
    ppo = PPO(config(dtype, env=env))
    first, index = weights(ppo), next(i for i, each in enumerate(ppo.envs.vector.envs) if each.unwrapped.breaks)
    with pytest.raises(Refused) as refused:
        ppo.iterate()
    assert said.replace("environment 1 ", f"environment {index} ") in str(refused.value)
    assert str(refused.value).startswith(f"env={env}: ") and same(weights(ppo), first)


def test_an_environment_whose_episodes_do_not_end(tmp_path):
    """Neither return nor time limit: there are curves, and the evaluation ends."""
    recipe.main([*WORDS, "--env=Endless-v0", f"--out={tmp_path / 'run'}"])
    assert {record["return_mean"] for record in records(tmp_path / "run")} == {None}
    assert (tmp_path / "run/curves.png").exists()
    assert json.loads((tmp_path / "run/evaluation.json").read_text())["mean"] == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_large_observation_is_for_wide_ranges(dtype):
    assert math.isfinite(PPO(config(dtype, env="Large-v0")).iterate()["approx_kl"])


def test_the_command_stops_in_one_line_at_a_nan(tmp_path):
    with pytest.raises(SystemExit) as refused:
        recipe.main([*WORDS, "--env=Nan-v0", f"--out={tmp_path / 'run'}"])
    said = str(refused.value.code)
    assert said.startswith("recipes.amp.ppo: env=Nan-v0: observation[0] of environment ") and "\n" not in said


def test_a_storm_of_overflows_ends_in_one_line(tmp_path):
    words = ["--use-amp", "--loss-scale=3e38", "--total-steps=320", f"--out={tmp_path / 'run'}"]
    with pytest.raises(SystemExit) as refused:
        recipe.main([*WORDS, *words])
    said = str(refused.value.code)
    assert said.startswith("recipes.amp.ppo: 32 optimizer steps in a row overflowed") and "\n" not in said
    assert records(tmp_path / "run")[-1]["overflow_rate"] == 1.0


def test_interrupted_it_says_how_to_go_on(tmp_path, monkeypatch):
    """There is a checkpoint after the first update; the second, which none knows, is made and told again."""
    out, iterate = tmp_path / "run", PPO.iterate

    def interrupted(ppo: PPO) -> dict:
        if ppo.updates == 2:
            raise KeyboardInterrupt
        return iterate(ppo)

    monkeypatch.setattr(PPO, "iterate", interrupted)
    with pytest.raises(SystemExit, match="interrupted; the same command with --resume goes on"):
        recipe.main([*WORDS, f"--out={out}"])
    monkeypatch.undo()
    recipe.main([*WORDS, f"--out={out}", "--resume"])
    assert [record["update"] for record in records(out)] == [1, 2, 3]
    told = [event.step for event in EventAccumulator(str(out)).Reload().Scalars("approx_kl")]
    assert told == [32, 64, 96]


@pytest.mark.parametrize(
    "change, words, said",
    [
        (lambda path: None, ["--hidden=8"], "made with hidden=16, not 8"),
        (lambda path: None, ["--env=Hand-v0"], "made with env=CartPole-v1, not Hand-v0"),
        (lambda path: path.write_bytes(path.read_bytes()[:2000]), [], "truncated, or no checkpoint"),
        (lambda path: edit(path, lambda saved: saved.update(version=99)), [], "version 99, this trainer reads up to"),
        (lambda path: edit(path, lambda saved: saved.update(extra={})), [], "no checkpoint of PPO"),
        (lambda path: edit(path, lambda saved: saved["extra"].pop("updates")), [], "no checkpoint of PPO"),
        (
            lambda path: edit(path, lambda saved: saved["extra"].update(device="cuda")),
            [],
            "made on cuda, not cpu: resume",
        ),
        (lambda path: edit(path, lambda saved: saved["model"].popitem()), [], "of another model"),
        (lambda path: path.unlink(), [], "there is no such checkpoint"),
    ],
)
def test_a_checkpoint_that_does_not_fit(change, words, said, run, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    for file in run.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    change(out / "checkpoint.pt")
    before = {file: file.read_bytes() for file in out.iterdir()}
    with pytest.raises(SystemExit) as refused:
        recipe.main([*WORDS, "--seed=3", "--use-amp", f"--out={out}", "--resume", *words])
    assert said in str(refused.value.code) and "\n" not in str(refused.value.code)
    assert before == {file: file.read_bytes() for file in out.iterdir()}


def edit(path: Path, change) -> None:
    saved = torch.load(path, weights_only=True)
    change(saved)
    torch.save(saved, path)


def test_without_a_loss_scale_float16_goes_on_with_a_warning(run, tmp_path):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes((run / "checkpoint.pt").read_bytes())
    edit(path, lambda saved: saved.update(grad_scaler=None))
    ppo = PPO(config("float16", seed=3, out=str(tmp_path)))
    with pytest.warns(UserWarning, match="holds no loss scale"):
        ppo.load(path)
    assert ppo.updates == 3


# --- torch.compile and CUDA


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_networks_give_the_same(dtype):
    torch._dynamo.utils.counters.clear()
    plain, compiled = (PPO(config(dtype, compile=each)) for each in (False, True))
    batch, gradients = plain.collect(), {}
    for name, ppo in {"plain": plain, "compiled": compiled}.items():
        with ppo.trainer.precision.autocast("cpu"):  # the trainer's own observes the first time, eagerly
            logits, _ = ppo.agent(batch.observations)
            loss, _ = recipe.ppo_loss(logits, *ppo.agent(batch.observations)[1:], batch, [2], ppo.config)
        # The graph's own dtype: 16 bits hold what comes out, and fp32's they do not.
        assert (logits == logits.half().float()).all() == (dtype == "float16")
        assert (logits == logits.bfloat16().float()).all() == (dtype == "bfloat16")
        loss.backward()
        gradients[name] = torch.cat([parameter.grad.flatten() for parameter in ppo.agent.parameters()])
        ppo.trainer.optimizer.zero_grad()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    distance = (gradients["compiled"] - gradients["plain"]).norm() / gradients["plain"].norm()
    assert distance < {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}[dtype]
    told = [compiled.iterate() for _ in range(2)]
    assert told[-1]["effective_dtype"] == dtype and told[0]["ratio_deviation"] < 1e-2
    assert read_names(compiled) == read_names(plain)


def read_names(ppo: PPO) -> list[str]:
    """Of a checkpoint's weights."""
    return list(ppo.trainer.module.state_dict())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_cuda(dtype):
    ppo = PPO(replace(PPOConfig(), total_steps=45_056, device="cuda", use_amp=dtype != "float32", dtype=amp(dtype)))
    while ppo.updates < ppo.config.updates:
        last = ppo.iterate()
        assert last["ratio_deviation"] < {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}[dtype]
    assert last["effective_dtype"] == dtype and last["return_mean"] > 120


# --- CartPole-v1, three seeds in each dtype: docs/results/amp-ppo

RESULTS, SEEDS, SOLVED = Path(__file__).parents[2] / "docs/results/amp-ppo.csv", (1, 2, 3), 475.0
FIELDS = ("dtype", "seed", "steps", "return_mean", "entropy", "approx_kl", "ratio_deviation", "loss_scale")
FIELDS += ("overflow_steps", "effective_dtype", "evaluation")
FIRST_SETTINGS = """\
The settings are the second ones, chosen from three in float32 alone, by the steps to 475. With the first ones
(γ 0.99, λ 0.95, 8 epochs, 300 000 steps) the runs ended at 500, 500, 500 in float32, 500, 500, 500 in bfloat16 and
500, 500, 260 in float16: 0.84 of float32's mean. Curves of all arms fell back on the way, those of seed 3 to 257, 222
and 206, and float16's did not recover. Whether that is float16 or chance is not decided: on a minibatch of seed 3 its
gradients were within 0.33 % of float32's, parameter by parameter, bfloat16's within 2.7 %.

"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_solves_cartpole(dtype, seed, tmp_path, pytestconfig):
    amp_words = [] if dtype == "float32" else ["--use-amp", f"--dtype={dtype}"]
    recipe.main(["--env=CartPole-v1", "--device=cpu", f"--seed={seed}", *amp_words, f"--out={tmp_path / 'run'}"])
    made = [{**record, "dtype": dtype, "seed": seed} for record in records(tmp_path / "run")]
    evaluation = json.loads((tmp_path / "run/evaluation.json").read_text())
    made[-1]["evaluation"] = evaluation["mean"]
    if pytestconfig.getoption("write_results"):
        write_down(made, evaluation)
    assert evaluation["mean"] >= SOLVED and made[-1]["effective_dtype"] == dtype


def committed() -> dict[tuple[str, str], list[dict[str, str]]]:
    """Rows of the results, an update each, by dtype and seed."""
    found: dict[tuple[str, str], list[dict[str, str]]] = {}
    with RESULTS.open() as file:
        for row in csv.DictReader(file):
            found.setdefault((row["dtype"], row["seed"]), []).append(row)
    return found


def solved_at(rows: list[dict[str, str]]) -> int | None:
    """The step by which the mean return of the last 100 episodes of training had reached 475."""
    return next((int(row["steps"]) for row in rows if row["return_mean"] and float(row["return_mean"]) >= SOLVED), None)


def write_down(made: list[dict], evaluation: dict) -> None:
    """Put the rows of one run in the place of its older ones; table and figure are those of all runs."""
    runs = committed() if RESULTS.exists() else {}
    runs[made[0]["dtype"], str(made[0]["seed"])] = made
    ordered = [runs[key] for key in sorted(runs, key=lambda key: (DTYPES.index(key[0]), key[1]))]
    with RESULTS.open("w", newline="") as file:
        table = csv.DictWriter(file, FIELDS, extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        table.writerows(row for rows in ordered for row in rows)
    RESULTS.with_suffix(".md").write_text(markdown(committed(), evaluation))
    draw(committed(), RESULTS.with_suffix(".png"))


def markdown(runs: dict[tuple[str, str], list[dict[str, str]]], evaluation: dict) -> str:
    means = {dtype: [float(rows[-1]["evaluation"]) for (d, _), rows in runs.items() if d == dtype] for dtype in DTYPES}
    lines = [
        "# PPO on CartPole-v1, in fp32 and under autocast",
        "",
        "Written by `pytest -m slow tests/recipes/test_amp_ppo_command.py -k solves --write-results`, on a CPU: nine runs of",
        "`python -m recipes.amp.ppo --env CartPole-v1 --device cpu --seed … [--use-amp --dtype …]`, all other settings",
        "the defaults below. The curves, a row an update, are in [amp-ppo.csv](amp-ppo.csv).",
        "",
        "| effective dtype | seed | 475 at step | return, 100 episodes | updates skipped | loss scale | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for (_, seed), rows in runs.items():
        last, deviation = rows[-1], max(float(row["ratio_deviation"]) for row in rows)
        cells = (last["effective_dtype"], seed, solved_at(rows) or "not reached", f"{float(last['evaluation']):.1f}")
        cells += (last["overflow_steps"], f"{float(last['loss_scale']):g}", f"{deviation:.1e}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    shares = [
        f"{dtype} {fmean(means[dtype]):.1f} ({fmean(means[dtype]) / fmean(means['float32']):.2f} of float32's)"
        for dtype in DTYPES
        if means[dtype] and means["float32"]
    ]
    settings = {key: value for key, value in evaluation["config"].items() if value is not None}
    for key in ("env", "use_amp", "dtype", "device", "seed", "resume", "out"):
        settings.pop(key, None)
    versions = ", ".join(f"{name} {version}" for name, version in evaluation["versions"].items())
    lines += [
        "",
        f"Means over the seeds: {'; '.join(shares)}.",
        "",
        "*475 at step*: when the mean return of the last 100 episodes of training, whose actions are drawn, was 475,",
        "Gymnasium's threshold. *Return*: of 100 further episodes by the final policy's most probable actions.",
        "*Loss scale*: at the end. *Ratio*: the largest mean |ratio − 1| of an update's first minibatch, before any",
        "step; rollout and update compute in one dtype.",
        "",
        *FIRST_SETTINGS.splitlines(),
        "![Return over the steps, a panel a dtype, a line a seed](amp-ppo.png)",
        "",
        f"Settings: {', '.join(f'{key} {value}' for key, value in settings.items())}.",
        f"Versions: {versions}, {platform.machine()}. GPUs: not measured.",
    ]
    return "\n".join(lines) + "\n"


def draw(runs: dict[tuple[str, str], list[dict[str, str]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(DTYPES), figsize=(12, 4.2), layout="constrained", sharey=True)
    for axis, dtype in zip(axes, DTYPES, strict=True):
        for seed in SEEDS:
            rows = [row for row in runs.get((dtype, str(seed)), []) if row["return_mean"]]
            across, up = ([float(row[key]) for row in rows] for key in ("steps", "return_mean"))
            axis.plot([steps / 1000 for steps in across], up, label=f"seed {seed}")
        axis.axhline(SOLVED, color="black", linewidth=0.8, linestyle="--")
        axis.set(title=dtype, xlabel="thousand steps of all environments")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("return, mean of the last 100 episodes")
    axes[0].legend(loc="lower right")
    figure.suptitle("CartPole-v1, PPO on a CPU; dashed: 475")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def test_the_results_say_what_they_are_quoted_for():
    """In each dtype three seeds end above 475, and AMP's mean is at least 0.9 of fp32's."""
    runs = committed()
    assert runs.keys() == {(dtype, str(seed)) for dtype in DTYPES for seed in SEEDS}
    for (dtype, _), rows in runs.items():
        assert {row["effective_dtype"] for row in rows} == {dtype}
        assert float(rows[-1]["evaluation"]) >= SOLVED and solved_at(rows) is not None
    mean = {dtype: fmean(float(runs[dtype, str(seed)][-1]["evaluation"]) for seed in SEEDS) for dtype in DTYPES}
    assert min(mean["float16"], mean["bfloat16"]) >= 0.9 * mean["float32"]


def test_the_results_were_made_by_the_defaults():
    told = RESULTS.with_suffix(".md").read_text()
    for key, value in asdict(PPOConfig()).items():
        assert (
            value is None or key in ("env", "use_amp", "dtype", "device", "seed", "resume") or f"{key} {value}" in told
        )
