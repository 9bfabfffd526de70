"""Train on a running Ray cluster: ``RAY_ADDRESS=http://HEAD:8265 scripts/submit.py [NAME=VALUE ...]``, as ``make run``.

Submits ``scripts/run.py`` as a job and shows its output. What verl needs in the environment goes to every process on
every node as the job's runtime environment: a variable of the shell would stay on this machine. Each node must have
this checkout, its environment, the model, the data and OUT at the same paths, and have started Ray from that
environment. Exit code 0: trained all steps; 1: refused or failed; 130: no longer watched, and the job goes on.
"""

import asyncio
import os
import shlex
import sys
from dataclasses import replace

from ray.job_submission import JobStatus, JobSubmissionClient

from lib import job as jobs
from lib import runs


def connect(address: str) -> JobSubmissionClient:
    if not address.startswith(("http://", "https://")):
        raise jobs.Refused(f"RAY_ADDRESS={address}: must be the cluster's dashboard, like http://HEAD:8265")
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError) as error:
        raise jobs.Refused(f"RAY_ADDRESS={address}: no Ray cluster answers there: {str(error)[:100]}") from error


async def show(client: JobSubmissionClient, number: str) -> None:
    async for text in client.tail_job_logs(number):
        print(text, end="", flush=True)


def main(words: list[str]) -> int:
    job = jobs.parse(words)
    client = connect(os.environ.get("RAY_ADDRESS", ""))
    job = replace(job, out=runs.folder(job, jobs.REPO / "outputs"))
    config = jobs.compose(job, job.out)
    jobs.check(job, config, job.out)
    runs.admit(job, job.out, config.trainer.total_training_steps)
    jobs.validate(job, config)
    asked = job.settings() | {"STEPS": job.steps or "", "OUT": job.out, "RETRIES": job.retries}
    words = [f"{name}={value}" for name, value in asked.items()]
    number = client.submit_job(entrypoint=shlex.join([sys.executable, str(jobs.REPO / "scripts/run.py"), *words]))
    print(f"job {number} on {client.get_address()}; ray job stop {number} ends it", flush=True)
    try:
        asyncio.run(show(client, number))
    except KeyboardInterrupt:
        return 130
    return 0 if client.get_job_status(number) == JobStatus.SUCCEEDED else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except jobs.Refused as refusal:
        sys.exit(f"submit: {refusal}")
