"""The first non-finite gradient is described, with and without a process group."""

import pytest
import torch
from precision import GradScalerConfig, LossScaleError, LossScaler, first_nonfinite_gradient


def storm_of(*gradients: torch.Tensor) -> str:
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return first_nonfinite_gradient((f"layer{i}", p) for i, p in enumerate(parameters))


def test_the_first_nonfinite_gradient_is_described(one_rank):
    inf, nan = float("inf"), float("nan")
    found = storm_of(torch.ones(2), torch.tensor([1.0, -3e4, inf, nan]), torch.tensor([nan]))
    assert found == "layer1 in the shard of rank 0, 2 of 4 elements, the largest other 3e+04 (scaled)"
    assert storm_of(torch.tensor([nan])) == "layer0 in the shard of rank 0, 1 of 1 elements, no other"
    assert storm_of(torch.zeros(0), torch.tensor([inf, 0.0])).startswith("layer1")
    assert storm_of(torch.full((2,), 3e38)) == "none, but their norm leaves fp32"


def test_the_first_gradient_of_all_ranks_is_described(one_rank, monkeypatch):
    """By its place in the model, not by its rank or its name."""
    inf = torch.tensor([float("inf")])
    others = [(1, 0, "zero in the shard of rank 1"), None, (3, 0, "a in the shard of rank 3")]

    def gather(into: list, own: tuple) -> None:
        into[:] = [own, *others]

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert storm_of(torch.ones(1), torch.ones(1), inf) == "zero in the shard of rank 1"
    assert storm_of(inf, inf).startswith("layer0 in the shard of rank 0")
    assert storm_of(torch.ones(1)) == "zero in the shard of rank 1"


@pytest.mark.parametrize("fused", [False, True])
def test_a_storm_without_a_process_group_is_described(fused):
    assert storm_of(torch.ones(2), torch.tensor([float("nan")])).startswith("layer1 in the shard of rank 0, 1 of 1")
    module = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.AdamW(module.parameters(), fused=fused)
    scaler = LossScaler(GradScalerConfig(init_scale=8.0, max_consecutive_skips=2), "cpu")
    with pytest.raises(LossScaleError, match="2 optimizer steps in a row .*, loss scale 4, .*: weight in"):
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(module(torch.ones(1, 2)).sum() * float("inf")).backward()
            scaler.clip_and_step(optimizer, module, 1.0)
    assert scaler.consecutive_skips == 2
