"""The log of ``main_ppo``: the root cause of a failure, the evidence of a death; by excerpts of real logs."""

from pathlib import Path

import pytest

from verl_precision.run.log import Death, DeathReader, errors


def recorded(name: str) -> list[str]:
    return (Path(__file__).parent / f"train_logs/{name}.txt").read_text().splitlines()


def test_cause_of_a_failure_is_shown_without_rays_wrapping():
    cause = "ValueError: actor_rollout_ref.actor.dtype=float61: use one of float16, bfloat16"
    lines = [
        "\x1b[36m(TaskRunnerV1 pid=9)\x1b[0m INFO:2026-01-01:worker group kwargs",
        f"\x1b[36m(WorkerDict pid=12)\x1b[0m {cause}",
        "Traceback (most recent call last):",
        "ray.exceptions.RayTaskError(ValueError): \x1b[36mray::TaskRunnerV1.run()\x1b[39m (pid=9, ip=127.0.0.1)",
        '    raise ValueError("no exception line: it is indented")',
        cause,
    ]
    assert errors(lines) == [cause]
    assert errors(ACTOR_DIED) == ACTOR_DIED[:1]


DIED = [
    "(TaskRunnerV1 pid=19447) step:2 - global_seqlen/min:100",
    "(WorkerDict pid=20673, ip=127.0.0.3) [verl-precision] {}",
    "(raylet) A worker died or was killed while executing a task by an unexpected system error. Node ID: 563c "
    "Worker IP address: 127.0.0.3 Worker port: 19114 Worker PID: 20673 Worker exit type: SYSTEM_ERROR",
]
ACTOR_DIED = ["ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.", "\tpid: 20673"]
TASK = "(main_task pid=20673, ip=127.0.0.3) Using fp16"
TAKEN_ALONG = DIED[2].replace("20673", "777").replace("127.0.0.3", "127.0.0.2")
CREATION = "The actor died because of an error raised in its creation task, ray::WorkerDict.__init__()"


def test_lost_worker_is_distinguished_from_a_failed_job():
    for lines, lost in (
        (DIED + ACTOR_DIED, "WorkerDict (pid 20673) on node 127.0.0.3"),
        (ACTOR_DIED + DIED, "WorkerDict (pid 20673) on node 127.0.0.3"),
        ([*DIED, TAKEN_ALONG], "WorkerDict (pid 20673) on node 127.0.0.3"),
        ([TASK, DIED[2]], "main_task (pid 20673) on node 127.0.0.3"),
        ([DIED[2]], "a worker (pid 20673) on node 127.0.0.3"),
        (ACTOR_DIED, "a worker"),
        (["ray.exceptions.OutOfMemoryError: The task was killed."], "a worker"),
        (["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."], None),
        (["ValueError: Total available GPUs 1.0 is less than total desired GPUs 2"], None),
        ([f"ray.exceptions.ActorDiedError: {CREATION}", "ValueError: no such key"], None),
    ):
        reader = DeathReader()
        reader.read(lines)
        assert reader.lost == lost


NO_ROOM = Death("Ray lacks the resources that verl requests", certain=True)
REFUSED_MODEL = (
    "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig "
    "Value error, The model type 'gemma2' does not support float16. Reason: Numerical instability. "
)
NO_WEIGHTS = "StopIteration in _create_merged_loras_inplace (vllm/lora/model_manager.py:833)"


def test_recorded_failure_shows_its_root_cause():
    for name, death, cause in (
        ("server-refuses-its-model", None, REFUSED_MODEL),  # main_ppo ends without help
        ("vllm-fails-to-take-weights", Death("vLLM failed", certain=True), NO_WEIGHTS),
        ("ray-has-no-room", NO_ROOM, None),
    ):
        shown = errors(recorded(name))
        assert len(shown) == bool(cause) and all(text.startswith(cause) for text in shown)
        assert DeathReader().read(recorded(name)) == death
    another_jobs = Death(NO_ROOM.cause, certain=False)
    assert DeathReader(shared_ray=True).read(recorded("ray-has-no-room")) == another_jobs


