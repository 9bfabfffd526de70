"""The benchmark of the AMP recipes: arms differ in their dtype and in nothing else; timings are not asserted."""

import csv
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bench_amp
from bench_amp import AmpBenchOptions, bench, main, write
from lib.bench.amp_measure import ArmResult, measure
from lib.bench.amp_ratio import ratio, seconds_of
from lib.bench.amp_report import Conditions, goals, markdown
from lib.bench.amp_scenarios import ARMS, SCENARIOS, Arm, BuiltArm, Scenario
from lib.bench.resource_usage import cpu_seconds, peak_memory

SCRIPT = Path(bench_amp.__file__)
CPU = torch.device("cpu")
ITEMS = {"mlp": 32, "transformer": 4 * 16, "world_model": 4 * 20, "evolution": 64, "ppo": 4 * 32}  # of an update


def conditions(device: str = "cpu") -> Conditions:
    return Conditions(device, "small", "make bench-amp", seconds=60.0, others=0.01)


@pytest.fixture(scope="module")
def rows() -> list[ArmResult]:
    """All scenarios on the CPU, twice."""
    return bench(SCENARIOS, "small", repeats=2, seed=3, device=CPU)


@pytest.fixture(scope="module")
def written(rows, tmp_path_factory) -> dict[str, Path]:
    files = write(rows, conditions(), tmp_path_factory.mktemp("out"))
    return {file.suffix: file for file in files}


@pytest.fixture(scope="module")
def table(written) -> list[dict[str, str]]:
    return list(csv.DictReader(written[".csv"].open()))


def repeats(table: list[dict[str, str]]) -> list[list[dict[str, str]]]:
    """Return the rows of the arms that took turns, by scenario and repeat."""
    by_repeat: dict[tuple, list] = {}
    for row in table:
        by_repeat.setdefault((row["scenario"], row["repeat"]), []).append(row)
    return list(by_repeat.values())


def test_every_arm_of_every_scenario_runs_in_its_dtype(table):
    assert [row["scenario"] for row in table] == [name for name in SCENARIOS for _ in range(2 * len(ARMS))]
    for row in table:
        assert row["requested_dtype"] == row["effective_dtype"] == ARMS[row["arm"]] and row["fallback"] == ""
        assert float(row["effective_share"]) > 0.5
        assert float(row["throughput"]) * float(row["seconds"]) == pytest.approx(ITEMS[row["scenario"]])
        assert float(row["seconds"]) > 0 and float(row["memory_mib"]) > 0
        assert int(row["optimizer_steps"]) >= int(row["updates"]) + 2 and row["gpu_busy"] == ""


def test_arms_of_a_repeat_share_weights_and_clipping_and_take_turns(table):
    digests = {}
    for arms in repeats(table):
        assert [row["arm"] for row in arms] == list(ARMS)
        for key in ("seed", "weights", "max_grad_norm", "updates", "optimizer_steps"):
            assert len({row[key] for row in arms}) == 1, (arms[0]["scenario"], key)
        if arms[0]["outcome"] == "loss":  # same weights and data, so equal up to rounding
            base, *others = (float(row["first"]) for row in arms)
            assert others == pytest.approx([base] * len(others), rel=1e-2)
        digests.setdefault(arms[0]["scenario"], set()).add((arms[0]["seed"], arms[0]["weights"]))
        rounds = list(zip(*(map(int, row["order"].split()) for row in arms), strict=True))
        assert len(rounds) == int(arms[0]["updates"]) and len(set(rounds)) > 1, "in a shuffled order"
        assert all(sorted(places) == list(range(len(ARMS))) for places in rounds)
    assert all(len({seed for seed, _ in of}) == len({weights for _, weights in of}) == 2 for of in digests.values())


def test_report_lists_every_scenario_and_arm(written, rows):
    from matplotlib.image import imread

    report = written[".md"].read_text()
    for name in SCENARIOS:
        for arm, dtype in ARMS.items():
            assert f"| {name} | {arm} | {dtype} " in report
    unmeasured = report.partition("## Goals on a GPU")[2].strip().splitlines()
    assert len(unmeasured) == 3 and all(line.endswith(": not measured, no CUDA device.") for line in unmeasured)
    assert "n/a |" not in report and "busy with other work" not in report
    busy = markdown(rows, replace(conditions(), others=1.5))
    assert "other processes used 1.50 of" in busy and "busy with other work" in busy
    gpu = [replace(row, gpu_busy=0.9) for row in rows if row.scenario == "mlp"]
    lines = goals(gpu, conditions("cuda"))
    assert f"mlp fp16 {ratio(gpu, 'mlp', 'fp16', seconds_of)}" in lines[1]
    assert lines[0].endswith(": not measured.") and lines[3].endswith("mlp 90%.")
    pixels = imread(written[".png"])
    coloured = pixels[..., :3].max(-1) - pixels[..., :3].min(-1) > 0.3  # blue and orange
    assert pixels.shape[1] == 1200 and 0.001 < coloured.mean() < 0.5


