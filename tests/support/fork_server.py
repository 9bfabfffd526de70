"""Run programs on ranks that are forks of one process, so that a rank costs the imports of its tree and its work."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from support.forked_ranks import Finished, Job
from support.waiting import TIMEOUT_S

SERVER = Path(__file__).with_name("forked_ranks.py")


class JobError(AssertionError):
    """A process of a job failed; its log is in the message."""


class ForkServer:
    """Send jobs to a server; a context manager.

    Args:
        preload: modules to import before the first job, in this order.
        python: of the server and of all jobs.
        environment: of the server; ``OMP_NUM_THREADS`` is 1 in any case.
        log: file for what the server itself prints.
    """

    def __init__(
        self,
        preload: Sequence[str],
        log: Path,
        python: str | Path = sys.executable,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [python, SERVER, *preload],
                env={**(os.environ if environment is None else environment), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )

    def run(
        self,
        words: Sequence[object],
        environment: dict[str, str],
        logs: Path,
        ranks: int = 2,
        others: int = 0,
        limit_s: float = TIMEOUT_S,
    ) -> Finished:
        """Run a program and return how its processes ended; one that fails ends the others at once."""
        job = Job([str(word) for word in words], environment, str(logs), ranks, others, limit_s)
        try:
            self.process.stdin.write(json.dumps(asdict(job)) + "\n")
            self.process.stdin.flush()
            return Finished(**json.loads(self.process.stdout.readline()))
        except (BrokenPipeError, json.JSONDecodeError) as error:
            raise JobError(f"the fork server ended\n{self.log.read_text()[-4000:]}") from error

    def check(self, words: Sequence[object], environment: dict[str, str], logs: Path, **options: float) -> None:
        """Run a program as ``run`` does.

        Raises:
            JobError: a process failed, or waited for another that never came ("stuck").
        """
        finished = self.run(words, environment, logs, **options)
        if finished.first is None and not finished.late:
            return
        text = (Path(logs) / f"rank_{finished.first or 0}.log").read_text()
        stuck = finished.late or "Timed out" in text
        reason = "stuck: one rank waited for the other" if stuck else f"rank {finished.first} failed"
        raise JobError(f"{reason}; exit codes {finished.codes}\n{text[-4000:]}")

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()
