"""A report: what it says of what is missing or doubtful, and that it comes again from the runs that it keeps."""

import csv
import json
import math
import re
import shutil
from pathlib import Path

import pytest

from lib.errors import Refused
from lib.files import read_jsonl, write_json
from lib.paths import REPO
from lib.report import build as report
from lib.report import readers as sources
from lib.run.metrics import K3_KL, LOSS_SCALE, REWARD, SECONDS, SKIPPED

RECORDED = sorted(file.parent for file in (REPO / "docs" / "results").rglob(report.SETTINGS))


def made(out: Path, label: str = "fp16", seed: int = 1, steps: range = range(1, 11), **more: float | None) -> tuple:
    """The folder of a finished run, and its label."""
    out.mkdir(parents=True)
    settings = {"EXPERIMENT": "sanity_cpu", "PRECISION": label, "SEED": seed, "ARGS": ""}
    write_json(out / "run.json", {"settings": settings, "steps": len(steps)})
    named = sources.named_dtypes(label)
    dtypes = {"actor": {"compute": named["actor"]}, "rollout": {"rollout": named["rollout"]}}
    write_json(out / "summary.json", {"effective_dtypes": dtypes, "wall_s": 9.0, "peak_memory_gib": 1.0})
    data = {REWARD: 0.5 + seed / 100, K3_KL: 1e-7 * seed, "perf/throughput": 100.0 + seed} | more
    lines = [json.dumps({"step": step, "data": data}) for step in steps]
    (out / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return label, out


def several(root: Path, labels: str = "fp16 bf16", seeds: range = range(1, 4), **more) -> list[tuple[str, Path]]:
    """The folders of runs that differ in little but their time."""
    given = [(label, seed) for label in labels.split() for seed in seeds]
    return [
        made(root / f"{label}-{seed}", label, seed, **{"actor/entropy": 4 + seed / 10, SECONDS: 2 + place} | more)
        for place, (label, seed) in enumerate(given)
    ]


def built(pairs: list[tuple[str, Path]], **more) -> report.Report:
    """A report that is not written: figures take seconds."""
    return report.build(sources.read_all(pairs), report.THRESHOLD, "Runs", **more)


def comes_again(found: report.Report, out: Path) -> bool:
    """Whether the runs as a report keeps them make the same page and tables, figures aside."""
    report.write_runs(found, out)
    kept = json.loads((out / report.SETTINGS).read_text())
    pairs = [(label, out / folder) for label, folder in kept["runs"]]
    again = report.build(sources.read_all(pairs), kept["threshold"], kept["title"], kept["labels"], kept["nospeed"])
    return report.page(again) == report.page(found) and report.run_rows(again) == report.run_rows(found)


def table(out: Path) -> dict[tuple[str, str], dict]:
    with (out / "table.csv").open() as content:
        return {(row["label"], row["outcome"]): row for row in csv.DictReader(content)}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def cells(page: bytes) -> list[str]:
    """The text of each cell of a page's tables."""
    found = re.findall(r"<td[ >].*?</td>", page.decode(), re.DOTALL)
    return [" ".join(re.sub(r"<[^>]*>", " ", cell).split()) for cell in found]


@pytest.mark.parametrize("folder", RECORDED, ids=lambda folder: str(folder.relative_to(REPO)))
def test_a_recorded_report_comes_again_from_its_runs_number_for_number(folder, tmp_path):
    again = report.again(folder, tmp_path / "again")
    old, new = contents(folder), contents(tmp_path / "again")
    text = {name for name in old if not name.startswith("figures/") and name != "index.html"}
    assert {"table.csv", "runs.csv", "verdicts.csv", "table.md"} <= text
    assert cells(old["index.html"]) == cells(new["index.html"]), "of its tables; its looks may change"
    assert [name for name in sorted(text) if old[name] != new[name]] == []
    assert {name for name in old if name.startswith("figures/")} <= set(new)
    for label in again.labels:  # not of the code that wrote it
        means = [
            math.fsum(row["data"][K3_KL] for row in read_jsonl(folder / "runs" / entry.id / "metrics.jsonl"))
            / len(entry.run.steps)
            for entry in again.of(label)
            if len(entry.run.steps) == len(again.common)
        ]
        if len(means) == len(again.of(label)):
            assert float(table(folder)[label, "k3_mean"]["mean"]) == pytest.approx(math.fsum(means) / len(means), 1e-12)


def test_a_recorded_report_has_three_regimes_of_three_seeds():
    seeds = [[int(row["n"]) for name, row in table(folder).items() if name[1] == "reward_last"] for folder in RECORDED]
    assert any(len(each) >= 3 and min(each) >= 3 for each in seeds)


def test_the_same_runs_give_the_same_bytes_and_the_kept_ones_the_same_report(tmp_path):
    pairs = several(tmp_path / "in", seeds=range(1, 3))
    for name in ("one", "two"):
        found = report.write(pairs, tmp_path / name, 0.4, "Two regimes", ["bf16", "fp16"], "a shared machine")
        assert found.labels == ("bf16", "fp16"), "in the order that is expected"
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    shutil.rmtree(tmp_path / "in")
    report.again(tmp_path / "one", tmp_path / "one")  # in its own place
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert not [name for name in tmp_path.iterdir() if name.name.startswith(".")]


def test_the_page_names_nothing_of_this_machine(tmp_path):
    found = built(several(tmp_path / "in", seeds=range(1, 2)))
    report.write_runs(found, tmp_path / "out")
    report.write_tables(found, tmp_path / "out")
    for name, content in (contents(tmp_path / "out") | {"index.html": report.page(found).encode()}).items():
        assert str(tmp_path).encode() not in content, name


def test_means_and_verdicts_over_the_seeds(tmp_path):
    found = built(several(tmp_path / "in"))
    report.write_tables(found, tmp_path)
    row = table(tmp_path)["fp16", "entropy_last"]
    assert (row["runs"], row["n"]) == ("3", "3")
    assert float(row["mean"]) == pytest.approx(4.2) and float(row["std"]) == pytest.approx(0.1)
    texts = {each.outcome: each.text for each in found.verdicts}
    assert texts["reward_last"].startswith("no verdict: ")
    assert texts["k3_mean"].startswith("no verdict: 1.00×") or texts["k3_mean"].startswith("no verdict: 1×")
    markdown = (tmp_path / "table.md").read_text()
    assert "| entropy, last 5 steps | 4.20 ± 0.10 | 4.20 ± 0.10 |" in markdown
    assert found.notes == ()


def test_runs_of_different_length_are_compared_on_the_common_steps(tmp_path):
    pairs = [
        made(tmp_path / "a", "fp16", 1, range(1, 11)),
        made(tmp_path / "b", "bf16", 2, range(3, 16)),
        made(tmp_path / "c", "bf16", 3, range(3, 11)),
    ]
    found = built(pairs)
    assert found.common == tuple(range(3, 11))
    said = " ".join(found.notes)
    assert "compared on the common ones, steps 3 to 10. " in said
    assert "More have fp16-seed1 steps 1 to 10, bf16-seed2 steps 3 to 15." in said
    assert "No verdict on fp16 (1), bf16 (2): 3 different seeds are needed." in said


def test_without_a_common_step_there_is_no_report(tmp_path):
    pairs = [made(tmp_path / "a", "fp16", 1, range(1, 5)), made(tmp_path / "b", "bf16", 1, range(5, 9))]
    with pytest.raises(Refused, match="no step in common: fp16=a has steps 1 to 4, bf16=b has steps 5 to 8"):
        report.write(pairs, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_run_alone_is_said_to_be_one(tmp_path):
    found = built([made(tmp_path / "a")])
    assert found.notes == ("One run only: there is no spread, and nothing to compare it with.",)
    assert found.spreads["fp16"]["reward_last"].std is None and found.verdicts == ()
    assert "None: no two labels have as many runs as a verdict needs." in report.page(found)


def test_a_regime_without_any_run_is_named(tmp_path):
    found = built(several(tmp_path / "in", "bf16"), expected=["fp16", "bf16", "fp32"])
    assert found.labels == ("bf16",) and found.without == ("fp16", "fp32")
    assert "fp32 has no run yet: it is not in the tables." in report.page(found)
    assert comes_again(found, tmp_path / "out")


def test_a_column_of_nan_has_no_mean_and_is_said(tmp_path):
    pairs = several(tmp_path / "in", "fp16", range(1, 3)) + [
        made(tmp_path / "bad", "fp16", 3, **{"actor/entropy": None}),
        *several(tmp_path / "in", "bf16", **{"response_length/mean": 26.0}),
    ]
    found = built(pairs)
    assert found.notes == ("fp16-seed3: actor/entropy is NaN or inf at every step: it has no value.",)
    assert "4.15 ± 0.071 (2 of 3)" in report.markdown(found)
    (verdict,) = [each for each in found.verdicts if each.outcome == "entropy_last"]
    assert verdict.text == "no verdict: fp16 has 2 of at least 3 seeds"


def test_speed_is_not_claimed_for_another_dtype_than_the_one_named(tmp_path):
    pairs = several(tmp_path / "in")
    summary = json.loads((pairs[0][1] / "summary.json").read_text())
    summary["effective_dtypes"]["actor"]["compute"] = "bfloat16"
    write_json(pairs[0][1] / "summary.json", summary)
    found = built(pairs)
    why = "not claimed: fp16-seed1: trained in bfloat16"
    assert {each.text for each in found.verdicts if each.outcome == "throughput_median"} == {why}
    assert f'<s>102 ± 1</s><span class="why">{why}</span>' in report.page(found)
    assert f"~~102 ± 1~~ {why}" in report.markdown(found)
    report.write_tables(found, tmp_path)
    assert table(tmp_path)["fp16", "throughput_median"]["not_claimed"] == "fp16-seed1: trained in bfloat16"
    assert table(tmp_path)["bf16", "throughput_median"]["not_claimed"] == ""


def test_no_speed_is_claimed_where_the_machine_was_shared(tmp_path):
    found = built(several(tmp_path / "in"), nospeed="others used the machine")
    why = "not claimed: others used the machine"
    assert {each.text for each in found.verdicts if each.outcome == "throughput_median"} == {why}
    page = report.page(found)
    assert f'<s>102 ± 1</s><span class="why">{why}</span>' in page and "dtypes as named" in page
    assert "No speed is claimed for any run: others used the machine." in found.notes
    assert comes_again(found, tmp_path / "out")


def test_k3_that_is_rounding_noise_is_said_to_be(tmp_path):
    pairs = several(tmp_path / "in", "fp16") + several(tmp_path / "in", "fp32", **{K3_KL: -2e-12})
    (note,) = built(pairs).notes
    assert note.startswith("Of fp32 a mean or median of k3 is not above 1e-08: that is the rounding of verl's estimate")


def test_three_runs_of_one_seed_are_no_three_seeds(tmp_path):
    same = [made(tmp_path / str(n), "fp16", 1, **{SECONDS: 2.0 + n}) for n in range(3)]
    found = built([*same, *several(tmp_path / "in", "bf16")])
    assert "No verdict on fp16 (1): 3 different seeds are needed." in found.notes
    assert not any(each.holds for each in found.verdicts) and report.judged(found) == []


def test_of_a_foreign_run_the_dtypes_are_said_to_be_unknown(tmp_path):
    file = tmp_path / "one.jsonl"
    data = {REWARD: 0.5, "perf/throughput": 9.0}
    file.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step in (1, 2)))
    found = built([("fp16", file)])
    assert found.entries[0].id == "fp16-1"
    page = report.page(found)
    assert "effective dtypes unknown: verl&#39;s file logger records none" in page and "<s>9</s>" in page
    assert comes_again(found, tmp_path / "out")


