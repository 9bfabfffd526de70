"""PPO's algorithm: arithmetic checked by hand, environments, 16 bits, and learning."""

import math
import time
from dataclasses import replace
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from amp_commands import DTYPES, SMALL, amp_settings, small_ppo
from amp_trainer_cases import same_bits, snapshot

from recipes.amp.environment import InvalidEnvironmentError
from recipes.amp.ppo.algorithm import PPO, Environments, PPOConfig, RolloutBatch, generalized_advantages, ppo_loss


def test_loss_by_hand():
    """Two choices of equal logits: the new probability is 1/2, the old ones make ratios of 1.5, 1.5, 0.5 and 0.5."""
    ratio, advantages = torch.tensor([1.5, 1.5, 0.5, 0.5]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    batch = RolloutBatch(
        observations=torch.zeros(4, 1),
        actions=torch.zeros(4, dtype=torch.int64),
        log_probs=(0.5 / ratio).log(),
        advantages=advantages,
        returns=torch.tensor([1.0, 2.0, 3.0, 4.0]),
    )
    settings = PPOConfig(**SMALL, clip=0.2, value_coefficient=0.25, entropy_coefficient=0.1)
    loss, terms = ppo_loss(torch.zeros(4, 2).log_softmax(-1), torch.zeros(4), batch, settings)
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
    advantages = generalized_advantages(rewards, values, terminated, ended, 0.5, 0.5)
    assert advantages[0].tolist() == [1 + 0.5 * 4 - 2 + 0.25 * (3 - 4), 2 + 0.5 * 8 - 1]
    assert advantages[1, 0].item() == 3 - 4
    assert advantages[2, 1].item() == 4 + 0.5 * 2 - 6


def test_rollout_returns_by_hand():
    """γ = 0.5, λ = 1, every value 10: rewards to come, and the value of the last observation where it was cut off."""
    settings = {"env": "Hand-v0", "num_envs": 2, "num_steps": 13, "total_steps": 26, "minibatches": 1}
    ppo = small_ppo(**settings, gamma=0.5, gae_lambda=1.0)
    torch.nn.init.zeros_(ppo.agent.value_head.weight)
    torch.nn.init.constant_(ppo.agent.value_head.bias, 10.0)
    batch = ppo.collect()
    # 3 steps, a reset, 2 steps, a reset, 3, a reset and 2: each environment learns from 10 of the 13.
    observed = [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1]] * 2
    assert batch.observations[::2].tolist() == observed
    terminated, cut_off = [1 + 2 / 2 + 3 / 4, 2 + 3 / 2, 3.0], [1 + 2 / 2 + 10 / 4, 2 + 10 / 2]
    torch.testing.assert_close(batch.returns, torch.tensor([*terminated, *cut_off] * 2).repeat_interleave(2))
    assert list(ppo.returns) == [6.0, 6.0, 3.0, 3.0] * 2 and ppo.episodes == 8
    assert batch.advantages.mean().abs() < 1e-6
    assert batch.advantages.std(correction=0).item() == pytest.approx(1, rel=1e-4)
    assert ppo.collect().observations[::2].tolist() == observed[:9], "the next rollout begins with a reset"


def test_evaluation_plays_one_episode_each():
    ppo = small_ppo(env="Lengths-v0")
    assert ppo.evaluate(6) == [2 + (1 + 2**31 + index) % 3 for index in range(6)]


def test_native_cartpole_matches_single_environments(monkeypatch):
    """From equal states by equal actions: observations, rewards, both kinds of end, and the step of the reset."""
    native = Environments("CartPole-v1", 8, torch.device("cpu"), 1e5)
    monkeypatch.setattr(gymnasium, "make_vec", partial(gymnasium.make_vec, vectorization_mode="sync"))
    single = Environments("CartPole-v1", 8, torch.device("cpu"), 1e5)
    assert not hasattr(native.vector.unwrapped, "envs")
    native.reset(0)
    single.reset(0)
    generator, outcome = torch.Generator().manual_seed(0), np.zeros((3, 8), dtype=bool)
    ends, was_reset = np.zeros(2, dtype=int), np.ones(8, dtype=bool)
    for step in range(1100):
        native_state = native.vector.unwrapped.state
        for index in np.flatnonzero(was_reset):  # each has its own first states
            single.vector.envs[index].unwrapped.state = native_state[:, index].copy()
        # Half of them push to the side that the pole falls to, and last; the others push at random.
        good = torch.from_numpy((native_state[2] + native_state[3] / 4 > 0).astype(np.int64))
        random = torch.randint(0, 2, (8,), generator=generator)
        actions = torch.where(torch.arange(8) < 4, good, random)
        was_reset = np.logical_or(*outcome[1:])
        (observed, *outcome), (expected, *same_outcome) = native.step(actions), single.step(actions)
        assert np.array_equal(outcome, same_outcome), step
        assert np.array_equal(outcome[0], np.where(was_reset, 0.0, 1.0)), step
        kept = observed[~was_reset], expected[~was_reset]
        torch.testing.assert_close(*kept, rtol=1e-5, atol=1e-6)
        assert (observed[was_reset].abs() <= 0.05).all()
        ends += [each.sum() for each in outcome[1:]]
    assert ends.min() >= 4, ends


