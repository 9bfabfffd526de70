"""Train on a running cluster: ``RAY_ADDRESS=http://HEAD:8265 scripts/submit.py [--dry-run] [NAME=VALUE ...]``.

The variables are ``make run``'s. Submits ``scripts/run.py`` as a job of Ray and shows its output. The job carries the
patched verl of this environment and this checkout's recipes, configs, scripts and patches to every node, so that a node
needs what verl depends on (torch, vllm, …) alone, and ``python3`` on the head's PATH. With CARRY=no every node must
have this checkout and its environment at the same paths and have started Ray from that. Either way OUT, the model and
the data must lie where every node, and the machine that submits, sees them at the same path. From one without a GPU say
DEVICE=cuda. A secret (HF_TOKEN, WANDB_API_KEY, …) is never sent: set it where the nodes start Ray. ``--dry-run`` says
what would be submitted.

Exit code 0: trained all steps; 1: refused or failed; 130: no longer watched, and the job goes on.
"""

import asyncio
import importlib.util
import os
import re
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
from ray.job_submission import JobStatus, JobSubmissionClient

from lib.errors import Refused
from lib.patches.status import status
from lib.paths import REPO
from lib.run import folder as runs
from lib.run import job as jobs

CARRIED = ("configs", "patches", "recipes", "scripts")  # of this checkout
COMPILED = "__pycache__"
SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|CREDENTIALS?|API_?KEY|ACCESS_?KEY(_ID)?)$")  # in a variable's name


@dataclass(frozen=True)
class Submission:
    """What Ray is given: the job's ``entrypoint``, a shell command, and its ``runtime_env``, of paths here."""

    entrypoint: str
    runtime_env: dict
    told: tuple[str, ...]


def refuse_address(address: str) -> None:
    if not address.startswith(("http://", "https://")):
        raise Refused(f"RAY_ADDRESS={address}: must be the cluster's dashboard, like http://HEAD:8265")


def connect(address: str) -> JobSubmissionClient:
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError) as error:
        raise Refused(f"RAY_ADDRESS={address}: no Ray cluster answers there: {str(error)[:100]}") from error


def refuse_secrets(words: list[str]) -> None:
    """Ray shows a job's command to whoever sees its dashboard, and keeps it.

    Raises:
        Refused: the value of a secret in this environment is in one of the words, which the message does not repeat.
    """
    for name, value in os.environ.items():
        if SECRET.search(name.upper()) and len(value) >= 8 and any(value in word for word in words):
            raise Refused(f"{name}: its value stands on the command line; set it where the nodes start Ray")


def patched_verl() -> tuple[Path, str]:
    """The package folder of the verl that is imported here, and what it is.

    Raises:
        Refused: it has not this checkout's patches.
    """
    package = Path(importlib.util.find_spec("verl").submodule_search_locations[0])
    found = status(package)
    if found.state != "patched":
        raise Refused(f"CARRY=yes: {package}: {found.state}: {found.detail}; make apply-patches VERL={package}")
    return package, found.detail


def size(folder: Path) -> str:
    files = [path for path in folder.rglob("*") if path.is_file() and COMPILED not in path.parts]
    return f"{len(files)} files, {sum(path.stat().st_size for path in files) / 2**20:.1f} MiB"


def prepare(job: jobs.Job, scratch: Path) -> Submission:
    """What is submitted for ``job``, whose ``out`` is set; what is carried of this checkout is copied to ``scratch``.

    Raises:
        Refused: there is nothing to carry.
    """
    asked = job.settings() | {"STEPS": job.steps or "", "OUT": job.out, "RETRIES": job.retries}
    words = [f"{name}={value}" for name, value in asked.items() if value != ""]
    if not job.carry:
        return Submission(shlex.join([sys.executable, str(REPO / "scripts/run.py"), *words]), {}, ("nothing",))
    verl, what = patched_verl()
    for name in CARRIED:
        shutil.copytree(REPO / name, scratch / name, ignore=shutil.ignore_patterns(COMPILED))
    carried = {"working_dir": str(scratch), "py_modules": [str(verl)], "excludes": [COMPILED]}
    told = (f"{what}, {size(verl)}", f"{', '.join(CARRIED)} of {REPO}, {size(scratch)}")
    return Submission(shlex.join(["python3", "scripts/run.py", *words]), carried, told)


def checked(job: jobs.Job, words: list[str]) -> jobs.Job:
    """The job with ``out`` set, looked at as ``run.py`` will.

    Raises:
        Refused: it could not run as asked.
    """
    out = dict(word.partition("=")[::2] for word in words).get("OUT", "")
    if job.carry and not out.startswith("/"):
        raise Refused(f"OUT={out}: must be an absolute path that every node of the cluster sees")
    job = replace(job, out=runs.folder(job, REPO / "outputs"))
    config = jobs.compose(job, job.out)
    jobs.check(job, config, job.out)
    runs.admit(job, job.out, config.trainer.total_training_steps)
    jobs.validate(job, config)
    return job


async def show(client: JobSubmissionClient, number: str) -> None:
    async for text in client.tail_job_logs(number):
        print(text, end="", flush=True)


def main(words: list[str]) -> int:
    if words in (["--help"], ["-h"]):
        print(f"{__doc__}\n{jobs.usage()}")
        return 0
    dry, words = "--dry-run" in words, [word for word in words if word != "--dry-run"]
    refuse_secrets(words)
    job = jobs.parse(words)
    refuse_address(job.cluster or "")
    client = None if dry else connect(job.cluster)
    job = checked(job, words)
    with tempfile.TemporaryDirectory() as scratch:
        submission = prepare(job, Path(scratch))
        for line in submission.told:
            print(f"carries {line}", flush=True)
        if dry:
            print(f"would submit to {job.cluster}: {submission.entrypoint}")
            return 0
        try:
            number = client.submit_job(entrypoint=submission.entrypoint, runtime_env=submission.runtime_env)
            print(f"job {number} on {client.get_address()}; ray job stop {number} ends it", flush=True)
            asyncio.run(show(client, number))
            return 0 if client.get_job_status(number) == JobStatus.SUCCEEDED else 1
        except KeyboardInterrupt:
            return 130
        except (RuntimeError, OSError, aiohttp.ClientError) as error:
            why = " ".join(str(error).split())[:200]
            raise Refused(f"RAY_ADDRESS={job.cluster}: fails ({why}); ray job list says what has become") from error


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Refused as refusal:
        sys.exit(f"submit: {refusal}")
