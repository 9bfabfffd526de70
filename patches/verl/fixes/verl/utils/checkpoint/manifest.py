# Copyright 2026 the verl-precision authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Mark checkpoints as whole by a manifest, written last, and choose the one to resume from.

A save begins with an unfinished ``manifest.json`` in ``global_step_N/`` and ends with one that lists every file and its
size; only then does the tracker name the step. Both are replaced atomically. Files that the writing process cannot
access, such as shards on the disks of other nodes, are not listed. A checkpoint without a manifest comes from a verl
without this file, or from ``async_save``: it counts as whole where the tracker names it.

Sizes, no checksums: what a kill, a full disk or a clean-up leaves behind differs in size, and to read every shard again
takes about as long as to write it (SHA-256 0.8, torch.save 0.6 GiB/s on one core). A flipped bit is not found, nor is
it by ``torch.load``.

The module needs only the standard library.
"""

import json
import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Optional

MANIFEST = "manifest.json"
TRACKER = "latest_checkpointed_iteration.txt"
SHARD = re.compile(r"_world_size_(\d+)_rank_\d+\.pt$")

_last_saved: dict[tuple[Path, str], Path] = {}  # by root and role, of this process; see remove_previous


class CheckpointError(RuntimeError):
    """A checkpoint cannot be resumed from; the message is one line with the reason and what to do."""


class Choice(NamedTuple):
    """The checkpoint to resume from, ``None`` to start from scratch, and what the user should know of it."""

    folder: Optional[Path]
    notes: list[str]


def begin(folder: str | os.PathLike) -> None:
    """Mark a checkpoint as unfinished, before its first file is written.

    Without the mark, a save over an older checkpoint of the same step would leave a mixture that passes for whole.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    _replace(Path(folder) / MANIFEST, json.dumps({"files": None}))


def finish(folder: str | os.PathLike, step: int) -> None:
    """List the files of a checkpoint, all of them written, and let the tracker name its step."""
    folder = Path(folder)
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    del files[MANIFEST]
    _replace(folder / MANIFEST, json.dumps({"files": files}, indent=1))
    _replace(folder.parent / TRACKER, str(step))


def hand_over(folder: str | os.PathLike) -> None:
    """Leave a checkpoint to workers that still write it (``async_save``) and name it in the tracker themselves."""
    (Path(folder) / MANIFEST).unlink()


def check_whole(folder: str | os.PathLike) -> None:
    """Refuse a checkpoint that its manifest shows to be torn; one without a manifest passes.

    Raises:
        CheckpointError: naming the checkpoint and what is wrong with it.
    """
    torn = fault(Path(folder))
    if torn:
        unchecked = f", or remove its {MANIFEST} to load it unchecked" if Path(folder).is_dir() else ""
        raise CheckpointError(f"checkpoint {folder} {torn}: resume from another one{unchecked}")


def find_latest(
    root: str | os.PathLike, directory_format: str = "global_step_{}", quiet: bool = False
) -> Optional[str]:
    """Return the folder to resume from, ``None`` to start from scratch; print why unless ``quiet``.

    Raises:
        CheckpointError: as :func:`choose`.
    """
    choice = choose(root, directory_format)
    if not quiet:
        found = f"resuming from {choice.folder}" if choice.folder else f"no checkpoint in {root}: starting from scratch"
        print(*choice.notes, found, sep="\n")
    return str(choice.folder) if choice.folder else None


def choose(root: str | os.PathLike, directory_format: str = "global_step_{}") -> Choice:
    """Return the newest whole checkpoint in ``root`` up to the step that the tracker names, or of all if it names none.

    Raises:
        CheckpointError: there are checkpoints, or a tracker, and none is whole. Starting over would overwrite them.
    """
    root = Path(root)
    tracker = root / TRACKER
    before, after = directory_format.split("{}")
    name = re.compile(f"{re.escape(before)}(\\d+){re.escape(after)}")
    found = {int(match[1]): path for path in root.glob("*") if (match := name.fullmatch(path.name))}
    if not found and not tracker.exists():
        return Choice(None, [])

    text = tracker.read_text().strip() if tracker.exists() else ""
    named = int(text) if text.isdecimal() else None
    faults = {}
    if named is None:
        faults[TRACKER] = "names no step" if tracker.exists() else "is missing"
    elif named not in found:
        faults[directory_format.format(named)] = "is missing"

    for step in sorted(found, reverse=True):
        if named is not None and step > named:
            continue
        torn = fault(found[step])
        if torn is None and (found[step] / MANIFEST).exists():
            return Choice(found[step], _notes(root, faults))
        if torn is None and step == named:
            return Choice(found[step], [f"{found[step]} has no {MANIFEST}: treated as whole, as {TRACKER} names it"])
        faults[found[step].name] = torn or f"has no {MANIFEST}, so it may be incomplete"

    if not tracker.exists() and all(_listed(path) == {} for path in found.values()):
        return Choice(None, [*_notes(root, faults), "no save was ever finished"])
    raise CheckpointError(
        f"no whole checkpoint in {root}: {'; '.join(f'{name} {what}' for name, what in faults.items())}. "
        "Name one by trainer.resume_mode=resume_path trainer.resume_from_path=…, or remove the folder to start over"
    )


