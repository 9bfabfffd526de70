"""The words of ``make compare``."""

import pytest
from support.report_runs import finished_run

from verl_precision.commands import compare
from verl_precision.errors import Refused
from verl_precision.paths import CONFIGS


def test_runs_by_label_make_a_report(tmp_path, capsys):
    for name, seed in (("one-1", 1), ("one-2", 2), ("b.1", 3)):
        finished_run(tmp_path / name, f"SEED={seed}")
    words = [f"RUNS=one={tmp_path}/one-* b.1={tmp_path}/b.1", f"OUT={tmp_path}/out", "DEVICE=cpu"]
    assert compare.main(compare.parse([*words, "THRESHOLD=0.4", "TITLE=One and another"])) == 0
    output = capsys.readouterr().out
    page = (tmp_path / "out" / "index.html").read_text()
    assert "passes 0.4" in output and "<h1>One and another</h1>" in page
    assert all(run in page for run in ("one-seed1", "one-seed2", "b.1-seed3"))
    assert "reward, last 5 steps" in output and str(tmp_path / "out" / "index.html") in output
    assert (tmp_path / "out" / "figures" / "reward.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("file", sorted((CONFIGS / "compare").glob("*.words")), ids=lambda file: file.stem)
def test_words_of_a_make_target_are_accepted(file):
    words = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    assert compare.parse([*words, "DEVICE=cpu"]).keys() >= {"EXPERIMENT", "PRECISION", "ALGO", "OUT"}


@pytest.mark.parametrize(
    "word, message",
    [
        ("RUNS=", "RUNS: is not set"),
        ("RUNS={run}", "must be LABEL=FOLDER"),
        ("RUNS=a/b={run}", "must be LABEL=FOLDER"),
        ("RUNS=fp32=", "fp32 has no run"),
        ("RUNS=fp32=/nowhere*", "there is nothing at /nowhere"),
        ("THRESHOLD=nan", "must be a number"),
        ("PRECISION=fp16", "PRECISION=fp16: cannot be set with RUNS, which takes existing runs"),
    ],
)
def test_bad_words_are_refused_and_nothing_is_written(word, message, tmp_path):
    folder = finished_run(tmp_path / "run")
    with pytest.raises(Refused, match=message) as refusal:
        compare.main(compare.parse([f"OUT={tmp_path}/out", f"RUNS=a={folder}", word.format(run=folder)]))
    assert "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == [folder]
