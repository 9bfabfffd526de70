"""Define a finding: a part of a configuration that is wrong or unknown, and the change that corrects it."""

from dataclasses import dataclass
from typing import Any

from lib.cli import options

# How the effect of a requested dtype that does not apply begins.
IGNORED, UNREAD, HALF = UNHEEDED = ("is ignored by", "is a key that nothing reads", "reaches only one half")
# The ends of the keys that request a dtype to compute in, or a regime.
DTYPE_KEYS = ("dtype", "param_dtype", "precision")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or not known.

    Args:
        key, value: what it is about.
        effect: what that does, a clause whose subject they are.
        mend: the command or the override that mends it.
    """

    key: str
    value: Any
    effect: str
    mend: str

    @property
    def unheeded(self) -> bool:
        """True if a dtype was requested, by a key of its own or by a regime, misspelt or not, and does not apply."""
        requests_dtype = self.key.rpartition(".")[2] in DTYPE_KEYS or self.value in options("precision")
        return requests_dtype and self.effect.startswith(UNHEEDED)
