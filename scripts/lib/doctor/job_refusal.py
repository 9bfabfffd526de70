"""Ask the doctor whether the installed verl could train a job, before anything starts."""

import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from lib.doctor.diagnosis import Diagnosis, diagnose
from lib.doctor.tree import Tree, identify_tree
from lib.errors import Refused
from lib.run.job import Job, culprit
from lib.run.presets import installed_verl


@cache
def installed_tree() -> Tree:
    """Return the verl that this Python imports.

    Raises:
        Refused: it is no release, and there is no wheel of one to compare it with.
    """
    return identify_tree(installed_verl().parent)


def ask_doctor(job: Job, out: Path) -> None:
    """Check the job by what the doctor knows of verl, vLLM and the model.

    Where it cannot examine the installed verl, print why: your own verl may be trained without a network.

    Raises:
        Refused: the doctor predicts that it ends before its first step is complete.
    """
    try:
        tree = installed_tree()
    except Refused as reason:
        print(f"the doctor cannot examine this verl: {reason}", file=sys.stderr)
        return

    def diagnosis(each: Job) -> Diagnosis:
        return diagnose(tree, each.overrides(out))

    def reasons(jobs: Iterable[Job]) -> Iterable[str | None]:
        return (diagnosis(each).refused for each in jobs)

    found = diagnosis(job)
    if found.refused is None:
        return
    word = culprit(job, found.refused, reasons)
    if found.findings:
        finding = found.findings[0]
        reason = f"{finding.key}={finding.value} {finding.effect}; give {finding.mend}"
        raise Refused(reason if word == f"ARGS={finding.key}={finding.value}" else f"{word}: {reason}")
    raise Refused(f"{word}: {found.sentence}")
