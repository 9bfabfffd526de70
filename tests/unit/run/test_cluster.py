"""Admission to a cluster: the facts of its nodes, the resources that are free, and refusals."""

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import ray
import torch

import lib
from lib.errors import Refused
from lib.files import write
from lib.patches.releases import VERL, find_release
from lib.paths import REPO
from lib.run import cluster
from lib.run.cluster_query import join, missing_resources, wait_for_nodes
from lib.run.job import Job, compose, parse_job
from lib.run.machine import cpus_per_node
from lib.run.node_facts import SAME_VERSIONS, difference, node_facts, refuse_driver

RELEASE = find_release("0.9.1")
QUERY = {
    "engines": {
        "actor": {"dtype": "float16", "mixed_precision": None, "model_dtype": "fp32"},
        "ref": {"dtype": "bfloat16", "mixed_precision": None, "model_dtype": None},
    },
    "rollout": "float16",
    "paths": ["/", "/no/such/folder"],
}


# --- the facts of a node ----------------------------------------------------------------------------------------------


def test_node_reports_its_verl_and_dtypes(patched, imported):
    path = list(sys.path)
    imported(patched)
    sys.path += path
    facts = node_facts(QUERY, "cpu")
    stamp = json.loads((patched / VERL.stamp).read_text())
    assert (facts["verl"], facts["root"], facts["stack"], facts["tree"]) == (
        "0.9.1",
        str(patched),
        stamp["stack"],
        stamp["tree"],
    )
    dtypes = facts["dtypes"]
    assert dtypes["actor"]["compute"] == dtypes["actor"]["product"] == "float16"
    assert dtypes["ref"]["product"] == "bfloat16", "observed, not copied from the rollout or the actor"
    assert dtypes["actor"]["loss_scaling"] and not dtypes["ref"]["loss_scaling"]
    assert all(facts[name] for name in SAME_VERSIONS) and facts["unseen"] == ["/no/such/folder"]
    refuse_driver(facts)


def test_node_gets_the_function_by_value_and_needs_no_checkout(patched, tmp_path):
    ray.cloudpickle.register_pickle_by_value(lib)
    (tmp_path / "function").write_bytes(ray.cloudpickle.dumps(node_facts))
    ray.cloudpickle.unregister_pickle_by_value(lib)
    program = """
import json, pickle, sys
node_facts = pickle.load(open(sys.argv[1], "rb"))
print(node_facts(json.loads(sys.argv[2]), "cpu")["stack"], "lib" in sys.modules)
"""
    command = [sys.executable, "-c", program, tmp_path / "function", json.dumps(QUERY)]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(patched)}
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True)
    stack = json.loads((patched / VERL.stamp).read_text())["stack"]
    assert done.stdout == f"{stack} False\n", done.stderr


def test_product_in_another_dtype_than_the_configs_is_reported(patched, imported, monkeypatch):
    path = list(sys.path)
    imported(patched)
    sys.path += path
    sound = node_facts(QUERY, "cpu")
    monkeypatch.setattr(torch, "autocast", lambda **_: contextlib.nullcontext())
    facts = node_facts(QUERY, "cpu")
    assert (facts["dtypes"]["actor"]["compute"], facts["dtypes"]["actor"]["product"]) == ("float16", "float32")
    assert difference(facts, sound).startswith("resolves the actor's config to ")


def test_node_with_an_unpatched_verl_or_none_reports_it(pristine, imported):
    imported(pristine)
    facts = node_facts(QUERY, "cpu")
    assert (facts["verl"], facts["stack"], facts["tree"], facts["dtypes"]) == ("0.9.1", None, RELEASE.tree_before, {})
    with pytest.raises(Refused, match="the driver's verl 0.9.1 is not patched; make status VERL=") as refusal:
        refuse_driver(facts)
    assert str(pristine) in str(refusal.value)
    imported(None)
    assert node_facts(QUERY, "cpu")["verl"] is None


