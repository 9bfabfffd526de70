"""Jobs that need more than this machine has are refused before Ray starts."""

from functools import cache

import pytest
from omegaconf import DictConfig, OmegaConf

from lib.errors import Refused
from lib.paths import REPO
from lib.run import machine
from lib.run.job import compose, parse_job


@cache
def default() -> DictConfig:
    return compose(parse_job(["DEVICE=cpu"]), REPO / "out")


def configured(args: str) -> DictConfig:
    """Return the configuration of the default job with these overrides."""
    return OmegaConf.merge(default(), OmegaConf.from_dotlist(args.split()))


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ("n_gpus_per_node=5", "must be at most 4: of the 16 CPUs that Ray is given here, verl reserves 3 a worker"),
        ("n_gpus_per_node=0", "must be a whole number of at least 1"),
        ("n_gpus_per_node=two", "must be a whole number of at least 1"),
        ("nnodes=2", "must be 1 without RAY_ADDRESS"),
        ("n_gpus_per_node=999 ray_kwargs.ray_init.num_cpus=null", "CPUs that Ray counts here"),
    ],
)
def test_more_workers_than_ray_can_place_are_refused(args, reason):
    with pytest.raises(Refused, match=f"^trainer.{args.split()[0]}: .*{reason}"):
        machine.check_machine(configured(f"trainer.{args}"), "cpu")


def test_as_many_workers_as_ray_can_place_pass():
    for args in ("4", "64 ray_kwargs.ray_init.num_cpus=194", "5 trainer.use_v1=false"):  # which has no TransferQueue
        machine.check_machine(configured(f"trainer.n_gpus_per_node={args}"), "cpu")
    units = "transfer_queue.backend.SimpleStorage.num_data_storage_units=7"
    assert machine.cpus_per_node(configured(f"trainer.nnodes=2 trainer.n_gpus_per_node=8 {units}")) == 3 * 8 + 4 + 1


def test_workers_take_all_gpus(monkeypatch):
    monkeypatch.setattr(machine, "gpu_count", lambda: 3)
    machine.check_machine(configured("trainer.n_gpus_per_node=3"), "cuda")
    with pytest.raises(Refused, match="^trainer.n_gpus_per_node=4: must be at most 3, the GPUs of this machine"):
        machine.check_machine(configured("trainer.n_gpus_per_node=4"), "cuda")
