"""Admission to a cluster: the facts of its nodes, the resources that are free, and refusals."""

import json
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray
from support.waiting import wait_until

from verl_precision.errors import Refused
from verl_precision.files import write
from verl_precision.patch.releases import VERL, find_release
from verl_precision.run import cluster
from verl_precision.run.cluster_query import SAME_VERSIONS, difference, join, node_facts, wait_for_nodes
from verl_precision.run.job import Job, compose, parse_job

RELEASE = find_release("0.9.1")
PATHS = ["/", "/no/such/folder"]


@pytest.fixture
def facts(imported) -> Callable[..., dict]:
    """``facts(root)``: what a node reports that imports the verl of a folder, or none."""

    def facts(root: Path | None) -> dict:
        imported(root)
        return node_facts(PATHS)

    return facts


def test_node_reports_its_verl(trees, facts):
    root, stamp = trees["patched"], json.loads((trees["patched"] / VERL.stamp).read_text())
    seen = facts(root)
    assert (seen["verl"], seen["root"]) == ("0.9.1", str(root))
    assert (seen["stack"], seen["tree"]) == (stamp["stack"], stamp["tree"])
    assert all(seen[name] for name in SAME_VERSIONS) and seen["unseen"] == ["/no/such/folder"]


def test_node_without_a_patched_verl_has_no_stack(trees, facts, tmp_path):
    root = shutil.copytree(trees["pristine"], tmp_path / "reinstalled")
    seen = facts(root)
    assert (seen["verl"], seen["stack"], seen["tree"]) == ("0.9.1", None, RELEASE.tree_before)
    write(root / VERL.stamp, json.dumps({"release": "0.9.1", "stack": "54ad"}).encode())
    assert facts(root)["stack"] is None, "pip leaves the stamp where it reinstalls verl over a patched one"
    assert facts(None)["verl"] is None


DRIVER = {"verl": "0.9.1", "stack": "54ad", "tree": "1", "root": "/site", "unseen": []}
DRIVER |= dict.fromkeys(SAME_VERSIONS, "1.0")


VERSIONS = ("python", "ray", "torch", "vllm", "transformers")  # of the rollout, too


def test_difference_is_described():
    assert difference(DRIVER, DRIVER) is None
    for odd, message in (
        ({"verl": None}, "has no verl, the driver 0.9.1"),
        ({"verl": "0.8.0"}, "has verl 0.8.0, the driver 0.9.1"),
        ({"stack": None}, "verl 0.9.1 is not patched; the driver has stack 54ad"),
        ({"stack": "ffff"}, "has stack ffff, the driver 54ad"),
        ({"tree": "9"}, "verl 0.9.1 has other files than the driver's; verl-precision status lists those edited"),
        *(({each: "2.0"}, f"has {each} 2.0, the driver 1.0") for each in VERSIONS),
        ({"unseen": ["/data/.seen-x"]}, "cannot access /data/.seen-x: OUT, the model and the data must be on storage"),
    ):
        assert difference(DRIVER | odd, DRIVER).startswith(message)


def node(name: str, **resources: float) -> dict:
    names = {"NodeID": name, "NodeName": name, "NodeManagerAddress": "10.0.0.3", "NodeManagerHostname": "host"}
    return names | {"Resources": resources, "Alive": name != "gone"}


def test_nodes_that_may_get_a_worker_are_waited_for(monkeypatch):
    """A node without GPUs may get verl's trainer; a head without CPUs and a node that is gone get nothing."""
    nodes = [node(name, GPU=8, CPU=64) for name in ("free", "busy", "gone")] + [node("cpus", CPU=64), node("head")]
    left = {"free": {"GPU": 1, "CPU": 64}, "busy": {"CPU": 64}, "cpus": {"CPU": 64}, "gone": {"GPU": 8, "CPU": 64}}
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray._private.state, "available_resources_per_node", lambda: left)
    assert [each["NodeID"] for each in wait_for_nodes(1, 1, 4, time.monotonic())] == ["free", "busy", "cpus"]
    for nnodes, cpus, fit in ((2, 29, 1), (1, 65, 0)):
        needed = f"{nnodes} nodes with 1 GPUs and {cpus} CPUs free are needed, but only {fit} of 4 nodes qualify; "
        with pytest.raises(Refused, match=f"{needed}.*busy .10.0.0.3. has 0 and 64"):
            wait_for_nodes(nnodes, 1, cpus, time.monotonic() - 1)


