"""``make collapse``: its words, what it makes of its pair of runs, and what it prints."""

import math

import pytest
from support.report_runs import made

from verl_precision.collapse.outcomes import describe_pair, first_and_last
from verl_precision.commands import collapse
from verl_precision.errors import Refused
from verl_precision.facts.metrics import K3_KL, REWARD
from verl_precision.report.catalog import ESS, RESPONSE_LENGTH
from verl_precision.report.logged_run import LoggedRun
from verl_precision.run import sweep
from verl_precision.run.sweep import SweepOutcome


def run_of(label: str, accuracy: list[float], k3: float = 0.06, tokens: float = 129.0) -> LoggedRun:
    names = (REWARD, K3_KL, RESPONSE_LENGTH, ESS)
    steps = {at: dict(zip(names, (value, k3, tokens, 0.05), strict=True)) for at, value in enumerate(accuracy, 1)}
    return LoggedRun(label, label, "make run", steps)


def falling(last: float) -> list[float]:
    """Return the accuracies of twenty steps, .4 in the first ten and ``last`` after them."""
    return [0.4] * 10 + [last] * 10


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["STEPS=19"], "STEPS=19: must be a whole number of at least 20"),
        (["SEED=1 2"], "SEED=1 2: must be a whole number of at least 0"),
        (["DEVICE=tpu"], "DEVICE=tpu: must be one of cpu, cuda"),
        (["LIFT=3"], "LIFT: is not a variable of this command"),
    ],
)
def test_bad_words_are_refused(words, reason):
    with pytest.raises(Refused, match=reason):
        collapse.parse(words)


@pytest.mark.parametrize(("last", "verb"), [(0.0, "collapsed"), (0.3, "did not rise"), (0.41, "rose"), (0.9, "rose")])
def test_sentences_describe_the_course_and_its_limits(last, verb):
    lines = describe_pair(run_of("bf16", falling(last), tokens=257.0), run_of("fp16", falling(0.95), k3=0.001))
    assert len(lines) == 3 and f"{verb} in bf16 (0.40 to {last:.2f}) and rose in fp16 (0.40 to 0.95)" in lines[0]
    assert "15 nats in bf16 and 0.13 in fp16" in lines[1] and "is 0.05 and 0.05 of the batch" in lines[1]
    assert "one seed of a constructed case" in lines[2]


def test_steps_that_are_not_finite_are_left_out():
    """verl logs NaN as null."""
    run = run_of("fp32", [math.nan, *falling(0.8)])
    assert first_and_last(run) == pytest.approx((0.4, 0.8))


@pytest.mark.subprocess  # figures take seconds
def test_pair_is_reported_and_described(tmp_path, capsys, monkeypatch):
    def run_first(number: int, code: int) -> None:
        """Replace the sweep by one that finishes the first ``number`` runs and returns an exit code."""

        def run(plan) -> SweepOutcome:
            for each in plan.runs[:number]:
                accuracy = falling(0.9 if each.label == "fp16" else 0.0)
                more = {RESPONSE_LENGTH: 129.0, REWARD: accuracy}
                made(each.out, each.label, 3, range(1, 21), **more)
            finished = [(each.label, each.out) for each in plan.runs[:number]]
            return SweepOutcome({"pg_is": finished}, list(plan.runs[number:]) if code == 1 else [], code == 130)

        monkeypatch.setattr(sweep, "run_sweep", run)

    monkeypatch.setattr(sweep, "find_finished", lambda runs: [])
    words = ["SEED=3", "STEPS=20", f"OUT={tmp_path}", "DEVICE=cpu"]
    for code in (1, 130):
        run_first(1, code)
        assert collapse.main(collapse.parse(words)) == code and not (tmp_path / "report").exists()
    printed = capsys.readouterr().out
    assert "failed: pg_is fp16 seed 3" in printed and "repeat the command to resume" in printed
    run_first(2, 0)
    assert collapse.main(collapse.parse(words)) == 0
    assert "collapsed in bf16 (0.40 to 0.00) and rose in fp16 (0.40 to 0.90)" in capsys.readouterr().out
    assert (tmp_path / "report/index.html").exists() and (tmp_path / "pg_is/bf16-seed3/summary.json").exists()
