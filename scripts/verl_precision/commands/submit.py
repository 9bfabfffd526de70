"""Train on a running Ray cluster, whose dashboard RAY_ADDRESS names: ``RAY_ADDRESS=http://HEAD:8265``.

Submits ``verl-precision run`` as a job of Ray and shows its output. The job carries the
patched verl of this environment and this checkout's recipes, configs, scripts and patches to every node, so that a node
needs only the dependencies of verl (torch, vllm, …), and ``python3`` on the head's PATH. With CARRY=no every node must
have this checkout and its environment at the same paths and have started Ray from that. Either way OUT, the model and
the data must lie on storage that every node and the submitting machine mount at the same path. On a submitting machine
without a GPU set DEVICE=cuda. A secret (HF_TOKEN, WANDB_API_KEY, …) is never sent: set it where the nodes start Ray.

Exit code 0: trained all steps; 1: refused or failed; 130: no longer watched; the job continues.
"""

import asyncio
import os
import re
import shlex
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from verl_precision.doctor.job_refusal import ask_doctor
from verl_precision.errors import Refused
from verl_precision.facts.packages import installed_verl
from verl_precision.patch.status import apply_command, status
from verl_precision.paths import PACKAGE, PROGRAM, REPO
from verl_precision.run.checks import check_job
from verl_precision.run.folder import choose_folder, start_record
from verl_precision.run.job import VARIABLES as VARIABLES  # its options
from verl_precision.run.job import Job, compose
from verl_precision.run.job import parse_job as parse
from verl_precision.run.validation import validate
from verl_precision.spelling import as_options

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

CARRIED = ("configs", "patches", "recipes")  # of this project
PACKAGED = "scripts/verl_precision"  # where a checkout has this package
COMPILED = "__pycache__"
SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|CREDENTIALS?|API_?KEY|ACCESS_?KEY(_ID)?)$")  # in a variable's name


@dataclass(frozen=True)
class Submission:
    """A job for Ray: its ``entrypoint``, a shell command, and its ``runtime_env``, of paths here.

    ``carried`` describes what the job brings to the nodes, a line each.
    """

    entrypoint: str
    runtime_env: dict
    carried: tuple[str, ...]


def check_dashboard(address: str) -> None:
    """Check that RAY_ADDRESS is a dashboard's, which takes jobs.

    Raises:
        Refused: it is not.
    """
    if not address.startswith(("http://", "https://")):
        raise Refused(f"RAY_ADDRESS={address}: must be the URL of the cluster's dashboard, like http://HEAD:8265")


def connect(address: str) -> "JobSubmissionClient":
    """Return a client of the cluster whose dashboard is at ``address``.

    Raises:
        Refused: none answers.
    """
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError) as error:
        raise Refused(f"RAY_ADDRESS={address}: no Ray cluster answers there: {str(error)[:100]}") from error


def refuse_secrets(words: list[str]) -> None:
    """Check that no secret is submitted: Ray keeps a job's command and shows it on its dashboard.

    Raises:
        Refused: the value of a secret in this environment is in one of the words; the message does not repeat it.
    """
    for name, value in os.environ.items():
        if SECRET.search(name.upper()) and len(value) >= 8 and any(value in word for word in words):
            raise Refused(f"{name}: its value is part of the command line; set it where the nodes start Ray")


def patched_verl() -> tuple[Path, str]:
    """Return the package folder of the verl that is imported here, and its state in words.

    Raises:
        Refused: it does not have this checkout's patches.
    """
    package = installed_verl()
    state = status(package)
    if state.state != "patched":
        remedy = apply_command(package, state.series)
        raise Refused(f"CARRY=yes: {package}: {state.state}: {state.detail}; {remedy}")
    return package, state.detail


def size(folder: Path) -> str:
    """Return the number and size of a folder's files in words."""
    files = [path for path in folder.rglob("*") if path.is_file() and COMPILED not in path.parts]
    return f"{len(files)} files, {sum(path.stat().st_size for path in files) / 2**20:.1f} MiB"


def prepare(job: Job, scratch: Path) -> Submission:
    """Return the submission of ``job``, whose ``out`` is set, with copies in ``scratch`` of what it carries from here.

    Raises:
        Refused: there is nothing to carry.
    """
    values = job.settings() | {"STEPS": job.steps or "", "OUT": job.out, "RETRIES": job.retries}
    options = as_options({name: str(value) for name, value in values.items() if value != ""})
    if not job.carry:
        return Submission(shlex.join([*PROGRAM, "run", *options]), {}, ("nothing",))
    verl, state = patched_verl()
    for name in CARRIED:
        shutil.copytree(REPO / name, scratch / name, ignore=shutil.ignore_patterns(COMPILED))
    shutil.copytree(PACKAGE, scratch / PACKAGED, ignore=shutil.ignore_patterns(COMPILED, "project"))
    runtime_env = {"working_dir": str(scratch), "py_modules": [str(verl)], "excludes": [COMPILED]}
    carried = (f"{state}, {size(verl)}", f"{', '.join(CARRIED)} and the package of {REPO}, {size(scratch)}")
    return Submission(shlex.join(["python3", PACKAGED, "run", *options]), runtime_env, carried)


def check_submission(job: Job, words: list[str]) -> Job:
    """Check the job as ``run`` will, except for this machine's GPUs and CPUs. Return it with ``out`` set.

    Raises:
        Refused: it could not run as described.
    """
    out = dict(word.partition("=")[::2] for word in words).get("OUT", "")
    if job.carry and not out.startswith("/"):
        raise Refused(f"OUT={out}: must be an absolute path on storage shared by all nodes of the cluster")
    job = replace(job, out=choose_folder(job))
    config = compose(job, job.out)
    check_job(job, config, job.out)
    start_record(job, job.out, config.trainer.total_training_steps)
    ask_doctor(job, job.out)
    validate(job, config)
    return job


async def show_logs(client: "JobSubmissionClient", job_id: str) -> None:
    async for text in client.tail_job_logs(job_id):
        print(text, end="", flush=True)


def submit(client: "JobSubmissionClient", submission: Submission, address: str) -> int:
    """Submit the job and show its output to the end. Return the exit code.

    Raises:
        Refused: the cluster fails meanwhile.
    """
    import aiohttp
    from ray.job_submission import JobStatus

    try:
        job_id = client.submit_job(entrypoint=submission.entrypoint, runtime_env=submission.runtime_env)
        print(f"job {job_id} on {client.get_address()}; ray job stop {job_id} ends it", flush=True)
        asyncio.run(show_logs(client, job_id))
        return 0 if client.get_job_status(job_id) == JobStatus.SUCCEEDED else 1
    except KeyboardInterrupt:
        return 130
    except (RuntimeError, OSError, aiohttp.ClientError) as error:
        cause = " ".join(str(error).split())[:200]
        raise Refused(f"RAY_ADDRESS={address}: connection failed ({cause}); ray job list reports the state") from error


def main(words: list[str]) -> int:
    dry, words = "--dry-run" in words, [word for word in words if word != "--dry-run"]
    refuse_secrets(words)
    job = parse(words)
    check_dashboard(job.cluster or "")
    client = None if dry else connect(job.cluster)
    job = check_submission(job, words)
    with tempfile.TemporaryDirectory() as scratch:
        submission = prepare(job, Path(scratch))
        for line in submission.carried:
            print(f"carries {line}", flush=True)
        if dry:
            print(f"would submit to {job.cluster}: {submission.entrypoint}")
            return 0
        return submit(client, submission, job.cluster)
