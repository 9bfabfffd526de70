"""Query a Ray cluster: ``python -m verl_precision.run.cluster_query ADDRESS REQUEST``, with the request as JSON.

Joins the cluster, waits for its nodes and lets each report what it runs. Prints JSON objects, a line each:
``progress``, and at the end ``answer`` or ``refused``.
"""

import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import verl_precision
from verl_precision.errors import Refused
from verl_precision.format import first_three
from verl_precision.run.node_facts import difference, node_facts, refuse_driver

REACH_S, CONNECT_S, PROOF_S, LEAVE_S = 5, 60, 300, 10
SHOWN_EVERY_S = 15  # while it waits for nodes
NOTICED_S = 30  # after which Ray's health checks have noticed that a node is gone


def node_name(node: Mapping[str, Any]) -> str:
    """Return the name of a node of ``ray.nodes()``; Ray's default name is the address."""
    address = node["NodeManagerAddress"]
    name = node.get("NodeName") or address
    return f"{node['NodeManagerHostname'] if name == address else name} ({address})"


def missing_resources(
    free: Sequence[tuple[dict, Mapping[str, float]]], nnodes: int, gpus: int, cpus: int
) -> str | None:
    """Describe what is missing for ``nnodes`` nodes with so many free GPUs and CPUs; None if nothing is.

    Args:
        free: the nodes that are alive, and their free resources.
    """
    able = [node for node, left in free if left.get("GPU", 0) >= gpus and left.get("CPU", 0) >= cpus]
    if len(able) >= nnodes:
        return None
    counts = "{} has {:g} of {:g} GPUs and {:g} of {:g} CPUs free"
    nodes = []
    for node, left in free:
        numbers = [of.get(kind, 0) for kind in ("GPU", "CPU") for of in (left, node["Resources"])]
        nodes.append(counts.format(node_name(node), *numbers))
    want = f"{nnodes} nodes with {gpus} GPUs and {cpus} CPUs free are needed"
    setting = f"trainer.nnodes={nnodes} trainer.n_gpus_per_node={gpus}"
    return f"{setting}: {want}, but only {len(able)} of {len(nodes)} nodes qualify; {'; '.join(nodes)}"


def wait_for_nodes(
    nnodes: int, gpus: int, cpus: int, until: float, show: Callable[[str], None]
) -> list[tuple[dict, bool]]:
    """Wait for enough nodes. Return those that may get a worker, and whether a GPU is free there.

    A node without CPUs and GPUs gets no worker. One without GPUs does: verl's trainer and agent loops need none.

    Raises:
        Refused: at the time ``until`` there are still not enough.
    """
    import ray

    shown_at = time.monotonic()
    while True:
        left = ray._private.state.available_resources_per_node()
        free = [(node, left.get(node["NodeID"], {})) for node in ray.nodes() if node["Alive"]]
        missing = missing_resources(free, nnodes, gpus, cpus)
        if not missing:
            used = [each for each in free if each[0]["Resources"].get("CPU") or each[0]["Resources"].get("GPU")]
            return [(node, left.get("GPU", 0) >= 1) for node, left in used]
        if time.monotonic() > until:
            raise Refused(missing)
        if time.monotonic() - shown_at > SHOWN_EVERY_S:
            shown_at = time.monotonic()
            show(f"waiting: {missing}")
        time.sleep(1)


def prove_nodes(nodes: list[tuple[dict, bool]], query: Mapping[str, Any], driver: Mapping[str, Any]) -> list[dict]:
    """Collect the facts of each of ``nodes``, as ``wait_for_nodes`` returned them, and compare them with the driver's.

    Raises:
        Refused: naming the nodes that differ, cannot set up the job's environment or do not answer.
        ray.exceptions.RayError: a node was lost meanwhile.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.cloudpickle.register_pickle_by_value(verl_precision)  # with all its modules
    waiting = {}
    for node, gpu_free in nodes:
        on_gpu = query["device"] == "cuda" and gpu_free
        task = ray.remote(node_facts).options(
            num_cpus=0,
            num_gpus=0.001 if on_gpu else 0,  # without a part of a GPU, the task would see none
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        waiting[task.remote(query, "cuda" if on_gpu else "cpu")] = node
    answered, silent = ray.wait(list(waiting), num_returns=len(waiting), timeout=PROOF_S)
    odd = [f"node {node_name(waiting[reference])} does not answer within {PROOF_S} s" for reference in silent]
    proven = []
    for reference in answered:
        node, name = waiting[reference], node_name(waiting[reference])
        try:
            facts = ray.get(reference)
        except (ray.exceptions.RuntimeEnvSetupError, ray.exceptions.RayTaskError) as error:
            odd.append(f"node {name} cannot report its code and dtypes: {str(error).strip().splitlines()[-1]}")
            continue
        if different := difference(facts, driver):
            odd.append(f"node {name}: {different}")
        known = {"node": name, "ip": node["NodeManagerAddress"], "id": node["NodeID"]}
        known |= {"gpus": node["Resources"].get("GPU", 0), "cpus": node["Resources"].get("CPU", 0)}
        proven.append(known | {key: value for key, value in facts.items() if key != "blobs"})
    if odd:
        raise Refused(first_three(odd))
    return sorted(proven, key=lambda each: each["node"])


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


def answer(address: str, request: Mapping[str, Any], show: Callable[[str], None]) -> list:
    """Return the facts of the nodes, or without a ``query`` the ids of the nodes that are alive.

    Raises:
        Refused: the cluster cannot be joined, is too small, or a node differs from this process.
    """
    import ray
    from ray.exceptions import NodeDiedError, TaskUnschedulableError, WorkerCrashedError

    if "query" not in request:
        join(address, request["runtime_env"])
        return [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    # Before Ray's threads run: loading torch beside them sometimes crashed this process in a job of Ray.
    driver = node_facts(request["query"], "cpu")
    refuse_driver(driver)
    join(address, request["runtime_env"])
    until = time.monotonic() + request["wait_s"]
    while True:
        nodes = wait_for_nodes(request["nnodes"], request["gpus"], request["cpus"], until, show)
        show(f"checking the code and dtypes of {len(nodes)} nodes")
        try:
            return prove_nodes(nodes, request["query"], driver)
        except (NodeDiedError, TaskUnschedulableError, WorkerCrashedError) as error:
            if time.monotonic() > until + NOTICED_S:
                raise
            show(f"a node was lost during the query: {str(error).strip().splitlines()[0]}")
            time.sleep(REACH_S)  # Ray may list the node for a while yet


def main(address: str) -> None:
    def send(**message: Any) -> None:
        print(json.dumps(message), flush=True)

    try:
        send(answer=answer(address, json.load(sys.stdin), lambda text: send(progress=text)))
    except Refused as refusal:
        send(refused=str(refusal))
    signal.alarm(LEAVE_S)  # disconnecting at exit may hang if the head is gone


if __name__ == "__main__":
    main(sys.argv[1])
