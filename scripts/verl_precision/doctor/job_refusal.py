"""Ask the doctor whether the installed verl could train a job, before anything starts."""

import re
import sys
from functools import cache
from pathlib import Path

from verl_precision.doctor.diagnosis import diagnose
from verl_precision.doctor.resolver import MODEL
from verl_precision.doctor.tree import Tree, identify_tree
from verl_precision.errors import Refused
from verl_precision.facts.packages import installed_verl
from verl_precision.run.job import Job, configuration_refusal

OVERRIDE = re.compile(r"\+?[\w.]+=")


@cache
def examined(root: Path) -> Tree | None:
    """Examine the verl in ``root``; None, with the reason on stderr, where no release can be downloaded to compare."""
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
    if (tree := examined(installed_verl().parent)) is None:
        return
    found = diagnose(tree, job.overrides(out))
    if found.refused is None:
        return
    if not found.findings:
        raise configuration_refusal(job, found.sentence)
    finding = found.findings[0]
    name = "MODEL" if job.model and finding.key == f"{MODEL}.path" else finding.key
    fix = f"ARGS={finding.fix}" if OVERRIDE.match(finding.fix) else finding.fix
    raise Refused(f"{name}={finding.value} {finding.effect}; give {fix}")
