"""Create Gymnasium environments by name, and flatten their observations into vectors."""

import difflib
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces.utils import flatten


def make_env(name: str, make: Callable[..., Any] = gymnasium.make, **settings: Any) -> Any:
    """Return ``make(name, **settings)``, with errors of one line.

    Args:
        make: ``gymnasium.make`` or ``gymnasium.make_vec``.

    Raises:
        ValueError: there is no such environment, or a package that it needs is missing.
    """
    module, colon, rest = name.rpartition(":")
    if colon and not (all(part.isidentifier() for part in module.split(".")) and rest):
        raise ValueError(f"env={name} must be NAME or MODULE:NAME")
    try:
        return make(name, **settings)
    except gymnasium.error.UnregisteredEnv:
        near = difflib.get_close_matches(name, gymnasium.registry, cutoff=0.7)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"env={name} is unknown to Gymnasium{hint}") from None
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(f"env={name} cannot be created: {' '.join(str(error).split())}") from None


def flat_observation(space: gymnasium.Space, value: Any, where: str) -> np.ndarray:
    """Return an element of a space as a vector, float32.

    Raises:
        ValueError: it has an inf or a NaN; the message begins with ``where`` and names the first component.
    """
    vector = np.asarray(flatten(space, value), dtype=np.float32).reshape(-1)
    nonfinite = np.flatnonzero(~np.isfinite(vector))
    if len(nonfinite):
        component = nonfinite[0]
        raise ValueError(f"{where}: component {component} of the observation is {vector[component]}")
    return vector
