"""The releases of verl that the suite runs, by family and feature."""

from collections.abc import Iterable

from verl_precision.patch.releases import load_releases

ENTRIES = load_releases()
RELEASES = tuple(ENTRIES)


def having(*features: str, without: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the releases that have all of ``features`` and none of those in ``without``."""
    return tuple(
        name
        for name, release in ENTRIES.items()
        if all(map(release.has, features)) and not any(map(release.has, without))
    )


# By family: legacy workers without fp16, legacy workers with an actor in fp16, the model engine.
A, B, C = (tuple(name for name in RELEASES if ENTRIES[name].family == family) for family in "ABC")
LEGACY = having("legacy_workers")