def fault(folder: Path) -> Optional[str]:
    """Return the fault of a checkpoint, as the end of a sentence; ``None`` where none is known."""
    if not folder.is_dir():
        return "is missing"
    files = _listed(folder)
    if files == {}:
        return "is torn: its save was not finished"
    for name, size in (files or {}).items():
        path = folder / name
        if not path.is_file():
            return f"is torn: {name} is missing"
        if path.stat().st_size != size:
            return f"is torn: {name} has {path.stat().st_size} bytes of {size}"
    return None


def check_world_size(folder: str | os.PathLike, world_size: int) -> None:
    """Refuse shards that another number of workers saved.

    Args:
        folder: of one role, with files such as ``model_world_size_2_rank_0.pt``; a remote one is not looked into.
        world_size: number of workers of the role in this run.

    Raises:
        CheckpointError: naming the folder, both numbers and what to do.
    """
    names = os.listdir(folder) if os.path.isdir(folder) else []
    saved = sorted({int(match[1]) for name in names if (match := SHARD.search(name))})
    if saved and world_size not in saved:
        raise CheckpointError(
            f"checkpoint {folder} was saved by {' or '.join(map(str, saved))} workers and this run has {world_size}: "
            "resume with as many (trainer.nnodes × trainer.n_gpus_per_node), or merge it (python -m verl.model_merger "
            "merge --backend fsdp) and start anew from the merged weights"
        )


def spare_previous(max_ckpt_to_keep: Optional[int]) -> Optional[int]:
    """Return how many checkpoints a role may keep while the next one is saved: 2 where the config has 1.

    verl's managers remove their role's previous files as soon as their own next ones are written, or even before: with
    the actor's gone and the critic's not yet written, no checkpoint is whole. From two on, one outlives the save.
    """
    return 2 if max_ckpt_to_keep == 1 else max_ckpt_to_keep


def remove_previous(
    folder: str | os.PathLike, role: str, max_ckpt_to_keep: Optional[int], workers: Optional[Any] = None
) -> None:
    """Remove what :func:`spare_previous` spared, now that the next checkpoint is whole.

    Like verl's managers, this removes only what the same process saved, and on the machine of the role's rank 0.

    Args:
        folder: the checkpoint that is whole, ``…/global_step_N``.
        role: name of the role's folder in it; empty where the checkpoint has no such folders (SFT).
        max_ckpt_to_keep: as configured.
        workers: worker group of the role, ``None`` where the caller itself is the role's rank 0.
    """
    root, path = Path(folder).parent, Path(folder) / role
    previous = _last_saved.get((root, role), path)
    _last_saved[root, role] = path
    if max_ckpt_to_keep != 1 or previous == path:
        return
    print(f"Removing the previous checkpoint {previous}")
    remove = partial(shutil.rmtree, previous, ignore_errors=True)  # as verl does: no reason to end the training
    remove() if workers is None else workers.execute_func_rank_zero(remove)


def _listed(folder: Path) -> Optional[dict[str, int]]:
    """Return the files of the manifest with sizes in bytes; empty of an unfinished one, ``None`` without a manifest."""
    manifest = folder / MANIFEST
    return (json.loads(manifest.read_text())["files"] or {}) if manifest.exists() else None


def _notes(root: Path, faults: dict[str, str]) -> list[str]:
    return [f"{root / name} {what}" for name, what in faults.items()]


def _replace(path: Path, text: str) -> None:
    """Write a file so that it is there as a whole or not at all, also after a power failure."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
