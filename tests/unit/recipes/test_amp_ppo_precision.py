"""PPO in 16 bits: when autocast is on, the code that it covers, tensors that stay fp32, and the initial ratio of 1."""

import math
from dataclasses import replace

import pytest
import torch
from amp_commands import records, run, words
from amp_ppo_cases import DTYPES, SMALL, amp_settings, small_ppo, weights

from recipes.amp.ppo import __main__ as command
from recipes.amp.ppo.agent import masked_log_softmax
from recipes.amp.ppo.algorithm import PPO
from recipes.amp.ppo.config import PPOConfig
from recipes.amp.ppo.objective import ppo_loss

BY_WORD, KILLED = "command line", "environment (DISABLE_AMP)"

# --- when autocast is on


@pytest.mark.parametrize(
    "requested, sources, switch, effective, source",
    [
        ("float32", {}, None, "float32", "default"),
        *((dtype, {"use_amp": BY_WORD}, None, dtype, BY_WORD) for dtype in DTYPES),
        *(("float16", {"use_amp": BY_WORD}, value, "float32", KILLED) for value in ("1", "true")),
        *(("float16", {"use_amp": BY_WORD}, value, "float16", BY_WORD) for value in ("0", "FALSE")),
    ],
)
def test_amp_is_on_as_requested_unless_it_is_killed(requested, sources, switch, effective, source, monkeypatch):
    if switch is not None:
        monkeypatch.setenv("DISABLE_AMP", switch)
    record = small_ppo(requested, sources).iterate()
    assert record["effective_dtype"] == effective and record["effective_dtype_share"] == {effective: 1.0}
    assert (record["amp_enabled"], record["amp_source"]) == (effective != "float32", source)


def test_kill_switch_overrides_the_command_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("DISABLE_AMP", "1")
    run(command, *words(**SMALL), "--use-amp", f"--out={tmp_path}")
    assert {record["effective_dtype"] for record in records(tmp_path)} == {"float32"}
    assert f"AMP off ({KILLED})" in capsys.readouterr().out.splitlines()[0]


def test_unnamed_cpu_falls_back_to_fp32(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="training in float32"):
        record = small_ppo("float16", device="auto").iterate()
    assert (record["amp_enabled"], record["effective_dtype"]) == (False, "float32")
    assert record["fallback"].startswith("the model is on the CPU: training in float32, not float16")


