"""Ask the doctor whether the installed verl could train a job, before anything starts."""

import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from verl_precision.doctor.diagnosis import Diagnosis, diagnose
from verl_precision.doctor.resolver import MODEL
from verl_precision.doctor.tree import Tree, identify_tree
from verl_precision.errors import Refused
from verl_precision.facts.packages import installed_verl
from verl_precision.run.job import NO_WORD, Job, culprit

OVERRIDE = re.compile(r"\+?[\w.]+=")


def installed_tree() -> Tree | None:
    """Return the verl that this Python imports; None, with the reason on stderr, where it cannot be examined.

    Your own verl may be trained without a network, from which a release would be had to compare it with.
    """
    return examined(installed_verl().parent)


@cache
def examined(root: Path) -> Tree | None:
    """Examine the verl in ``root``; see :func:`installed_tree`."""
    try:
        return identify_tree(root)
    except (Refused, OSError) as reason:
        print(f"the doctor cannot examine this verl: {reason}", file=sys.stderr)
        return None


def ask_doctor(job: Job, out: Path) -> None:
    """Check the job by what the doctor knows of verl, vLLM and the model.

    Raises:
        Refused: the doctor predicts that it ends before its first step is complete.
    """
    if (tree := installed_tree()) is None:
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
        name = "MODEL" if job.model and finding.key == f"{MODEL}.path" else finding.key
        mend = f"ARGS={finding.mend}" if OVERRIDE.match(finding.mend) else finding.mend
        reason = f"{name}={finding.value} {finding.effect}; give {mend}"
        known = word in (f"ARGS={finding.key}={finding.value}", NO_WORD)
        raise Refused(reason if known else f"{word}: {reason}")
    raise Refused(f"{word}: {found.sentence}")
