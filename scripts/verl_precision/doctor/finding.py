"""Define a finding: a part of a configuration that is wrong or unknown, and its fix."""

from typing import Any, NamedTuple

from verl_precision.words import options

# The ends of the keys that request a dtype, or a regime.
DTYPE_KEYS = ("dtype", "param_dtype", "precision", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


class Finding(NamedTuple):
    """One thing that is wrong, or not known.

    Args:
        key, value: the setting that it concerns.
        effect: what that does, a clause whose subject they are.
        fix: the command or the override that corrects it.
        applies: whether verl does what ``value`` requests.
    """

    key: str
    value: Any
    effect: str
    fix: str
    applies: bool = True

    @property
    def unheeded(self) -> bool:
        """True if a dtype was requested, by its key or by a regime, misspelt or not, and does not apply."""
        requests_dtype = self.key.rpartition(".")[2] in DTYPE_KEYS or self.value in options("precision")
        return requests_dtype and not self.applies

    @property
    def sentence(self) -> str:
        return f"{self.key}{'' if self.value is None else f'={self.value}'} {self.effect}"

    def json(self) -> dict[str, Any]:
        """Return the finding in ``doctor --json``."""
        return {"key": self.key, "value": self.value, "effect": self.effect, "fix": self.fix}
