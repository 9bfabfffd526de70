"""Find uv, and give it what pip is configured with on this machine: indexes, folders of wheels, certificates."""

import ast
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

from verl_precision.paths import CACHE

# uv's variable for each setting of pip; words in it are separated by spaces, folders of wheels by commas.
VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "constraint": "UV_CONSTRAINT",
    "timeout": "UV_HTTP_TIMEOUT",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
}
SECTIONS = ("global", "install", ":env:")  # of pip's configuration; the last one wins
ON = ("y", "yes", "t", "true", "on", "1")  # a switch of pip's that is on
LIKE_PIP = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_PYTHON_DOWNLOADS": "never"}


class Uv(NamedTuple):
    program: Path
    environment: dict[str, str]
    options: list[str]  # of ``uv pip``, for which it has no variable

    def pip(self, *words: str | Path, cwd: Path | None = None) -> None:
        """Run ``uv pip`` with these words; a terminal shows its progress."""
        quiet = [] if sys.stderr.isatty() else ["--quiet"]
        subprocess.run([self.program, "pip", *words, *self.options, *quiet], cwd=cwd, env=self.environment, check=True)


def find_uv(python: str | Path = sys.executable) -> Uv:
    """Return uv: that on PATH, or one in .cache, which pip installs unless it is there.

    The pip of ``python`` is asked for its settings; uv's own in the environment win.
    """
    on_path, own = shutil.which("uv"), CACHE / "uv/bin/uv"
    if not on_path and not own.exists():
        venv.create(CACHE / "uv", with_pip=True, clear=True)
        subprocess.run([CACHE / "uv/bin/python", "-m", "pip", "install", "--quiet", "uv"], check=True)
    pip = [python, "-m", "pip", "config", "list"]
    settings = settings_of(subprocess.run(pip, stdout=subprocess.PIPE, text=True, check=True).stdout)
    variables = {VARIABLES[name]: value for name, value in settings.items() if name in VARIABLES}
    options = ["--no-index"] if settings.get("no-index", "").lower() in ON else []
    return Uv(Path(on_path or own), LIKE_PIP | variables | os.environ, options)


def settings_of(listed: str) -> dict[str, str]:
    """Return pip's settings for an installation, by name, from what ``pip config list`` prints."""
    settings = {}
    for section in SECTIONS:
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(f"{section}."):
                name = name.removeprefix(f"{section}.").removeprefix("default-")
                settings[name] = ("," if name == "find-links" else " ").join(ast.literal_eval(value).split())
    return settings
