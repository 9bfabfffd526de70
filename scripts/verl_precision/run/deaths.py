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
# Classes of verl that the job cannot lose. Ray may restart a user's own actor.
VERLS_OWN = re.compile(
    r"WorkerDict|\w*TaskRunner\w*|vLLM\w*|SGLang\w*|AgentLoopWorker\w*|TransferQueue\w*|SimpleStorage\w*"
)


def is_class(name: str) -> bool:
    """Return whether Ray's name of a process is an actor's class rather than a task's function."""
    return any(letter.isupper() for letter in name)


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
    """

    def __init__(self, shared_ray: bool = False) -> None:
        self.shared_ray = shared_ray
        self.names: dict[tuple[str | None, str], str] = {}  # by IP address, None on this node, and process id
        self.dead: dict[str, str] = {}  # IP address by process id, in the order in which Ray reported the deaths
        self.unnamed: dict[str, Death] = {}  # by process id, deaths of processes that no line has named yet
        self.unanswered = False  # whether Ray reported that some worker does not answer

    def read(self, lines: Iterable[str]) -> Death | None:
        """Return the first certain evidence in the log's new ``lines``, or else the first."""
        deaths = [death for line in lines if (death := self.read_line(line))]
        return next((death for death in deaths if death.certain), deaths[0] if deaths else None)

    def read_line(self, line: str) -> Death | None:
        """Return the death that one line reports."""
        died, unanswered = WORKER_DIED.search(line), NO_ANSWER.search(line)
        if died:
            self.dead.setdefault(died[2], died[1])
        self.unanswered |= bool(unanswered)
        prefix = WORKER_PREFIX.match(line)
        if process := prefix and PROCESS.match(prefix[1]):
            name, pid, address = process.groups()
            self.names[address, pid] = name
            if pid in self.unnamed and is_class(name):  # Ray's log monitor is later than its report of the death
                return self.death_of(name, pid, self.unnamed.pop(pid).line)
        text = line[prefix.end() :] if prefix else line
        text = text[VLLM_PREFIX.match(text).end() :]
        if cause := next((cause for pattern, cause in FATAL.items() if re.match(pattern, text)), None):
            return Death(cause, True, short(line))
        if NO_ROOM.match(COLOUR.sub("", line)):
            return Death("Ray lacks the resources that verl requests", not self.shared_ray, short(line))
        if died:
            address, pid = died.groups()
            name = self.name_of(address, pid)
            actor = name if name and is_class(name) else None
            death = self.death_of(actor, pid, short(line))
            if not actor:
                self.unnamed[pid] = death
            return death
        return Death("a worker died", False, short(line)) if unanswered else None

    def name_of(self, address: str, pid: str) -> str | None:
        """Return Ray's name of the process with this id on the node with this address; None: no line names it."""
        return self.names.get((address, pid)) or self.names.get((None, pid))

    @staticmethod
    def death_of(name: str | None, pid: str, line: str) -> Death:
        certain = bool(name and VERLS_OWN.fullmatch(name))
        return Death(f"{name or 'a worker'} (pid {pid}) died", certain, line)


def lost_worker(reader: DeathReader, nodes: Iterable[dict] = ()) -> str | None:
    """Describe the first worker that ended, by Ray's report in the log that ``reader`` has read; None without a report.

    ``nodes`` are the facts of the cluster's nodes, for their names.
    """
    if not reader.dead:
        return "a worker" if reader.unanswered else None
    pid, address = next(iter(reader.dead.items()))
    node = next((node["node"] for node in nodes if node["node"].endswith(f"({address})")), address)
    return f"{reader.name_of(address, pid) or 'a worker'} (pid {pid}) on node {node}"
