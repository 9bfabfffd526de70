"""Admission to, and recovery of runs on, a two-node Ray cluster on this machine, started by the shipped scripts."""

import importlib.util
import os
import shlex
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from nodes import HEAD, Cluster, below, end, running
from processes import kill
from small_runs import ROLLOUT, SCALER, Run, small_batch, start_run
from support.waiting import TIMEOUT_S

from verl_precision.patch.apply import apply
from verl_precision.patch.wheels import unpacked_wheel
from verl_precision.run.cluster import admit
from verl_precision.run.job import compose, parse_job

SECOND, THIRD = "127.0.0.3", "127.0.0.4"
STEPS = 5
SCALES = (2.0**40, 2.0**10)  # every gradient overflows at the first, none at the second
OVERRIDES = [
    *small_batch(micro_batch=16),
    f"trainer.nnodes=2 {ROLLOUT}.n=4 trainer.max_actor_ckpt_to_keep=9",
    # The scale goes up and down: steps 1, 3 and 5 overflow and are skipped, 2 and 4 are taken.
    f"{SCALER}.init_scale={SCALES[0]}",
    f"{SCALER}.backoff_factor={SCALES[1] / SCALES[0]}",
    f"{SCALER}.growth_factor={SCALES[0] / SCALES[1]}",
    f"{SCALER}.growth_interval=1",
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def task(generated) -> list[str]:
    """The ``NAME=VALUE`` words that select the sanity task's model and data."""
    data = [f"{name}={generated}/{split}.parquet" for name, split in (("TRAIN", "train"), ("VAL", "val"))]
    return ["EXPERIMENT=arithmetic", f"MODEL={generated}/model", *data]


def start(cluster: Cluster, task: list[str], out: Path) -> Run:
    return start_run(out, STEPS, OVERRIDES, *task, environment=cluster.token | {"RAY_ADDRESS": cluster.address})


def ray_with(tree: Path, folder: Path) -> Path:
    """Create an environment like this one, but with the verl in ``tree``. Return its ``ray``."""
    venv.create(folder, symlinks=True)
    packages = Path(torch.__file__).parents[1]
    (folder / f"lib/python3.{sys.version_info.minor}/site-packages/other.pth").write_text(f"{tree}\n{packages}\n")
    ray = folder / "bin" / "ray"
    ray.write_text(f"#!{folder}/bin/python\nfrom ray.scripts.scripts import main\nmain()\n")
    ray.chmod(0o755)
    return ray


@pytest.mark.e2e
def test_head_listens_only_on_loopback_by_default():
    with running(bind="") as cluster:
        (head,) = cluster.nodes
        sockets = [each for of in (head, *head.children(recursive=True)) for each in of.net_connections("tcp")]
        listening = {each.laddr for each in sockets if each.status == psutil.CONN_LISTEN}
    assert len(listening) >= 5, "the cluster's port, the dashboard, the raylet's and the agents'"
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}, listening


@pytest.mark.slow
@pytest.mark.e2e
def test_nodes_with_another_verl_are_refused_by_name(cluster, task, trees, tmp_path):
    older = unpacked_wheel("0.8.0", tmp_path / "older")
    apply(older)
    odd = [
        cluster.join("unpatched", SECOND, RAY=ray_with(trees["pristine"], tmp_path / "one")),
        cluster.join("older", THIRD, RAY=ray_with(older, tmp_path / "two")),
    ]
    run = start(cluster, task, tmp_path / "run")
    asking, line = run.finish(code=1).splitlines()
    for node in odd:
        end(node)
    assert asking == "checking the code of 3 nodes"
    assert line.startswith(f"verl-precision run: RAY_ADDRESS={cluster.address}: ")
    assert f"node unpatched ({SECOND}): verl 0.9.1 is not patched; the driver has stack " in line
    assert f"node older ({THIRD}): has verl 0.8.0, the driver 0.9.1" in line
    assert not run.out.exists()


