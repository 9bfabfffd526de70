"""A fork server for OAT: its processes run a release's own code on the CPU, with the workers' locked environment."""

import os
from pathlib import Path

from support.fork_server import ForkServer
from verl_precision.paths import REPO

PYTHON = REPO / ".venv-workers/bin/python"
ADAPTATIONS = REPO / "tests/conformance/oat"  # the folder of oat_cpu, on which recorded outcomes depend
PRELOAD = (
    "oat_cpu",  # first: it makes DeepSpeed take the CPU
    *("datasets", "Levenshtein", "math_verify", "openai", "pandas", "peft", "rich.pretty", "scipy.special"),
    *("sympy.parsing.latex", "transformers.trainer", "transformers.models.qwen2.modeling_qwen2", "tree", "tyro"),
)


def oat_server(folder: Path) -> ForkServer:
    """Return a server that has imported what OAT imports, except OAT itself; ``folder`` is for its log."""
    variables = {**os.environ, "PYTHONPATH": f"{ADAPTATIONS}:{REPO}"}
    return ForkServer(PRELOAD, folder / "server.log", PYTHON, variables)


def oat_variables(tree: Path) -> dict[str, str]:
    """Return the environment of a process that imports the OAT of ``tree``."""
    return {**os.environ, "PYTHONPATH": f"{tree}:{REPO}:{REPO / 'tests'}", "PYTHONDONTWRITEBYTECODE": "1"}