def test_stamp_alone_does_not_make_a_verl_patched(pristine, imported, tmp_path):
    """pip leaves it where it reinstalls verl over a patched one."""
    root = shutil.copytree(pristine, tmp_path / "reinstalled")
    write(root / VERL.stamp, json.dumps({"release": "0.9.1", "stack": "54ad"}).encode())
    imported(root)
    assert node_facts(QUERY, "cpu")["stack"] is None


def test_edited_driver_and_another_stack_are_refused(patched, imported):
    imported(patched)
    (patched / "verl/utils/tracking.py").write_text("# mine\n")
    facts = node_facts(QUERY | {"engines": {}}, "cpu")
    with pytest.raises(Refused, match="was edited after it was patched"):
        refuse_driver(facts)
    with pytest.raises(Refused, match=f"has stack 0123, this checkout {facts['stack']}"):
        refuse_driver(facts | {"stack": "0123"})


@pytest.mark.parametrize(
    "words", ["", "model_engine=megatron", "actor_rollout_ref.actor.strategy=fsdp2 critic.strategy=fsdp2"]
)
def test_nodes_resolve_the_dtype_of_each_roles_engine(words, tmp_path):
    config = compose(parse_job(["DEVICE=cpu", "ALGO=ppo", f"ARGS={words}"]), tmp_path)
    for role in (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic):
        assert cluster.engine_settings(role)["dtype"] == "float16"


def test_nodes_get_every_key_that_may_decide_a_dtype(tmp_path):
    word = "++actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16"
    config = compose(parse_job(["DEVICE=cpu", f"ARGS={word}"]), tmp_path)
    settings = cluster.engine_settings(config.actor_rollout_ref.actor)
    assert set(settings) == {"dtype", "mixed_precision", "model_dtype"}
    assert settings["mixed_precision"] == {"param_dtype": "bf16"}


DRIVER = {
    "verl": "0.9.1",
    "stack": "54ad",
    "blobs": {"verl/a.py": "1", "verl/b.py": "2"},
    **dict.fromkeys(SAME_VERSIONS, "1.0"),
    "dtypes": {"actor": {"compute": "float16", "product": "float16"}},
    "unseen": [],
}


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"verl": None, "stack": None}, "has no verl, the driver 0.9.1"),
        ({"verl": "0.8.0", "stack": None}, "has verl 0.8.0, the driver 0.9.1"),
        ({"stack": None}, "verl 0.9.1 is not patched; the driver has stack 54ad"),
        ({"stack": "ffff"}, "verl 0.9.1 has stack ffff, the driver 54ad"),
        ({"blobs": {"verl/a.py": "9", "verl/b.py": "2"}}, "verl 0.9.1 is edited: verl/a.py"),
        ({"blobs": {"verl/a.py": "1"}}, "verl 0.9.1 is edited: verl/b.py"),
        ({"blobs": DRIVER["blobs"] | {"verl/c.py": "3"}}, "verl 0.9.1 is edited: verl/c.py"),
        ({"torch": "2.12.0"}, "has torch 2.12.0, the driver 1.0"),
        ({"vllm": None}, "has vllm None, the driver 1.0"),
        ({"transformers": "4.57.6"}, "has transformers 4.57.6, the driver 1.0"),
        (
            {"dtypes": {"actor": {"compute": "float16", "product": "float32"}}},
            "resolves the actor's config to {'compute'",
        ),
        ({"unseen": ["/data/.seen-x"]}, "cannot access /data/.seen-x: OUT, the model and the data must be on storage"),
    ],
)
def test_difference_is_described(odd, message):
    assert difference(DRIVER, DRIVER) is None
    assert difference(DRIVER | odd, DRIVER).startswith(message)


def node(name: str, **resources: float) -> dict:
    return {
        "NodeID": name,
        "NodeName": name,
        "NodeManagerAddress": "10.0.0.3",
        "NodeManagerHostname": "host",
        "Resources": resources,
    }


