"""Prepare the versions of the code that ``make compare`` compares: patched trees (TREES) or this project's branches."""

import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.facts.packages import installed_verl
from verl_precision.format import first_three
from verl_precision.patch.git import git, run_git
from verl_precision.patch.git_objects import package_blobs, package_tree_id
from verl_precision.patch.precision_module import precision_file
from verl_precision.patch.releases import VERL
from verl_precision.patch.stack import FIXES
from verl_precision.patch.status import status
from verl_precision.patch.target import find_target
from verl_precision.patch.wheels import unpacked_wheel
from verl_precision.paths import CACHE, INSTALLED, PACKAGE, REPO, WORK
from verl_precision.words import shell_words

NAME = re.compile(r"[\w.+-]+")  # part of a label and of a folder's name


@dataclass(frozen=True)
class CodeVersion:
    """A version of the code: a checkout of this project, and the folder that contains its verl.

    ``verl`` is None for the verl of this environment. ``identity`` describes what ``name`` stands for, for a reader and
    to notice that it has changed.
    """

    name: str = ""
    project: Path = REPO
    verl: Path | None = None
    identity: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def program(self) -> Path:
        """What Python starts as this version's command line."""
        return PACKAGE if self.project == REPO else self.project / "scripts/verl_precision"

    @property
    def folder(self) -> Path:
        """The folder in which this version's command line is started."""
        return WORK if self.project == REPO else self.project

    def environment(self) -> dict[str, str]:
        """Return the whole environment of a process that runs this version."""
        paths = filter(None, [str(self.verl or ""), os.environ.get("PYTHONPATH")])
        return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def find_versions(values: Mapping[str, str]) -> list[CodeVersion]:
    """Return the versions that TREES or BRANCHES name, or this one.

    Raises:
        Refused: one cannot be used.
    """
    if "TREES" in values and "BRANCHES" in values:
        raise Refused("TREES, BRANCHES: set only one; each branch has its own verl")
    if "TREES" in values:
        pairs = [word.partition("=")[::2] for word in shell_words("TREES", values["TREES"])]
        distinct("TREES", " ".join(name for name, _ in pairs))
        return [tree_version(name, folder) for name, folder in pairs]
    if "BRANCHES" in values and INSTALLED:
        raise Refused(f"BRANCHES={values['BRANCHES']}: branches of this project need a checkout of it")
    if "BRANCHES" in values:
        commits = {name: branch_commit(name) for name in distinct("BRANCHES", values["BRANCHES"])}
        return [branch_version(name, commit) for name, commit in commits.items()]
    return [CodeVersion()]


def distinct(name: str, value: str) -> list[str]:
    """Return the values of a variable that takes several.

    Raises:
        Refused: one occurs twice.
    """
    values = value.split()
    if repeated := [item for item in values if values.count(item) > 1]:
        raise Refused(f"{name}={value}: contains {repeated[0]} more than once")
    return values


def tree_version(name: str, folder: str) -> CodeVersion:
    """Return the verl in ``folder`` with this checkout.

    Raises:
        Refused: there is no verl, or it is not patched: it would train in bf16 whatever the regime.
    """
    word = f"TREES={name}={folder}"
    if not folder or not NAME.fullmatch(name):
        raise Refused(f"{word}: must be NAME=FOLDER; a name may contain letters, digits and . _ + -")
    try:
        root = find_target(Path(folder).expanduser().resolve(), VERL).root
        state = status(root)
    except Refused as refusal:
        raise Refused(f"{word}: {refusal}") from refusal
    # make port leaves no stamp; a port of another version of the stack may lack files that this one copies.
    patched = state.stamp or (state.state in ("ported", "foreign") and precision_file(root))
    if not patched or state.state in ("half-patched", "interrupted"):
        remedy = f"; make apply-patches VERL={folder} patches it" if state.state == "unpatched" else ""
        raise Refused(f"{word}: {state}{remedy}")
    content = package_tree_id(package_blobs(root))
    identity = {"folder": str(root), "state": str(state), "tree": content}
    return CodeVersion(name, verl=root, identity=identity)


