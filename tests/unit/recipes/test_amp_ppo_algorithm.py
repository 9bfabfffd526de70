"""PPO's algorithm: arithmetic checked by hand, environments, and learning."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from amp_ppo_cases import DTYPES, SMALL, amp_settings, small_ppo, weights
from amp_trainer_cases import same_bits

from recipes.amp.ppo.algorithm import PPO
from recipes.amp.ppo.config import PPOConfig
from recipes.amp.ppo.environments import Environments, InvalidEnvironmentError
from recipes.amp.ppo.objective import RolloutBatch, generalised_advantages, ppo_loss

# --- networks, loss and advantages


def test_first_weights_are_orthogonal():
    agent, gains = small_ppo(env="Factors-v0").agent, {"policy_heads": 0.01, "value_head": 1.0}
    for name, weight in agent.named_parameters():
        if weight.ndim == 1:
            assert not weight.count_nonzero(), name
            continue
        products = weight @ weight.T if weight.shape[0] <= weight.shape[1] else weight.T @ weight
        expected = gains.get(name.split(".")[0], 2**0.5) ** 2 * torch.eye(len(products))
        torch.testing.assert_close(products, expected, rtol=1e-4, atol=1e-5)


def test_loss_by_hand():
    """Two choices of equal logits: the new probability is 1/2, the old ones make ratios of 1.5, 1.5, 0.5 and 0.5."""
    ratio, advantages = torch.tensor([1.5, 1.5, 0.5, 0.5]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    batch = RolloutBatch(
        observations=torch.zeros(4, 1),
        allowed=torch.ones(4, 2, dtype=torch.bool),
        actions=torch.zeros(4, 1, dtype=torch.int64),
        log_probs=(0.5 / ratio).log(),
        advantages=advantages,
        returns=torch.tensor([1.0, 2.0, 3.0, 4.0]),
    )
    settings = PPOConfig(**SMALL, clip=0.2, value_coefficient=0.25, entropy_coefficient=0.1)
    loss, terms = ppo_loss(torch.zeros(4, 2), torch.zeros(4), batch, [2], settings)
    policy = -(1.2 - 1.5 + 0.5 - 0.8) / 4  # gains are cut off at 1.2, and losses that ended at 0.8 count no less
    assert terms["policy_loss"].item() == pytest.approx(policy)
    assert terms["value_loss"].item() == pytest.approx((1 + 4 + 9 + 16) / 4)
    assert terms["entropy"].item() == pytest.approx(math.log(2))
    assert terms["approx_kl"].item() == pytest.approx((2 * (0.5 - math.log(1.5)) + 2 * (-0.5 - math.log(0.5))) / 4)
    assert (terms["clip_fraction"], terms["ratio_deviation"]) == (1.0, 0.5)
    assert loss.item() == pytest.approx(policy + 0.25 * 7.5 - 0.1 * math.log(2))


def test_advantages_by_hand():
    """γ = 0.5, λ = 0.5. Left: terminates at the second step, so that the value 100 is not read; the third is a reset.
    Right: cut off at the first, worth 8 there; after the reset one that the rollout ends in."""
    rewards = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 4.0]])
    values = torch.tensor([[2.0, 1.0], [4.0, 8.0], [100.0, 6.0], [10.0, 2.0]])
    terminated = torch.tensor([[False, False], [True, False], [False, False]])
    ended = torch.tensor([[False, True], [True, False], [False, False]])
    advantages = generalised_advantages(rewards, values, terminated, ended, 0.5, 0.5)
    assert advantages[0].tolist() == [1 + 0.5 * 4 - 2 + 0.25 * (3 - 4), 2 + 0.5 * 8 - 1]
    assert advantages[1, 0].item() == 3 - 4
    assert advantages[2, 1].item() == 4 + 0.5 * 2 - 6


# --- rollouts


def test_rollout_returns_by_hand():
    """Every step of every episode: rewards to come, and the value of the last observation where it was cut off."""
    gamma, lam, steps = 0.9, 0.8, 13
    settings = {"env": "Hand-v0", "num_envs": 2, "num_steps": steps, "total_steps": 26, "minibatches": 1}
    ppo = small_ppo(**settings, gamma=gamma, gae_lambda=lam)
    batch = ppo.collect()

    @torch.no_grad()
    def value(t: int, cut_off: bool) -> float:
        return ppo.agent(torch.tensor([[float(t), float(cut_off)]]))[1].item()

    def returns(length: int, cut_off: bool, steps: int) -> list[float]:
        """Return the returns of an episode's first ``steps`` steps, those in the rollout."""
        values = []
        for start in range(steps):
            advantage = 0.0
            for t in range(start, steps):
                bootstraps = cut_off or t + 1 < length
                delta = t + 1 + gamma * value(t + 1, cut_off) * bootstraps - value(t, cut_off)
                advantage += (gamma * lam) ** (t - start) * delta
            values.append(advantage + value(start, cut_off))
        return values

    # 3 steps, a reset, 2 steps, a reset, 3, reset, 2, and the reset: 13 of which 10 are learned from, of each.
    one = [*returns(3, False, 3), *returns(2, True, 2)] * 2
    expected = torch.tensor(one).repeat_interleave(2)
    assert batch.observations[::2].tolist() == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1]] * 2
    torch.testing.assert_close(batch.returns, expected, rtol=1e-5, atol=1e-5)
    assert list(ppo.returns) == [6.0, 6.0, 3.0, 3.0] * 2 and ppo.episodes == 8
    assert batch.advantages.mean().abs() < 1e-6
    assert batch.advantages.std(correction=0).item() == pytest.approx(1, rel=1e-4)