def test_first_causes_and_the_last_exception_are_shown():
    chain = [
        *("Traceback (most recent call last):", "  File 'a.py', line 1, in a", "KeyError: 'float61'", ""),
        *("During handling of the above exception, another exception occurred:", ""),
        *("Traceback (most recent call last):", "ValueError: dtype=float61", ""),
        *("The above exception was the direct cause of the following exception:", ""),
        *("Traceback (most recent call last):", "RuntimeError: the worker could not be built"),
    ]
    own = [f"(WorkerDict pid=1) {line}" for line in chain]
    interleaved = [text for line in own for text in (line, "(WorkerDict pid=2) starting")]
    assert errors(interleaved) == ["KeyError: 'float61'", "RuntimeError: the worker could not be built"]
    many = [f"(WorkerDict pid={pid}) RuntimeError: rank {pid}" for pid in range(9)]
    assert errors(many) == ["RuntimeError: rank 0", "RuntimeError: rank 1", "RuntimeError: rank 8"]


def test_details_of_an_exception_are_those_of_its_own_process_of_vllm():
    own = [f"(Worker pid=2) {text}" for text in ("ValidationError: 1 validation error for C", "size", "  too small")]
    lines = [f"(vLLMHttpServer pid=1) {text}" for line in own for text in (line, "(EngineCore pid=3) starting")]
    assert errors(lines) == ["ValidationError: 1 validation error for C size too small"]
    assert errors([*own[:1], "(Worker pid=2) shutting down"]) == ["ValidationError: 1 validation error for C"]


ACTOR_OF_VERL = Death("WorkerDict (pid 20673) died", certain=True)
UNKNOWN = Death("a worker (pid 20673) died", certain=False)


@pytest.mark.parametrize(
    ("parts", "deaths"),
    [
        ([DIED], [ACTOR_OF_VERL]),
        ([DIED[:2], DIED[2:]], [None, ACTOR_OF_VERL]),
        # Ray prefixes actors on the driver's own node without an address
        ([DIED[2:]], [UNKNOWN]),
        ([[DIED[1].replace(", ip=127.0.0.3", ""), DIED[2]]], [ACTOR_OF_VERL]),
        # a process id identifies an actor only on its own node; a task and a user's own actor are not verl's
        ([[DIED[1].replace("ip=127.0.0.3", "ip=10.0.0.9"), DIED[2]]], [UNKNOWN]),
        ([[TASK, DIED[2]]], [Death("main_task (pid 20673) died", certain=False)]),
        ([[DIED[1].replace("WorkerDict", "SandboxPool"), DIED[2]]], [Death("SandboxPool (pid 20673) died", False)]),
        ([ACTOR_DIED], [Death("a worker died", certain=False)]),
    ],
)
def test_only_the_death_of_an_actor_of_verl_is_certain_to_end_a_run(parts, deaths):
    reader = DeathReader()
    assert [reader.read(lines) for lines in parts] == deaths


def test_vllms_own_messages_are_certain_and_the_text_of_a_response_is_no_evidence():
    time = "ERROR 11-22 13:05:46"
    for line in (
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)",
        f"{time} [a.py:729] [shutdown] MPClient: engine core exited unexpectedly",
        f"(EngineCore pid=8) {time} [a.py:312] Worker proc VllmWorker-0 died unexpectedly (exit code: -9)",
        f"(Worker pid=8) {time} [executor.py:1043] WorkerProc hit an exception.",
    ):
        death = DeathReader().read([f"(vLLMHttpServer pid=7) {line}"])
        assert death and death.certain and death.cause.startswith("vLLM")
    for text in ("EngineDeadError: ", "WorkerProc hit an exception", "Worker proc 1 died unexpectedly"):
        assert DeathReader().read([f"(RewardLoopWorker pid=7) the answer: {text}"]) is None