def test_a_run_that_is_not_finished_is_said_to_be_so_and_kept_so(tmp_path):
    label, folder = made(tmp_path / "a")
    (folder / "summary.json").unlink()
    reports = [{"role": "actor", "rank": 0, "compute": "bfloat16", "stamp": {"release": "0.9.1", "stack": "abc"}}]
    (folder / "train.log").write_text("".join(f"[verl-precision] {json.dumps(each)}\n" for each in reports))
    write_json(folder / "run.json", json.loads((folder / "run.json").read_text()) | {"steps": 40})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "da')
    found = built([(label, folder)])
    assert "fp16-seed1 is not finished: 10 of 40 steps." in found.notes
    assert "fp16-seed1: the last line of metrics.jsonl, line 11, is half-written: left out." in found.notes
    assert found.entries[0].departure == "trained in bfloat16"
    assert comes_again(found, tmp_path / "out")


def test_what_else_differs_in_the_configurations_is_told(tmp_path):
    pairs = several(tmp_path / "in", seeds=range(1, 3))
    for number, (_, folder) in enumerate(pairs):
        (folder / "hydra").mkdir()
        actor = f"actor:\n  lr: {2.0 if number == 1 else 1.0}\n  dtype: {number > 1}\n"
        (folder / "hydra" / "config.yaml").write_text(f"data:\n  seed: {number}\n  path: /same\n{actor}")
    found = built(pairs)
    assert list(found.differs) == ["actor.lr", "actor.dtype"]
    assert "Within fp16 the runs differ in more than their seed: actor.lr." in found.notes
    assert comes_again(found, tmp_path / "out")
    kept = json.loads((tmp_path / "out" / "runs" / "fp16-seed1" / sources.RECORD).read_text())
    assert kept["config"] == {"actor.lr": 1.0, "actor.dtype": False}, "what all share is not kept"


