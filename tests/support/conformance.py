"""What the conformance suites share: behaviours, the comparison of outcomes, and the file of results.

A suite's fixture ``outcomes(release, patched)`` returns the outcomes of that tree by case.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lib.patches.releases import Framework, load_releases
from lib.patches.stack import load_stack
from support.recorded import fingerprint

# Placeholders for the digests of a patched and an unpatched tree where they are the same.
IDENTICAL, REFERENCE = "to the bit as the unpatched release", "what the patched one is compared with"
DIGEST = "[0-9a-f]{64} [0-9a-f]{64}"  # of two ranks
DIGESTS = re.compile(f"{DIGEST}|fsdp: {DIGEST}; fsdp2: {DIGEST}")

Outcomes = Callable[[str, bool], Mapping[str, str]]


@dataclass(frozen=True)
class Behaviour:
    """One case of a suite.

    Args:
        row: its row of the support matrix.
        patched: the outcome on a patched tree, the same on every release.
        upstream: the outcomes on unpatched trees, and the releases of each.
        absent: releases that cannot have it, by reason.
    """

    row: str
    patched: str
    upstream: dict[str, tuple[str, ...]]
    absent: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def predicted(self, release: str) -> str:
        """Return the outcome on the unpatched release."""
        (text,) = (text for text, releases in self.upstream.items() if release in releases)
        return text

    def why_absent(self, release: str) -> str | None:
        return next((why for why, releases in self.absent.items() if release in releases), None)


def outcome(outcomes: Outcomes, release: str, case: str, patched: bool) -> str:
    """Return the outcome of a case; a digest becomes ``IDENTICAL`` or ``REFERENCE`` where the other tree's is the same.

    Only for a digest is the other tree looked at.
    """
    text = outcomes(release, patched)[case]
    if DIGESTS.fullmatch(text) and text == outcomes(release, not patched)[case]:
        return IDENTICAL if patched else REFERENCE
    return text


def verdicts(release: str, behaviours: Mapping[str, Behaviour], outcomes: Outcomes) -> dict[str, dict]:
    """Return the outcome of each behaviour on one release, for the support matrix."""
    results = {}
    for case, behaviour in behaviours.items():
        if why := behaviour.why_absent(release):
            results[case] = {"row": behaviour.row, "absent": why}
            continue
        upstream = outcome(outcomes, release, case, patched=False)
        results[case] = {
            "row": behaviour.row,
            "passed": outcome(outcomes, release, case, patched=True) == behaviour.patched,
            "upstream_has_it": upstream == behaviour.patched,
            "upstream": upstream,
        }
    return results


def write_results(results: Mapping[str, dict], file: Path, framework: Framework, suite: Path) -> None:
    """Write the verdicts on some releases into ``file``, and keep those on others.

    Each has the number of lines that the stack changes, and the fingerprint of what the verdicts depend on.
    """
    entries = json.loads(file.read_text()) if file.exists() else {}
    releases = load_releases(framework=framework)
    for name, seen in results.items():
        stack = load_stack(releases[name])
        signs = changed_lines(patch.text for patch in stack.patches)
        entries[name] = {
            "stack": stack.id,
            "fingerprint": fingerprint(releases[name], suite),
            "patches": len(stack.patches),
            "lines": {"added": signs.count("+"), "removed": signs.count("-")},
            "seen": seen,
        }
    ordered = {name: entries[name] for name in releases if name in entries}
    file.write_text(json.dumps(ordered, indent=1) + "\n")


def changed_lines(patches: Iterable[str]) -> list[str]:
    """Return the sign of every line that the patches add or remove."""
    bodies = [patch.partition("\n---\n")[2] for patch in patches]
    return [sign for body in bodies for sign in re.findall(r"^[+-](?![+-]{2} )", body, re.M)]
