"""Finished runs side by side."""

import json
from pathlib import Path

import pytest

import compare
from lib import job as jobs
from lib import runs


def finished(out: Path, *words: str) -> Path:
    """A finished run's folder, of three steps."""
    request = jobs.parse(["DEVICE=cpu", *words])
    data = [{"step": step, "data": {runs.REWARD: step / 4, runs.K3_KL: 1e-7, runs.SECONDS: 2.0}} for step in (1, 2, 3)]
    record = runs.admit(request, out, 3)
    out.mkdir()
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    runs.write_json(out / "run.json", record)
    runs.write_json(out / "summary.json", runs.summarize(request, record, data, []))
    return out


def test_runs_are_told_by_label_with_what_was_asked(tmp_path, capsys):
    folders = [finished(tmp_path / name, word) for name, word in (("a", "SEED=1"), ("b", "SEED=2"), ("c", "ALGO=ppo"))]
    labels = ["GRPO", "GRPO", "PPO"]
    out = tmp_path / "both"
    compare.main([str(out), *(f"{label}={folder}" for label, folder in zip(labels, folders, strict=True))])
    told = json.loads(out.with_suffix(".json").read_text())
    assert [(run["asked"]["SEED"], run["reward_first"]) for run in told["GRPO"]] == [(1, 0.25), (2, 0.25)]
    assert [run["asked"]["ALGO"] for run in told["PPO"]] == ["ppo"]
    assert "MODEL" not in told["PPO"][0]["asked"], "what was not given"
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("0.250 at the first step, 0.500 mean of the last 3") == 3


def test_a_run_that_is_not_finished_is_refused_and_nothing_written(tmp_path):
    folder = finished(tmp_path / "run")
    (folder / "summary.json").unlink()
    for words in ([], ["both"], [f"a={folder}"], ["both", "a"], ["both", f"a={folder}"], ["both", f"a={tmp_path}/no"]):
        with pytest.raises(jobs.Refused, match="must be"):
            compare.main([str(tmp_path / words[0]), *words[1:]] if words else [])
    assert list(tmp_path.iterdir()) == [folder]
