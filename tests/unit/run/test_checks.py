"""Checks of a job's data, disk and machine before it starts."""

from functools import cache
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import DictConfig, OmegaConf

from lib.errors import Refused
from lib.paths import REPO
from lib.run import machine
from lib.run.checks import check_job
from lib.run.job import compose, parse_job

ROW = {"data_source": "arithmetic", "prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"style": "rule"}}


def parquet(file: Path, rows: int = 64, without: str | None = None) -> Path:
    row = {name: value for name, value in ROW.items() if name != without}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * rows), file)
    return file


def check(words: list[str], out: Path) -> None:
    job = parse_job(["DEVICE=cpu", "STEPS=1", "EXPERIMENT=arithmetic", *words])
    check_job(job, compose(job, out), out)


@pytest.mark.subprocess  # a configuration a case
def test_unusable_data_is_refused(tmp_path, monkeypatch):
    broken = tmp_path / "broken.parquet"
    broken.write_text("not a parquet file")
    good, few = parquet(tmp_path / "good.parquet"), parquet(tmp_path / "few.parquet", rows=3)
    cases = {f"lacks the column '{name}'": [f"TRAIN={parquet(tmp_path / name, without=name)}"] for name in ROW}
    cases |= {
        f"^TRAIN={broken}: is not a readable parquet file": [f"TRAIN={broken}"],
        f"^TRAIN={tmp_path}/none: is not a readable": [f"TRAIN={tmp_path}/none"],
        f"^VAL={broken}: ": [f"TRAIN={good}", f"VAL={broken}"],
        "3 rows, but a batch needs 32": [f"TRAIN={few}"],
        "^TRAIN: is not set": ["ARGS=data.train_files=null"],
        "^STEPS: is not set": ["ARGS=trainer.total_training_steps=null"],
    }
    for refusal, words in cases.items():
        with pytest.raises(Refused, match=refusal):
            check(words, tmp_path / "out")
    monkeypatch.setattr("lib.files.FREE_GIB", 1e9)  # a full disk
    with pytest.raises(Refused, match="^OUT=.* GiB free"):
        check([], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_data_that_fill_one_batch_pass(tmp_path):
    """A training batch has 32 rows, of one file or several; one row is enough to validate on."""
    batch, half, row = (parquet(tmp_path / f"{rows}.parquet", rows) for rows in (32, 16, 1))
    check([f"TRAIN={batch}"], tmp_path)
    check([f"TRAIN={half}", f"ARGS=data.train_files=[{half},{half}]", f"VAL={row}"], tmp_path)


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
