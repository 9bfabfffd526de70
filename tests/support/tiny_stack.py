"""A project with a tiny stack for verl 0.9.1: two patches on three files, and three files to copy."""

import shutil
from pathlib import Path

from lib.patches.checkout import checkout
from lib.patches.export import export
from lib.patches.wheels import wheel
from lib.paths import REPO
from support.patch_tool import entry, message
from support.trees import edit, git

RELEASE = "0.9.1"
ENGINE = "verl/workers/engine/fsdp/transformer_impl.py"
CONFIG = "verl/trainer/config/ppo_trainer.yaml"
PROTOCOL = "verl/protocol.py"
UNTOUCHED = "verl/utils/device.py"
MODULE = "verl/utils/precision.py"
PART = "verl/new_room/inner/part.py"
OVERLAY = "verl/trainer/config/precision/fp16.yaml"
STAMP = "verl/utils/precision_stamp.json"


def make_project(folder: Path) -> Path:
    """Make the project in ``folder`` and return its root."""
    project = folder / "project"
    shutil.copytree(REPO / "scripts", project / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (project / ".cache/wheels").mkdir(parents=True)
    (project / ".cache/wheels" / wheel(RELEASE).name).symlink_to(wheel(RELEASE))
    for path, text in {
        "patches/verl/versions.toml": entry(RELEASE),
        "patches/oat/versions.toml": "",
        f"patches/verl/files/{MODULE}": "ANSWER = 42\n",
        f"patches/verl/files/{PART}": "",
        "configs/precision/fp16.yaml": "# @package _global_\n",
    }.items():
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(text)
    tree = folder / "tree"
    checkout(RELEASE, tree, project)
    edit(tree / ENGINE, "import logging\n", "import logging\nimport verl.utils.precision\n")
    git("commit", "-am", message("[fsdp, worker] feat: read the configured dtype"), cwd=tree)
    edit(tree / ENGINE, "import logging\n", "import logging\n# twice\n")
    edit(tree / CONFIG, "# Format", "# A key.\nkey: 1\n\n# Format")
    edit(tree / PROTOCOL, "Implement base", "Hooked. Implement base")
    git("commit", "-am", message("[cfg] fix: add a user's key (twice!)", Reason="pending"), cwd=tree)
    export(tree, project)
    return project
