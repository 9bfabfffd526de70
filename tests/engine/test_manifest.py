"""The choice of the checkpoint to resume from, on files written by torch."""

import os
import shutil
import signal
import sys
from pathlib import Path

import manifest
import pytest
import torch

from verl_precision.errors import Refused
from verl_precision.run import folder as runs

FILES = ["actor/model_world_size_1_rank_0.pt", "actor/optim_world_size_1_rank_0.pt", "critic/model.pt", "data.pt"]
EXPORT = "actor/huggingface/model.safetensors"
TRACKER = "latest_checkpointed_iteration.txt"


def write(folder: Path) -> None:
    for name in [*FILES, EXPORT]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save({"weight": torch.randn(1000)}, folder / name)


def save(root: Path, step: int, listed: bool = True) -> Path:
    """Save a checkpoint as verl's trainers do, without a manifest unless ``listed``."""
    folder = root / f"global_step_{step}"
    if listed:
        manifest.begin(folder)
        write(folder)
        manifest.finish(folder, step)
    else:
        write(folder)
        (root / TRACKER).write_text(str(step))
    return folder


def truncate(folder: Path) -> None:
    os.truncate(folder / FILES[1], (folder / FILES[1]).stat().st_size - 100)


def lose_data_order(folder: Path) -> None:
    (folder / "data.pt").unlink()


def lose_export(folder: Path) -> None:
    (folder / EXPORT).unlink()


def begin_again(folder: Path) -> None:
    """Overwrite one file, as if killed in a repeated save: old and new files, each of the right size."""
    manifest.begin(folder)
    torch.save({"weight": torch.randn(1000)}, folder / FILES[0])


DAMAGE = {
    truncate: "is torn: actor/optim_world_size_1_rank_0.pt has ",
    lose_data_order: "is torn: data.pt is missing",
    lose_export: f"is torn: {EXPORT} is missing",
    shutil.rmtree: "is missing",
    begin_again: "is torn: its save was not finished",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_torn_checkpoint_is_refused_or_falls_back_to_the_previous_one(tmp_path, damage):
    torn = save(tmp_path, 2)
    assert manifest.choose(tmp_path) == (torn, [])
    damage(torn)
    with pytest.raises(manifest.CheckpointError, match=f"global_step_2 {DAMAGE[damage]}") as refusal:
        manifest.choose(tmp_path)
    assert "resume_from_path" in str(refusal.value) and "\n" not in str(refusal.value)
    with pytest.raises(manifest.CheckpointError, match=f"{torn} {DAMAGE[damage]}"):
        manifest.check_whole(torn)

    whole = save(tmp_path, 1)
    (tmp_path / TRACKER).write_text("2")
    folder, (note,) = manifest.choose(tmp_path)
    assert folder == whole and note.startswith(f"{torn} {DAMAGE[damage]}")
    manifest.check_whole(whole)


@pytest.mark.parametrize("text", ["", None])
def test_newest_whole_checkpoint_is_resumed_without_a_tracker(tmp_path, text):
    save(tmp_path, 9)
    whole, torn = save(tmp_path, 10), save(tmp_path, 11)
    truncate(torn)
    (tmp_path / TRACKER).unlink()
    if text is not None:
        (tmp_path / TRACKER).write_text(text)
    folder, notes = manifest.choose(tmp_path)
    assert folder == whole and len(notes) == 2 and TRACKER in notes[0]


def test_tracker_set_to_an_earlier_step_is_respected(tmp_path):
    earlier = save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / TRACKER).write_text("1")
    assert manifest.choose(tmp_path) == (earlier, [])


def test_run_killed_in_its_first_save_starts_over(tmp_path):
    assert manifest.choose(tmp_path / "nothing") == (None, [])
    (tmp_path / "global_step_1" / "actor").mkdir(parents=True)
    begin_again(tmp_path / "global_step_1")
    folder, notes = manifest.choose(tmp_path)
    assert folder is None and "its save was not finished" in notes[1] and notes[-1] == "no save was ever finished"


def test_unpatched_checkpoint_is_resumed_if_the_tracker_names_it(tmp_path):
    old = save(tmp_path, 1, listed=False)
    folder, (note,) = manifest.choose(tmp_path)
    assert folder == old and "has no manifest.json: treated as whole, as" in note

    truncate(save(tmp_path, 2))  # the older one cannot be checked
    with pytest.raises(manifest.CheckpointError, match="global_step_1 has no manifest.json"):
        manifest.choose(tmp_path)


