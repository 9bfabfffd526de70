# Copyright 2025 Individual Contributor: the verl-precision authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""What a step that overflows on only one rank does to an FSDP2 engine on two ranks, and what a checkpoint keeps."""

import math

import pytest
import torch
from gloo_engine import make_worker, run_on_gloo, train

CHECKPOINT = {"save_contents": ["model", "optimizer", "extra"], "load_contents": ["model", "optimizer", "extra"]}


def poison(worker, value: float, rank: int = 1) -> None:
    """Put ``value`` into one element of one gradient of ``rank``, after the next backward pass, once."""
    engine, forward_backward_batch = worker.engine, worker.engine.forward_backward_batch

    def poisoned(*args, **kwargs):
        engine.forward_backward_batch = forward_backward_batch
        output = forward_backward_batch(*args, **kwargs)
        if torch.distributed.get_rank() == rank:
            gradient = next(p.grad for p in engine.module.parameters() if p.grad is not None)
            gradient.to_local().view(-1)[0] = value
        return output

    engine.forward_backward_batch = poisoned


def state(worker) -> list[torch.Tensor]:
    """Weights and Adam state of this rank, as clones."""
    tensors = list(worker.engine.module.parameters())
    for entry in worker.engine.optimizer.state.values():
        tensors += entry.values()
    return [(t.to_local() if hasattr(t, "to_local") else t).detach().clone() for t in tensors]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def overflow() -> dict:
    """One clean update, then one whose only step has an inf on rank 1, then one more clean one."""
    worker = make_worker(dtype="float16")
    clean = train(worker)
    before, scale = state(worker), worker.engine.scaler.get_scale()
    poison(worker, math.inf)
    skipped = train(worker, seed=1)
    unchanged = same(before, state(worker))
    after = train(worker, seed=2)
    return {
        "unchanged": unchanged,
        "moves on": not same(before, state(worker)),
        "scale": worker.engine.scaler.get_scale() / scale,
        "lr": [metrics["lr"] for metrics in (clean, skipped, after)],
        "grad_norm": [metrics.get("grad_norm") for metrics in (clean, skipped, after)],
        "skipped_steps": [metrics.get("skipped_steps") for metrics in (clean, skipped, after)],
        "loss_scale": [metrics.get("loss_scale") for metrics in (clean, skipped, after)],
    }


def resume() -> dict:
    from verl.utils.precision import GradScalerConfig

    saved = make_worker(checkpoint=CHECKPOINT, dtype="float16", grad_scaler=GradScalerConfig(init_scale=512.0))
    train(saved)
    poison(saved, math.inf)
    train(saved, seed=1)
    saved.engine.save_checkpoint("checkpoint")
    resumed = make_worker(checkpoint=CHECKPOINT, dtype="float16", grad_scaler=GradScalerConfig(growth_interval=3))
    resumed.engine.load_checkpoint("checkpoint", del_local_after_load=False)
    outcome = {
        "scale": resumed.engine.scaler.get_scale(),
        "settings": resumed.engine.scaler.get_growth_interval(),
        "state": same(state(saved), state(resumed)),
    }
    norms = [train(worker, seed=2)["grad_norm"] for worker in (saved, resumed)]
    outcome["next step"] = norms[0] == norms[1] and same(state(saved), state(resumed))
    return outcome


def scalers() -> dict:
    """Which models have a loss scaler: those that are trained in fp16."""
    return {
        "forward only": make_worker(dtype="float16", forward_only=True).engine.scaler,
        "bfloat16": make_worker().engine.scaler,
    }


def unrequested() -> dict:
    """The metrics and the scaler's entry of a checkpoint of an update for which no key requests a precision."""
    worker = make_worker(checkpoint=CHECKPOINT)
    metrics = train(worker)
    worker.engine.save_checkpoint("unrequested")
    rank = torch.distributed.get_rank()
    extra = torch.load(f"unrequested/extra_state_world_size_2_rank_{rank}.pt", weights_only=False)
    named = sorted(metrics.keys() & {"grad_norm", "skipped_steps", "loss_scale"})
    return {"metrics": named, "extra": "grad_scaler" in extra}


def storm() -> str:
    from verl.utils.precision import GradScalerConfig

    worker = make_worker(dtype="float16", grad_scaler=GradScalerConfig(init_scale=8.0, max_consecutive_skips=2))
    try:
        for seed in range(3):
            poison(worker, math.nan)
            train(worker, seed)
    except RuntimeError as error:
        return str(error)
    return "no error"


def each_by_itself() -> dict:
    """Every case, so that one that raises does not hide the others."""
    outcomes = {}
    for case in (overflow, resume, scalers, unrequested, storm):
        try:
            outcomes[case.__name__] = case()
        except Exception as error:
            outcomes[case.__name__] = f"{type(error).__name__}: {error}"
    return outcomes


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return run_on_gloo(each_by_itself, ranks=2)


def test_both_ranks_skip_to_the_bit_and_go_on(ranks):
    for rank in ranks:
        assert rank["overflow"]["unchanged"] and rank["overflow"]["moves on"]
        assert rank["overflow"]["scale"] == 0.5


def test_the_learning_rate_is_held_in_an_update_without_a_step(ranks):
    clean, skipped, after = ranks[0]["overflow"]["lr"]
    assert clean == skipped < after


def test_a_skip_is_counted_and_leaves_no_grad_norm(ranks):
    overflow = ranks[0]["overflow"]
    assert overflow["skipped_steps"] == [0.0, 1.0, 0.0]
    assert overflow["loss_scale"] == [65536.0, 32768.0, 32768.0]
    clean, skipped, after = overflow["grad_norm"]
    assert skipped is None and 0 < clean < 1e3 and 0 < after < 1e3


def test_a_checkpoint_keeps_the_scale_and_the_next_step_is_equal_to_the_bit(ranks):
    for rank in ranks:
        assert rank["resume"] == {"scale": 256.0, "settings": 3, "state": True, "next step": True}


def test_only_a_model_that_is_trained_in_fp16_has_a_scaler(ranks):
    assert ranks[0]["scalers"] == {"forward only": None, "bfloat16": None}


def test_without_a_request_nothing_is_counted_or_saved(ranks):
    assert all(rank["unrequested"] == {"metrics": ["grad_norm"], "extra": False} for rank in ranks)


def test_a_storm_ends_on_every_rank_and_names_the_rank_that_holds_it(ranks):
    for rank in ranks:
        assert "2 optimizer steps in a row overflowed" in rank["storm"]
        assert "in the shard of rank 1" in rank["storm"]