def test_speed_up_is_the_median_ratio_over_the_repeats():
    row = measure("mlp", "small", 0, 0, CPU)[0]
    times = {"fp32": [4.0, 4.0, 40.0], "fp16": [2.0, 1.0, 20.0], "bf16": [4.0, 8.0, 40.0]}
    memory = {"fp32": 8.0, "fp16": 2.0, "bf16": 6.0}
    rows = []
    for repeat in range(3):
        for arm, dtype in ARMS.items():
            measured = {"seconds": times[arm][repeat], "memory_mib": memory[arm]}
            rows.append(replace(row, arm=arm, repeat=repeat, requested_dtype=dtype, effective_dtype=dtype, **measured))
    report = markdown(rows, conditions())
    assert "| 2 (2–4) | 2 | 75% |" in report and "| 1 (0.500–1) | 6 | 25% |" in report
    speed_up = ratio(rows, "mlp", "fp16", seconds_of)
    assert (speed_up.median, speed_up.low, speed_up.high) == (2.0, 2.0, 4.0)
    assert str(ratio(rows, "mlp", "bf16", seconds_of)) == "1 (0.500–1)"
    fell_back = [replace(row, effective_dtype="float32") if row.arm == "fp16" else row for row in rows]
    assert ratio(fell_back, "mlp", "fp16", seconds_of).reason == "it ran in float32, not in float16"
    assert ratio(fell_back, "mlp", "bf16", seconds_of).median == 1.0
    base = [replace(row, effective_dtype="float16") if row.arm == "fp32" else row for row in rows]
    assert ratio(base, "mlp", "bf16", seconds_of).reason.startswith("fp32: it ran in float16")


def test_scenario_that_is_named_twice_is_measured_once():
    assert AmpBenchOptions(only="ppo,mlp,ppo").names == ["ppo", "mlp"]


def test_arm_that_fell_back_has_no_speed_up(tmp_path, capsys):
    with pytest.warns(UserWarning, match="the model is on the CPU"):
        rows = bench(["mlp"], "small", repeats=1, seed=0, device=CPU, on_cpu=False)
    assert "n/a: the model is on the CPU: training in float32, not float16" in capsys.readouterr().out
    _, report, figure = write(rows, conditions(), tmp_path)
    lines = {line.split(" | ")[1]: line for line in report.read_text().splitlines() if line.startswith("| mlp")}
    assert all("float32" in lines[arm] and lines[arm].count("| n/a |") == 2 for arm in ("fp16", "bf16"))
    assert "- mlp, fp16: the model is on the CPU" in report.read_text()
    assert "- transformer: left out of this run" in report.read_text() and figure.stat().st_size > 1000


def test_outcomes_are_the_first_update_and_the_mean_of_the_last_ones(monkeypatch):
    def build(arm: Arm) -> BuiltArm:
        shown = iter([None, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 17.0])
        run = SCENARIOS["mlp"].build(arm, width=8, layers=1, batch=4)
        return replace(run, update=lambda: run.update() is not None and next(shown))

    counted = Scenario(build, "samples", {"small": {"updates": 6}}, outcome="return")
    monkeypatch.setitem(SCENARIOS, "counted", counted)
    rows = measure("counted", "small", 0, 0, CPU)
    assert [row.last for row in rows] == [7.0] * 3 and all(math.isnan(row.first) for row in rows)
    assert "| return not finite in 1 of 1 repeats | 7 (7–7) |" in markdown(rows, conditions())


def test_kill_switch_of_ppo_leaves_no_speed_up(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("DISABLE_AMP", "1")
    bench(["ppo"], "small", repeats=1, seed=0, device=CPU)
    assert "n/a: it ran in float32, not in float16" in capsys.readouterr().out
    monkeypatch.setenv("DISABLE_AMP", "yes")
    with pytest.raises(SystemExit, match="DISABLE_AMP='yes' in the environment must be 1, 0, true or false"):
        main(["--size", "small", "--only", "mlp", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_core_seconds_of_other_processes_are_counted_apart():
    all_before, own_before = cpu_seconds()
    other = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", other], check=True)
    while time.process_time() < own_before + 0.5:
        pass
    all_after, own_after = cpu_seconds()
    assert 0.5 <= own_after - own_before < 1.0 and all_after - all_before > 0.95


def test_peak_memory_is_of_tensors_alive_at_once():
    with peak_memory(CPU) as peak:
        kept = torch.zeros(1000)
        for size in (500, 800, 600):
            gone = torch.zeros(size)
            del gone
        view = kept[:10]
    assert peak() == 4 * 1800 and view.sum() == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "4"], "repeats=4 must be at least 5"),
        (["--only", "mlp,nlp"], "only=mlp,nlp must be of mlp,transformer,world_model,evolution,ppo"),
        (["--size", "huge"], "size=huge must be small, cpu or cuda"),
        (["--size", "small"], "size=small requires --out: docs/results is for size="),
        (["--out", __file__], "test_bench_amp.py must be a writable folder"),
        (["--device", "tpu"], "device=tpu must be auto, cpu or cuda"),
        (["--repeat", "5"], "--repeat is not an option; did you mean --repeats?"),
    ],
)
def test_invalid_words_are_refused_in_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as refused:
        main(words)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.subprocess
def test_command_writes_csv_report_and_figure(tmp_path):
    words = ["--size", "small", "--only", "mlp", "--device", "cpu", "--out", tmp_path / "out"]
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()[:-3]] == [f"mlp {n}/5" for n in range(1, 6)]
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {f"amp-bench-cpu.{suffix}" for suffix in ("csv", "md", "png")}
    assert "make bench-amp ARGS='--size small --only mlp" in (tmp_path / "out" / "amp-bench-cpu.md").read_text()


@pytest.mark.gpu
def test_gpu_memory_and_load_are_measured_and_goals_reported(tmp_path):
    rows = bench(SCENARIOS, "small", repeats=2, seed=0, device=torch.device("cuda"))
    assert all(row.memory_mib > 0 and 0 < row.gpu_busy <= 1 and not row.wrong_dtype for row in rows)
    _, report, _ = write(rows, conditions("cuda"), tmp_path)
    assert "not measured" not in report.read_text().partition("## Goals on a GPU")[2]
