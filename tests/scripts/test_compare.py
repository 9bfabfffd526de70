"""The words of ``make compare``, and finished runs for other tests."""

import json
from pathlib import Path

import pytest

import compare
from lib.errors import Refused
from lib.files import write_json
from lib.run.folder import start_record
from lib.run.job import parse_job
from lib.run.metrics import K3_KL, REWARD, SECONDS
from lib.run.summary import summarize


def finished(out: Path, *words: str, steps: int = 3) -> Path:
    """Create the folder of a finished run."""
    request = parse_job(["DEVICE=cpu", *words])
    data = [
        {"step": step, "data": {REWARD: step / 4, K3_KL: 1e-7, SECONDS: 2.0 + request.seed}}
        for step in range(1, steps + 1)
    ]
    record = start_record(request, out, steps)
    out.mkdir()
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    write_json(out / "run.json", record)
    write_json(out / "summary.json", summarize(request, record, data, []))
    return out


def test_runs_by_label_make_a_report(tmp_path, capsys):
    a, b, c = (finished(tmp_path / name, word) for name, word in (("a", "SEED=1"), ("b", "SEED=2"), ("c", "SEED=3")))
    assert compare.main([f"RUNS=one={a} one={b} other={c}", f"OUT={tmp_path}/out", "DEVICE=cpu"]) == 0
    printed = capsys.readouterr().out
    assert "reward, last 5 steps" in printed and str(tmp_path / "out" / "index.html") in printed
    assert (tmp_path / "out" / "figures" / "reward.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "word, message",
    [
        ("RUNS=", "there is no run"),
        ("RUNS={run}", "must be LABEL=FOLDER"),
        ("RUNS=a/b={run}", "must be LABEL=FOLDER"),
        ("RUNS==x", "must be LABEL=FOLDER"),
        ("RUNS=fp32=", "fp32 has no run"),
        ("RUNS=fp32=/nowhere*", "there is nothing at /nowhere"),
        ("RUNS='a={run}", "quotation"),
        ("FOLDERS=a={run}", "is not a variable"),
        ("THRESHOLD=high", "must be a number"),
        ("THRESHOLD=nan", "must be a number"),
    ],
)
def test_bad_words_are_refused_and_nothing_is_written(word, message, tmp_path):
    folder = finished(tmp_path / "run")
    words = [f"RUNS=a={folder}", f"OUT={tmp_path}/out"] if word.startswith("THRESHOLD") else [f"OUT={tmp_path}/out"]
    with pytest.raises(Refused, match=message) as refusal:
        compare.main([*words, word.format(run=folder)])
    assert "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == [folder]
