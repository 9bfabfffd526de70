"""Read the log of ``main_ppo``: the precision that its workers report, and the exceptions that ended it.

Ray writes the output of every process to this log, each line after ``(NAME pid=PID)``, so lines of several processes
interleave. A traceback is read from the lines of one process.
"""

import json
import re
from collections.abc import Iterable

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
