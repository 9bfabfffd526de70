"""``scripts/launch/flowrl_7b.sh`` end to end, with the sanity task instead of the 7B model: on this node, where verl
starts Ray itself, and as a job on a running two-node Ray cluster whose own environment contains no verl.

``pytest -m slow tests/e2e/test_launched_runs.py`` takes two minutes a test.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import Cluster, running
from processes import kill, of_this_run
from small_runs import SCALER, generate_task, small_batch

from lib.files import read_jsonl
from lib.paths import REPO

SCRIPT = REPO / "scripts/launch/flowrl_7b.sh"
STEPS = 2
HANGS_S = 900
OVERRIDES = [*small_batch(micro_batch=32), f"{SCALER}.init_scale=1024"]


@pytest.fixture
def task(tmp_path) -> Path:
    """The sanity task's model, and its data under the names that the script expects."""
    generated, folder = generate_task(), tmp_path / "task"
    folder.mkdir()
    for link, file in (("model", "model"), ("train.parquet", "train.parquet"), ("test.parquet", "val.parquet")):
        (folder / link).symlink_to(generated / file)
    return folder


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running() as cluster:
        cluster.join("second", "127.0.0.3")
        yield cluster


def launch(task: Path, out: Path, **knobs: object) -> tuple[str, dict, list[dict]]:
    """Run the script. Return its output, the run's summary and its metrics, a dict a step."""
    environment = os.environ | {
        "EXPERIMENT": "arithmetic",
        "DEVICE": "cpu",
        "MODEL": str(task / "model"),
        "DATA": str(task),
        "STEPS": str(STEPS),
        "OUT": str(out),
        "GPUS_PER_NODE": "1",
    }
    environment |= {name: str(value) for name, value in knobs.items()}
    command = [SCRIPT, *OVERRIDES]
    with subprocess.Popen(
        command, cwd="/", env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as started:
        try:
            output, _ = started.communicate(timeout=HANGS_S)
        finally:
            started.kill()
            kill(of_this_run(out))
    assert started.returncode == 0, output
    metrics = [row["data"] for row in read_jsonl(out / "metrics.jsonl")]
    return output, json.loads((out / "summary.json").read_text()), metrics


def check(summary: dict, metrics: list[dict]) -> None:
    assert (summary["precision"], summary["steps"], summary["recipe"]) == ("fp16", STEPS, "flowrl_paper")
    assert summary["effective_dtypes"]["actor"]["compute"] == "float16"
    assert len(metrics) == STEPS
    for row in metrics:
        assert row["actor/flowrl/partition_grad_norm"] > 0, "the paper's head is not learning"
        assert 0 < row["flowrl/right_answers"] < 1


@pytest.mark.slow
def test_script_trains_on_one_node(task, tmp_path):
    _, summary, metrics = launch(task, tmp_path / "out")
    check(summary, metrics)


@pytest.mark.slow
def test_script_trains_as_a_job_on_a_two_node_cluster(task, cluster, tmp_path):
    output, summary, metrics = launch(task, tmp_path / "out", RAY_ADDRESS=cluster.dashboard, NNODES=2, **cluster.token)
    check(summary, metrics)
    assert f" on {cluster.dashboard}" in output
