"""Find the patched verls that ``make compare TREES=…`` compares, and record what each name stands for."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.patch.git_objects import package_blobs, package_tree_id
from verl_precision.patch.precision_module import precision_file
from verl_precision.patch.releases import VERL
from verl_precision.patch.status import status
from verl_precision.patch.target import find_target
from verl_precision.words import shell_words

NAME = re.compile(r"[\w.+-]+")  # part of a label and of a folder's name


@dataclass(frozen=True)
class CodeVersion:
    """The verl of some runs.

    Attributes:
        name: part of the label of its runs.
        verl: the folder that contains ``verl/``; None for the verl of this environment.
        identity: what ``name`` stands for, for a reader and to detect that it has changed.
    """

    name: str = ""
    verl: Path | None = None
    identity: Mapping[str, str] = field(default_factory=dict, hash=False)

    def environment(self) -> dict[str, str]:
        """Return the whole environment of a process that imports this verl."""
        paths = filter(None, [str(self.verl or ""), os.environ.get("PYTHONPATH")])
        return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def find_versions(values: Mapping[str, str]) -> list[CodeVersion]:
    """Return the versions that TREES names, or this environment's; refuse those that cannot be compared."""
    if "TREES" not in values:
        return [CodeVersion()]
    pairs = [word.partition("=")[::2] for word in shell_words("TREES", values["TREES"])]
    distinct("TREES", " ".join(name for name, _ in pairs))
    return [tree_version(name, folder) for name, folder in pairs]


def distinct(name: str, value: str) -> list[str]:
    """Return the values of a variable that takes several; refuse one that occurs twice."""
    values = value.split()
    if repeated := [item for item in values if values.count(item) > 1]:
        raise Refused(f"{name}={value}: contains {repeated[0]} more than once")
    return values


def tree_version(name: str, folder: str) -> CodeVersion:
    """Return the verl in ``folder``; refuse one that is not patched, which would train in bf16 in any regime."""
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
    return CodeVersion(name, root, {"folder": str(root), "state": str(state), "tree": content})


def code_record(out: Path, versions: Sequence[CodeVersion]) -> dict[str, dict]:
    """Return the content of ``OUT/code.json`` with these versions.

    Raises:
        Refused: ``out`` contains runs of another version with the same name.
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
