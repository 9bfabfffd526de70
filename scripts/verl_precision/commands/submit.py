"""Train on a running Ray cluster, whose dashboard RAY_ADDRESS names: ``RAY_ADDRESS=http://HEAD:8265``.

Submits ``verl-precision run`` as a job of Ray and shows its output. The job carries the
patched verl of this environment and this checkout's recipes, configs, scripts and patches to every node, so that a node
needs only the dependencies of verl (torch, vllm, …), and ``python3`` on the head's PATH. With CARRY=no every node must
have this checkout and its environment at the same paths and have started Ray from that. Either way OUT, the model and
the data must lie on storage that every node and the submitting machine mount at the same path. On a submitting machine
without a GPU set DEVICE=cuda. A secret (HF_TOKEN, WANDB_API_KEY, …) is never sent: set it where the nodes start Ray.

Exit code 0: trained all steps; 1: refused or failed; 130: no longer watched; the job continues.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from verl_precision.commands.run import check_run
from verl_precision.errors import Refused
from verl_precision.facts.packages import installed_verl
from verl_precision.patch.status import apply_command, status
from verl_precision.paths import PACKAGE, PROGRAM, REPO
from verl_precision.run.folder import choose_folder
from verl_precision.run.job import VARIABLES as VARIABLES  # its options
from verl_precision.run.job import Job, compose, parse_job
from verl_precision.spelling import as_options

RAY = (sys.executable, "-m", "ray.scripts.scripts")  # the command ray of this environment
CARRIED = ("configs", "patches", "recipes")  # of this project
PACKAGED = "scripts/verl_precision"  # the place of this package in a checkout
COMPILED = "__pycache__"
SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|CREDENTIALS?|API_?KEY|ACCESS_?KEY(_ID)?)$")  # in a variable's name


def refuse_secrets(words: list[str]) -> None:
    """Refuse to submit the value of a secret, without repeating it: Ray shows a job's command on its dashboard."""
    for name, value in os.environ.items():
        if SECRET.search(name.upper()) and len(value) >= 8 and any(value in word for word in words):
            raise Refused(f"{name}: its value is part of the command line; set it where the nodes start Ray")


def prepare(job: Job, scratch: Path) -> list[str]:
    """Return the words of ``ray job submit`` for ``job``, whose ``out`` is set.

    What the job carries to the nodes is copied into ``scratch``, which Ray packs.
    """
    values = job.settings() | {"STEPS": job.steps or "", "OUT": job.out, "RETRIES": job.retries}
    options = as_options({name: str(value) for name, value in values.items() if value != ""})
    if not job.carry:
        return ["--", *map(str, PROGRAM), "run", *options]
    verl = installed_verl()
    state = status(verl)
    if state.state != "patched":
        raise Refused(f"CARRY=yes: {verl}: {state.state}: {state.detail}; {apply_command(verl, state.series)}")
    for name in CARRIED:
        shutil.copytree(REPO / name, scratch / name, ignore=shutil.ignore_patterns(COMPILED))
    shutil.copytree(PACKAGE, scratch / PACKAGED, ignore=shutil.ignore_patterns(COMPILED, "project"))
    print(f"carries {state.detail}, and the {', '.join(CARRIED)} and scripts of {REPO}", flush=True)
    runtime_env = {"working_dir": str(scratch), "py_modules": [str(verl)], "excludes": [COMPILED]}
    return ["--runtime-env-json", json.dumps(runtime_env), "--", "python3", PACKAGED, "run", *options]


def parse(words: list[str]) -> Job:
    refuse_secrets(words)
    job, out = parse_job(words), dict(word.partition("=")[::2] for word in words).get("OUT", "")
    if job.carry and not out.startswith("/"):
        raise Refused(f"OUT={out}: must be an absolute path on storage shared by all nodes of the cluster")
    return job


def main(job: Job, dry_run: bool = False) -> int:
    address = os.environ.get("RAY_ADDRESS", "")
    if not address.startswith(("http://", "https://")):
        raise Refused(f"RAY_ADDRESS={address}: must be the URL of the cluster's dashboard, like http://HEAD:8265")
    if not dry_run:
        check_dashboard(address)
    job = replace(job, out=choose_folder(job))
    check_run(job, compose(job, job.out), job.out)
    with tempfile.TemporaryDirectory() as scratch:
        submission = prepare(job, Path(scratch))
        if dry_run:
            print(f"would submit to {address}: {shlex.join(submission[submission.index('--') + 1 :])}")
            return 0
        try:
            return subprocess.run([*RAY, "job", "submit", "--address", address, *submission]).returncode
        except KeyboardInterrupt:
            return 130


def check_dashboard(address: str) -> None:
    """Refuse a cluster whose dashboard does not answer at ``address``."""
    from ray.job_submission import JobSubmissionClient

    try:
        JobSubmissionClient(address)
    except (RuntimeError, OSError) as error:
        cause = " ".join(str(error).split())[:200]
        raise Refused(f"RAY_ADDRESS={address}: no Ray cluster answers there ({cause})") from error
