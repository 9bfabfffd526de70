"""Reports: notes on missing or doubtful results, and rebuilding from the runs that a report keeps."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure
from support.report_runs import RECORDED, built, built_from, is_rebuilt_from, made, several, write_metrics
from support.trees import contents

from verl_precision.commands import report as command
from verl_precision.errors import Refused
from verl_precision.facts.metrics import K3_KL, LOSS_SCALE, REWARD, SECONDS, SKIPPED
from verl_precision.files import write, write_json
from verl_precision.paths import REPO
from verl_precision.report.build import SETTINGS, rebuild, write_report
from verl_precision.report.catalog import RESPONSE_LENGTH, SERIES
from verl_precision.report.content import Report, notes
from verl_precision.report.figures import OTHERS, center, colors, curve, draw, write_figures
from verl_precision.report.readers import RECORD
from verl_precision.report.render import at_step, on_screen, page, write_tables

RESULTS = REPO / "docs" / "results"
EXPECTED = REPO / "tests" / "expected" / "reports"  # outcomes.csv of each recorded report


def screen_rows(report: Report) -> dict[str, list[str]]:
    """Return the cells of the table on the terminal by the name of their row."""
    rows = [re.split("  +", line.strip()) for line in on_screen(report).splitlines()]
    return {name: cells for name, *cells in rows}


@pytest.mark.parametrize("folder", RECORDED, ids=lambda folder: str(folder.relative_to(REPO)))
def test_recorded_report_has_the_expected_numbers(folder, tmp_path):
    write_tables(built_from(folder), tmp_path)
    expected = EXPECTED / f"{str(folder.relative_to(RESULTS)).replace('/', '-')}.csv"
    assert (tmp_path / "outcomes.csv").read_text() == expected.read_text()


def test_recorded_verdicts_are_those_of_the_documents():
    report = built_from(RESULTS / "sanity" / "grpo")
    texts = {(each.outcome, each.first, each.second): each.text for each in report.verdicts}
    assert texts["k3_median", "fp16", "bf16"] == "fp16 lower: 57.9× (10.8× to 309×)"
    assert texts["k3_median", "fp16", "bf16_train_fp16_infer"] == "fp16 lower: 130× (27.7× to 615×)"
    assert texts["k3_mean", "fp16", "bf16"] == "no verdict: 19.3× (0.240× to 1556×) includes 1×"


@pytest.mark.subprocess
def test_command_rebuilds_a_recorded_report(tmp_path, capsys):
    source, out = RESULTS / "sanity" / "ppo", tmp_path / "out"
    assert command.main(command.parse([f"FROM={source}", f"OUT={out}"])) == 0
    assert "reward, last 5 steps" in capsys.readouterr().out
    new = contents(out)
    assert {"index.html", "outcomes.csv", "verdicts.csv", "figures/reward.svg", "figures/k3.png"} <= set(new)
    kept = contents(source)
    assert {name: new[name] for name in kept} == kept, "report.json and the runs"
    html = new["index.html"].decode()
    files = re.findall(r'(?:src|href)="([^"#:]+)"', html)
    assert files and [name for name in files if name not in new] == [], "which the page shows or links"
    assert set(re.findall(r'href="#([^"]+)"', html)) <= set(re.findall(r'id="([^"]+)"', html))


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "FROM: is not set"),
        (["FROM={docs}/sanity"], "contains no report.json; give the folder of a report"),
        (["FROM={tmp}/torn"], "report.json: is not JSON"),
        (["FROM={tmp}/pairs"], "report.json: must contain title, threshold and runs, a list of"),
        (["FROM={tmp}/lost"], "lost/runs/fp16-seed1: does not exist"),
        (["FROM={docs}/oat", "OUT={tmp}"], "OUT=.*: is not empty and contains no report"),
    ],
)
def test_command_refuses_bad_words_and_folders(words, message, tmp_path):
    settings = {"title": "x", "threshold": 0.95}
    write(tmp_path / "torn" / SETTINGS, b"{")
    for name, runs in (("pairs", ["fp16"]), ("lost", [["fp16", "runs/fp16-seed1"]])):
        write(tmp_path / name / SETTINGS, json.dumps(settings | {"runs": runs}).encode())
    before = contents(tmp_path)
    with pytest.raises(Refused, match=message) as refusal:
        command.main(
            command.parse([f"OUT={tmp_path}/out", *(word.format(tmp=tmp_path, docs=RESULTS) for word in words)])
        )
    assert "\n" not in str(refusal.value) and contents(tmp_path) == before


@pytest.mark.subprocess  # two reports with figures
def test_kept_runs_give_the_same_bytes(tmp_path):
    pairs = several(tmp_path / "in", seeds=range(1, 3))
    report = write_report([pairs[-1], *pairs[:-1]], tmp_path / "out", 0.4, "Two regimes")
    assert list(report.by_label) == ["bf16", "fp16"], "in the order of their first runs"
    before = contents(tmp_path / "out")
    (tmp_path / "in/torn.jsonl").write_text("{\n{}\n")
    with pytest.raises(Refused, match="torn.jsonl: line 1 is not a line of metrics"):
        write_report([("fp16", tmp_path / "in/torn.jsonl")], tmp_path / "out")
    assert contents(tmp_path / "out") == before
    assert [name for name, content in before.items() if str(tmp_path).encode() in (content or b"")] == []
    shutil.rmtree(tmp_path / "in")
    rebuild(tmp_path / "out", tmp_path / "out")  # in its own place
    assert contents(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_means_and_verdicts_over_seeds(tmp_path):
    report = built(several(tmp_path / "in"))
    entropy = report.spreads["fp16"]["entropy_last"]
    assert (entropy.runs, entropy.values) == (3, pytest.approx((4.1, 4.2, 4.3)))
    texts = {each.outcome: each.text for each in report.verdicts}
    assert texts["reward_last"].startswith("no verdict: ") and not texts.keys() & {
        "throughput_median",
        "seconds_median",
    }
    assert report.seeds == {"fp16": 3, "bf16": 3} and notes(report) == []
    assert screen_rows(report)["entropy, last 5 steps"] == ["4.20 ± 0.10", "4.20 ± 0.10"]


def test_runs_of_different_length_are_compared_on_the_common_steps(tmp_path):
    steps = {"fp16": range(1, 11), "bf16": range(3, 16), "fp32": range(3, 11)}
    report = built([made(tmp_path / label, label, steps=of) for label, of in steps.items()])
    text = " ".join(notes(report))
    assert report.common == tuple(range(3, 11))
    assert "compared on the common ones, steps 3 to 10. " in text
    assert "More have fp16-seed1 steps 1 to 10, bf16-seed1 steps 3 to 15." in text
    with pytest.raises(Refused, match="no step in common: fp16=a has steps 1 to 4, bf16=b has steps 5 to 8"):
        built([made(tmp_path / "a", steps=range(1, 5)), made(tmp_path / "b", "bf16", steps=range(5, 9))])


def test_passing_and_collapse_are_looked_for_in_all_steps(tmp_path):
    rewards = {"fp16": [1.0] * 10 + [0.0] * 10, "bf16": [0.0] * 10 + [1.0] * 10, "fp32": [0.0] * 10}
    pairs = [made(tmp_path / of, of, steps=range(1, len(each) + 1), **{REWARD: each}) for of, each in rewards.items()]
    report = built(pairs)
    assert report.common == tuple(range(1, 11))
    events = [(entry.outcomes["passed"], entry.outcomes["collapsed"]) for entry in report.entries]
    assert events == [(5, 13), (15, None), (None, None)]
    cards = re.findall(r"passes 0.95: (\d) of 1,\s+collapsed: (\d)<", page(report))
    assert cards == [("1", "1"), ("1", "0"), ("0", "0")]


def test_steps_at_which_runs_passed():
    for steps, text in (((20, 22), "at 21 ± 1.4"), ((20,), "at 20"), ((None, 20, 24), "2 of 3, at 20, 24")):
        assert at_step([SimpleNamespace(outcomes={"passed": step}) for step in steps], "passed") == text
    assert at_step([SimpleNamespace(outcomes={"passed": None})], "passed") == "never"


ONE = ("fp16", 1)


@pytest.mark.parametrize(
    ("runs", "note"),
    [
        ([ONE, ONE], "fp16 has several runs of seed 1: each counts in means, as one seed for verdicts."),
        ([ONE, ONE, ("bf16", 1), ("bf16", 2), ("bf16", 3)], "No verdict on fp16 (1): 3 different seeds are needed."),
    ],
)
def test_doubtful_comparison_has_a_note(runs, note, tmp_path):
    report = built([made(tmp_path / f"{at}", of, seed, **{SECONDS: 2.0 + at}) for at, (of, seed) in enumerate(runs)])
    assert any(each.startswith(note) for each in notes(report))
    assert not any(each.separates for each in report.verdicts)
    assert "None: no two labels have as many seeds as a verdict needs." in page(report)
    assert len({entry.id for entry in report.entries}) == len(runs)


@pytest.mark.parametrize(("k3", "noted"), [(2e-2, True), (1e-3, False), (float("nan"), False)])
def test_mismatch_that_may_decide_the_outcome_has_a_note(k3, noted, tmp_path):
    runs = [
        made(tmp_path / label, label, **{K3_KL: value, RESPONSE_LENGTH: 100.0})
        for label, value in {"bf16": k3, "fp16": 1e-4}.items()
    ]
    report = built(runs)
    note = "At the first common step, k3 times the length of an answer is 2 nats in bf16, 0.010 nats in fp16. This"
    assert any(each.startswith(note) for each in notes(report)) == noted
    assert is_rebuilt_from(tmp_path / "out", report)


def test_metric_that_is_always_nan_has_no_mean_and_a_note(tmp_path):
    pairs = several(tmp_path / "in", "fp16", range(1, 3)) + [
        made(tmp_path / "bad", "fp16", 3, **{"actor/entropy": None}),
        *several(tmp_path / "in", "bf16", **{"response_length/mean": 26.0}),
    ]
    report = built(pairs)
    assert notes(report) == ["fp16-seed3: actor/entropy is NaN or inf at every step: it has no value."]
    assert "4.15 ± 0.071 (2 of 3)" in on_screen(report)
    (verdict,) = [each for each in report.verdicts if each.outcome == "entropy_last"]
    assert verdict.text == "no verdict: fp16 has 2 of at least 3 seeds"
    assert is_rebuilt_from(tmp_path / "out", report)
    kept = (tmp_path / "out" / "runs" / "fp16-seed3" / "metrics.jsonl").read_text()
    assert '"actor/entropy": null' in kept and "NaN" not in kept, "which is not JSON"


def test_run_in_another_dtype_is_marked(tmp_path):
    other = made(tmp_path / "other", "bf16", 4, dtypes={"actor": {"compute": "float16"}, "rollout": {"rollout": "x"}})
    report = built([*several(tmp_path / "in"), other])
    assert "bf16-seed4: its actor computed in float16." in notes(report)
    html = page(report)
    assert html.count('<p class="bad">its actor computed in float16</p>') == 1 and html.count("dtypes as named") == 1
    assert screen_rows(report)["step, s, median"][1] == "6 ± 1 (3 of 4)"


def test_dtypes_of_a_foreign_run_are_unknown(tmp_path):
    file = write_metrics(tmp_path / "one.jsonl", dict.fromkeys((1, 2), {REWARD: 0.5, "perf/throughput": 9.0}))
    report = built([("fp16", file)])
    assert report.entries[0].id == "fp16-1"
    assert "2 common steps are fewer than the 5 of a moving mean." in notes(report)
    html = page(report)
    assert "effective dtypes unknown: a .jsonl file records none" in html
    assert is_rebuilt_from(tmp_path / "out", report)


def test_unfinished_run_has_a_note_and_stays_unfinished(tmp_path):
    label, folder = made(tmp_path / "a")
    (folder / "summary.json").unlink()
    reported = {"role": "actor", "rank": 0, "compute": "bfloat16", "stamp": {"release": "0.9.1", "stack": "abc"}}
    (folder / "train.log").write_text(f"[verl-precision] {json.dumps(reported)}\n")
    write_json(folder / "run.json", json.loads((folder / "run.json").read_text()) | {"steps": 40})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "da')
    report = built([(label, folder)])
    assert "fp16-seed1 is not finished: 10 of 40 steps." in notes(report)
    assert "fp16-seed1: the last line of metrics.jsonl, line 11, is half-written: left out." in notes(report)
    (run,) = [entry.run for entry in report.entries]
    assert (run.progress, run.departure) == ("10 of 40 steps", "its actor computed in bfloat16")
    assert is_rebuilt_from(tmp_path / "out", report)


def test_other_differences_of_the_configurations_have_a_note(tmp_path):
    pairs = several(tmp_path / "in", seeds=range(1, 3))
    for number, (_, folder) in enumerate(pairs):
        actor = f"actor:\n  lr: {2.0 if number == 1 else 1.0}\n  dtype: {number > 1}\n"
        write(folder / "hydra/config.yaml", f"data:\n  seed: {number}\n  path: /same\n{actor}".encode())
    report = built(pairs)
    assert list(report.differs) == ["actor.lr", "actor.dtype"]
    assert "Within fp16 the runs differ in more than their seed: actor.lr." in notes(report)
    assert is_rebuilt_from(tmp_path / "out", report)
    kept = json.loads((tmp_path / "out" / "runs" / "fp16-seed1" / RECORD).read_text())
    assert kept["config"] == {"actor.lr": 1.0, "actor.dtype": False}, "what all share is not kept"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("k3", [1e-7, 0.0, -2e-12])
def test_figures_accept_equal_and_nonpositive_values(k3, tmp_path):
    """In fp32 the estimate is rounding noise around 0, which a logarithmic axis does not have."""
    report = built([made(tmp_path / "a", "fp32", **{K3_KL: k3, LOSS_SCALE: 65536.0, SKIPPED: 0.0})])
    write_figures(report, tmp_path)
    drawn = {file.stem for file in (tmp_path / "figures").iterdir()}
    assert ("k3" in drawn) == (k3 > 0) and {"reward", "loss_scale"} <= drawn and "skipped" not in drawn
    assert set(re.findall(r"figures/(\w+)\.svg", page(report))) == drawn


def test_labels_beyond_the_colors_share_them():
    labels = [f"branch {number}" for number in range(2 * len(OTHERS))]
    assert list(colors(labels).values()) == [*OTHERS, *OTHERS]


def test_mean_of_a_logarithmic_figure_is_geometric():
    for scale in ("log", "log2"):
        assert center([1.0, 100.0], scale)[0] == pytest.approx(10)
        assert center([8.0], scale) == pytest.approx((8, 8, 8))
    assert center([1.0, 3.0], "linear") == pytest.approx((2, 2 - 2**0.5, 2 + 2**0.5))


def test_skipped_steps_are_marked_and_counted(tmp_path):
    skipped = {SKIPPED: [0.0, 2.0, 0.0, 1.0], LOSS_SCALE: [8.0, 4.0, 4.0, 2.0]}
    report = built([made(tmp_path / "a", steps=range(1, 5), **skipped)])
    by_metric = {series.metric: series for series in SERIES}
    assert curve(report.entries[0].run.steps, by_metric[SKIPPED]) == {1: 0.0, 2: 2.0, 3: 2.0, 4: 3.0}
    axis = Figure().add_subplot()
    draw(report, by_metric[LOSS_SCALE], axis)
    (crosses,) = [line for line in axis.lines if line.get_marker() == "x"]
    assert (list(crosses.get_xdata()), list(crosses.get_ydata())) == ([2, 4], [4.0, 2.0])


def test_report_goes_to_a_folder_of_the_sources_name(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(command, "rebuild", lambda *paths: calls.append(paths))
    monkeypatch.setattr(command, "on_screen", str)
    monkeypatch.chdir(tmp_path)
    assert command.main(command.parse(["FROM=."])) == 0 and calls == [
        (Path("."), Path("outputs/report") / tmp_path.name)
    ]


def test_folder_with_other_content_is_not_written_to(tmp_path):
    pairs = [made(tmp_path / "a")]
    write(tmp_path / "out/thesis.tex", b"all of it")
    for out, why in (
        (tmp_path / "out", "is not empty and contains no report"),
        (tmp_path / "out/thesis.tex", "is not empty and contains no report"),
        (tmp_path / "a/run.json/below", "cannot be written to"),
    ):
        with pytest.raises(Refused, match=f"OUT={out}: {why}"):
            write_report(pairs, out)
    assert contents(tmp_path / "out") == {"thesis.tex": b"all of it"}
