"""Wrong claims about mixed precision, which docs/explanation/evidence.md lists, each tested on torch's own code."""

import math
import re

import pytest
import torch
from amp_trainer_cases import INF, batches, loss_of, network, train, trainer
from torch.amp import GradScaler

from recipes.amp.multiplication_dtypes import MultiplicationDtypes
from verl.utils.precision import GradScalerConfig, LossScaler
from verl_precision.paths import REPO

EVIDENCE = REPO / "docs/explanation/evidence.md"


def torchs_steps(scaler: GradScaler, factors: list[float], clear: bool = True) -> list[tuple[float, float, bool]]:
    """Return the scale before and after ``update()``, and whether the step ran, for a loss times each factor."""
    model, steps = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer.register_step_post_hook(lambda *_: ran.append(True))
    for factor in factors:
        ran: list[bool] = []
        scaler.scale(loss_of(model, batches(1)[0]) * factor).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        steps.append((before, scaler.get_scale(), bool(ran)))
        if clear or ran:
            optimizer.zero_grad()
    return steps


def test_scale_read_after_update_never_shows_an_overflow():
    """``step(); update(); before = get_scale(); …; overflow = get_scale() < before`` compares a number with itself.

    Comparing the scale before and after ``update()`` detects overflows of torch's scaler, but none at a floor.
    """
    steps = torchs_steps(GradScaler("cpu", init_scale=1024.0), [1.0, INF, 1.0])
    assert steps == [(1024, 1024, True), (1024, 512, False), (512, 512, True)]

    floored, steps = trainer(loss_scale=2.0, min_scale=1.0), []
    for factor in (INF, INF, 1.0):
        before = floored.get_stats()["current_scale"]
        floored.training_step(batches(1)[0] * factor, loss_of)
        steps.append((before, floored.get_stats()["current_scale"], floored.skipped))
    assert steps == [(2, 1, True), (1, 1, True), (1, 1, False)] and floored.overflow_steps == 2


@pytest.mark.parametrize("right", [False, True])
def test_clipping_scaled_gradients_divides_the_norm_by_the_scale(right):
    model, scaler = network(), GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler.scale(loss_of(model, batches(1)[0])).backward()
    if right:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    moved = [new - old for new, old in zip(model.parameters(), network().parameters(), strict=True)]
    expected = 0.5 if right else 0.5 / 1024
    assert torch.nn.utils.get_total_norm(moved).item() == pytest.approx(expected, rel=1e-3)


def test_there_is_no_overflow_buffer():
    assert not hasattr(GradScaler("cpu"), "_get_overflow_buffer")
    assert not hasattr(LossScaler(GradScalerConfig(), "cpu"), "_get_overflow_buffer")


def test_scaler_keeps_no_master_weights():
    """It contains a scale and a count. It refuses fp16 weights, on which SGD loses small steps and Adam gives NaN."""
    scaler = GradScaler("cpu")
    torchs_steps(scaler, [1e-3])
    tensors = [value for value in vars(scaler).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 2 and all(tensor.numel() == 1 for tensor in tensors)
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    scaler.scale(weight.sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.step(torch.optim.SGD([weight], lr=1e-4))

    for dtype, moved in ((torch.float16, 0.0), (torch.float32, 1e-4)):
        weight = torch.nn.Parameter(torch.ones(4, dtype=dtype))
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=1e-4).step()
        assert 1.0 - weight[0].item() == pytest.approx(moved, rel=1e-2)
        weight.grad = torch.zeros_like(weight)
        torch.optim.Adam([weight]).step()  # 0 / (0 + 1e-8), and 1e-8 is 0 in fp16
        assert weight.isfinite().all() == (dtype == torch.float32)


def test_skipping_without_zero_grad_skips_every_further_step():
    poisoned = torchs_steps(GradScaler("cpu", init_scale=1024.0), [INF] + [1.0] * 9, clear=False)
    assert not any(ran for *_, ran in poisoned) and poisoned[-1][1] == 1.0  # ten times half of 1024
    cleared = torchs_steps(GradScaler("cpu", init_scale=1024.0), [INF] + [1.0] * 9)
    assert [ran for *_, ran in cleared] == [False] + [True] * 9


def test_benchmark_labelled_fp16_may_run_in_fp32():
    """Without a GPU, an arm configured as fp16 is bit-identical to the fp32 arm; the effective dtype reports it."""
    with pytest.warns(UserWarning, match="training in float32"):
        called_fp16 = trainer(on_cpu=False)
    arms = {"fp32": trainer(enabled=False), "called fp16": called_fp16, "fp16": trainer()}
    losses = {name: train(arm, batches(5)) for name, arm in arms.items()}
    assert losses["called fp16"] == losses["fp32"] != losses["fp16"]
    effective = {name: arm.get_stats()["effective_dtype"] for name, arm in arms.items()}
    assert effective == {"fp32": "float32", "called fp16": "float32", "fp16": "float16"}


def test_output_dtype_may_differ_from_the_matmul_dtype():
    layer, given = torch.nn.GRU(4, 8, batch_first=True), torch.randn(2, 5, 4)
    with torch.autocast("cpu", torch.float16), MultiplicationDtypes() as counted:
        out, _ = layer(given)
    assert out.dtype == torch.float32 and counted.shares() == {"float16": 1.0}

    with MultiplicationDtypes() as counted:
        out = torch.nn.Linear(4, 8)(given).half()
    assert out.dtype == torch.float16 and counted.shares() == {"float32": 1.0}


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("float16", 2)])
def test_weights_gradients_and_adam_take_as_much_memory_as_in_fp32(dtype, size):
    """Only activations saved for the backward are halved; 16-bit copies of the weights come on top."""
    trained, saved = trainer(dtype=dtype), []
    train(trained, batches(1))
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, torch.clone)
    with hooks, trained.autocast():
        hidden = trained.module[1](trained.module[0](torch.ones(512, 6)))
    hidden.sum().backward()
    state = [value for each in trained.optimizer.state.values() for value in each.values()]
    tensors = [*trained.module.parameters(), trained.module[0].weight.grad, *state]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    assert {tensor.element_size() for tensor in saved if tensor.shape == (512, 16)} == {size}


