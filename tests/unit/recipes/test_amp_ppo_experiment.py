"""The CartPole experiment: its committed results, its command, and, slow, that the default settings solve CartPole."""

import shutil
from dataclasses import asdict

import pytest
from amp_commands import refusal
from amp_ppo_cases import SMALL, small_ppo

from lib.paths import REPO
from recipes.amp.ppo import experiment
from recipes.amp.ppo import experiment_results as results
from recipes.amp.ppo.config import PPOConfig
from recipes.amp.ppo.provenance import provenance

FOLDER = REPO / "docs" / "results"


def test_committed_results_solve_cartpole_in_every_dtype():
    """In each dtype three seeds end above 475, and the mean of 16 bits is at least 0.9 of fp32's."""
    runs, report = results.read_runs(FOLDER), (FOLDER / "amp-ppo.md").read_text()
    assert runs.keys() == {(dtype, str(seed)) for dtype in results.DTYPES for seed in results.SEEDS}
    for (dtype, _), rows in runs.items():
        assert {row["effective_dtype"] for row in rows} == {dtype}
        assert float(rows[-1]["evaluation"]) >= results.SOLVED_RETURN and results.solved_at(rows) is not None
    means = results.mean_evaluation(runs)
    assert min(means["float16"], means["bfloat16"]) >= 0.9 * means["float32"]
    for key, value in asdict(PPOConfig()).items():
        varied = key in ("env", "use_amp", "dtype", "device", "seed", "resume")
        assert value is None or varied or f"{key} {value}" in report, "the results are of the default settings"


def test_recorded_run_replaces_its_older_rows(tmp_path, monkeypatch):
    """Run after run in another order: the committed table, and the report but for settings and versions."""
    runs, evaluation = results.read_runs(FOLDER), provenance(small_ppo())
    with monkeypatch.context() as patch:  # one figure takes as long as all tables
        patch.setattr(results, "plot_returns", lambda runs, path: None)
        for rows in reversed(runs.values()):
            files = results.record_run(tmp_path, rows, evaluation)
    assert [file.name for file in files] == ["amp-ppo.csv", "amp-ppo.md", "amp-ppo.png"]
    assert files[0].read_bytes() == (FOLDER / "amp-ppo.csv").read_bytes()
    report, committed = (file.read_text().partition("Settings:")[0] for file in (files[1], FOLDER / "amp-ppo.md"))
    assert report == committed
    worse = [{**row, "evaluation": row["evaluation"] and "100.0"} for row in runs["float16", "2"]]
    results.record_run(tmp_path, worse, evaluation)
    assert "| float16 | 2 | 98304 | 100.0 | " in files[1].read_text() and len(results.read_runs(tmp_path)) == len(runs)
    assert files[2].stat().st_size > 20_000


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--dtypes=float16,float8", "dtypes=float16,float8 must be of float32,float16,bfloat16"),
        ("--seeds=4", "seeds=4 must be of 1,2,3"),
        ("--seeds=", "seeds= must be of 1,2,3"),
        (f"--out={__file__}", f"out={__file__} must be a writable folder"),
    ],
)
def test_invalid_word_is_refused(word, message, monkeypatch):
    monkeypatch.setattr(experiment, "train", lambda *_: pytest.fail("a run was started"))
    assert refusal(experiment, word).startswith(message)


def test_run_in_another_dtype_is_not_recorded(monkeypatch, tmp_path):
    """The switch turns AMP off: the run's rows would be fp32's under float16's name."""
    for file in FOLDER.glob("amp-ppo.*"):
        shutil.copy(file, tmp_path)
    monkeypatch.setenv("DISABLE_AMP", "1")
    small = {key: SMALL[key] for key in ("num_envs", "num_steps", "total_steps", "minibatches")} | {"eval_episodes": 1}
    monkeypatch.setattr(experiment, "PPOConfig", lambda **settings: PPOConfig(**{**settings, **small}))
    refused = refusal(experiment, "--dtypes=float16", "--seeds=1", f"--out={tmp_path}")
    assert refused.startswith("dtypes=float16: the run computed in float32 ") and "; unset DISABLE_AMP" in refused
    assert (tmp_path / "amp-ppo.csv").read_bytes() == (FOLDER / "amp-ppo.csv").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("seed", results.SEEDS)
@pytest.mark.parametrize("dtype", results.DTYPES)
def test_default_settings_solve_cartpole(dtype, seed, tmp_path):
    rows, evaluation = experiment.run_cartpole(dtype, seed, tmp_path / "run")
    assert evaluation["mean"] >= results.SOLVED_RETURN and rows[-1]["effective_dtype"] == dtype
