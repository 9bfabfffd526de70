"""The ``NAME=VALUE`` words of the commands: values and refusals."""

import re
import shutil
from types import SimpleNamespace

import pytest

from verl_precision import words
from verl_precision.errors import Refused
from verl_precision.files import check_room
from verl_precision.run.job import VARIABLES


def test_words_are_parsed_and_an_unknown_name_is_refused_with_the_nearest_one():
    assert words.parse_words(["ARGS=a=1 b=2", "STEPS="], VARIABLES) == {"ARGS": "a=1 b=2"}
    for name, nearest in {"precison": "did you mean PRECISION? The", "COLOUR": "the", "--": "the"}.items():
        message = f"^{name}: is not a variable of this command; {re.escape(nearest)} variables are EXPERIM.*, CARRY$"
        with pytest.raises(Refused, match=message):
            words.parse_words(["STEPS=3", f"{name}=1"], VARIABLES)


def test_overrides_have_up_to_two_plus_signs_or_a_tilde():
    assert words.override_words("ARGS", "a.b=1 +a=x=y ++a= ~a.b") == ["a.b=1", "+a=x=y", "++a=", "~a.b"]
    for word in ("+++a=1", "+a", "--a=1", "=1"):
        with pytest.raises(Refused, match=f"^ARGS={re.escape(word)}: is not a Hydra override"):
            words.override_words("ARGS", f"a=1 {word}")
    with pytest.raises(Refused, match="^RUNS=a='x: No closing quotation; quote it$"):
        words.override_words("RUNS", "a='x", "; quote it")


@pytest.mark.parametrize("code", [0, 9])
def test_gpu_is_present_where_nvidia_smi_lists_it(code, tmp_path, monkeypatch):
    """It fails without a driver, or without a GPU."""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nexit {code}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert words.gpu_present() == (code == 0)


def test_paths_of_models_and_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "outputs/run").mkdir(parents=True)
    assert words.file_path({"OUT": "~/run"}, "OUT") == str(tmp_path / "home/run")
    assert words.file_path({"OUT": "run"}, "OUT") == str(tmp_path / "run") and words.file_path({}, "OUT") is None
    assert words.model_path("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    with pytest.raises(Refused, match="^MODEL=outputs/run: contains no config.json"):
        words.model_path("outputs/run")
    (tmp_path / "outputs/run/config.json").write_text("{}")
    assert words.model_path("outputs/run") == str(tmp_path / "outputs/run")


def test_room_is_checked_in_the_folder_itself(tmp_path, monkeypatch):
    check_room(tmp_path / "new/folder")
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match=f"^OUT={tmp_path}/file: cannot be written to"):
        check_room(tmp_path / "file")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**29))
    with pytest.raises(Refused, match=f"^OUT={tmp_path}: 0.50 GiB free on its disk, 1.0 needed"):
        check_room(tmp_path)