def test_amp_on_a_cpu_runs_other_operations():
    """Kernels differ and casts are added, so durations differ too; docs/results/amp-bench-cpu.md has them."""
    for enabled, share in ((False, {"float32": 1.0}), (True, {"float16": 1.0})):
        with torch.profiler.profile() as profile, torch.autocast("cpu", torch.float16, enabled=enabled):
            with MultiplicationDtypes() as counted:
                network()(batches(1)[0])
        casts = [event for event in profile.events() if event.name == "aten::_to_copy"]
        assert counted.shares() == share
        assert len(casts) >= 5 if enabled else not casts  # the input, and the weight and the bias of both layers


def masked_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Return the entropy bonus with the third action masked."""
    allowed = torch.tensor([True, True, False])
    masked = torch.where(allowed, logits, torch.tensor(-1e9, dtype=logits.dtype))
    log_probs = masked.log_softmax(-1)
    return (log_probs.exp() * log_probs).sum(-1).mean()


def clipped_surrogate(logits: torch.Tensor) -> torch.Tensor:
    """Return PPO's loss at a negative advantage of an action that was sampled at exp(-13) and has become likely."""
    ratio = (logits.log_softmax(-1)[:, 0] + 13.0).exp()
    advantage = torch.tensor(-1.0)
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


@pytest.mark.parametrize("policy_loss", [masked_entropy, clipped_surrogate])
def test_policy_loss_of_fp16_logits_has_no_finite_gradient(policy_loss):
    """-1e9 is -inf in fp16, and 0 times -inf is NaN; exp(11.1) is inf. The same loss in fp32 has neither.

    CUDA's fp32 list contains log_softmax and exp, the CPU's does not; ``.float()`` works on both.
    """
    assert torch.tensor(-1e9).half() == -INF and 11.0 < math.log(torch.finfo(torch.float16).max) < 11.1
    torch.manual_seed(0)
    head, given = torch.nn.Linear(4, 3), torch.randn(8, 4)
    for dtype in (torch.float16, torch.float32):
        head.zero_grad()
        with torch.autocast("cpu", torch.float16):
            logits = head(given)
            assert logits.dtype == logits.log_softmax(-1).dtype == logits.exp().dtype == torch.float16
            policy_loss(logits.to(dtype)).backward()
        allowed = head.weight.grad[:2]
        assert allowed.isfinite().any() == allowed.isfinite().all() == (dtype == torch.float32)
    assert head.weight.grad.abs().max() > 0


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_no_grad_forward_leaves_the_autocast_cache_usable(without):
    """Older versions of torch cached 16-bit weights without a gradient for the rest of the region."""
    model, batch = network(), batches(1)[0]
    with torch.autocast("cpu", torch.float16):
        with without():
            loss_of(model, batch)
        loss = loss_of(model, batch)
    loss.float().backward()
    assert all(parameter.grad.any() for parameter in model.parameters())


def test_autocast_cache_ignores_weight_changes_inside_the_region():
    """Optimizer steps, target network updates and loads therefore belong outside the region."""
    layer, given = torch.nn.Linear(6, 1, bias=False), batches(1)[0]
    with torch.autocast("cpu", torch.float16):
        before = layer(given)
        layer.weight.data.mul_(2.0)
        assert torch.equal(layer(given), before)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(layer(given), 2 * before)


def test_page_names_a_test_for_every_claim():
    section = EVIDENCE.read_text().partition("## Claims about AMP")[2].partition("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| ")][1:]
    named = [re.findall(r"`(test_\w+)`", row) for row in rows]
    assert len(rows) >= 9 and all(named)
    here = {name for name in globals() if name.startswith("test_")} - {"test_page_names_a_test_for_every_claim"}
    assert {name for names in named for name in names} == here
