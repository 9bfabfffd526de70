"""GSM8K in verl's schema, scored by verl itself."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

from lib.paths import REPO
from verl.utils.reward_score import default_compute_score

# The dataset's own layout on the Hub: a configuration called "main" with two splits.
README = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.jsonl}
  - {split: test, path: main/test.jsonl}
---
"""


@pytest.fixture
def source(tmp_path) -> Path:
    folder = tmp_path / "gsm8k"
    (folder / "main").mkdir(parents=True)
    (folder / "README.md").write_text(README)
    for split, answer in (("train", "She has 3 * 400 = <<3*400=1200>>1200.\n#### 1,200"), ("test", "None.\n#### -3")):
        (folder / "main" / f"{split}.jsonl").write_text(json.dumps({"question": "How many?", "answer": answer}) + "\n")
    return folder


def prepare(source: Path, out: Path, cache: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "recipes.gsm8k.prepare", "--source", str(source), "--out", str(out)]
    environment = {"PATH": "/usr/bin:/bin", "HF_HOME": str(cache), "HOME": str(cache)}
    return subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True)


def test_verl_reads_and_scores_the_rows(source, tmp_path):
    done = prepare(source, tmp_path / "out", tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    for split, truth in (("train", "1200"), ("test", "-3")):
        (row,) = pyarrow.parquet.read_table(tmp_path / "out" / f"{split}.parquet").to_pylist()
        assert row["prompt"][0]["role"] == "user" and row["prompt"][0]["content"].startswith("How many? ")
        assert row["reward_model"] == {"style": "rule", "ground_truth": truth}
        assert row["extra_info"] == {"split": split, "index": 0}
        assert default_compute_score(row["data_source"], f"So it is\n#### {truth}", truth) == 1
        assert default_compute_score(row["data_source"], "So it is\n#### 7", truth) == 0
        assert default_compute_score(row["data_source"], truth, truth) == 0, "the prompt must ask for ####"
        assert "####" in row["prompt"][0]["content"]


def test_other_dataset_is_refused_in_one_line(source, tmp_path):
    (source / "main" / "test.jsonl").write_text(json.dumps({"question": "How many?", "answer": "3"}) + "\n")
    done = prepare(source, tmp_path / "out", tmp_path / "cache")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("test row 0: the answer has no number after ####")
