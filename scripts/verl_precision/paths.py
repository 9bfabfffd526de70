"""Folders of this project: of a checkout, or of what pip installed."""

import os
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
SCRIPTS = PACKAGE.parent  # from which a process that this one starts imports the package
INSTALLED = (PACKAGE / "project").is_dir()  # a wheel has patches, configs and recipes there
REPO = PACKAGE / "project" if INSTALLED else PACKAGE.parents[1]
CONFIGS = REPO / "configs"
WORK = Path.cwd() if INSTALLED else REPO  # relative paths of a job's configuration start there
OUTPUTS = WORK / "outputs"
USER_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
CACHE = USER_CACHE / "verl-precision" if INSTALLED else REPO / ".cache"  # wheels, made models and data
ARITHMETIC = CACHE / "addition"  # model and data of the sanity task
IMPORTS = () if INSTALLED else (str(SCRIPTS),)  # of PYTHONPATH, for a process that imports the package
PROGRAM = (sys.executable, str(PACKAGE))  # starts the command line in this Python
