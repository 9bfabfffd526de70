"""Give the processes of a run a separate temporary folder, and remove it with all that they leave there."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def temporary_folder() -> Iterator[dict[str, str]]:
    """Make a temporary folder, and remove it at the end.

    vLLM leaves its sockets and ``vllm_dist_*`` there, and verl its ``ckpt_*.lock``. Ray's logs and torch's compiled
    kernels, which outlive a run, stay outside.

    Yields:
        The environment variables by which processes find the folder.
    """
    usual = Path(tempfile.gettempdir())
    kept = {"RAY_TMPDIR": usual, "TORCHINDUCTOR_CACHE_DIR": usual / f"torchinductor_{os.getuid()}"}
    # A file of another user that cannot be removed must not fail a run that has trained.
    with tempfile.TemporaryDirectory(prefix="run-", ignore_cleanup_errors=True) as folder:
        yield {name: os.environ.get(name, str(path)) for name, path in kept.items()} | {"TMPDIR": folder}
