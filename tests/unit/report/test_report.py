"""Reports: notes on missing or doubtful results, and rebuilding from the runs that a report keeps."""

import csv
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure
from support.report_runs import RECORDED, contents, made, several

import report as command
from lib.errors import Refused
from lib.files import read_jsonl, write_json
from lib.paths import REPO
from lib.report.build import SETTINGS, build_report, rebuild, write_report, write_runs
from lib.report.catalog import SERIES
from lib.report.figures import centre, curve, draw, write_figures
from lib.report.page import page, state
from lib.report.readers.dispatch import read_all
from lib.report.readers.run_folder import RECORD
from lib.report.report import Report
from lib.report.statistics import THRESHOLD
from lib.report.tables import at_step, markdown, pairs_with_verdicts, run_rows, write_tables
from lib.run.metrics import K3_KL, LOSS_SCALE, REWARD, SECONDS, SKIPPED

RESULTS = REPO / "docs" / "results"
EXPECTED = REPO / "tests" / "expected" / "reports"  # table.csv of each recorded report


def built(pairs: list[tuple[str, Path]], **more) -> Report:
    """Return a report without writing it: figures take seconds."""
    return build_report(read_all(pairs), THRESHOLD, "Runs", **more)


def built_from(folder: Path) -> Report:
    """Return the report of a folder, built from the runs that it keeps, without writing it."""
    kept = json.loads((folder / SETTINGS).read_text())
    pairs = [(label, folder / run) for label, run in kept["runs"]]
    return build_report(read_all(pairs), kept["threshold"], kept["title"], kept["labels"], kept["nospeed"])


def is_rebuilt_from(out: Path, original: Report) -> bool:
    """Return whether the runs that a report keeps give the same page and tables, figures aside."""
    write_runs(original, out)
    again = built_from(out)
    return page(again) == page(original) and run_rows(again) == run_rows(original)


def table(file: Path) -> dict[tuple[str, str], dict]:
    """Return the lines of a ``table.csv`` by label and outcome."""
    with file.open() as content:
        return {(row["label"], row["outcome"]): row for row in csv.DictReader(content)}


@pytest.mark.parametrize("folder", RECORDED, ids=lambda folder: str(folder.relative_to(REPO)))
def test_recorded_report_has_the_expected_numbers(folder, tmp_path):
    report = built_from(folder)
    write_tables(report, tmp_path)
    rebuilt, expected = table(tmp_path / "table.csv"), table(expected_table(folder))
    for rows in (rebuilt, expected):
        for row in rows.values():
            row.pop("not_claimed")
    assert rebuilt == expected
    for label in report.labels:  # not by the code that writes tables
        kept = [folder / run for of, run in json.loads((folder / SETTINGS).read_text())["runs"] if of == label]
        rows = [[row for row in read_jsonl(run / "metrics.jsonl") if row["step"] in report.common] for run in kept]
        means = [math.fsum(row["data"][K3_KL] for row in of_run) / len(of_run) for of_run in rows]
        assert float(expected[label, "k3_mean"]["mean"]) == pytest.approx(math.fsum(means) / len(means), 1e-12)


def test_recorded_verdicts_are_those_of_the_documents():
    report = built_from(RESULTS / "sanity" / "grpo")
    texts = {(each.outcome, each.first, each.second): each.text for each in report.verdicts}
    assert texts["k3_median", "fp16", "bf16"] == "fp16 lower: 57.9× (10.8× to 309×)"
    assert texts["k3_median", "fp16", "bf16_train_fp16_infer"] == "fp16 lower: 130× (27.7× to 615×)"
    assert texts["k3_mean", "fp16", "bf16"] == "no verdict: 19.3× (0.240× to 1556×) includes 1×"


def expected_table(folder: Path) -> Path:
    return EXPECTED / f"{str(folder.relative_to(RESULTS)).replace('/', '-')}.csv"


def test_a_recorded_report_has_three_regimes_of_three_seeds():
    rows = [table(expected_table(folder)) for folder in RECORDED]
    seeds = [[int(row["n"]) for (_, outcome), row in of.items() if outcome == "reward_last"] for of in rows]
    assert any(len(each) >= 3 and min(each) >= 3 for each in seeds)


