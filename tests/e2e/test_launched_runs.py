"""``scripts/launch/flowrl_7b.sh`` end to end, with the sanity task instead of the 7B model: on this node, where verl
starts Ray itself, and as a job on a running two-node Ray cluster whose own environment contains no verl.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import Cluster, running
from processes import run_to_end
from small_runs import SCALER, small_batch

from verl_precision.files import read_jsonl
from verl_precision.paths import REPO

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.usefixtures("exclusive")]
SCRIPT = REPO / "scripts/launch/flowrl_7b.sh"
STEPS = 2
OVERRIDES = [*small_batch(micro_batch=32), f"{SCALER}.init_scale=1024"]


@pytest.fixture
def task(generated, tmp_path) -> Path:
    """The sanity task's model, and its data under the names that the script expects."""
    folder = tmp_path / "task"
    folder.mkdir()
    for link, file in (("model", "model"), ("train.parquet", "train.parquet"), ("test.parquet", "val.parquet")):
        (folder / link).symlink_to(generated / file)
    return folder


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running() as cluster:
        cluster.join("second", "127.0.0.3")
        yield cluster


def launch(task: Path, out: Path, **knobs: object) -> list[str]:
    """Run the script and check the run. Return the lines of its output."""
    environment = {"EXPERIMENT": "arithmetic", "DEVICE": "cpu", "MODEL": task / "model", "DATA": task, "STEPS": STEPS}
    environment |= {"OUT": out, "GPUS_PER_NODE": 1} | knobs
    lines = run_to_end([SCRIPT, *OVERRIDES], environment, out, out.with_suffix(".txt"), cwd="/")
    summary, metrics = json.loads((out / "summary.json").read_text()), read_jsonl(out / "metrics.jsonl")
    assert (summary["precision"], summary["steps"], summary["recipe"]) == ("fp16", STEPS, "flowrl_paper")
    assert summary["effective_dtypes"]["actor"]["compute"] == "float16"
    assert len(metrics) == STEPS
    for row in metrics:
        assert row["data"]["actor/flowrl/partition_grad_norm"] > 0, "the paper's head is not learning"
        assert 0 < row["data"]["flowrl/right_answers"] < 1
    return lines


def test_script_trains_on_one_node(task, tmp_path):
    launch(task, tmp_path / "out")


def test_script_trains_as_a_job_on_a_two_node_cluster(task, cluster, tmp_path):
    lines = launch(task, tmp_path / "out", RAY_ADDRESS=cluster.dashboard, NNODES=2, **cluster.token)
    assert any(cluster.dashboard in line for line in lines)
