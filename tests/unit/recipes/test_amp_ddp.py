"""The trainer in two processes under DDP: synchronisation, skips and checkpoints."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import amp_trainer_cases
import pytest
import torch
import torch.distributed as dist
from amp_trainer_cases import INF, loss_of, network, train
from support.waiting import STUCK_S
from torch.nn.parallel import DistributedDataParallel

from recipes.amp.trainer import FP16Trainer

pytestmark = [pytest.mark.subprocess, pytest.mark.slow]
RANKS, PARTS = 2, 3


def data(update: int) -> torch.Tensor:
    """Return the batches of an update: (micro-batches, ranks, rows, features)."""
    return torch.randn(PARTS, RANKS, 8, 6, generator=torch.Generator().manual_seed(update))


def trainer(model: torch.nn.Module, dtype: str, parts: int = PARTS) -> FP16Trainer:
    settings = {"dtype": dtype, "accumulation_steps": parts, "max_grad_norm": 0.25}
    return amp_trainer_cases.trainer(model, torch.optim.SGD, lr=1.0, **settings)


def weights(module: torch.nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).tolist()


def one_rank(rank: int, folder: Path) -> None:
    """All cases, in one process group; writes ``rank_R.json``."""
    torch.set_num_threads(1)
    # A rank that waits for one that gave up fails after this, not after half an hour.
    limit = timedelta(seconds=STUCK_S)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=limit)
    found: dict[str, Any] = {}
    for dtype in ("float16", "float32"):
        ddp = DistributedDataParallel(network(seed=rank))  # synchronises rank 0's weights
        reductions = []

        def reduce(_, bucket: dist.GradBucket, reductions=reductions) -> torch.futures.Future[torch.Tensor]:
            reductions.append(bucket.index())
            averaged = dist.all_reduce(bucket.buffer().div_(RANKS), async_op=True).get_future()
            return averaged.then(lambda done: done.value()[0])

        ddp.register_comm_hook(None, reduce)
        trained, counts = trainer(ddp, dtype), []
        for part in data(1):
            trained.training_step(part[rank], loss_of)
            counts.append(len(reductions))
        found[dtype] = {"reductions": counts, "updated": weights(trained.module)}

        second = data(2)[:, rank]
        if rank == 1:  # an overflow on this rank only, in one of its micro-batches
            second[1] *= INF
        train(trained, second)
        found[dtype] |= {"skipped": trained.skipped, "after": weights(trained.module), "stats": trained.get_stats()}

        trained.save_checkpoint(folder / f"{dtype}_by_{rank}.pt", {"epoch": 1})
        try:
            trained.save_checkpoint(folder / "missing" / "a.pt")
            found[dtype]["refused"] = False
        except (OSError, RuntimeError):
            found[dtype]["refused"] = True
        loaded = trainer(DistributedDataParallel(network(seed=7)), dtype)
        found[dtype]["extra"] = loaded.load_checkpoint(folder / f"{dtype}_by_0.pt")
        found[dtype]["loaded"] = weights(loaded.module)
        for name, each in (("went on", trained), ("resumed", loaded)):
            train(each, data(3)[:, rank])
            found[dtype][name] = weights(each.module)
    found["compiled"] = []
    for model in (
        torch.compile(DistributedDataParallel(network()), backend="eager"),
        DistributedDataParallel(torch.compile(network(), backend="eager")),
    ):
        trained = trainer(model, "float16")
        train(trained, data(1)[:, rank])
        found["compiled"].append(weights(trained.module))
    (folder / f"rank_{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """Return the folder of the checkpoints, and what each rank found."""
    folder = tmp_path_factory.mktemp("ddp")
    torch.multiprocessing.spawn(one_rank, (folder,), nprocs=RANKS)
    return folder, [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture(params=["float16", "float32"])
def dtype(request) -> str:
    return request.param


@pytest.fixture
def ranks(outcomes, dtype) -> list[dict[str, Any]]:
    return [found[dtype] for found in outcomes[1]]


def test_update_equals_one_process_with_all_the_data(ranks, dtype):
    """Gradients are synchronised with the last micro-batch only."""
    assert [rank["reductions"] for rank in ranks] == [[0, 0, 1]] * RANKS
    assert ranks[0]["updated"] == ranks[1]["updated"]
    single = trainer(network(), "float32", parts=1)
    train(single, [data(1).flatten(0, 2)])
    assert ranks[0]["updated"] == pytest.approx(weights(single.module), abs=5e-4 if dtype == "float16" else 1e-6)
    moved = torch.tensor(weights(single.module)) - torch.tensor(weights(network()))
    assert moved.norm().item() == pytest.approx(0.25, rel=1e-3)  # max_grad_norm, of the mean gradient of both ranks


def test_overflow_on_one_rank_skips_the_update_on_both(ranks, dtype):
    for rank in ranks:
        assert rank["skipped"] and rank["after"] == rank["updated"]
        assert (rank["stats"]["training_steps"], rank["stats"]["overflow_steps"]) == (2, 1)
        assert rank["stats"]["current_scale"] == (512.0 if dtype == "float16" else 1.0)
        assert rank["stats"]["effective_dtype"] == dtype


def test_checkpoint_is_written_once_and_loaded_by_both_ranks_and_by_one_process(outcomes, ranks, dtype):
    folder, _ = outcomes
    assert [path.name for path in folder.glob(f"{dtype}_*")] == [f"{dtype}_by_0.pt"]
    for rank in ranks:
        assert rank["extra"] == {"epoch": 1} and rank["loaded"] == rank["after"]
        assert rank["resumed"] == rank["went on"] != rank["loaded"]
    single = trainer(network(seed=7), dtype)
    single.load_checkpoint(folder / f"{dtype}_by_0.pt")
    assert weights(single.module) == ranks[0]["after"]
    # A failed write is raised by its rank, and the other goes on.
    assert [rank["refused"] for rank in ranks] == [True, False]


def test_torch_compile_wraps_ddp_or_is_wrapped_by_it(outcomes):
    for rank in outcomes[1]:
        for found in rank["compiled"]:
            assert found == pytest.approx(rank["float16"]["updated"], abs=1e-6)