def test_missing_gpus_are_counted_by_node():
    full, busy = node("worker-1", GPU=8, CPU=64), node("10.0.0.3", GPU=8, CPU=64)
    free = [(full, full["Resources"]), (busy, {"GPU": 2, "CPU": 64})]
    assert missing_resources(free, nnodes=1, gpus=8, cpus=64) is None
    assert missing_resources(free, nnodes=2, gpus=2, cpus=64) is None
    assert missing_resources(free, nnodes=2, gpus=8, cpus=29) == (
        "trainer.nnodes=2 trainer.n_gpus_per_node=8: 2 nodes with 8 GPUs and 29 CPUs free are needed, but only 1 of 2 "
        "nodes qualify; worker-1 (10.0.0.3) has 8 of 8 GPUs and 64 of 64 CPUs free; "
        "host (10.0.0.3) has 2 of 8 GPUs and 64 of 64 CPUs free"
    )
    assert "0 of 1 nodes qualify" in missing_resources([(full, {"GPU": 8, "CPU": 28})], nnodes=1, gpus=8, cpus=29)


def test_nodes_that_may_get_a_worker_are_waited_for(monkeypatch):
    """A node without GPUs may get verl's trainer; a head without CPUs and a node that is gone get nothing."""
    nodes = [node("free", GPU=8, CPU=64), node("busy", GPU=8, CPU=64), node("cpus", CPU=64), node("head")]
    nodes = [each | {"Alive": True} for each in nodes] + [node("gone", GPU=8, CPU=64) | {"Alive": False}]
    left = {"free": {"GPU": 1, "CPU": 64}, "busy": {"CPU": 64}, "cpus": {"CPU": 64}, "gone": {"GPU": 8, "CPU": 64}}
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray._private.state, "available_resources_per_node", lambda: left)
    found = {each["NodeID"]: gpu_free for each, gpu_free in wait_for_nodes(1, 1, 4, time.monotonic(), print)}
    assert found == {"free": True, "busy": False, "cpus": False}
    with pytest.raises(Refused, match="only 0 of 4 nodes qualify"):
        wait_for_nodes(1, 8, 4, time.monotonic() - 1, print)


def test_alarm_is_off_once_the_cluster_is_joined(monkeypatch):
    """The query may wait for nodes for hours."""
    monkeypatch.setattr(ray, "init", lambda **_: None)
    join("auto", {"env_vars": None})
    assert signal.alarm(0) == 0


def test_cpus_of_verl_and_transfer_queue_are_counted(tmp_path):
    words = [
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=8",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=7",
    ]
    config = compose(parse_job(["DEVICE=cpu", f"ARGS={' '.join(words)}"]), tmp_path)
    assert cpus_per_node(config) == 3 * 8 + 4 + 1


@pytest.fixture
def query_of(tmp_path, monkeypatch):
    """``query_of(*words)``: what a job in ``tmp_path/a/run`` asks the nodes, and which of its paths exist meanwhile."""
    queries = []

    def query_cluster(job, out, request, show):
        queries.append((request["query"], [path for path in request["query"]["paths"] if Path(path).exists()]))
        raise Refused("enough")

    monkeypatch.setattr(cluster, "query_cluster", query_cluster)

    def query_of(*words: str) -> tuple[dict, list[str]]:
        job = replace(parse_job(["DEVICE=cpu", f"OUT={tmp_path}/a/run", *words]), cluster="auto")
        with pytest.raises(Refused, match="enough"):
            cluster.admit(job, compose(job, job.out), job.out)
        return queries[-1]

    return query_of


