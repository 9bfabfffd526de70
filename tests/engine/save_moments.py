"""Inspect the checkpoint folder at every line of a save, the state that a process killed there leaves."""

import contextlib
import io
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import verl
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

VERL = Path(verl.__file__).parent
TRACED = (str(VERL / "trainer"), str(VERL / "utils/checkpoint"), shutil.__file__)
SAVES = 4


def files(folder: Path) -> dict[str, int]:
    """Return the sizes in bytes of a checkpoint's files, except its manifest."""
    paths = [Path(base) / name for base, _, names in os.walk(folder) for name in names if name != "manifest.json"]
    return {str(path.relative_to(folder)): path.stat().st_size for path in paths}


def resumed_from(root: Path) -> Path | None:
    """Return the checkpoint that verl resumes from, ``None`` if it starts over or refuses."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            found = find_latest_ckpt_path(str(root))
        except (RuntimeError, ValueError):  # upstream, on an empty tracker
            return None
    return Path(found) if found else None


def watch(save: Callable[[int], None], root: Path, watched: bool) -> dict[str, list]:
    """Save steps 1 to 4 into ``root``, and inspect it before each line of verl's checkpoint code and of ``shutil``.

    Args:
        save: called with each step.
        root: the folder of the checkpoints.
        watched: whether to inspect; other ranks only save.

    Returns:
        ``left``: after each save, the folders that contain weights, by step and role.
        ``unsafe``: functions that, from the second save on, leave no whole checkpoint to resume from at some line.
    """
    whole: dict[Path, dict[str, int]] = {}  # the files of each checkpoint once its save has ended
    left, unsafe = [], set()
    for step in range(1, SAVES + 1):
        chosen: list[tuple[str, Path | None, dict[str, int]]] = []
        before: dict[str, int] = {}

        def look(frame, event, _, step=step, chosen=chosen):
            nonlocal before
            if not frame.f_code.co_filename.startswith(TRACED):
                return None
            if event == "line" and step > 1 and (now := files(root)) != before:
                before = now
                folder = resumed_from(root)
                chosen.append((frame.f_code.co_name, folder, files(folder) if folder else {}))
            return look

        if watched:
            sys.settrace(look)
        try:
            save(step)
        finally:
            sys.settrace(None)
        whole[root / f"global_step_{step}"] = files(root / f"global_step_{step}")
        unsafe |= {name for name, folder, content in chosen if not folder or content != whole[folder]}
        shards = sorted({path.parent for path in root.rglob("model_world_size_*.pt")})
        left.append([str(path.relative_to(root)).removeprefix("global_step_") for path in shards])
    return {"left": left, "unsafe": sorted(unsafe)}
