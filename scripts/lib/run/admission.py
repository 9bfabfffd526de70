"""May these runs start? ``python scripts/lib/run/admission.py REPO`` with a JSON list of the words of each on stdin.

Asks the project in the folder REPO, which may be another version than the one that this file is of, and the verl
that comes first on PYTHONPATH. Prints a JSON list: of each whether it is finished already. Exit code 1 with one line on
stderr where a run would be refused.
"""

import json
import sys

from lib.errors import Refused

if __name__ == "__main__":
    sys.path[0] = f"{sys.argv[1]}/scripts"  # instead of this file's own folder

    from lib.run import folder as runs
    from lib.run import job as jobs


def finished(job: "jobs.Job", steps: int) -> bool:
    """Whether the job's folder holds it, finished, with these settings and this length."""
    if not runs.finished(job.out):
        return False
    record = json.loads((job.out / "run.json").read_text())
    return record["steps"] == steps and job.settings().items() <= record["settings"].items()


def main(asked: list[list[str]]) -> None:
    """Raises ``Refused`` for the first that can neither start nor be taken up; what takes longest comes last."""
    wanted = [jobs.parse(words) for words in asked]
    configs = [jobs.compose(job, job.out) for job in wanted]
    done = [finished(job, config.trainer.total_training_steps) for job, config in zip(wanted, configs, strict=True)]
    ahead = [(job, config) for job, config, is_done in zip(wanted, configs, done, strict=True) if not is_done]
    for job, config in ahead:
        jobs.check(job, config, job.out)
        runs.admit(job, job.out, config.trainer.total_training_steps)
    for job, config in ahead:
        jobs.validate(job, config)
    print(json.dumps(done))


if __name__ == "__main__":
    try:
        main(json.load(sys.stdin))
    except Refused as refusal:
        sys.exit(str(refusal))