def test_nodes_look_for_a_new_file_beside_out_and_for_the_model(query_of, tmp_path):
    """They look for a new file beside OUT, and for the model and the data if these are files."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").touch()
    (tmp_path / "val.parquet").write_bytes(b"PAR1")
    query, there = query_of(f"MODEL={tmp_path}/model", f"VAL={tmp_path}/val.parquet")
    mark, *given = query["paths"]
    assert mark in there and Path(mark).parent == tmp_path
    assert given == [f"{tmp_path}/model", f"{tmp_path}/val.parquet"]
    (another,) = query_of("MODEL=Qwen/Qwen3-0.6B")[0]["paths"]
    assert another != mark, "each path must be new to every node"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "val.parquet"]


@pytest.mark.parametrize(
    ("words", "roles"),
    [
        ([], ["actor"]),
        (["ALGO=ppo"], ["actor", "critic"]),
        (["ARGS=actor_rollout_ref.actor.use_kl_loss=true"], ["actor", "ref"]),
    ],
)
def test_nodes_resolve_the_dtypes_of_the_roles_that_exist(words, roles, query_of):
    query, _ = query_of(*words)
    assert list(query["engines"]) == roles and query["rollout"] == "float16"


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


def test_crash_of_ray_is_retried_once(query_by, tmp_path):
    once = f'test -e {tmp_path}/crashed || {{ touch {tmp_path}/crashed; kill -SEGV $$; }}; echo \'{{"answer": ["1"]}}\''
    shown = []
    assert cluster.query_cluster(query_by(once), tmp_path, {}, shown.append) == ["1"]
    assert shown == ["Ray crashed the process that queries the cluster (SIGSEGV): trying again"]
    with pytest.raises(Refused, match="^RAY_ADDRESS=auto: the cluster could not be queried: exit code -11$"):
        cluster.query_cluster(query_by("kill -SEGV $$"), tmp_path, {}, shown.append)


def test_failed_query_is_refused_with_its_cause(query_by, tmp_path):
    with pytest.raises(Refused, match="^RAY_ADDRESS=auto: the cluster could not be queried: OSError: no room$"):
        cluster.query_cluster(query_by("echo 'OSError: no room' >&2; exit 1"), tmp_path, {}, print)
    with pytest.raises(Refused, match="^RAY_ADDRESS=auto: no Ray cluster answers there within 60 s$"):
        cluster.query_cluster(query_by("kill -ALRM $$"), tmp_path, {}, print)


def test_output_of_ray_is_not_taken_for_an_answer(query_by, tmp_path):
    noisy = """echo 'ray: connected'; echo '{"answer": ["1"]}'"""
    assert cluster.query_cluster(query_by(noisy), tmp_path, {}, print) == ["1"]


def test_nodes_that_the_cluster_no_longer_has_are_lost(query_by, tmp_path):
    nodes = [{"node": "first", "id": "1"}, {"node": "second", "id": "2"}]
    assert cluster.lost_nodes(query_by("""echo '{"answer": ["1", "3"]}'"""), tmp_path, nodes) == ["second"]


def test_interruption_ends_the_query(query_by, tmp_path):
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    waits = f"""echo $$ > {tmp_path}/pid; echo '{{"progress": "waiting"}}'; exec sleep 60"""
    with pytest.raises(KeyboardInterrupt):
        cluster.query_cluster(query_by(waits), tmp_path, {}, interrupt)
    pid = int((tmp_path / "pid").read_text())
    _, left = psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)
    assert not left


# --- a missing head -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "ray://127.0.0.1:10001", "head", "head:", ":6379"])
def test_address_that_no_node_can_join_is_refused(address):
    with pytest.raises(Refused, match=f"^RAY_ADDRESS={address}: must be HOST:PORT of a cluster"):
        cluster.check_address(address)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no.such.host.invalid:6379", "127.0.0.1:99999"])
def test_silent_head_is_refused(address):
    with pytest.raises(Refused, match=f"^RAY_ADDRESS={address}: no Ray cluster answers there"):
        cluster.check_address(address)


# --- a real cluster ---------------------------------------------------------------------------------------------------

STARTS_S = 180
SECRET = "hf_of_nobody_else"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@dataclass(frozen=True)
class UnpatchedCluster:
    folder: Path  # of all that Ray writes
    gcs: str
    dashboard: str


@pytest.fixture
def unpatched_cluster(pristine, monkeypatch) -> Iterator[UnpatchedCluster]:
    """Two nodes with one "GPU" each, whose Python has all packages of this one, but an unpatched verl."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # Ray's sockets need a short path
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (site,) = folder.glob("venv/lib/python*/site-packages")
    (site / "others.pth").write_text(f"{pristine}\n{sysconfig.get_paths()['purelib']}\n")
    monkeypatch.setenv("HOME", str(folder))  # Ray looks for a token here and must, like the nodes, find none
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)  # set by ray.init in other tests of this process
    gcs, dashboard = free_port(), free_port()
    head = ["--head", f"--port={gcs}", f"--dashboard-port={dashboard}"]
    environment = {"PATH": f"{folder}/venv/bin:/usr/bin:/bin", "HOME": str(folder), "HF_TOKEN": SECRET}
    environment |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    started = []
    try:
        for name, words in (("head-1", head), ("worker-2", [f"--address=127.0.0.1:{gcs}"])):
            options = ["--block", f"--node-name={name}", "--num-gpus=1", "--num-cpus=16"]
            # A fresh one: a node removes a job's files once its last process there has ended.
            options += [f"--temp-dir={folder}/{name}"]
            command = [folder / "venv/bin/python", "-m", "ray.scripts.scripts", "start", *options, *words]
            shown = folder / f"{name}.log"
            with shown.open("w") as log:
                started.append(subprocess.Popen(command, cwd="/", env=environment, stdout=log))
            until = time.monotonic() + STARTS_S
            while "Ray runtime started" not in shown.read_text():
                assert time.monotonic() < until and started[-1].poll() is None, "Ray did not start"
                time.sleep(0.5)
        yield UnpatchedCluster(folder, f"127.0.0.1:{gcs}", f"http://127.0.0.1:{dashboard}")
    finally:
        processes = [psutil.Process(node.pid) for node in started]
        processes += [child for process in processes for child in process.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=10)
        shutil.rmtree(folder)