@pytest.mark.parametrize(
    "env, dtype, message",
    [
        ("Nan-v0", "float32", "observation[0]{} is nan: must be finite"),
        ("Large-v0", "float16", "observation[0]{} is 100000.0: must be finite and at most 65504"),
        ("NanReward-v0", "float32", "reward{} is nan: must be finite"),
    ],
)
def test_invalid_step_of_an_environment_is_refused(env, dtype, message):
    ppo = small_ppo(dtype, env=env)
    first, index = snapshot(ppo.trainer), [each.unwrapped.breaks for each in ppo.envs.vector.envs].index(True)
    with pytest.raises(InvalidEnvironmentError) as refused:
        ppo.iterate()
    message = message.format(f" of environment {index} (of 4) at step 3")
    assert str(refused.value).startswith(f"env={env}: {message}") and same_bits(snapshot(ppo.trainer), first)


def test_large_observation_is_accepted_in_a_wide_range_dtype():
    assert math.isfinite(small_ppo("bfloat16", env="Large-v0").iterate()["approx_kl"])


BY_WORD, KILLED = "command line", "environment (DISABLE_AMP)"


@pytest.mark.parametrize(
    "requested, switch, effective, source",
    [
        *((dtype, None, dtype, BY_WORD) for dtype in DTYPES),
        *(("float16", value, "float32", KILLED) for value in ("1", "true")),
        *(("float16", value, "float16", BY_WORD) for value in ("0", "FALSE")),
    ],
)
def test_amp_is_on_as_requested_unless_it_is_killed(requested, switch, effective, source, monkeypatch):
    if switch is not None:
        monkeypatch.setenv("DISABLE_AMP", switch)
    record = small_ppo(requested, {"use_amp": BY_WORD}).iterate()
    assert record["effective_dtype"] == effective and record["effective_dtype_share"] == {effective: 1.0}
    assert (record["amp_enabled"], record["amp_source"]) == (effective != "float32", source)


@pytest.mark.parametrize("dtype", DTYPES)
def test_networks_compute_in_the_dtype_and_losses_in_fp32(dtype):
    """In rollout, update and evaluation; backward runs outside of autocast."""
    ppo, heads, autocast = small_ppo(dtype), set(), set()
    for head in (ppo.agent.policy_head, ppo.agent.value_head):
        head.register_forward_hook(lambda *passed: heads.add(passed[-1].dtype))
        head.weight.register_hook(lambda _: autocast.add(torch.is_autocast_enabled("cpu")))
    batch = ppo.collect()
    ppo.learn(batch)
    ppo.evaluate(1)
    losses = {value.dtype for terms in ppo.loss_terms for value in terms.values()}
    assert heads == {getattr(torch, dtype)} and losses == {torch.float32} and autocast == {False}
    assert {each.dtype for each in batch if each.is_floating_point()} == {torch.float32}
    if dtype != "float32":  # not fp32 in name only: most values are not representable in 16 bits
        rounded = batch.log_probs.to(getattr(torch, dtype)).float()
        assert (rounded != batch.log_probs).float().mean() > 0.5


def test_unscaled_gradients_are_clipped():
    """Adam's first moment after its first step is a tenth of its gradient."""
    ppo = small_ppo("float16", loss_scale=1024.0, epochs=1, minibatches=1, max_grad_norm=0.01)
    ppo.learn(ppo.collect())
    moments = torch.cat([state["exp_avg"].flatten() for state in ppo.trainer.optimizer.state.values()])
    assert moments.norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_resets_in_a_rollout_leave_every_update():
    ppo = small_ppo(minibatches=8)
    ppo.learn(RolloutBatch(*(each[:13] for each in ppo.collect())))
    assert len(ppo.loss_terms) == SMALL["epochs"] * 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_weight_gets_a_gradient_from_spaces_that_do_not_start_at_0(dtype):
    ppo = small_ppo(dtype, env="Shifted-v0")
    for _ in range(3):  # the first loss scale overflows some times
        ppo.iterate()
    assert ppo.trainer.overflow_steps < ppo.trainer.training_steps
    for name, parameter in ppo.agent.named_parameters():
        assert ppo.trainer.optimizer.state[parameter]["exp_avg"].count_nonzero(), name


