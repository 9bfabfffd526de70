"""Releases by family, and what a diagnosis of the doctor contains, for its tests."""

from collections.abc import Callable

from lib.doctor.diagnosis import Diagnosis
from lib.patches.releases import load_releases

RELEASES = load_releases()
ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))
ENGINE = f"{ACTOR}.fsdp_config"
# By family: legacy workers, legacy workers with an actor in fp16, the model engine.
A, B, C = ([name for name in RELEASES if RELEASES[name].family == family] for family in "ABC")
# The first and the last of the legacy families and of the model engine; tests/conformance/verl runs the workers of all.
SOME = (A[0], A[-1], B[-1], C[0], C[-1])
NEWEST = C[-1]
Examine = Callable[..., Diagnosis]


def having(feature: str) -> list[str]:
    return [name for name, release in RELEASES.items() if release.has(feature)]


def rounds_weights(release: str) -> bool:
    """Return whether the wire of the release's default workers casts the weights to bfloat16."""
    return RELEASES[release].has("bfloat16_wire") and not RELEASES[release].has("legacy_workers")


def dtypes(diagnosis: Diagnosis, *names: str) -> list[str | None]:
    return [diagnosis.hops[name].effective_dtype for name in names]


def effects(diagnosis: Diagnosis) -> dict[str, str]:
    """Return the effect of each finding by its key."""
    return {finding.key: finding.effect for finding in diagnosis.findings}


def mends(diagnosis: Diagnosis) -> dict[str, str]:
    return {finding.key: finding.mend for finding in diagnosis.findings}
