"""Read the log of ``main_ppo``: the precision that its workers report, exceptions, and the deaths of processes.

Ray writes the output of every process to this log, each line after ``(NAME pid=PID)``, so lines of several processes
interleave. A traceback is read from the lines of one process.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

COLOUR = re.compile(r"\x1b\[\d+m")
WORKER_PREFIX = re.compile(r"^(?:\x1b\[\d+m)*\(([^()]*\bpid=\d+[^()]*)\)(?:\x1b\[\d+m)*\s?")
# vLLM's own processes, and what its logger writes before every line of a traceback.
VLLM_PREFIX = re.compile(
    r"^(\(\w+ pid=\d+\) )?(?:(?:INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+\] ?)?"
)
EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception|Interrupt|OutOfMemory\w*)|StopIteration)"
    r"(?:\(\w+\))?(?::(?= )|$)"
)
FRAME = re.compile(r'^File "(?:.*/site-packages/)?(?P<file>.+)", line (?P<line>\d+), in (?P<function>\S+)')
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
# Exceptions that only report another one, which the log contains as well.
PASSES_ON = re.compile(
    r"ray\.|RayTaskError|hydra\.errors\."
    r"|RuntimeError: (Worker failed with error|Engine core initialization failed)"  # vLLM's
    r"|Exception: Call to \w+ method failed"
    r"|(\w+\.)*EngineDeadError: "
)
# pydantic's message: this line, then for each wrong field a line of its name and indented ones.
INVALID, FIELD = re.compile(r"\d+ validation errors? for \w+"), re.compile(r"[\w.]+$")
UNSENDABLE = "TypeError: cannot pickle "  # raised by Ray while it sends the exception before it
LONGEST = 400  # characters of an exception or a line that are shown

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


def reports(lines: Iterable[str]) -> list[dict]:
    """Return what the workers reported of their precision: the JSON after ``[verl-precision]`` in each such line."""
    decoder = json.JSONDecoder()
    tails = (line.partition("[verl-precision] ")[2] for line in lines)
    return [decoder.raw_decode(tail)[0] for tail in tails if tail.startswith("{")]


def short(text: str) -> str:
    """Return the text without colours, cut after ``LONGEST`` characters."""
    text = COLOUR.sub("", text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"


def by_process(lines: Iterable[str]) -> dict[str, list[tuple[int, str]]]:
    """Return each process's own lines, numbered as in the log, without the prefixes of Ray and vLLM."""
    processes: dict[str, list[tuple[int, str]]] = {}
    for number, line in enumerate(lines):
        outer = WORKER_PREFIX.match(line)
        text = line[outer.end() :] if outer else line
        inner = VLLM_PREFIX.match(text)
        name = f"{outer and outer[1]} {inner[1]}"
        processes.setdefault(name, []).append((number, text[inner.end() :].rstrip()))
    return processes


def exceptions(lines: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the exceptions that one process logged, with their details: of each chain the first and the last."""
    chains: list[list[tuple[int, str]]] = []
    frame, chained, details = "", False, False  # whether the next exception joins a chain, and a line the last one
    for number, line in lines:
        text = line.strip()
        if (exception := EXCEPTION.match(line)) and not (chained and text.startswith(UNSENDABLE)):
            bare = frame and exception.end() == len(text)
            chains += [] if chained and chains else [[]]
            chains[-1].append((number, f"{text} in {frame}" if bare else text))
            chained, details = False, True
        elif at := FRAME.match(text):
            frame, details = f"{at['function']} ({at['file']}:{at['line']})", False
        elif text.startswith(CHAINED):
            chained, details = True, False
        elif details and (line.startswith("  ") or (INVALID.search(chains[-1][-1][1]) and FIELD.match(line))):
            first, message = chains[-1][-1]
            chains[-1][-1] = first, f"{message} {text}"
        elif text:
            details = False
    return [link for chain in chains for link in dict.fromkeys((chain[0], chain[-1]))]


def errors(lines: Iterable[str], most: int = 3) -> list[str]:
    """Return why a run failed: the first different exceptions of its log, and the last one at the end.

    Those that only report another one are left out if there is any other.
    """
    numbered = sorted(each for process in by_process(lines).values() for each in exceptions(process))
    texts = dict.fromkeys(short(text) for _, text in numbered)
    causes = [text for text in texts if not PASSES_ON.match(text)] or list(texts)
    return causes if len(causes) <= most else [*causes[: most - 1], causes[-1]]


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