@pytest.mark.e2e
@pytest.mark.slow
def test_unpatched_node_is_admitted_if_the_job_carries_verl(cluster, trees, tmp_path, monkeypatch, capsys):
    node = cluster.join("unpatched", SECOND, RAY=ray_with(trees["pristine"], tmp_path / "one"))
    for name, value in (cluster.token | {"RAY_ADDRESS": cluster.address}).items():
        monkeypatch.setenv(name, value)
    (verl,) = importlib.util.find_spec("verl").submodule_search_locations
    carried = f"++ray_kwargs.ray_init.runtime_env.py_modules=['{verl}']"
    job = parse_job(["DEVICE=cpu", f"OUT={tmp_path}/run", f"ARGS=trainer.nnodes=2 {shlex.quote(carried)}"])
    facts = admit(job, compose(job, job.out), job.out, TIMEOUT_S)["nodes"]
    end(node)
    assert [each["node"].split()[0] for each in facts] == ["head", "unpatched"]
    for each in facts:
        assert each["root"].startswith(str(cluster.folder)), "that of the job, not the interpreter's"
    assert "2 nodes run verl 0.9.1 with stack " in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"one"}, "nothing is left beside OUT"


@pytest.mark.e2e
@pytest.mark.slow
def test_killed_worker_and_killed_node(cluster, task, exclusive, tmp_path):
    """The run resumes without help, with the checkpoint's weights, Adam state and loss scale, bitwise.

    Worker and node are killed during a save. Each time the next step is a skipped one, so the state saved
    after it is the loaded state.
    """
    second = cluster.join("second", SECOND)
    run = start(cluster, task, tmp_path / "run")
    checkpoints = run.checkpoints
    try:
        run.wait_for(lambda: run.last_saved)
        blocked = {}
        for step in (3, 5):  # opening a FIFO for writing blocks: the save stops here
            blocked[step] = checkpoints / f"global_step_{step}" / "actor" / "optim_world_size_2_rank_1.pt"
            blocked[step].parent.mkdir(parents=True)
            os.mkfifo(blocked[step])

        run.wait_for(blocked[3].with_name("model_world_size_2_rank_1.pt").exists)
        worker = below(second, "ray::WorkerDict")
        worker.kill()
        run.wait_for(lambda: "] lost " in run.shown)
        blocked[3].unlink()

        run.wait_for(blocked[5].with_name("model_world_size_2_rank_1.pt").exists)
        below(second, "raylet").kill()
        run.wait_for(lambda: "waiting: " in run.shown)
        blocked[5].unlink()
        third = cluster.join("third", THIRD)
        shown = run.finish()
        end(third)
    finally:
        run.process.kill()
        kill(run.processes)
    assert f"lost WorkerDict (pid {worker.pid}) on node {SECOND} after step 2 of {STEPS}" in shown
    assert f"lost node second ({SECOND}) after step 4 of {STEPS}" in shown
    assert [f"resuming after step {step} of" in shown for step in (2, 4)] == [True, True]

    def saved(step: int, kind: str) -> list[Path]:
        """Each rank's file."""
        folder = checkpoints / f"global_step_{step}/actor"
        return [folder / f"{kind}_world_size_2_rank_{rank}.pt" for rank in (0, 1)]

    def content(step: int, kind: str) -> list[list[bytes]]:
        """Each rank's tensors."""
        files = map(zipfile.ZipFile, saved(step, kind))
        return [[file.read(name) for name in sorted(file.namelist()) if "/data/" in name] for file in files]

    def scales(step: int) -> list[float]:
        return [torch.load(file, weights_only=False)["grad_scaler"]["scale"] for file in saved(step, "extra_state")]

    for loaded, left in ((2, 3), (4, 5)):
        assert content(loaded, "model") == content(left, "model")
        assert content(loaded, "optim") == content(left, "optim")
        assert (scales(loaded), scales(left)) == ([SCALES[0]] * 2, [SCALES[1]] * 2)
    assert content(3, "model") != content(4, "model") and content(3, "optim") != content(4, "optim")

    assert [(row["step"], row["data"]["actor/skipped_steps"]) for row in run.metrics] == [
        *((1, 1), (2, 0), (3, 1), (4, 0), (5, 1))
    ]
    assert [node["node"] for node in run.record["nodes"]] == [f"head ({HEAD})", f"third ({THIRD})"]
