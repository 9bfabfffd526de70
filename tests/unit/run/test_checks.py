"""Checks of a job's data and disk before it starts."""

import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import DictConfig

from lib.errors import Refused
from lib.run.checks import check_job
from lib.run.job import Job, compose, parse_job

ROW = {"data_source": "arithmetic", "prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"style": "rule"}}
FILES = {"batch": 32, "half": 16, "other": 16, "row": 1, "few": 3}  # their rows


@pytest.fixture
def data(tmp_path) -> Path:
    """A folder of data files: of each number of rows, without each column, and one that is no parquet file."""

    def write(name: str, row: dict, rows: int) -> None:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * rows), tmp_path / f"{name}.parquet")

    for name, rows in FILES.items():
        write(name, ROW, rows)
    for column in ROW:
        write(f"without-{column}", {name: value for name, value in ROW.items() if name != column}, 32)
    (tmp_path / "broken.parquet").write_text("not a parquet file")
    return tmp_path


def job_of(words: list[str], out: Path) -> tuple[Job, DictConfig]:
    job = parse_job(["DEVICE=cpu", "STEPS=1", "EXPERIMENT=arithmetic", *words])
    return job, compose(job, out)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("TRAIN={}/broken.parquet", "is not a readable parquet file"),
        ("TRAIN={}/none", "is not a readable"),
        ("TRAIN={}/batch.parquet VAL={}/broken.parquet", "is not a readable parquet file"),
        *((f"TRAIN={{}}/without-{column}.parquet", f"lacks the column '{column}'") for column in ROW),
        ("TRAIN={}/few.parquet", "has 3 rows, but a batch needs 32"),
        ("ARGS=data.train_files=null", "TRAIN: is not set"),
        ("ARGS=trainer.total_training_steps=null", "STEPS: is not set"),
    ],
)
def test_unusable_data_are_refused(words, refusal, data):
    last = words.split()[-1].format(data)
    begin = refusal if last.startswith("ARGS") else f"{last}: {refusal}"
    with pytest.raises(Refused, match=f"^{re.escape(begin)}"):
        check_job(*job_of(words.format(data, data).split(), data / "out"), data / "out")
    assert not (data / "out").exists()


def test_uncreatable_folder_and_full_disk_are_refused(tmp_path, monkeypatch):
    job, config = job_of([], tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(Refused, match=f"^OUT={tmp_path}/file/out: cannot be written to"):
        check_job(job, config, tmp_path / "file" / "out")
    monkeypatch.setattr("lib.files.FREE_GIB", 1e9)
    with pytest.raises(Refused, match="GiB free"):
        check_job(job, config, tmp_path / "out")


def test_data_that_fill_one_batch_pass(data):
    """A training batch has 32 rows, of one file or several; one row is enough to validate on."""
    batch, half, other, row = (data / f"{name}.parquet" for name in ("batch", "half", "other", "row"))
    several = [f"TRAIN={half}", f"ARGS=data.train_files=[{half},{other}]"]
    for words in ([f"TRAIN={batch}"], [f"TRAIN={batch}", f"VAL={row}"], [*several, f"VAL={row}"]):
        check_job(*job_of(words, data), data)
