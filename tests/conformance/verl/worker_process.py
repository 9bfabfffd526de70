"""The processes in which releases run: their Python, their environment and the model that they load."""

import os
import subprocess
from pathlib import Path

from lib.patches.releases import find_release
from lib.paths import REPO

MAKE_MODEL = """
import sys
from recipes.arithmetic.model import build_model, build_tokenizer
tokenizer = build_tokenizer()
for part in (tokenizer, build_model(tokenizer, seed=0)):
    part.save_pretrained(sys.argv[1])
"""


def worker_python(release: str) -> Path:
    """Return the Python with the packages that the release's workers run with."""
    lock = "requirements/workers.lock"
    assert "workers" in find_release(release).dependencies, f"verl {release} does not run with {lock}"
    return REPO / ".venv-workers/bin/python"


def worker_environment(tree: Path) -> dict[str, str]:
    """Return the environment of a process that imports the verl in ``tree`` and the modules of this folder."""
    return {
        **os.environ,
        "PYTHONPATH": f"{tree}:{REPO}:{REPO / 'scripts'}",
        "OMP_NUM_THREADS": "1",
        "VERL_PLATFORM": "cpu",  # this and the next are read only by verl 0.9
        "VERL_ENGINE_DEVICE": "cuda",
    }


def save_model(release: str, folder: Path) -> None:
    """Save the sanity task's model with its first weights, by the transformers that the release will load it with."""
    variables = {**os.environ, "PYTHONPATH": str(REPO)}
    subprocess.run([worker_python(release), "-c", MAKE_MODEL, folder], env=variables, check=True, capture_output=True)
