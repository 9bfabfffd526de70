"""What the conformance suites share: behaviours, the outcomes of all releases, and the file of results."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import pytest

from support.recorded import Recording, changed_entries
from verl_precision.patch.releases import find_release
from verl_precision.patch.stack import load_stack

# Placeholders for the digests of a patched and an unpatched tree where they are the same.
IDENTICAL, REFERENCE = "bitwise as the unpatched release", "what the patched one is compared with"
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
        fixes: the patched tree has the series ``fixes``, too; without it, as any other case, only ``precision``.
    """

    row: str
    patched: str
    upstream: dict[str, tuple[str, ...]]
    absent: dict[str, tuple[str, ...]] = field(default_factory=dict)
    fixes: bool = False

    def predicted(self, release: str) -> str:
        """Return the outcome on the unpatched release."""
        (text,) = (text for text, releases in self.upstream.items() if release in releases)
        return text

    def why_absent(self, release: str) -> str | None:
        return next((why for why, releases in self.absent.items() if release in releases), None)


@dataclass(frozen=True)
class Suite:
    """The cases that run on every release of a framework, patched and unpatched.

    Args:
        recording: where their outcomes are recorded.
        behaviours: by the name of their case.
        not_run: further rows of the support matrix, and why they could not be tested.
    """

    recording: Recording
    behaviours: Mapping[str, Behaviour]
    not_run: Mapping[str, str] = field(default_factory=dict)

    def outcomes(self, request: pytest.FixtureRequest, run: Callable[..., Mapping[str, str]]) -> Iterator[Outcomes]:
        """Yield ``outcomes(release, patched)``, the outcomes of that tree by case; record them at the end if asked to.

        Only the cases that the session's tests name are run, and on an unpatched tree those that are not recorded.

        Args:
            run: ``run(release, patched, *cases)`` returns the outcomes of these cases.
        """
        tests = [item for item in request.session.items if item.path.is_relative_to(self.recording.suite)]
        named = {item.callspec.params["case"] for item in tests if "outcomes" in item.fixturenames}
        write = request.config.getoption("write_results")
        done: dict[tuple[str, bool], Mapping[str, str]] = {}
        begun: dict[str, str] = {}  # the fingerprint of each release when it was first run

        def of(release: str, patched: bool) -> Mapping[str, str]:
            if (release, patched) not in done:
                begun.setdefault(release, self.recording.fingerprint(release))
                known = {} if patched or write else self.recording.upstream.of(release)
                wanted = sorted(named - known.keys())
                done[release, patched] = known | (run(release, patched, *wanted) if wanted else {})
            return done[release, patched]

        yield of
        if write and named == set(self.behaviours):
            for release, fingerprint in begun.items():
                assert self.recording.fingerprint(release) == fingerprint, f"{release}: files changed while it ran"
                if (release, True) in done and (release, False) in done:
                    self.record(release, of)

    def record(self, release: str, outcomes: Outcomes) -> None:
        """Record the outcomes of a release; if one is not the expected one, remove those that are recorded."""
        if not self.as_expected(release, outcomes):
            self.write(release, None)
            self.recording.upstream.remove(release)
            return
        self.write(release, verdicts(release, self.behaviours, outcomes))
        lasting = {case: text for case, text in outcomes(release, False).items() if not DIGESTS.fullmatch(text)}
        self.recording.upstream.write(release, lasting)

    def as_expected(self, release: str, outcomes: Outcomes) -> bool:
        """Return whether the patched tree has exactly the behaviours that the release can have, and the unpatched
        tree did what is predicted of it."""
        for case, behaviour in self.behaviours.items():
            if behaviour.why_absent(release):
                if case in outcomes(release, True) or case in outcomes(release, False):
                    return False
            elif outcome(outcomes, release, case, patched=True) != behaviour.patched:
                return False
            elif outcome(outcomes, release, case, patched=False) != behaviour.predicted(release):
                return False
        return True

    def write(self, release: str, seen: Mapping[str, dict] | None) -> None:
        """Write the verdicts on a release, or remove them if there are none; those on others stay.

        The entry has the number of lines that the stack changes, and the fingerprint of what the verdicts depend on.
        """
        file, framework = self.recording.results, self.recording.framework
        with changed_entries(file) as entries:
            entries.pop(release, None)
            if not seen:
                return
            rows = {f"not_run_{i}": {"row": row, "not_run": why} for i, (row, why) in enumerate(self.not_run.items())}
            stack = load_stack(find_release(release, framework=framework))
            signs = changed_lines(patch.text for patch in stack.patches)
            entries[release] = {
                "stack": stack.id,
                "fingerprint": self.recording.fingerprint(release),
                "patches": len(stack.patches),
                "lines": {"added": signs.count("+"), "removed": signs.count("-")},
                "seen": dict(seen) | rows,
            }


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


def changed_lines(patches: Iterable[str]) -> list[str]:
    """Return the sign of every line that the patches add or remove."""
    bodies = [patch.partition("\n---\n")[2] for patch in patches]
    return [sign for body in bodies for sign in re.findall(r"^[+-](?![+-]{2} )", body, re.M)]