def test_runs_of_one_seed_are_told_apart(tmp_path):
    found = built([made(tmp_path / "a"), made(tmp_path / "b", **{REWARD: 0.1})])
    assert [entry.id for entry in found.entries] == ["fp16-seed1", "fp16-seed1-2"]
    assert "fp16 has several runs of seed 1: each counts in means, as one seed for verdicts." in found.notes


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("k3", [1e-7, 0.0, -2e-12])
def test_figures_of_values_that_are_equal_or_not_above_zero(k3, tmp_path):
    """In fp32 the estimate is rounding noise around 0, which a logarithmic axis does not have."""
    found = built([made(tmp_path / "a", "fp32", **{K3_KL: k3, LOSS_SCALE: 65536.0, SKIPPED: 0.0})])
    report.write_figures(found, tmp_path)
    drawn = {file.stem for file in (tmp_path / "figures").iterdir()}
    assert ("k3" in drawn) == (k3 > 0) and {"reward", "loss_scale", "outcomes"} <= drawn and "skipped" not in drawn
    assert set(re.findall(r"figures/(\w+)\.svg", report.page(found))) == drawn


def test_a_folder_that_holds_something_else_is_not_written_to(tmp_path):
    pairs = [made(tmp_path / "a")]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("all of it")
    for out in (tmp_path / "out", tmp_path / "out" / "thesis.tex"):
        with pytest.raises(Refused, match=f"OUT={out}: is not empty and holds no report"):
            report.write(pairs, out)
    for out in (tmp_path / "a" / "run.json" / "below", Path("/proc/none")):
        with pytest.raises(Refused, match=f"OUT={out}: cannot be written to"):
            report.write(pairs, out)
    assert contents(tmp_path / "out") == {"thesis.tex": b"all of it"}


def test_a_refusal_leaves_the_report_that_is_there(tmp_path):
    pairs = [made(tmp_path / "a")]
    report.write(pairs, tmp_path / "out")
    before = contents(tmp_path / "out")
    (tmp_path / "a" / "metrics.jsonl").write_text("{\n{}\n")
    with pytest.raises(Refused, match="metrics.jsonl: line 1 is no line of metrics"):
        report.write(pairs, tmp_path / "out")
    with pytest.raises(Refused, match="there is no run"):
        report.write([], tmp_path / "out")
    assert contents(tmp_path / "out") == before
