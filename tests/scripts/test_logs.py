"""The log of ``main_ppo``: the workers' reports, the root cause of a failure, the evidence that a run cannot go on.

``train_logs/`` has excerpts of real runs' logs.
"""

import json
from pathlib import Path

import pytest

from lib.run import log as logs

RECORDED = Path(__file__).parent / "train_logs"
STAMP = {"release": "0.9.1", "stack": "0123456789ab", "tree": "f" * 40}
ACTOR = {"role": "actor", "rank": 0, "compute": "float16", "loss_scaling": True, "stamp": STAMP}
ROLLOUT = {"role": "rollout", "rank": 0, "rollout": "float16", "stamp": STAMP}


def recorded(name: str) -> list[str]:
    return (RECORDED / f"{name}.txt").read_text().splitlines()


def test_the_workers_reports_are_found_in_the_log():
    lines = [
        "\x1b[36m(WorkerDict pid=123)\x1b[0m [verl-precision] " + json.dumps(ACTOR),
        "(vLLMHttpServer pid=7) (EngineCore pid=9) [verl-precision] " + json.dumps(ROLLOUT) + " (trailing)",
        "what [verl-precision] lines look like",
    ]
    assert logs.reports(lines) == [ACTOR, ROLLOUT]


def test_the_cause_of_a_failure_is_told_without_rays_wrapping():
    log = """\
\x1b[36m(TaskRunnerV1 pid=9)\x1b[0m INFO:2026-01-01:worker group kwargs
\x1b[36m(WorkerDict pid=12)\x1b[0m ValueError: actor_rollout_ref.actor.dtype=float61: use one of float16, bfloat16
Traceback (most recent call last):
  File "main_ppo.py", line 90, in run_ppo
ray.exceptions.RayTaskError(ValueError): \x1b[36mray::TaskRunnerV1.run()\x1b[39m (pid=9, ip=127.0.0.1)
    raise ValueError("no exception line: it is indented")
ValueError: actor_rollout_ref.actor.dtype=float61: use one of float16, bfloat16
"""
    expected = "ValueError: actor_rollout_ref.actor.dtype=float61: use one of float16, bfloat16"
    assert logs.errors(log.splitlines()) == [expected]
    died = "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."
    assert logs.errors(["nothing", died]) == [died]


# As Ray 2.60 logged them on a cluster of two nodes.
DIED = [
    "(TaskRunnerV1 pid=19447) step:2 - global_seqlen/min:100",
    "(WorkerDict pid=20673, ip=127.0.0.3) [verl-precision] {}",
    "(raylet) A worker died or was killed while executing a task by an unexpected system error. To troubleshoot the "
    "problem, check the logs for the dead worker. Lease ID: 1000 Worker ID: 6757 Node ID: 563c Worker IP address: "
    "127.0.0.3 Worker port: 19114 Worker PID: 20673 Worker exit type: SYSTEM_ERROR",
]
ACTOR_DIED = ["ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.", "\tpid: 20673"]


def test_a_lost_worker_is_told_from_a_job_that_failed():
    nodes = [{"node": "head (127.0.0.2)"}, {"node": "second (127.0.0.3)"}]
    assert logs.lost_worker(DIED + ACTOR_DIED, nodes) == "WorkerDict (pid 20673) on node second (127.0.0.3)"
    closed = ["RuntimeError: [gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.3]:45843"]
    assert logs.lost_worker(DIED[2:] + closed) == "a worker (pid 20673) on node 127.0.0.3"
    assert logs.lost_worker(ACTOR_DIED, nodes) == "a worker"
    for error in ("OutOfMemory", "ActorUnavailable", "NodeDied", "WorkerCrashed"):
        assert logs.lost_worker([f"ray.exceptions.{error}Error: The task was killed."]) == "a worker"
    assert logs.lost_worker(["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."]) is None
    assert logs.lost_worker(["ValueError: Total available GPUs 1.0 is less than total desired GPUs 2"], nodes) is None
    created = (
        "ActorDiedError: The actor died because of an error raised in its creation task, ray::WorkerDict.__init__()"
    )
    assert logs.lost_worker([f"ray.exceptions.{created}", "ValueError: no such key"], nodes) is None


