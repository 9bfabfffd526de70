"""Name the regime in which the workers of a run computed."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from verl_precision.paths import CONFIGS
from verl_precision.words import options

ROLES = ("actor", "ref", "critic", "rollout")


@cache
def named_dtypes(regime: str) -> dict[str, str]:
    """Return by role the dtype that a regime's overlay names."""
    import yaml

    tree = yaml.safe_load((CONFIGS / "precision" / f"{regime}.yaml").read_text())
    roles = {**tree["actor_rollout_ref"], "critic": tree["critic"]}
    return {role: of_role["dtype"] for role, of_role in roles.items() if "dtype" in of_role}


def computing_dtype(role: str, reported: Mapping[str, Any]) -> str:
    return reported["rollout" if role == "rollout" else "compute"]


def effective_regime(effective_dtypes: Mapping[str, Any]) -> str | None:
    """Return the regime whose dtypes the workers of every role reported; None where there is none.

    Args:
        effective_dtypes: by role what its workers reported, a list where they differ.
    """
    reported = {role: each for role, each in effective_dtypes.items() if role in ROLES}
    if not {"actor", "rollout"} <= reported.keys() or any(isinstance(each, list) for each in reported.values()):
        return None
    dtypes = {role: computing_dtype(role, each) for role, each in reported.items()}
    return next((name for name in options("precision") if dtypes.items() <= named_dtypes(name).items()), None)