def test_reset_between_two_rollouts_is_not_learned_from():
    ppo = small_ppo(env="Hand-v0", num_envs=2, num_steps=3, total_steps=6, minibatches=1)
    assert len(ppo.collect().actions) == 6
    assert ppo.collect().observations.tolist() == [[0, 1], [0, 1], [1, 1], [1, 1]]


def test_evaluation_plays_one_episode_each_and_respects_masks():
    ppo = small_ppo(env="Masked-v0")
    ppo.iterate()
    assert ppo.evaluate(6) == [2 + (1 + 2**31 + index) % 3 for index in range(6)]


# --- environments


def test_discrete_observation_is_one_hot():
    envs = Environments("Factors-v0", 2, "auto", torch.device("cpu"))
    assert (envs.inputs, envs.factors) == (4, [3, 2, 4])
    assert envs.reset(0).observations.tolist() == [[1, 0, 0, 0]] * 2
    assert envs.step(torch.zeros(2, 3, dtype=torch.int64))[0].observations.tolist() == [[0, 1, 0, 0]] * 2


def test_async_environments_match_sync_ones():
    batches = []
    for mode in ("sync", "async"):
        ppo = small_ppo(vectorize=mode, num_envs=2, num_steps=64, total_steps=128)
        batches.append(ppo.collect())
        ppo.envs.vector.close()
    assert same_bits(list(batches[0]), list(batches[1])) and len(batches[0].actions) < 128


