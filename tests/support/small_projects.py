"""Projects of the patch tool's tests: its scripts, and stacks of a few patches on wheels of a few files."""

import compileall
import shutil
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from support.patch_tool import message, run_command
from support.trees import edit, git
from verl_precision.files import write
from verl_precision.patch.git_objects import package_blobs, package_tree_id
from verl_precision.patch.releases import FRAMEWORKS, OAT, VERL, Framework, add_release, find_release
from verl_precision.patch.wheels import sha256, unpack, wheel
from verl_precision.paths import PACKAGE

# verl: two patches on three files, and three files to copy
RELEASE = "0.9.1"
ENGINE = "verl/workers/engine/fsdp/transformer_impl.py"
CONFIG = "verl/trainer/config/ppo_trainer.yaml"
PROTOCOL = "verl/protocol.py"
UNTOUCHED = "verl/utils/device.py"
MODULE = "verl/utils/precision.py"
PART = "verl/new_room/inner/part.py"
OVERLAY = "verl/trainer/config/precision/fp16.yaml"
STAMP = VERL.stamp
# OAT: one patch on two files, one file to copy, and a newer release without patches
OAT_RELEASE, OAT_NEWER = "0.2.3", "0.2.4"
ARGS = "oat/args.py"  # differs between the two
EXPLORATION = "oat/exploration.py"  # does not
OAT_MODULE = "oat/utils/precision.py"

FILES_OF_VERL = (ENGINE, CONFIG, PROTOCOL, UNTOUCHED, "verl/base_config.py")
FILES_OF_OAT = (ARGS, EXPLORATION, "oat/model.py", "oat/utils/ops.py")


def cut_wheel(archive: Path, to: Path, paths: Iterable[str], added: Mapping[str, str] | None = None) -> Path:
    """Write a wheel with these files of another, and with files of these contents; return its path."""
    to.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive) as whole, zipfile.ZipFile(to, "w") as part:
        for path in paths:
            part.writestr(path, whole.read(path))
        for path, text in (added or {}).items():
            part.writestr(path, text)
    return to


def wheel_of(project: Path, release: str, framework: Framework = VERL) -> Path:
    """Return the wheel of a release that the project has in its cache."""
    return project / ".cache/wheels" / wheel(release, framework).name


def make_project(folder: Path, releases: Mapping[tuple[Framework, str], Iterable[str]]) -> Path:
    """Make a project in ``folder`` whose releases have only the given files of their wheels, and no patches.

    Its scripts are compiled, so that a process of the tool starts fast.
    """
    project = folder / "project"
    package = project / "scripts/verl_precision"
    for room in ("patch", "facts"):
        shutil.copytree(PACKAGE / room, package / room)
    (package / "commands").mkdir()
    for file in (*PACKAGE.glob("*.py"), PACKAGE / "commands/__init__.py", PACKAGE / "commands/patches.py"):
        shutil.copy2(file, package / file.relative_to(PACKAGE))
    compileall.compile_dir(project / "scripts", quiet=1)
    (project / "configs/precision").mkdir(parents=True)
    for framework in FRAMEWORKS.values():
        write(framework.home(project) / "versions.toml", b"")
    for (framework, name), paths in releases.items():
        always = (f"{framework.name}/__init__.py", framework.version_file)
        archive = cut_wheel(wheel(name, framework), wheel_of(project, name, framework), (*always, *paths))
        tree = package_tree_id(package_blobs(unpack(archive, folder / f"{framework.name}-{name}"), framework))
        release = find_release(name, framework=framework)
        release = replace(release, wheel_sha256=sha256(archive), tree_before=tree, tree_after=tree)
        add_release(release, framework.home(project) / "versions.toml")
    return project


def add_patches(
    project: Path, release: str, patches: Iterable[tuple[str, Mapping[str, tuple[str, str]]]], *options: str
) -> None:
    """Make patches of a release, each from its message and, by path, a text and its replacement."""
    tree = project.parent / f"tree-{release}"
    assert run_command(project, "checkout", *options, release, tree).returncode == 0
    for text, edits in patches:
        for path, (old, new) in edits.items():
            edit(tree / path, old, new)
        git("commit", "-am", text, cwd=tree)
    done = run_command(project, "export", tree)
    assert done.returncode == 0, done.stderr


def make_tiny_project(folder: Path) -> Path:
    """Make the project with a tiny stack of verl and one of OAT in ``folder`` and return its root."""
    releases = {(VERL, RELEASE): FILES_OF_VERL, (OAT, OAT_RELEASE): FILES_OF_OAT, (OAT, OAT_NEWER): FILES_OF_OAT}
    project = make_project(folder, releases)
    write(project / "patches/verl/files" / MODULE, b"ANSWER = 42\n")
    write(project / "patches/verl/files" / PART, b"")
    write(project / "patches/oat/files" / OAT_MODULE, b"ANSWER = 42\n")
    write(project / "configs/precision/fp16.yaml", b"# @package _global_\n")
    hook = {ENGINE: ("import logging\n", "import logging\nimport verl.utils.precision\n")}
    key = {
        ENGINE: ("import logging\n", "import logging\n# twice\n"),
        CONFIG: ("# Format", "# A key.\nkey: 1\n\n# Format"),
        PROTOCOL: ("Implement base", "Hooked. Implement base"),
    }
    patches = [
        (message("[fsdp, worker] feat: read the configured dtype"), hook),
        (message("[cfg] fix: add a user's key (twice!)", Reason="pending"), key),
    ]
    add_patches(project, RELEASE, patches)
    import_it = ("import torch\n", "import torch\nimport oat.utils.precision\n")
    patches = [(message("[args] feat: import the module"), {ARGS: import_it, EXPLORATION: import_it})]
    add_patches(project, OAT_RELEASE, patches, "--framework", "oat")
    return project