def test_alarm_is_off_once_the_cluster_is_joined(monkeypatch):
    """The query may wait for nodes for hours."""
    monkeypatch.setattr(ray, "init", lambda **_: None)
    join("auto", {"env_vars": None})
    assert signal.alarm(0) == 0


@pytest.fixture
def query_of(tmp_path, monkeypatch):
    """``query_of(*words)``: the paths that the nodes look for, for a job in ``tmp_path/a/run``."""
    queries = []

    def query_cluster(job, out, request):
        queries.append(request["paths"])
        assert Path(request["paths"][0]).exists()
        raise Refused("enough")

    monkeypatch.setattr(cluster, "query_cluster", query_cluster)

    def query_of(*words: str) -> list[str]:
        job = replace(parse_job(["DEVICE=cpu", f"OUT={tmp_path}/a/run", *words]), cluster="auto")
        with pytest.raises(Refused, match="enough"):
            cluster.admit(job, compose(job, job.out), job.out)
        return queries[-1]

    return query_of


def test_nodes_look_for_a_new_file_beside_out_and_for_the_model(query_of, tmp_path):
    write(tmp_path / "model/config.json", b"{}")
    write(tmp_path / "val.parquet", b"PAR1")
    mark, *given = query_of(f"MODEL={tmp_path}/model", f"VAL={tmp_path}/val.parquet")
    assert Path(mark).parent == tmp_path and given == [f"{tmp_path}/model", f"{tmp_path}/val.parquet"]
    (another,) = query_of("MODEL=Qwen/Qwen3-0.6B")
    assert another != mark, "each path must be new to every node"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "val.parquet"]


@pytest.fixture
def query_by(tmp_path, monkeypatch):
    """Replace the process that queries the cluster by a shell script, since Ray's crashes cannot be provoked."""

    def query_by(script: str) -> Job:
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        return replace(parse_job(["DEVICE=cpu"]), cluster="auto")

    return query_by


def test_query_without_an_answer_is_refused(query_by, tmp_path, capfd):
    for script, refusal in (
        ("kill -SEGV $$", "the cluster could not be queried: exit code -11; the reason is above"),
        ("echo 'OSError: no room' >&2; exit 1", "the cluster could not be queried: exit code 1; the reason is above"),
        ("kill -ALRM $$", "no Ray cluster answers there within 60 s"),
    ):
        with pytest.raises(Refused, match=f"^RAY_ADDRESS=auto: {refusal}$"):
            cluster.query_cluster(query_by(script), tmp_path, {})
    assert "OSError: no room" in capfd.readouterr().err


def test_nodes_that_the_cluster_no_longer_has_are_lost(query_by, tmp_path):
    """What Ray itself prints is not treated as an answer."""
    nodes = [{"node": "first", "id": "1"}, {"node": "second", "id": "2"}]
    noisy = """echo 'ray: connected'; echo '{"answer": ["1", "3"]}'; echo 'ray: disconnected'"""
    assert cluster.lost_nodes(query_by(noisy), tmp_path, nodes) == ["second"]


def test_interruption_ends_the_query(query_by, tmp_path):
    pid = tmp_path / "pid"
    waits = f"cat > /dev/null; echo $$ > {pid}; kill -INT $PPID; exec sleep 60"  # once the request is there
    with pytest.raises(KeyboardInterrupt):
        cluster.query_cluster(query_by(waits), tmp_path, {})
    query = int(pid.read_text())
    ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    wait_until(lambda: not psutil.pid_exists(query) or psutil.Process(query).status() in ended, "the query has ended")


def test_address_that_no_node_can_join_or_whose_head_is_silent_is_refused():
    silent = ["127.0.0.1:1", "no.such.host.invalid:6379", "127.0.0.1:99999"]
    for address in ("http://127.0.0.1:8265", "ray://127.0.0.1:10001", "head", ":6379", *silent):
        refusal = "no Ray cluster answers there" if address in silent else "must be HOST:PORT of a cluster"
        with pytest.raises(Refused, match=f"^RAY_ADDRESS={address}: {refusal}"):
            cluster.check_address(address)
