"""Find evidence in the log of ``main_ppo`` that the run cannot continue: dead processes, unmet requests."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from verl_precision.run.log import COLOUR, VLLM_PREFIX, WORKER_PREFIX, short

# Ray's report of a worker whose process has ended, and the errors that it raises instead of the worker's result. An
# actor that "died because of an error raised in its creation task" is not lost: that is the job's own error.
WORKER_DIED = re.compile(r"Worker IP address: (\S+) Worker port: \d+ Worker PID: (\d+)")
NO_ANSWER = re.compile(
    r"ActorDiedError: The actor died unexpectedly"
    r"|ray\.exceptions\.(ActorUnavailable|NodeDied|OutOfMemory|WorkerCrashed)Error: "  # the memory is the node's
)
# Beginnings of lines, without the prefixes of Ray and vLLM, after which no further step can complete, whatever
# ``main_ppo`` waits for.
FATAL = {
    # verl has no second engine, and its agent loops ask a dead one again and again.
    r"EngineCore encountered a fatal error": "vLLM's engine failed",
    r"(\[shutdown\] MPClient: )?engine core exited unexpectedly|(\w+\.)*EngineDeadError: ": "vLLM's engine died",
    # verl sends weights to vLLM's workers and waits for each bucket's receipt without a limit.
    r"WorkerProc hit an exception|Invocation of \w+ method failed": "vLLM failed",
    r"(Ray)?Worker ?[Pp]roc .*died unexpectedly": "vLLM's worker died",
}
# Ray keeps such a request for nodes to come. On a shared cluster it may be another job's: Ray shows it to every driver.
NO_ROOM = re.compile(r"\(autoscaler [^)]*\) Error: No available node types can fulfill")
PROCESS = re.compile(r"(\w+) pid=(\d+)(?:, ip=([^)]+))?")  # Ray names it by the actor's class or the task's function
NAMELESS = "a worker"
# Classes of verl that the job cannot lose. Ray may restart a user's own actor.
VERLS_OWN = re.compile(
    r"WorkerDict|\w*TaskRunner\w*|vLLM\w*|SGLang\w*|AgentLoopWorker\w*|TransferQueue\w*|SimpleStorage\w*"
)


@dataclass(frozen=True)
class Death:
    """Evidence that a job cannot continue.

    Attributes:
        cause: the event, with the process if it is known.
        certain: whether no further step can complete. Otherwise the process may have run a task, which Ray retries.
        line: the line of the log.
    """

    cause: str
    certain: bool
    line: str = field(default="", compare=False)


class DeathReader:
    """Reads the evidence from a log that grows.

    Args:
        shared_ray: whether other jobs may run on the same Ray.

    Attributes:
        lost: the first worker that ended, by Ray's report, or that does not answer; None without a report.
    """

    def __init__(self, shared_ray: bool = False) -> None:
        self.shared_ray = shared_ray
        self.names: dict[tuple[str | None, str], str] = {}  # by IP address, None on this node, and process id
        self.lost: str | None = None

    def read(self, lines: Iterable[str]) -> Death | None:
        """Return the first certain evidence in the log's new ``lines``, or else the first."""
        deaths = [death for line in lines if (death := self.read_line(line))]
        return next((death for death in deaths if death.certain), deaths[0] if deaths else None)

    def read_line(self, line: str) -> Death | None:
        """Return the death that one line reports."""
        prefix, died = WORKER_PREFIX.match(line), WORKER_DIED.search(line)
        if process := prefix and PROCESS.match(prefix[1]):
            name, pid, address = process.groups()
            self.names[address, pid] = name
        if died:
            address, pid = died.groups()
            name = self.names.get((address, pid)) or self.names.get((None, pid))
            worker = f"{name or 'a worker'} (pid {pid})"
            if self.lost in (None, NAMELESS):
                self.lost = f"{worker} on node {address}"
        elif NO_ANSWER.search(line):
            self.lost = self.lost or NAMELESS
        text = line[prefix.end() :] if prefix else line
        text = text[VLLM_PREFIX.match(text).end() :]
        if cause := next((cause for pattern, cause in FATAL.items() if re.match(pattern, text)), None):
            return Death(cause, True, short(line))
        if NO_ROOM.match(COLOUR.sub("", line)):
            return Death("Ray lacks the resources that verl requests", not self.shared_ray, short(line))
        if died:
            return Death(f"{worker} died", bool(name and VERLS_OWN.fullmatch(name)), short(line))
        return Death(f"{NAMELESS} died", False, short(line)) if NO_ANSWER.search(line) else None
