"""Jobs that need more than this machine has are refused before Ray starts."""

from collections.abc import Callable

import pytest
from omegaconf import DictConfig, OmegaConf

from lib.cli import gpu_present
from lib.errors import Refused
from lib.paths import REPO
from lib.run import machine
from lib.run.job import compose, parse_job


@pytest.fixture(scope="module")
def configured() -> Callable[[str], DictConfig]:
    """``configured(args)``: the configuration of the default job with these overrides."""
    config = compose(parse_job(["DEVICE=cpu"]), REPO / "out")
    return lambda args: OmegaConf.merge(config, OmegaConf.from_dotlist(args.split()))


@pytest.fixture
def check(configured) -> Callable[..., None]:
    """``check(args, device="cpu")``: check the default job with these overrides."""
    return lambda args, device="cpu": machine.check_machine(configured(args), device)


def test_cpus_of_verl_and_transfer_queue_are_counted(configured):
    units = "transfer_queue.backend.SimpleStorage.num_data_storage_units=7"
    assert machine.cpus_per_node(configured(f"trainer.nnodes=2 trainer.n_gpus_per_node=8 {units}")) == 3 * 8 + 4 + 1


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ("n_gpus_per_node=64", "must be at most 4: of the 16 CPUs that Ray is given here, verl reserves 3 a worker"),
        ("n_gpus_per_node=5", "must be at most 4: "),
        ("n_gpus_per_node=0", "must be a whole number of at least 1"),
        ("n_gpus_per_node=two", "must be a whole number of at least 1"),
        ("nnodes=2", "must be 1 without RAY_ADDRESS"),
        ("n_gpus_per_node=999 ray_kwargs.ray_init.num_cpus=null", "CPUs that Ray counts here"),
    ],
)
def test_more_workers_than_ray_can_place_are_refused(check, args, reason):
    with pytest.raises(Refused) as refusal:
        check(f"trainer.{args}")
    assert str(refusal.value).startswith(f"trainer.{args.split()[0]}: ") and reason in str(refusal.value)


def test_as_many_workers_as_ray_can_place_pass(check):
    check("trainer.n_gpus_per_node=4")
    check("trainer.n_gpus_per_node=64 ray_kwargs.ray_init.num_cpus=194")
    check("trainer.n_gpus_per_node=5 trainer.use_v1=false")  # verl's older trainer starts no TransferQueue


@pytest.mark.parametrize("gpus", [3, pytest.param(0, marks=pytest.mark.skipif(gpu_present(), reason="has a GPU"))])
def test_workers_take_all_gpus(check, monkeypatch, gpus):
    if gpus:
        monkeypatch.setattr(machine, "gpu_count", lambda: gpus)
        check(f"trainer.n_gpus_per_node={gpus}", device="cuda")
    refusal = f"^trainer.n_gpus_per_node={gpus + 1}: must be at most {gpus}, the GPUs of this machine"
    with pytest.raises(Refused, match=refusal):
        check(f"trainer.n_gpus_per_node={gpus + 1}", device="cuda")