@pytest.mark.e2e
def test_unpatched_nodes_are_admitted_if_the_job_carries_verl(unpatched_cluster, pristine, tmp_path, monkeypatch):
    """tests/e2e/test_cluster_faults.py tests the refusal of such nodes."""
    where = "import importlib.util; print(importlib.util.find_spec('verl').submodule_search_locations[0])"
    without = subprocess.run(
        [unpatched_cluster.folder / "venv/bin/python", "-c", where], capture_output=True, text=True
    )
    assert without.stdout.strip() == str(pristine / "verl")
    monkeypatch.setenv("RAY_ADDRESS", unpatched_cluster.gcs)
    words, shown = ["DEVICE=cpu", f"OUT={tmp_path}/run", "ARGS=trainer.nnodes=2"], []
    verl = importlib.util.find_spec("verl").submodule_search_locations[0]
    carried = shlex.quote(f"++ray_kwargs.ray_init.runtime_env.py_modules=['{verl}']")
    job = parse_job([*words[:-1], f"{words[-1]} {carried}"])
    nodes = cluster.admit(job, compose(job, job.out), job.out, STARTS_S, shown.append)["nodes"]
    assert [each["node"].split()[0] for each in nodes] == ["head-1", "worker-2"]
    for each in nodes:
        assert each["root"].startswith(str(unpatched_cluster.folder)), "that of the job, not the interpreter's"
        assert each["dtypes"]["actor"]["product"] == "float16"
    assert any(line.startswith("2 nodes run verl 0.9.1 with stack ") for line in shown)
    assert not list(tmp_path.iterdir()), "nothing is left beside OUT"


@pytest.mark.slow
def test_submitted_job_trains_patched_on_unpatched_nodes(unpatched_cluster, tmp_path):
    small = (
        "trainer.nnodes=2 data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=8"
        " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32"  # of a worker: half of 8 prompts, 8 answers each
        " actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32"
    )
    words = ["DEVICE=cpu", "STEPS=1", f"OUT={tmp_path}/run", f"ARGS={small}"]
    environment = os.environ | {"RAY_ADDRESS": unpatched_cluster.dashboard, "HF_TOKEN": SECRET}
    command = [sys.executable, REPO / "scripts/submit.py", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    (verl,) = importlib.util.find_spec("verl").submodule_search_locations
    assert summary["patch_stamp"] == json.loads((Path(verl).parent / VERL.stamp).read_text())
    logs = [path for path in unpatched_cluster.folder.rglob("*") if path.is_file() and "/logs/" in str(path)]
    assert logs and not [path for path in logs if SECRET.encode() in path.read_bytes()]