def branch_commit(name: str) -> str:
    """Return the commit of a branch of this project.

    Raises:
        Refused: there is no such branch, or a checkout of it has changes that are not committed.
    """
    parsed = run_git("rev-parse", "--verify", "--quiet", f"refs/heads/{name}^{{commit}}", cwd=REPO)
    if parsed.returncode:
        known = run_git("for-each-ref", "--format=%(refname:short)", "refs/heads", cwd=REPO).stdout.decode()
        raise Refused(f"BRANCHES={name}: there is no such branch; there are {', '.join(known.split()) or 'none'}")
    checkouts = git("worktree", "list", "--porcelain", cwd=REPO).split("\n\n")
    for lines in map(str.splitlines, checkouts):
        if f"branch refs/heads/{name}" in lines:
            folder = Path(lines[0].removeprefix("worktree "))
            changed = [line[3:] for line in git("status", "--porcelain", cwd=folder).splitlines()]
            if changed:
                raise Refused(f"BRANCHES={name}: {folder} has changes that are not committed: {first_three(changed)}")
    return parsed.stdout.decode().strip()


def branch_version(name: str, commit: str) -> CodeVersion:
    """Return the project as of ``commit``, with a fresh copy of this environment's verl, patched by its own tool.

    Both are created in .cache/branches, once a commit: a comparison that was interrupted finds them again. The Python
    environment is that of this checkout.

    Raises:
        Refused: its command run has no --check-each, or its patches do not apply.
    """
    if b"check_each=" not in run_git("show", f"{commit}:scripts/verl_precision/cli.py", cwd=REPO).stdout:
        raise Refused(
            f"BRANCHES={name}: its command run lacks the option --check-each, which checks runs before they start; "
            "merge the current branch into it, or rebase it"
        )
    project = CACHE / "branches" / commit
    if not project.exists():
        print(f"BRANCHES={name}: creating {project}", flush=True)
        project.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=project.parent) as scratch:
            whole = Path(scratch) / "whole"
            archive = run_git("archive", "--format=tar", commit, cwd=REPO).stdout
            tarfile.open(fileobj=io.BytesIO(archive)).extractall(whole, filter="data")
            release = installed_release()
            verl = unpacked_wheel(release, whole / ".cache" / "verl")
            texts = (patch.read_text() for patch in (whole / f"patches/verl/v{release}").glob("*.patch"))
            fixes = ["--fixes"] if any(f"\n{FIXES}\n" in text for text in texts) else []
            apply = [sys.executable, str(whole / "scripts/verl_precision"), "apply", *fixes, str(verl)]
            done = subprocess.run(apply, capture_output=True, text=True)
            if done.returncode:
                raise Refused(f"BRANCHES={name}: {last_line(done.stderr)}")
            os.replace(whole, project)
    verl = project / ".cache" / "verl"
    return CodeVersion(name.replace("/", "-"), project, verl, {"branch": name, "commit": commit})


def installed_release() -> str:
    """Return the release of this environment's verl."""
    return status(installed_verl()).release


def code_record(out: Path, versions: Sequence[CodeVersion]) -> dict[str, dict]:
    """Return the content of ``OUT/code.json`` with these versions: what each name stands for.

    Raises:
        Refused: ``out`` contains runs of another version under the same name.
    """
    file = out / "code.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    for version in versions:
        for key, value in version.identity.items():
            recorded = known.get(version.name, {}).get(key, value)
            if recorded != value:
                raise Refused(
                    f"OUT={out}: contains runs of another {version.name}, {key} {recorded}, not {value}; "
                    "choose another folder"
                )
    return known | {version.name: dict(version.identity) for version in versions if version.name}


def last_line(text: str) -> str:
    """Return the last line that is not blank."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "it ended without a message")
