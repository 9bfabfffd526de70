"""What the log of ``main_ppo`` reports: its workers' precision, why it failed, and whether it can still go on.

Ray writes the output of every process to this log, each line after ``(NAME pid=PID)``, so lines of several processes
interleave. A traceback is read along the lines of its own process.
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
# Exceptions that only pass on another one, which the log has as well.
PASSES_ON = re.compile(
    r"ray\.|RayTaskError|hydra\.errors\."
    r"|RuntimeError: (Worker failed with error|Engine core initialization failed)"  # vLLM's
    r"|Exception: Call to \w+ method failed"
    r"|(\w+\.)*EngineDeadError: "
)
UNSENDABLE = "TypeError: cannot pickle "  # raised by Ray while it sends the exception before it
LONGEST = 400  # characters that are shown of an exception or a line

# What Ray reports of a worker whose process has ended, and in the place of what it was to return. An actor that "died
# because of an error raised in its creation task" is not lost: that is the job's own error.
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
# Ray keeps such a request for nodes to come. On a cluster it may be another job's: Ray shows it to every driver.
NO_ROOM = re.compile(r"\(autoscaler [^)]*\) Error: No available node types can fulfill")
# Classes of verl whose death nothing survives. Ray may restart an actor of a user's own.
VERLS_OWN = re.compile(
    r"WorkerDict|\w*TaskRunner\w*|vLLM\w*|SGLang\w*|AgentLoopWorker\w*|TransferQueue\w*|SimpleStorage\w*"
)


def reports(lines: Iterable[str]) -> list[dict]:
    """Return what the workers reported of their precision: the JSON after ``[verl-precision]`` in each such line."""
    decoder = json.JSONDecoder()
    tails = (line.partition("[verl-precision] ")[2] for line in lines)
    return [decoder.raw_decode(tail)[0] for tail in tails if tail.startswith("{")]


def short(text: str) -> str:
    """Return the text without colours and without what is beyond ``LONGEST`` characters."""
    text = COLOUR.sub("", text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"


def by_process(lines: Iterable[str]) -> dict[str, list[tuple[int, str]]]:
    """Return each process's own lines, numbered as in the log, without the prefixes of Ray and vLLM."""
    found: dict[str, list[tuple[int, str]]] = {}
    for number, line in enumerate(lines):
        outer = WORKER_PREFIX.match(line)
        text = line[outer.end() :] if outer else line
        inner = VLLM_PREFIX.match(text)
        name = f"{outer and outer[1]} {inner[1]}"
        found.setdefault(name, []).append((number, text[inner.end() :].rstrip()))
    return found


def exceptions(lines: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the exceptions that one process logged, with their details: of each chain the first and the last."""
    chains: list[list[tuple[int, str]]] = []
    frame, chained, details = "", False, False  # whether the next exception joins a chain, and a line the last one
    for number, line in lines:
        text = line.strip()
        if (named := EXCEPTION.match(line)) and not (chained and text.startswith(UNSENDABLE)):
            bare = frame and named.end() == len(text)
            chains += [] if chained and chains else [[]]
            chains[-1].append((number, f"{text} in {frame}" if bare else text))
            chained, details = False, True
        elif at := FRAME.match(text):
            frame, details = f"{at['function']} ({at['file']}:{at['line']})", False
        elif text.startswith(CHAINED):
            chained, details = True, False
        elif details and line.startswith("  "):
            first, said = chains[-1][-1]
            chains[-1][-1] = first, f"{said} {text}"
        elif text:
            details = False
    return [link for chain in chains for link in dict.fromkeys((chain[0], chain[-1]))]


def errors(lines: Iterable[str], most: int = 3) -> list[str]:
    """Return why a run failed: the first different exceptions of its log, and the last one at the end.

    Those that only pass on another one are left out where there is anything else.
    """
    found = sorted(each for process in by_process(lines).values() for each in exceptions(process))
    texts = dict.fromkeys(short(text) for _, text in found)
    causes = [text for text in texts if not PASSES_ON.match(text)] or list(texts)
    return causes if len(causes) <= most else [*causes[: most - 1], causes[-1]]


def lost_worker(lines: Iterable[str], nodes: Iterable[dict] = ()) -> str | None:
    """Return the first worker whose process ended, in words, as Ray reports it in a log; None: it reports none.

    Args:
        nodes: the facts of the cluster's nodes, for their names.
    """
    text = "\n".join(lines)
    if not (died := WORKER_DIED.search(text)):
        return "a worker" if NO_ANSWER.search(text) else None
    address, pid = died.groups()
    node = next((node["node"] for node in nodes if node["node"].endswith(f"({address})")), address)
    role = re.search(rf"\((\w+) pid={pid}\b", text)
    return f"{role[1] if role else 'a worker'} (pid {pid}) on node {node}"


@dataclass(frozen=True)
class Death:
    """Evidence that a job cannot go on.

    ``certain``: no step can complete any more. Otherwise a process ended that may have been one of a task of Ray, which
    is tried again. ``line``: of the log.
    """

    what: str
    certain: bool
    line: str = field(default="", compare=False)


class Watch:
    """Finds the evidence in a log that grows.

    Args:
        cluster: whether other jobs may run on the same Ray.
    """

    def __init__(self, cluster: bool = False) -> None:
        self.cluster = cluster
        self.actors: dict[tuple[str | None, str], str] = {}  # class by address, None of this node, and process id
        self.unnamed: dict[str, Death] = {}  # deaths by process id whose class no line has named yet

    def read(self, lines: list[str]) -> Death | None:
        """Return the first certain evidence in the log's new ``lines``, or else the first."""
        found = [death for line in lines if (death := self.evidence(line))]
        return next((death for death in found if death.certain), found[0] if found else None)

    def evidence(self, line: str) -> Death | None:
        """Return what one line is evidence of."""
        named = WORKER_PREFIX.match(line)
        text = line[named.end() :] if named else line
        if actor := named and re.match(r"(\w*[A-Z]\w*) pid=(\d+)(?:, ip=([^)]+))?", named[1]):
            self.actors[actor[3], actor[2]] = actor[1]  # Ray names a task's process by its function
            if actor[2] in self.unnamed:  # Ray's log monitor is later than its report of the death
                return self.died(actor[1], actor[2], self.unnamed.pop(actor[2]).line)
        text = text[VLLM_PREFIX.match(text).end() :]
        if what := next((what for pattern, what in FATAL.items() if re.match(pattern, text)), None):
            return Death(what, True, short(line))
        if NO_ROOM.match(COLOUR.sub("", line)):
            return Death("Ray has not the resources that verl requests", not self.cluster, short(line))
        if died := WORKER_DIED.search(line):
            address, pid = died.groups()
            actor = self.actors.get((address, pid)) or self.actors.get((None, pid))
            death = self.died(actor, pid, short(line))
            if not actor:
                self.unnamed[pid] = death
            return death
        return Death("a worker died", False, short(line)) if NO_ANSWER.search(line) else None

    @staticmethod
    def died(actor: str | None, pid: str, line: str) -> Death:
        certain = bool(actor and VERLS_OWN.fullmatch(actor))
        return Death(f"{actor or 'a worker'} (pid {pid}) died", certain, line)
