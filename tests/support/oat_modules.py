"""OAT's two modules that are copied into every release, loaded without OAT."""

import importlib.util
from dataclasses import dataclass
from types import ModuleType

from verl_precision.paths import REPO

FILES = REPO / "patches/oat/files/oat/utils"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"oat_{name}", FILES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


precision, mismatch = load("precision"), load("mismatch")


@dataclass
class Args(precision.PrecisionArgs):
    """The arguments of OAT that the modules read, with OAT's defaults except for flash attention."""

    bf16: bool = True
    load_in_4bit: bool = False
    flash_attn: bool = False
    zero_stage: int = 2
    grad_accum_dtype: str | None = None
