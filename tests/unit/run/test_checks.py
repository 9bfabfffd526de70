"""Checks of a job's data and disk before it starts."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from lib.errors import Refused
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
def test_unusable_data_is_refused(tmp_path):
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
    assert not (tmp_path / "out").exists()


def test_full_disk_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("lib.files.FREE_GIB", 1e9)
    with pytest.raises(Refused, match="^OUT=.* GiB free"):
        check([], tmp_path / "out")


def test_data_that_fill_one_batch_pass(tmp_path):
    """A training batch has 32 rows, of one file or several; one row is enough to validate on."""
    batch, half, row = (parquet(tmp_path / f"{rows}.parquet", rows) for rows in (32, 16, 1))
    check([f"TRAIN={batch}"], tmp_path)
    check([f"TRAIN={half}", f"ARGS=data.train_files=[{half},{half}]", f"VAL={row}"], tmp_path)
