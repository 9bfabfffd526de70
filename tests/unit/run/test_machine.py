"""Jobs that need more than this machine has are refused before Ray starts."""

import pytest

from lib.cli import gpu_present
from lib.errors import Refused
from lib.paths import REPO
from lib.run import machine
from lib.run.job import compose, parse_job
from lib.run.machine import check_machine


def check(args: str, device: str = "cpu") -> None:
    job = parse_job(["DEVICE=cpu", f"ARGS={args}"])
    check_machine(compose(job, REPO / "out"), device)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (
            "trainer.n_gpus_per_node=64",
            "must be at most 4: of the 16 CPUs that Ray is given here, verl reserves 3 a worker",
        ),
        ("trainer.n_gpus_per_node=5", "must be at most 4: "),
        ("trainer.n_gpus_per_node=0", "must be a whole number of at least 1"),
        ("trainer.n_gpus_per_node=two", "must be a whole number of at least 1"),
        ("trainer.nnodes=2", "must be 1 without RAY_ADDRESS"),
        ("trainer.n_gpus_per_node=999 ray_kwargs.ray_init.num_cpus=null", "CPUs that Ray counts here"),
    ],
)
def test_more_workers_than_ray_can_place_are_refused(args, reason):
    with pytest.raises(Refused) as refusal:
        check(args)
    assert str(refusal.value).startswith(f"{args.split()[0]}: ") and reason in str(refusal.value)


def test_as_many_workers_as_ray_can_place_pass():
    check("trainer.n_gpus_per_node=4")
    check("trainer.n_gpus_per_node=64 ray_kwargs.ray_init.num_cpus=194")
    check("trainer.n_gpus_per_node=5 trainer.use_v1=false")  # verl's older trainer starts no TransferQueue


def test_workers_take_all_gpus(monkeypatch):
    monkeypatch.setattr(machine, "gpu_count", lambda: 3)
    check("trainer.n_gpus_per_node=3", device="cuda")
    with pytest.raises(Refused, match="^trainer.n_gpus_per_node=4: must be at most 3, the GPUs of this machine"):
        check("trainer.n_gpus_per_node=4", device="cuda")


@pytest.mark.skipif(gpu_present(), reason="there is a GPU")
def test_more_workers_than_gpus_are_refused():
    with pytest.raises(Refused, match="^trainer.n_gpus_per_node=1: must be at most 0, the GPUs of this machine"):
        check("trainer.n_gpus_per_node=1", device="cuda")