@pytest.mark.parametrize(
    ("name", "death", "causes"),
    [
        (
            "server-refuses-its-model",  # main_ppo ends by itself
            None,
            [
                "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig "
                "Value error, The model type 'gemma2' does not support float16. Reason: Numerical instability. "
            ],
        ),
        (
            "vllm-fails-to-take-weights",
            logs.Death("vLLM failed", certain=True),
            ["StopIteration in _create_merged_loras_inplace (vllm/lora/model_manager.py:833)"],
        ),
        ("ray-has-no-room", logs.Death("Ray has not the resources that verl requests", certain=True), []),
    ],
)
def test_a_recorded_failure_shows_its_root_cause(name, death, causes):
    lines = recorded(name)
    shown = logs.errors(lines)
    assert len(shown) == len(causes)
    assert all(text.startswith(cause) for text, cause in zip(shown, causes, strict=True)), shown
    assert logs.Watch().read(lines) == death


def test_a_chain_shows_its_first_and_its_last_exception():
    chain = """\
Traceback (most recent call last):
  File "a.py", line 1, in a
KeyError: 'float61'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
ValueError: dtype=float61

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
RuntimeError: the worker could not be built
"""
    own = [f"(WorkerDict pid=1) {line}" for line in chain.splitlines()]
    other = ["(WorkerDict pid=2) starting"] * len(own)
    interleaved = [line for pair in zip(own, other, strict=True) for line in pair]
    expected = ["KeyError: 'float61'", "RuntimeError: the worker could not be built"]
    assert logs.errors(own) == logs.errors(interleaved) == expected


def test_the_first_causes_are_kept_where_many_failed():
    lines = [f"(WorkerDict pid={pid}) RuntimeError: rank {pid}" for pid in range(9)]
    assert logs.errors(lines) == ["RuntimeError: rank 0", "RuntimeError: rank 1", "RuntimeError: rank 8"]


def test_only_the_death_of_an_actor_is_certain_to_end_a_run():
    died = DIED[2]
    assert logs.Watch().read(DIED) == logs.Death("WorkerDict (pid 20673) died", certain=True)
    task = DIED[1].replace("WorkerDict", "get_master_addr_port")
    assert logs.Watch().read([task, died]) == logs.Death("a worker (pid 20673) died", certain=False)
    watch = logs.Watch()
    assert watch.read(DIED[:2]) is None
    assert watch.read([died]) == logs.Death("WorkerDict (pid 20673) died", certain=True)
    assert logs.Watch().read(ACTOR_DIED) == logs.Death("a worker died", certain=False)
    assert logs.Watch().read([*ACTOR_DIED, *DIED]) == logs.Death("WorkerDict (pid 20673) died", certain=True)
    assert logs.Watch().read(["ValueError: EngineCore is not a word of a death"]) is None


def test_ray_may_name_a_dead_actor_after_its_death():
    watch = logs.Watch()
    assert watch.read([DIED[2]]) == logs.Death("a worker (pid 20673) died", certain=False)
    assert watch.read(DIED[:2]) == logs.Death("WorkerDict (pid 20673) died", certain=True)
    assert watch.read(DIED[:2]) is None


def test_an_actor_of_a_users_own_may_be_restarted():
    own = [line.replace("WorkerDict", "SandboxPool") for line in DIED[1:3]]
    assert logs.Watch().read(own) == logs.Death("SandboxPool (pid 20673) died", certain=False)


def test_a_process_id_counts_on_its_own_node():
    elsewhere = DIED[1].replace("ip=127.0.0.3", "ip=10.0.0.9")
    assert "ip=10.0.0.9" in elsewhere
    assert logs.Watch().read([elsewhere, DIED[2]]) == logs.Death("a worker (pid 20673) died", certain=False)


def test_a_request_without_room_may_be_another_jobs_on_a_cluster():
    death = logs.Watch(cluster=True).read(recorded("ray-has-no-room"))
    assert death == logs.Death("Ray has not the resources that verl requests", certain=False)


def test_words_of_a_response_are_no_evidence():
    for said in ("EngineDeadError: ", "WorkerProc hit an exception", "Worker proc 1 died unexpectedly"):
        assert logs.Watch().read([f"(RewardLoopWorker pid=7) the answer: {said}"]) is None


@pytest.mark.parametrize(
    "line",
    [
        "(EngineCore pid=8) ERROR 11-22 13:05:46 [core.py:1100] EngineCore encountered a fatal error.",
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)",
        "ERROR 11-22 13:05:46 [a.py:729] [shutdown] MPClient: engine core exited unexpectedly",
        "(EngineCore pid=8) ERROR 11-22 13:05:46 [a.py:312] Worker proc VllmWorker-0 died unexpectedly (exit code: -9)",
        "(Worker pid=8) ERROR 11-22 13:05:46 [multiproc_executor.py:1043] WorkerProc hit an exception.",
    ],
)
def test_vllms_own_words_are_certain(line):
    death = logs.Watch().read([f"(vLLMHttpServer pid=7) {line}"])
    assert death and death.certain and death.what.startswith("vLLM")
