"""Cases of the doctor: what it finds on a release with some overrides, and the releases by family."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import pytest

from verl_precision.doctor.diagnosis import Diagnosis
from verl_precision.doctor.resolver import UPSTREAM_SCALER
from verl_precision.patch.releases import load_releases

RELEASES = load_releases()
ALL = list(RELEASES)
# By family: legacy workers, legacy workers with an actor in fp16, the model engine.
A, B, C = ([name for name in RELEASES if RELEASES[name].family == family] for family in "ABC")
NEWEST = C[-1]
# Of each family one, in `make test`; tests/conformance/verl runs the workers of all. `make test-quick` has the newest,
# and what is common to several releases.
TRIED = ("0.5.0", "0.7.1", NEWEST)
ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))
ENGINE = f"{ACTOR}.fsdp_config"
Examine = Callable[..., Diagnosis]


@dataclass(frozen=True)
class Case:
    """What the doctor finds with some overrides; what is not given is not compared.

    Texts contain names in braces: ``{actor}``, ``{ref}``, ``{rollout}``, the nodes of these roles; ``{engine}`` and
    ``{critic}``, the FSDP settings of actor and critic; ``{fp16_rollout}``, an override; ``{release}``.

    Args:
        releases: where it is so; `make test` runs those of ``TRIED``, the last one if none of them is among these.
        words: the overrides, with spaces between them.
        dtypes: the effective dtypes of some hops, as words like ``wire=float32``.
        verdict: "refused" if ``refused`` is given.
        refused: the line of the refusal; if empty, the config must be accepted. Like those below it is a pattern:
            ``*contradict*`` matches a part.
        effect: the effects of all findings by their keys; those of one key are joined.
        fix: the fixes of some findings by their keys.
        scaled: the roles whose loss is scaled.
    """

    name: str
    releases: Iterable[str]
    states: str
    words: str
    dtypes: str = ""
    verdict: str = ""
    refused: str = ""
    sentence: str = "*"
    effect: Mapping[str, str] | None = None
    fix: Mapping[str, str] | None = None
    scaled: str | None = None

    def check(self, release: str, state: str, examine: Examine) -> None:
        """Compare the diagnosis on a release with what is expected of it."""
        names = {"actor": ACTOR, "ref": REF, "rollout": ROLLOUT, "engine": ENGINE, "release": release}
        names["critic"] = "critic.fsdp" if release in C else "critic.model.fsdp_config"
        names["fp16_rollout"] = f"{ROLLOUT}.dtype=float16"
        diagnosis = examine(release, state, *self.words.format(**names).split())
        assert_matches(diagnosis.refused or "", self.refused.format(**names))
        assert_matches(diagnosis.sentence, self.sentence)
        expected = dict(word.split("=") for word in self.dtypes.split())
        assert {name: str(diagnosis.hops[name].effective_dtype) for name in expected} == expected
        if self.verdict or self.refused:
            assert diagnosis.verdict == (self.verdict or "refused"), diagnosis.sentence
        effects, fixes = {}, {finding.key: finding.fix for finding in diagnosis.findings}
        for finding in diagnosis.findings:
            effects[finding.key] = f"{effects.get(finding.key, '')}{finding.effect}"
        assert self.effect is None or set(effects) == {key.format(**names) for key in self.effect}
        for texts, patterns in ((effects, self.effect), (fixes, self.fix)):
            for key, pattern in (patterns or {}).items():
                assert_matches(texts[key.format(**names)], pattern.format(**names))
        scalers = {role: settings for role, settings in diagnosis.scaler.items() if settings}
        assert self.scaled is None or set(scalers) == set(self.scaled.split())
        for settings in scalers.values():
            assert settings["saved"] if state == "patched" else settings == UPSTREAM_SCALER


def of_cases(*cases: Case) -> pytest.MarkDecorator:
    """Run a test of ``case``, ``release`` and ``state`` on each case, release and state."""
    rows = [
        pytest.param(case, *each.values, marks=each.marks, id=f"{case.name}-{each.id}")
        for case in cases
        for each in of_states(case.releases, case.states)
    ]
    return pytest.mark.parametrize(("case", "release", "state"), rows)


def of_states(releases: Iterable[str], states: str = "unpatched patched") -> list:
    """Return parameters, a release and a state each; those that repeat others of the family are slow."""
    releases = list(releases)
    tried = set(TRIED) & set(releases) or releases[-1:]
    marks = {release: [pytest.mark.subprocess if release in tried else pytest.mark.slow] for release in releases}
    if len(releases) > 1:
        marks[NEWEST] = []
    return [
        pytest.param(release, state, marks=marks[release], id=f"{release}-{state}")
        for release in releases
        for state in states.split()
    ]


def having(feature: str) -> list[str]:
    return [name for name, release in RELEASES.items() if release.has(feature)]


def assert_matches(text: str, pattern: str) -> None:
    """Compare a text with a pattern, in which ``*`` stands for anything."""
    assert fnmatchcase(text, pattern), f"{text!r} is not {pattern!r}"
