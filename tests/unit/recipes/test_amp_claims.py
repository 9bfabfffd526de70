"""Wrong claims about mixed precision, each tested on torch's own code with the correct behaviour.

docs/amp.md lists them and names these tests.
"""

import math
import re
from collections.abc import Callable

import pytest
import torch
from amp_trainer_cases import INF, batches, loss_of, network, trainer
from torch.amp import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode

from lib.paths import REPO
from recipes.amp.multiplication_dtypes import MultiplicationDtypes
from verl.utils.precision import GradScalerConfig, LossScaler

GUIDE = REPO / "docs" / "amp.md"


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
    """``step(); update(); before = get_scale(); …; overflow = get_scale() < before`` compares a number with itself."""
    scaler, detected = GradScaler("cpu", init_scale=1024.0), []
    for _ in range(5):
        torchs_steps(scaler, [INF])
        before = scaler.get_scale()
        detected.append(scaler.get_scale() < before)
    assert scaler.get_scale() == 1024.0 / 2**5 and not any(detected)


def test_scale_at_its_floor_does_not_fall_on_overflow():
    """Comparing the scale before and after ``update()`` detects overflows of torch's scaler, but none at a floor."""
    assert torchs_steps(GradScaler("cpu", init_scale=1024.0), [1.0, INF]) == [(1024, 1024, True), (1024, 512, False)]

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
    assert not scaler._per_optimizer_states

    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    scaler.scale(weight.sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.step(torch.optim.SGD([weight], lr=1e-4))

    for dtype, moved in ((torch.float16, 0.0), (torch.float32, 0.01)):
        weight = torch.nn.Parameter(torch.ones(4, dtype=dtype))
        optimizer = torch.optim.SGD([weight], lr=1e-4)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        assert 1.0 - weight[0].item() == pytest.approx(moved, abs=1e-5)  # 100 steps of 1e-4

    for dtype, finite in ((torch.float16, False), (torch.float32, True)):
        weight = torch.nn.Parameter(torch.ones(4, dtype=dtype))
        weight.grad = torch.zeros_like(weight)
        torch.optim.Adam([weight]).step()  # 0 / (0 + 1e-8), and 1e-8 is 0 in fp16
        assert weight.isfinite().all() == finite


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
    losses = {name: [arm.training_step(batch, loss_of).item() for batch in batches(5)] for name, arm in arms.items()}
    assert losses["called fp16"] == losses["fp32"] != losses["fp16"]
    effective = {name: arm.get_stats()["effective_dtype"] for name, arm in arms.items()}
    assert effective == {"fp32": "float32", "called fp16": "float32", "fp16": "float16"}
    assert called_fp16.get_stats()["requested_dtype"] == "float16"


def test_output_dtype_may_differ_from_the_matmul_dtype():
    layer, given = torch.nn.GRU(4, 8, batch_first=True), torch.randn(2, 5, 4)
    with torch.autocast("cpu", torch.float16), MultiplicationDtypes() as counted:
        out, _ = layer(given)
    assert out.dtype == torch.float32 and counted.shares() == {"float16": 1.0}

    with MultiplicationDtypes() as counted:
        out = torch.nn.Linear(4, 8)(given).half()
    assert out.dtype == torch.float16 and counted.shares() == {"float32": 1.0}


def test_weights_gradients_and_adam_take_as_much_memory_as_in_fp32():
    """Only activations saved for the backward are halved; 16-bit copies of the weights come on top."""
    state_bytes, kept = {}, {}
    for dtype in ("float32", "float16"):
        trained, saved = trainer(dtype=dtype), {}
        trained.training_step(batches(1)[0], loss_of)
        own = {parameter.data_ptr() for parameter in trained.module.parameters()}

        def pack(tensor: torch.Tensor, saved=saved, own=own) -> torch.Tensor:
            if tensor.data_ptr() not in own:
                saved[tensor.data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), trained.autocast():
            hidden = trained.module[1](trained.module[0](torch.ones(512, 6)))
        hidden.sum().backward()
        state = [value for each in trained.optimizer.state.values() for value in each.values()]
        tensors = [*trained.module.parameters(), *(p.grad for p in trained.module[0].parameters()), *state]
        state_bytes[dtype] = sum(tensor.nbytes for tensor in tensors)
        kept[dtype] = {tuple(tensor.shape): tensor.element_size() for tensor in saved.values()}
    assert state_bytes["float16"] == state_bytes["float32"]
    assert kept["float32"][512, 16] == 4 and kept["float16"][512, 16] == 2


class Operations(TorchDispatchMode):
    """Record the operations that run, with the dtypes of their outputs."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.calls.append((str(operation), out.dtype))
        return out


def test_amp_on_a_cpu_runs_other_operations():
    """Kernels differ and casts are added, so durations differ too; docs/results/amp-bench-cpu.md has them."""
    calls, outputs = {}, {}
    for enabled in (False, True):
        model = network()
        with Operations() as operations, torch.autocast("cpu", torch.float16, enabled=enabled):
            outputs[enabled] = model(batches(1)[0]).float()
        calls[enabled] = operations.calls
    matmul = "aten.addmm.default"
    assert (matmul, torch.float32) in calls[False] and (matmul, torch.float16) in calls[True]
    casts = [sum(operation == "aten._to_copy.default" for operation, _ in calls[enabled]) for enabled in (False, True)]
    assert casts[0] == 0 and casts[1] >= 5  # the input, and the weight and the bias of both layers
    assert (matmul, torch.float32) not in calls[True]
    assert not torch.equal(outputs[False], outputs[True])


def gradient_of_a_head(policy_loss: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the gradient of a policy's last layer under fp16 autocast if the loss gets logits (8, 3) in ``dtype``."""
    torch.manual_seed(0)
    head = torch.nn.Linear(4, 3)
    with torch.autocast("cpu", torch.float16):
        logits = head(torch.randn(8, 4))
        assert logits.dtype == torch.float16
        policy_loss(logits.to(dtype)).backward()
    return head.weight.grad


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
    """-1e9 is -inf in fp16, and 0 times -inf is NaN; exp(11.1) is inf. The same loss in fp32 has neither."""
    assert torch.tensor(-1e9).half() == -INF and 11.0 < math.log(torch.finfo(torch.float16).max) < 11.1
    assert not gradient_of_a_head(policy_loss, torch.float16)[:2].isfinite().any()  # both allowed actions
    gradient = gradient_of_a_head(policy_loss, torch.float32)
    assert gradient.isfinite().all() and gradient.abs().max() > 0


def test_autocast_on_a_cpu_leaves_log_softmax_in_fp16():
    """CUDA's fp32 list contains log_softmax and exp, the CPU's does not; ``.float()`` works on both."""
    with torch.autocast("cpu", torch.float16):
        logits = torch.nn.Linear(4, 3)(torch.ones(1, 4))
        assert logits.log_softmax(-1).dtype == logits.exp().dtype == torch.float16
        assert logits.float().log_softmax(-1).dtype == torch.float32


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_no_grad_forward_leaves_the_autocast_cache_usable(dtype, without, cache):
    """Older versions of torch cached 16-bit weights without a gradient for the rest of the region."""
    gradients = []
    for first in (False, True):
        model, batch = network(), batches(1)[0]
        with torch.autocast("cpu", dtype, cache_enabled=cache):
            if first:
                with without():
                    loss_of(model, batch)
            loss = loss_of(model, batch)
        loss.float().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) and one.any() for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("first", [torch.enable_grad, torch.no_grad])
def test_autocast_cache_ignores_weight_changes_inside_the_region(first):
    """Optimizer steps, target network updates and loads therefore belong outside the region."""
    layer, given = torch.nn.Linear(6, 1), batches(1)[0]

    def twice() -> None:
        with torch.no_grad():
            layer.weight.mul_(2.0), layer.bias.mul_(2.0)

    with torch.autocast("cpu", torch.float16):
        with first():
            before = layer(given)
        twice()
        stale = layer(given)
    with torch.autocast("cpu", torch.float16):
        after = layer(given)
    assert torch.equal(stale, before) and torch.equal(after, 2 * before)
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        before = layer(given)
        twice()
        assert torch.equal(layer(given), 2 * before)


def test_guide_names_a_test_for_every_claim():
    section = GUIDE.read_text().partition("## Claims that are wrong")[2].partition("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| ")][1:]
    named = [re.findall(r"`(test_\w+)`", row) for row in rows]
    assert len(rows) >= 9 and all(named)
    here = {name for name in globals() if name.startswith("test_")} - {"test_guide_names_a_test_for_every_claim"}
    assert {name for names in named for name in names} == here