def test_asynchronous_save_counts_once_the_tracker_names_it(tmp_path):
    save(tmp_path, 1)
    folder = tmp_path / "global_step_2"
    manifest.begin(folder)
    write(folder)
    manifest.hand_over(folder)
    assert manifest.choose(tmp_path).folder == tmp_path / "global_step_1"
    (tmp_path / TRACKER).write_text("2")
    assert manifest.choose(tmp_path).folder == folder


@pytest.mark.parametrize(("saved", "workers"), [(4, 2), (2, 4), (16, 8)])
def test_shards_of_fewer_or_more_workers_are_refused(tmp_path, saved, workers):
    for rank in range(saved):
        (tmp_path / f"model_world_size_{saved}_rank_{rank}.pt").touch()
    manifest.check_world_size(tmp_path, saved)
    manifest.check_world_size(tmp_path / "missing", workers)  # a remote folder
    with pytest.raises(manifest.CheckpointError, match=f"saved by {saved} workers and this run has {workers}: resume"):
        manifest.check_world_size(tmp_path, workers)


def test_only_checkpoints_of_this_process_are_removed(tmp_path):
    earlier = save(tmp_path, 1)
    for keep, left in ((1, [2]), (1, [3]), (2, [3, 4]), (None, [3, 4, 5]), (1, [3, 4, 6])):
        folder = save(tmp_path, left[-1])
        manifest.remove_previous(folder, "", keep)
        manifest.remove_previous(folder, "", keep)  # the same step saved again
        names = {path.name for path in tmp_path.glob("global_step_*")}
        assert names == {earlier.name, *(f"global_step_{step}" for step in left)}


def test_role_that_keeps_all_checkpoints_loses_none(tmp_path):
    for step in (1, 2):
        folder = save(tmp_path, step)
        manifest.remove_previous(folder, "actor", 1)
        manifest.remove_previous(folder, "critic", None)
    left = {path.name for path in (tmp_path / "global_step_1").iterdir()}
    assert left == {"critic", "data.pt", "manifest.json"}
    assert manifest.choose(tmp_path).folder == folder


def save_until_killed(root: Path, keep: int | None, lines: int, writer: int) -> None:
    """Save steps 2, 3, … and write the number of each that is finished, until SIGKILL after a number of lines."""
    left = iter(range(lines))

    def count(frame, event, _):
        if frame.f_code.co_filename not in (__file__, manifest.__file__, shutil.__file__):
            return None
        if event == "line" and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return count

    sys.settrace(count)
    for step in range(2, 1_000_000):
        manifest.remove_previous(save(root, step), "", keep)
        os.write(writer, step.to_bytes(8))


@pytest.mark.parametrize("keep", [None, 1])
def test_sigkill_at_any_line_leaves_the_last_finished_checkpoint(tmp_path, keep):
    interrupted = 0
    for attempt in range(20):
        root, reader, writer = tmp_path / str(attempt), *os.pipe()
        manifest.remove_previous(save(root, 1), "", keep)
        child = os.fork()
        if child == 0:
            try:
                save_until_killed(root, keep, 13 * attempt, writer)
            finally:
                os._exit(1)
        os.close(writer)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        with os.fdopen(reader, "rb") as steps:
            finished = int.from_bytes(steps.read()[-8:]) or 1
        folder = manifest.choose(root).folder
        assert int(folder.name.removeprefix("global_step_")) in (finished, finished + 1)
        for name in FILES:
            assert torch.load(folder / name)["weight"].shape == (1000,)
        begun = sorted(root.glob("global_step_*"), key=lambda path: int(path.name.removeprefix("global_step_")))
        assert keep is None or len(begun) <= 2
        interrupted += begun[-1] != folder
    assert interrupted > 5, "the child was never killed during a save"


def test_make_run_resumes_where_verl_does(tmp_path):
    whole, torn = save(tmp_path / "checkpoints", 1), save(tmp_path / "checkpoints", 2)
    assert runs.checkpoint_step(tmp_path) == 2
    truncate(torn)
    assert runs.checkpoint_step(tmp_path) == 1
    truncate(whole)
    with pytest.raises(Refused, match="OUT=.*no whole checkpoint"):
        runs.checkpoint_step(tmp_path)