def test_command_rebuilds_a_recorded_report(tmp_path, capsys):
    source = RESULTS / "sanity" / "ppo"
    assert command.main([f"FROM={source}", f"OUT={tmp_path / 'out'}"]) == 0
    assert "reward, last 5 steps" in capsys.readouterr().out
    new = contents(tmp_path / "out")
    assert {"index.html", "table.md", "runs.csv", "verdicts.csv", "figures/reward.svg", "figures/k3.png"} <= set(new)
    kept = contents(source)
    assert {name: new[name] for name in kept} == kept, "report.json and the runs"


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "FROM: is not set"),
        (["FROM={tmp}/nowhere"], "FROM=.*nowhere: contains no report.json; give the folder of a report"),
        (["FROM={docs}/sanity"], "contains no report.json; below it are .*sanity/grpo, .*sanity/pg_is, .*sanity/ppo; "),
        (["FROM={tmp}/torn"], "report.json: is not JSON"),
        (["FROM={tmp}/other"], "report.json: has no title; it is not a report's"),
        (["FROM={tmp}/pairs"], "report.json: runs must be a list of"),
        (["FROM={tmp}/lost"], "lost/runs/fp16-seed1: does not exist"),
        (["FROM={docs}/oat", "OUT={tmp}"], "OUT=.*: is not empty and contains no report"),
        (["RUNS=a=b"], "RUNS: is not a variable of this command"),
    ],
)
def test_command_refuses_bad_words_and_folders(words, message, tmp_path):
    settings = {"title": "x", "threshold": 0.95, "nospeed": "", "labels": ["fp16"]}
    for name, content in (
        ("torn", "{"),
        ("other", "{}"),
        ("pairs", json.dumps(settings | {"runs": ["fp16"]})),
        ("lost", json.dumps(settings | {"runs": [["fp16", "runs/fp16-seed1"]]})),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / SETTINGS).write_text(content)
    before = contents(tmp_path)
    with pytest.raises(Refused, match=message) as refusal:
        command.main([f"OUT={tmp_path}/out", *(word.format(tmp=tmp_path, docs=RESULTS) for word in words)])
    assert "\n" not in str(refusal.value) and contents(tmp_path) == before


def test_same_runs_and_kept_runs_give_the_same_bytes(tmp_path):
    pairs = several(tmp_path / "in", seeds=range(1, 3))
    for name in ("one", "two"):
        report = write_report(pairs, tmp_path / name, 0.4, "Two regimes", ["bf16", "fp16"], "a shared machine")
        assert report.labels == ("bf16", "fp16"), "in the order that is expected"
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    shutil.rmtree(tmp_path / "in")
    rebuild(tmp_path / "one", tmp_path / "one")  # in its own place
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert not [name for name in tmp_path.iterdir() if name.name.startswith(".")]


def test_report_contains_no_path_of_this_machine(tmp_path):
    report = built(several(tmp_path / "in", seeds=range(1, 2)))
    write_runs(report, tmp_path / "out")
    write_tables(report, tmp_path / "out")
    for name, content in (contents(tmp_path / "out") | {"index.html": page(report).encode()}).items():
        assert str(tmp_path).encode() not in content, name


def test_means_and_verdicts_over_seeds(tmp_path):
    report = built(several(tmp_path / "in"))
    write_tables(report, tmp_path)
    row = table(tmp_path / "table.csv")["fp16", "entropy_last"]
    assert (row["runs"], row["n"]) == ("3", "3")
    assert float(row["mean"]) == pytest.approx(4.2) and float(row["std"]) == pytest.approx(0.1)
    texts = {each.outcome: each.text for each in report.verdicts}
    assert texts["reward_last"].startswith("no verdict: ")
    assert texts["k3_mean"].startswith("no verdict: 1.00×") or texts["k3_mean"].startswith("no verdict: 1×")
    assert pairs_with_verdicts(report) == [("fp16", "bf16")]
    markdown = (tmp_path / "table.md").read_text()
    assert "| entropy, last 5 steps | 4.20 ± 0.10 | 4.20 ± 0.10 |" in markdown
    assert report.notes == ()


def test_runs_of_different_length_are_compared_on_the_common_steps(tmp_path):
    pairs = [
        made(tmp_path / "a", "fp16", 1, range(1, 11)),
        made(tmp_path / "b", "bf16", 2, range(3, 16)),
        made(tmp_path / "c", "bf16", 3, range(3, 11)),
    ]
    report = built(pairs)
    assert report.common == tuple(range(3, 11))
    notes = " ".join(report.notes)
    assert "compared on the common ones, steps 3 to 10. " in notes
    assert "More have fp16-seed1 steps 1 to 10, bf16-seed2 steps 3 to 15." in notes
    assert "No verdict on fp16 (1), bf16 (2): 3 different seeds are needed." in notes