@pytest.mark.parametrize(
    "dtype, rollout, least, most",
    [
        *((dtype, dtype, 0.0, most) for dtype, most in zip(DTYPES, (1e-6, 3e-5, 1e-4), strict=True)),  # measured: 0
        ("float16", "float32", 1e-4, 1e-2),  # the control: 2.9e-4
        ("bfloat16", "float32", 5e-4, 1e-2),  # 1.2e-3
    ],
)
def test_ratio_is_one_at_equal_weights_and_dtypes(dtype, rollout, least, most):
    size = {"num_envs": 16, "num_steps": 16, "total_steps": 256}
    learns, acts = small_ppo(dtype, **size), small_ppo(rollout, **size)
    with torch.no_grad():  # as sure of its actions as a trained policy is: rounding shows in its logits
        learns.agent.policy_head.weight.mul_(300)
    acts.agent.load_state_dict(learns.agent.state_dict())
    assert least <= learns.learn(acts.collect())["ratio_deviation"] < most


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_networks_match_eager_ones(dtype):
    torch._dynamo.utils.counters.clear()
    plain, compiled = (small_ppo(dtype, compile=each) for each in (False, True))
    batch, gradients = plain.collect(), []
    for ppo in (plain, compiled):
        with ppo.trainer.precision.autocast("cpu"):  # the trainer's own observes the first time, eagerly
            log_probs, values = ppo.agent(batch.observations)
            loss, _ = ppo_loss(log_probs, values, batch, ppo.config)
        # The graph computes in its own dtype: its outputs are representable in 16 bits, those of fp32 are not.
        assert (values == values.half().float()).all() == (dtype != "float32")
        assert (values == values.bfloat16().float()).all() == (dtype == "bfloat16")
        loss.backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in ppo.agent.parameters()]))
        ppo.trainer.optimizer.zero_grad()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    distance = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert distance < {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}[dtype]
    updates = [compiled.iterate() for _ in range(2)]
    assert updates[-1]["effective_dtype"] == dtype and updates[0]["ratio_deviation"] < 1e-2
    assert [*compiled.trainer.module.state_dict()] == [*plain.trainer.module.state_dict()], "names in a checkpoint"


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_seed_repeats_the_run(dtype):
    one, again, other = (small_ppo(dtype, seed=seed) for seed in (1, 1, 2))
    for ppo in (one, again, other):
        ppo.iterate()
    one_state, same, different = (snapshot(each.trainer) for each in (one, again, other))
    assert same_bits(one_state, same) and not same_bits(one_state["trained"], different["trained"])
    assert same_bits(list(one.collect()), list(again.collect()))


def test_speed_is_of_rollout_and_update(monkeypatch):
    learn = PPO.learn
    monkeypatch.setattr(PPO, "learn", lambda ppo, batch: time.sleep(0.2) or learn(ppo, batch))
    assert small_ppo().iterate()["steps_per_second"] < 32 / 0.2


def test_learning_rate_falls_to_zero():
    ppo, rates = small_ppo(learning_rate=0.003), []
    for _ in range(3):
        rates.append(ppo.iterate()["learning_rate"])
        assert ppo.trainer.optimizer.param_groups[0]["lr"] == rates[-1]
    assert rates == pytest.approx([0.003, 0.002, 0.001])


ON_GPU = [pytest.param("cuda", dtype, 45_056, 120, marks=pytest.mark.gpu) for dtype in DTYPES]


@pytest.mark.subprocess
@pytest.mark.parametrize("device, dtype, steps, least", [("cpu", "float16", 32_768, 80), *ON_GPU])
def test_training_raises_the_return(device, dtype, steps, least):
    """Train with a fifth of the default steps or some more; an untrained policy returns 22."""
    ppo = PPO(replace(PPOConfig(), total_steps=steps, device=device, **amp_settings(dtype)))
    first = ppo.iterate()["return_mean"]
    while ppo.updates < ppo.config.updates:
        last = ppo.iterate()
        assert last["ratio_deviation"] < {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}[dtype]
    assert last["effective_dtype"] == dtype and last["overflow_rate"] < 0.05
    assert first < 40 and last["return_mean"] > least, (first, last["return_mean"])