# --- the autocast region, and fp32 tensors


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_runs_in_autocast_and_backward_outside(dtype):
    """The update's effective dtype is reported, not the rollout's."""
    ppo, autocast = small_ppo(dtype), {"forward": set(), "backward": set()}
    batch = ppo.collect()
    assert ppo.precision()["effective_dtype"] is None
    head = ppo.agent.policy_heads[0]
    head.register_forward_hook(lambda *_: autocast["forward"].add(torch.is_autocast_enabled("cpu")))
    head.weight.register_hook(lambda _: autocast["backward"].add(torch.is_autocast_enabled("cpu")))
    ppo.learn(batch)
    assert autocast == {"forward": {dtype != "float32"}, "backward": {False}}
    assert ppo.precision()["effective_dtype"] == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_rollout_batch_and_loss_are_fp32(dtype):
    ppo, heads = small_ppo(dtype), set()
    for head in (*ppo.agent.policy_heads, ppo.agent.value_head):
        head.register_forward_hook(lambda *passed: heads.add(passed[-1].dtype))
    batch = ppo.collect()
    with ppo.trainer.autocast():
        loss = ppo.loss(ppo.agent, batch)
    losses = {loss.dtype, *(value.dtype for value in ppo.loss_terms[-1].values())}
    ppo.evaluate(1)
    assert heads == {getattr(torch, dtype)} and losses == {torch.float32}
    floats = [each for each in batch if each.is_floating_point()]
    assert {each.dtype for each in floats} == {torch.float32} and len(floats) == 4
    if dtype != "float32":  # not fp32 in name only: most values are not representable in 16 bits
        rounded = batch.log_probs.to(getattr(torch, dtype)).float()
        assert (rounded != batch.log_probs).float().mean() > 0.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_log_softmax_is_finite_in_every_dtype(dtype):
    assert torch.tensor(-1e9).half().isinf(), "the mistake under test"
    logits = torch.randn(5, 6).to(getattr(torch, dtype)).requires_grad_()
    allowed = torch.zeros(5, 6, dtype=torch.bool)
    allowed[torch.arange(5), torch.arange(5)] = True
    allowed[0] = True
    (log_probs,) = masked_log_softmax(logits.float(), allowed, [6])
    probabilities = log_probs.exp()
    assert log_probs.isfinite().all() and (probabilities[~allowed] == 0).all()
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(5))
    entropy = -(probabilities * log_probs).sum()
    (entropy + log_probs[allowed].sum()).backward()
    assert logits.grad.isfinite().all() and logits.grad[0].count_nonzero() and entropy > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_action_is_never_taken(dtype):
    ppo = small_ppo(dtype, env="Taxi-v4", num_steps=32, total_steps=384)
    for _ in range(3):
        batch = ppo.collect()
        assert batch.allowed.gather(-1, batch.actions).all() and not batch.allowed.all()
        assert all(map(math.isfinite, ppo.learn(batch).values()))
    assert all(tensor.isfinite().all() for tensor in ppo.agent.state_dict().values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_unscaled_gradients_are_clipped(dtype):
    """Adam's first moment after its first step is a tenth of its gradient."""
    ppo = small_ppo(dtype, loss_scale=1024.0, epochs=1, minibatches=1, max_grad_norm=0.01)
    ppo.learn(ppo.collect())
    moments = torch.cat([state["exp_avg"].flatten() for state in ppo.trainer.optimizer.state.values()])
    assert moments.norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_head_gets_a_gradient(dtype):
    ppo = small_ppo(dtype, env="Factors-v0")  # without an entropy bonus, which would reach them too
    first = weights(ppo)
    for _ in range(3):  # the first loss scale overflows some times
        ppo.iterate()
    assert ppo.trainer.overflow_steps < ppo.trainer.training_steps
    assert len(ppo.agent.policy_heads) == 3
    for name, parameter in ppo.agent.named_parameters():
        assert ppo.trainer.optimizer.state[parameter]["exp_avg"].count_nonzero(), name
        assert not torch.equal(parameter, first[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_observation_is_accepted_in_wide_range_dtypes(dtype):
    assert math.isfinite(small_ppo(dtype, env="Large-v0").iterate()["approx_kl"])


# --- the ratio of new to old probabilities


def deviation(dtype: str, rollout: str) -> float:
    """Return the ratio's deviation from 1 at equal weights, after a rollout in ``rollout``."""
    size = {"num_envs": 16, "num_steps": 16, "total_steps": 256}
    learns, acts = small_ppo(dtype, **size), small_ppo(rollout, **size)
    with torch.no_grad():  # as sure of its actions as a trained policy is: rounding shows in its logits
        learns.agent.policy_heads[0].weight.mul_(300)
    acts.agent.load_state_dict(learns.agent.state_dict())
    return learns.learn(acts.collect())["ratio_deviation"]


@pytest.mark.parametrize(
    "dtype, rollout, least, most",
    [
        *((dtype, dtype, 0.0, most) for dtype, most in zip(DTYPES, (1e-6, 3e-5, 1e-4), strict=True)),  # measured: 0
        ("float16", "float32", 1e-4, 1e-2),  # the control: 2.9e-4
        ("bfloat16", "float32", 5e-4, 1e-2),  # 1.2e-3
    ],
)
def test_ratio_is_one_at_equal_weights_and_dtypes(dtype, rollout, least, most):
    assert least <= deviation(dtype, rollout) < most


# --- torch.compile and CUDA


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_networks_match_eager_ones(dtype):
    torch._dynamo.utils.counters.clear()
    plain, compiled = (small_ppo(dtype, compile=each) for each in (False, True))
    batch, gradients = plain.collect(), {}
    for name, ppo in {"plain": plain, "compiled": compiled}.items():
        with ppo.trainer.precision.autocast("cpu"):  # the trainer's own observes the first time, eagerly
            logits, _ = ppo.agent(batch.observations)
            loss, _ = ppo_loss(logits, *ppo.agent(batch.observations)[1:], batch, [2], ppo.config)
        # The graph computes in its own dtype: its outputs are representable in 16 bits, those of fp32 are not.
        assert (logits == logits.half().float()).all() == (dtype == "float16")
        assert (logits == logits.bfloat16().float()).all() == (dtype == "bfloat16")
        loss.backward()
        gradients[name] = torch.cat([parameter.grad.flatten() for parameter in ppo.agent.parameters()])
        ppo.trainer.optimizer.zero_grad()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    distance = (gradients["compiled"] - gradients["plain"]).norm() / gradients["plain"].norm()
    assert distance < {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}[dtype]
    updates = [compiled.iterate() for _ in range(2)]
    assert updates[-1]["effective_dtype"] == dtype and updates[0]["ratio_deviation"] < 1e-2
    names, plain_names = (list(ppo.trainer.module.state_dict()) for ppo in (compiled, plain))
    assert names == plain_names, "a checkpoint's names of the weights"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_trains_in_every_dtype(dtype):
    ppo = PPO(replace(PPOConfig(), total_steps=45_056, device="cuda", **amp_settings(dtype)))
    while ppo.updates < ppo.config.updates:
        last = ppo.iterate()
        assert last["ratio_deviation"] < {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}[dtype]
    assert last["effective_dtype"] == dtype and last["return_mean"] > 120