def rewarded(out: Path, label: str, rewards: list[float], **more: list[float]) -> tuple[str, Path]:
    """Make the folder of a finished run with a reward, and further metrics, by step."""
    label, folder = made(out, label, 1, range(1, len(rewards) + 1))
    rows = [
        {"step": step, "data": {REWARD: reward} | {name: values[step - 1] for name, values in more.items()}}
        for step, reward in enumerate(rewards, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return label, folder


def test_passing_and_collapse_are_looked_for_in_all_steps(tmp_path):
    pairs = [
        rewarded(tmp_path / "a", "fp16", [1.0] * 10 + [0.0] * 10),
        rewarded(tmp_path / "b", "bf16", [0.0] * 10 + [1.0] * 10),
        rewarded(tmp_path / "c", "fp32", [0.0] * 10),
    ]
    report = built(pairs)
    assert report.common == tuple(range(1, 11))
    assert [(entry.passed, entry.collapsed) for entry in report.entries] == [(5, 13), (15, None), (None, None)]


def test_steps_at_which_runs_passed():
    texts = [
        at_step([SimpleNamespace(passed=step) for step in steps], "passed")
        for steps in ((20, 22), (20,), (None, 20, 24), (None,))
    ]
    assert texts == ["at 21 ± 1.4", "at 20", "2 of 3, at 20, 24", "never"]


def test_runs_without_a_common_step_are_refused(tmp_path):
    pairs = [made(tmp_path / "a", "fp16", 1, range(1, 5)), made(tmp_path / "b", "bf16", 1, range(5, 9))]
    with pytest.raises(Refused, match="no step in common: fp16=a has steps 1 to 4, bf16=b has steps 5 to 8"):
        write_report(pairs, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_single_run_has_a_note(tmp_path):
    report = built([made(tmp_path / "a")])
    assert report.notes == ("One run only: there is no spread, and nothing to compare it with.",)
    assert report.spreads["fp16"]["reward_last"].std is None and report.verdicts == ()
    assert "None: no two labels have as many runs as a verdict needs." in page(report)


def test_label_without_any_run_has_a_note(tmp_path):
    report = built(several(tmp_path / "in", "bf16"), expected=["fp16", "bf16", "fp32"])
    assert report.labels == ("bf16",) and report.without == ("fp16", "fp32")
    assert "fp32 has no run yet: it is not in the tables." in page(report)
    assert is_rebuilt_from(tmp_path / "out", report)


def test_metric_that_is_always_nan_has_no_mean_and_a_note(tmp_path):
    pairs = several(tmp_path / "in", "fp16", range(1, 3)) + [
        made(tmp_path / "bad", "fp16", 3, **{"actor/entropy": None}),
        *several(tmp_path / "in", "bf16", **{"response_length/mean": 26.0}),
    ]
    report = built(pairs)
    assert report.notes == ("fp16-seed3: actor/entropy is NaN or inf at every step: it has no value.",)
    assert "4.15 ± 0.071 (2 of 3)" in markdown(report)
    (verdict,) = [each for each in report.verdicts if each.outcome == "entropy_last"]
    assert verdict.text == "no verdict: fp16 has 2 of at least 3 seeds"
    assert is_rebuilt_from(tmp_path / "out", report)
    kept = (tmp_path / "out" / "runs" / "fp16-seed3" / "metrics.jsonl").read_text()
    assert '"actor/entropy": null' in kept and "NaN" not in kept, "which is not JSON"


def compute_in(folder: Path, dtype: str) -> None:
    """Change what the actor of a finished run reported."""
    summary = json.loads((folder / "summary.json").read_text())
    summary["effective_dtypes"]["actor"]["compute"] = dtype
    write_json(folder / "summary.json", summary)


def test_speed_is_not_claimed_beside_a_run_in_another_dtype(tmp_path):
    pairs = several(tmp_path / "in")
    compute_in(pairs[-1][1], "float16")
    report = built(pairs)
    assert report.unclaimed == {"fp16": "", "bf16": "bf16-seed3: trained in float16"}
    texts = {each.text for each in report.verdicts if each.outcome in ("throughput_median", "seconds_median")}
    assert texts == {"not claimed: bf16-seed3: trained in float16"}


def test_speed_is_not_claimed_for_a_dtype_other_than_the_regimes(tmp_path):
    pairs = several(tmp_path / "in")
    compute_in(pairs[0][1], "bfloat16")
    report = built(pairs)
    why = "not claimed: fp16-seed1: trained in bfloat16"
    assert {each.text for each in report.verdicts if each.outcome == "throughput_median"} == {why}
    assert f'<s>102 ± 1</s><span class="why">{why}</span>' in page(report)
    assert f"~~102 ± 1~~ {why}" in markdown(report)
    write_tables(report, tmp_path)
    assert (
        table(tmp_path / "table.csv")["fp16", "throughput_median"]["not_claimed"] == "fp16-seed1: trained in bfloat16"
    )
    assert table(tmp_path / "table.csv")["bf16", "throughput_median"]["not_claimed"] == ""


def test_speed_is_not_claimed_on_a_shared_machine(tmp_path):
    report = built(several(tmp_path / "in"), nospeed="others used the machine")
    why = "not claimed: others used the machine"
    assert {each.text for each in report.verdicts if each.outcome == "throughput_median"} == {why}
    html = page(report)
    assert f'<s>102 ± 1</s><span class="why">{why}</span>' in html and "dtypes as named" in html
    assert [html.count(f"<s>{value}</s>") for value in (101, 102, 103)] == [2, 2, 2], "in the table of runs, too"
    assert "No speed is claimed for any run: others used the machine." in report.notes
    assert is_rebuilt_from(tmp_path / "out", report)


def test_k3_that_is_rounding_noise_has_a_note(tmp_path):
    pairs = several(tmp_path / "in", "fp16") + several(tmp_path / "in", "fp32", **{K3_KL: -2e-12})
    (note,) = built(pairs).notes
    assert note.startswith("Of fp32 a mean or median of k3 is not above 1e-08: that is the rounding of verl's estimate")


def test_three_runs_of_one_seed_count_as_one_seed(tmp_path):
    same = [made(tmp_path / str(n), "fp16", 1, **{SECONDS: 2.0 + n}) for n in range(3)]
    report = built([*same, *several(tmp_path / "in", "bf16")])
    assert "No verdict on fp16 (1): 3 different seeds are needed." in report.notes
    assert not any(each.holds for each in report.verdicts) and pairs_with_verdicts(report) == []


def test_dtypes_of_a_foreign_run_are_unknown(tmp_path):
    file = tmp_path / "one.jsonl"
    data = {REWARD: 0.5, "perf/throughput": 9.0}
    file.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step in (1, 2)))
    report = built([("fp16", file)])
    assert report.entries[0].id == "fp16-1"
    assert "2 common steps are fewer than the 5 of a moving mean." in report.notes
    html = page(report)
    assert "effective dtypes unknown: verl&#39;s file logger records none" in html and "<s>9</s>" in html
    assert is_rebuilt_from(tmp_path / "out", report)


def test_unfinished_run_has_a_note_and_stays_unfinished(tmp_path):
    label, folder = made(tmp_path / "a")
    (folder / "summary.json").unlink()
    reports = [{"role": "actor", "rank": 0, "compute": "bfloat16", "stamp": {"release": "0.9.1", "stack": "abc"}}]
    (folder / "train.log").write_text("".join(f"[verl-precision] {json.dumps(each)}\n" for each in reports))
    write_json(folder / "run.json", json.loads((folder / "run.json").read_text()) | {"steps": 40})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "da')
    report = built([(label, folder)])
    assert "fp16-seed1 is not finished: 10 of 40 steps." in report.notes
    assert state(report.entries[0]) == "10 of 40 steps"
    assert "fp16-seed1: the last line of metrics.jsonl, line 11, is half-written: left out." in report.notes
    assert report.entries[0].departure == "trained in bfloat16"
    assert is_rebuilt_from(tmp_path / "out", report)


def test_other_differences_of_the_configurations_have_a_note(tmp_path):
    pairs = several(tmp_path / "in", seeds=range(1, 3))
    for number, (_, folder) in enumerate(pairs):
        (folder / "hydra").mkdir()
        actor = f"actor:\n  lr: {2.0 if number == 1 else 1.0}\n  dtype: {number > 1}\n"
        (folder / "hydra" / "config.yaml").write_text(f"data:\n  seed: {number}\n  path: /same\n{actor}")
    report = built(pairs)
    assert list(report.differs) == ["actor.lr", "actor.dtype"]
    assert "Within fp16 the runs differ in more than their seed: actor.lr." in report.notes
    assert is_rebuilt_from(tmp_path / "out", report)
    kept = json.loads((tmp_path / "out" / "runs" / "fp16-seed1" / RECORD).read_text())
    assert kept["config"] == {"actor.lr": 1.0, "actor.dtype": False}, "what all share is not kept"


def test_runs_of_one_seed_have_different_names(tmp_path):
    report = built([made(tmp_path / "a"), made(tmp_path / "b", **{REWARD: 0.1})])
    assert [entry.id for entry in report.entries] == ["fp16-seed1", "fp16-seed1-2"]
    assert "fp16 has several runs of seed 1: each counts in means, as one seed for verdicts." in report.notes


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("k3", [1e-7, 0.0, -2e-12])
def test_figures_accept_equal_and_nonpositive_values(k3, tmp_path):
    """In fp32 the estimate is rounding noise around 0, which a logarithmic axis does not have."""
    report = built([made(tmp_path / "a", "fp32", **{K3_KL: k3, LOSS_SCALE: 65536.0, SKIPPED: 0.0})])
    write_figures(report, tmp_path)
    drawn = {file.stem for file in (tmp_path / "figures").iterdir()}
    assert ("k3" in drawn) == (k3 > 0) and {"reward", "loss_scale", "outcomes"} <= drawn and "skipped" not in drawn
    assert set(re.findall(r"figures/(\w+)\.svg", page(report))) == drawn


def test_mean_of_a_logarithmic_figure_is_geometric():
    for scale in ("log", "log2"):
        assert centre([1.0, 100.0], scale)[0] == pytest.approx(10)
        assert centre([8.0], scale) == pytest.approx((8, 8, 8))
    assert centre([1.0, 3.0], "linear") == pytest.approx((2, 2 - 2**0.5, 2 + 2**0.5))


def test_skipped_steps_are_marked_and_counted(tmp_path):
    skipped = {SKIPPED: [0.0, 2.0, 0.0, 1.0], LOSS_SCALE: [8.0, 4.0, 4.0, 2.0]}
    report = built([rewarded(tmp_path / "a", "fp16", [0.5] * 4, **skipped)])
    by_metric = {series.metric: series for series in SERIES}
    assert curve(report.entries[0].run.steps, by_metric[SKIPPED]) == {1: 0.0, 2: 2.0, 3: 2.0, 4: 3.0}
    axis = Figure().add_subplot()
    draw(report, by_metric[LOSS_SCALE], axis)
    (crosses,) = [line for line in axis.lines if line.get_marker() == "x"]
    assert (list(crosses.get_xdata()), list(crosses.get_ydata())) == ([2, 4], [4.0, 2.0])


def test_report_goes_to_a_folder_of_the_sources_name(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(command, "rebuild", lambda source, out: calls.append(out))
    monkeypatch.setattr(command, "on_screen", str)
    (tmp_path / "grpo").mkdir()
    monkeypatch.chdir(tmp_path / "grpo")
    assert command.main(["FROM=."]) == 0 and calls == [Path("outputs/report/grpo")]


def test_folder_with_other_content_is_not_written_to(tmp_path):
    pairs = [made(tmp_path / "a")]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("all of it")
    for out in (tmp_path / "out", tmp_path / "out" / "thesis.tex"):
        with pytest.raises(Refused, match=f"OUT={out}: is not empty and contains no report"):
            write_report(pairs, out)
    for out in (tmp_path / "a" / "run.json" / "below", Path("/proc/none")):
        with pytest.raises(Refused, match=f"OUT={out}: cannot be written to"):
            write_report(pairs, out)
    assert contents(tmp_path / "out") == {"thesis.tex": b"all of it"}


def test_refusal_leaves_the_existing_report(tmp_path):
    pairs = [made(tmp_path / "a")]
    write_report(pairs, tmp_path / "out")
    before = contents(tmp_path / "out")
    (tmp_path / "a" / "metrics.jsonl").write_text("{\n{}\n")
    with pytest.raises(Refused, match="metrics.jsonl: line 1 is not a line of metrics"):
        write_report(pairs, tmp_path / "out")
    with pytest.raises(Refused, match="there is no run"):
        write_report([], tmp_path / "out")
    assert contents(tmp_path / "out") == before
