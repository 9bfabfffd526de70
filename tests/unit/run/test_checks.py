"""Checks of a job's data and disk before it starts."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from lib.errors import Refused
from lib.run.checks import check_job
from lib.run.job import compose, parse_job

ROW = {"data_source": "arithmetic", "prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"style": "rule"}}

FILES = {"batch": 32, "half": 16, "other": 16, "row": 1}  # their rows


def parquet(file: Path, rows: int = 64, without: str | None = None) -> Path:
    row = {name: value for name, value in ROW.items() if name != without}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * rows), file)
    return file


def refusal_of_check(words: list[str], out: Path) -> str:
    with pytest.raises(Refused) as refusal:
        job = parse_job(["DEVICE=cpu", "STEPS=1", "EXPERIMENT=arithmetic", *words])
        check_job(job, compose(job, out), out)
    return str(refusal.value)


def test_unusable_data_is_refused(tmp_path):
    broken = tmp_path / "broken.parquet"
    broken.write_text("not a parquet file")
    good = parquet(tmp_path / "good.parquet")
    out = tmp_path / "out"
    assert refusal_of_check([f"TRAIN={broken}"], out).startswith(f"TRAIN={broken}: is not a readable parquet file")
    assert refusal_of_check([f"TRAIN={tmp_path}/none"], out).startswith(f"TRAIN={tmp_path}/none: is not a readable")
    assert refusal_of_check([f"TRAIN={good}", f"VAL={broken}"], out).startswith(f"VAL={broken}: ")
    for column in ROW:
        lacking = parquet(tmp_path / "lacking.parquet", without=column)
        assert f"lacks the column '{column}'" in refusal_of_check([f"TRAIN={lacking}"], out)
    assert "3 rows, but a batch needs 32" in refusal_of_check(
        [f"TRAIN={parquet(tmp_path / 'few.parquet', rows=3)}"], out
    )
    assert refusal_of_check(["ARGS=data.train_files=null"], out).startswith("TRAIN: is not set")
    assert refusal_of_check(["ARGS=trainer.total_training_steps=null"], out).startswith("STEPS: is not set")
    assert not out.exists()


def test_uncreatable_folder_and_full_disk_are_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert refusal_of_check([], tmp_path / "file" / "out").startswith(f"OUT={tmp_path}/file/out: cannot be written to")
    monkeypatch.setattr("lib.files.FREE_GIB", 1e9)
    assert "GiB free" in refusal_of_check([], tmp_path / "out")


def test_data_that_fill_one_batch_pass(tmp_path):
    """A training batch has 32 rows, of one file or several; one row is enough to validate on."""
    batch, half, other, row = (parquet(tmp_path / f"{name}.parquet", rows) for name, rows in FILES.items())
    several = [f"TRAIN={half}", f"ARGS=data.train_files=[{half},{other}]"]
    for words in ([f"TRAIN={batch}"], [f"TRAIN={batch}", f"VAL={row}"], [*several, f"VAL={row}"]):
        job = parse_job(["DEVICE=cpu", "STEPS=1", "EXPERIMENT=arithmetic", *words])
        check_job(job, compose(job, tmp_path), tmp_path)