def test_native_cartpole_matches_single_environments():
    """From equal states by equal actions: observations, rewards, both kinds of end, and the step of the reset."""
    native = Environments("CartPole-v1", 8, "auto", torch.device("cpu"))
    single = Environments("CartPole-v1", 8, "sync", torch.device("cpu"))
    assert (native.mode, single.mode) == ("native", "sync")
    native.reset(0)
    single.reset(0)
    generator, ended, ends = torch.Generator().manual_seed(0), np.zeros(8, dtype=bool), np.zeros(2, dtype=int)
    was_reset = np.ones(8, dtype=bool)
    for step in range(1100):
        native_state = native.vector.unwrapped.state
        for index in np.flatnonzero(was_reset):  # each has its own first states
            single.vector.envs[index].unwrapped.state = native_state[:, index].copy()
        # Half of them push to the side that the pole falls to, and last; the others push at random.
        good = torch.from_numpy((native_state[2] + native_state[3] / 4 > 0).astype(np.int64))
        random = torch.randint(0, 2, (8,), generator=generator)
        actions = torch.where(torch.arange(8) < 4, good, random)[:, None]
        was_reset = ended
        (state, *outcome), (expected, *same_outcome) = native.step(actions), single.step(actions)
        for one, other in zip(outcome, same_outcome, strict=True):
            assert np.array_equal(one, other), step
        rewards, terminated, truncated = outcome
        assert np.array_equal(rewards, np.where(was_reset, 0.0, 1.0)), step
        torch.testing.assert_close(
            state.observations[~was_reset], expected.observations[~was_reset], rtol=1e-5, atol=1e-6
        )
        assert (state.observations[was_reset].abs() <= 0.05).all()
        ended = terminated | truncated
        ends += [terminated.sum(), truncated.sum()]
    assert ends.min() >= 4, ends


@pytest.mark.parametrize(
    "env, dtype, message",
    [
        ("Nan-v0", "float32", "observation[0]{} is nan: must be finite"),
        ("Nan-v0", "float16", "observation[0]{} is nan: must be finite"),
        ("Large-v0", "float16", "observation[0]{} is 100000.0: must be finite and at most 65504"),
        ("NanReward-v0", "float32", "reward{} is nan: must be finite"),
        ("NoAction-v0", "float32", "number of actions that action_mask allows{} is 0: must be 1 at least"),
    ],
)
def test_invalid_step_of_an_environment_is_refused(env, dtype, message):
    ppo = small_ppo(dtype, env=env)
    first, index = weights(ppo), next(i for i, each in enumerate(ppo.envs.vector.envs) if each.unwrapped.breaks)
    with pytest.raises(InvalidEnvironmentError) as refused:
        ppo.iterate()
    message = message.format(f" of environment {index} (of 4) at step 3")
    assert str(refused.value).startswith(f"env={env}: {message}") and same_bits(weights(ppo), first)


# --- training


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_seed_repeats_the_run(dtype):
    one, again, other = (small_ppo(dtype, seed=seed) for seed in (1, 1, 2))
    for ppo in (one, again, other):
        for _ in range(3):
            ppo.iterate()
    assert same_bits(weights(one), weights(again)) and not same_bits(weights(one), weights(other))
    assert same_bits(list(one.collect()), list(again.collect()))


def test_learning_rate_falls_to_zero():
    rates = {anneal: [] for anneal in (True, False)}
    for anneal, per_update in rates.items():
        ppo = small_ppo(anneal=anneal, learning_rate=0.003)
        for _ in range(3):
            per_update.append(ppo.iterate()["learning_rate"])
            assert ppo.trainer.optimizer.param_groups[0]["lr"] == per_update[-1]
    assert rates[True] == pytest.approx([0.003, 0.002, 0.001]) and rates[False] == [0.003] * 3


@pytest.mark.subprocess
def test_factors_are_learned():
    """The best action is (last, first, last), of the factors' own starts: worth 3 - 0 + 8 a step, 33 an episode."""
    ppo = small_ppo(env="Factors-v0", num_envs=16, num_steps=16, total_steps=256 * 40, epochs=8, learning_rate=0.01)
    while ppo.updates < ppo.config.updates:
        ppo.iterate()
    assert ppo.evaluate(3) == [33.0] * 3


@pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("float32", "bfloat16")] + ["float16"]
)
@pytest.mark.subprocess
def test_training_raises_the_return(dtype):
    """Train with a fifth of the default steps; an untrained policy returns 22."""
    ppo = PPO(replace(PPOConfig(), total_steps=32_768, device="cpu", **amp_settings(dtype)))
    first = ppo.iterate()["return_mean"]
    while ppo.updates < ppo.config.updates:
        last = ppo.iterate()
    assert last["effective_dtype"] == dtype
    assert first < 40 and last["return_mean"] > 80, (first, last["return_mean"])
    assert last["overflow_rate"] < 0.05
