"""The benchmark of the AMP recipes: arms differ in their dtype and in nothing else; timings are not asserted."""

import csv
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from verl_precision.bench import amp_measure, amp_report
from verl_precision.bench.amp_measure import ArmResult, measure, ratio
from verl_precision.bench.amp_report import Conditions, goals, markdown
from verl_precision.bench.amp_scenarios import ARMS, SCENARIOS, Arm, BuiltArm, Scenario, arms_on, no_tf32
from verl_precision.bench.resource_usage import cpu_seconds, peak_memory
from verl_precision.commands.bench_amp import bench, main, write

pytestmark = pytest.mark.subprocess  # it trains for seconds
CPU = torch.device("cpu")
ITEMS = {"mlp": 32, "transformer": 4 * 16, "world_model": 4 * 20, "evolution": 64, "ppo": 4 * 32}  # of an update


def conditions(device: str = "cpu") -> Conditions:
    return Conditions(device, "small", "make bench-amp", seconds=60.0, others=0.01)


@pytest.fixture(scope="module")
def rows() -> list[ArmResult]:
    """All scenarios on the CPU, twice."""
    return bench(SCENARIOS, "small", repeats=2, seed=3, device=CPU)


def test_every_arm_of_every_scenario_runs_in_its_dtype(rows):
    assert [row.scenario for row in rows] == [name for name in SCENARIOS for _ in range(2 * len(ARMS))]
    for row in rows:
        assert row.requested_dtype == row.effective_dtype == ARMS[row.arm] and not row.fallback
        assert row.effective_share > 0.5
        assert row.throughput * row.seconds == pytest.approx(ITEMS[row.scenario])
        assert row.seconds > 0 and row.memory_mib > 0
        assert row.optimizer_steps >= row.updates + 2 and row.gpu_busy is None


def test_arms_of_a_repeat_share_weights_and_clipping_and_take_turns(rows):
    seeds = set()
    for number in range(0, len(rows), len(ARMS)):
        base, *others = arms = rows[number : number + len(ARMS)]
        assert [row.arm for row in arms] == list(ARMS)
        for row in others:
            for key in ("scenario", "repeat", "seed", "weights", "max_grad_norm", "updates", "optimizer_steps"):
                assert getattr(row, key) == getattr(base, key), (row.scenario, key)
            if row.outcome == "loss":  # same weights and data, so equal up to rounding
                assert row.first == pytest.approx(base.first, rel=1e-2)
        seeds.add((base.scenario, base.seed, base.weights))
        rounds = list(zip(*(map(int, row.order.split()) for row in arms), strict=True))
        assert len(rounds) == base.updates and len(set(rounds)) > 1, "in a shuffled order"
        assert all(sorted(places) == list(range(len(ARMS))) for places in rounds)
    assert len(seeds) == 2 * len(SCENARIOS) == len({weights for *_, weights in seeds})


def test_report_lists_every_scenario_and_arm(rows, tmp_path):
    table, report, figure = write(rows, conditions(), tmp_path)
    assert [row["weights"] for row in csv.DictReader(table.open())] == [row.weights for row in rows]
    assert figure.stat().st_size > 1000
    text = report.read_text()
    for name in SCENARIOS:
        for arm, dtype in ARMS.items():
            assert f"| {name} | {arm} | {dtype} " in text
    assert text.partition("## Goals on a GPU")[2].count(": not measured, no CUDA device.") == 3
    assert "n/a |" not in text and "busy with other work" not in text
    busy = markdown(rows, replace(conditions(), others=1.5))
    assert "other processes used 1.50 of" in busy and "busy with other work" in busy
    gpu = [replace(row, gpu_busy=0.9) for row in rows if row.scenario == "mlp"]
    lines = goals(gpu, conditions("cuda"))
    assert f"mlp fp16 {ratio(gpu, 'mlp', 'fp16', 'seconds')}" in lines[1]
    assert lines[0].endswith(": not measured.") and lines[3].endswith("mlp 90%.")


def test_speed_up_is_the_median_ratio_over_the_repeats(rows):
    times = {"fp32": [4.0, 4.0, 40.0], "fp16": [2.0, 1.0, 20.0], "bf16": [4.0, 8.0, 40.0]}
    memory = {"fp32": 8.0, "fp16": 2.0, "bf16": 6.0}
    rows = [
        replace(row, repeat=repeat, seconds=times[row.arm][repeat], memory_mib=memory[row.arm])
        for repeat in range(3)
        for row in rows[: len(ARMS)]
    ]
    report = markdown(rows, conditions())
    assert "| 2 (2–4) | 2 | 75% |" in report and "| 1 (0.500–1) | 6 | 25% |" in report
    speed_up = ratio(rows, "mlp", "fp16", "seconds")
    assert (speed_up.median, speed_up.low, speed_up.high) == (2.0, 2.0, 4.0)
    fell_back = [replace(row, effective_dtype="float32") if row.arm == "fp16" else row for row in rows]
    assert ratio(fell_back, "mlp", "fp16", "seconds").reason == "it ran in float32, not in float16"
    assert ratio(fell_back, "mlp", "bf16", "seconds").median == 1.0
    base = [replace(row, effective_dtype="float16") if row.arm == "fp32" else row for row in rows]
    assert ratio(base, "mlp", "bf16", "seconds").reason.startswith("fp32: it ran in float16")


def test_arm_that_fell_back_has_no_speed_up(tmp_path, capsys):
    with pytest.warns(UserWarning, match="the model is on the CPU"):
        rows = bench(["mlp"], "small", repeats=1, seed=0, device=CPU, on_cpu=False)
    assert "n/a: the model is on the CPU: training in float32, not float16" in capsys.readouterr().out
    _, report, figure = write(rows, conditions(), tmp_path)
    assert report.read_text().count("| n/a |") == 4 and figure.stat().st_size > 1000
    assert "- mlp, fp16: the model is on the CPU" in report.read_text()


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


def test_core_seconds_of_other_processes_are_counted_apart():
    all_before, own_before = cpu_seconds()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
    all_after, own_after = cpu_seconds()
    assert own_after - own_before < 0.3 and all_after - all_before > 0.45


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
        (["--size", "small"], "size=small requires --out: docs/results is for size="),
        (["--size", "small", "--out", "out"], "DISABLE_AMP='yes' in the environment must be 1, 0, true or false"),
    ],
)
def test_invalid_words_are_refused_in_one_line(words, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    if "DISABLE_AMP" in message:
        monkeypatch.setenv("DISABLE_AMP", "yes")
    with pytest.raises(SystemExit) as refused:
        main(words)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_command_writes_csv_report_and_figure(tmp_path, capsys):
    assert main(["--size", "small", "--only", "mlp,mlp", "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:-3]] == [f"mlp {number}/5" for number in range(1, 6)], "named twice"
    files = {file.suffix: file for file in (tmp_path / "out").iterdir()}
    assert {file.name for file in files.values()} == {f"amp-bench-cpu{suffix}" for suffix in (".csv", ".md", ".png")}
    assert "make bench-amp ARGS='--size small --only mlp" in files[".md"].read_text()


def test_tf32_is_on_in_the_updates_of_its_arm_alone_and_is_the_second_base(rows, monkeypatch):
    flags = []
    monkeypatch.setattr(amp_measure, "arms_on", lambda device: {"fp32": "float32", "tf32": "float32", **ARMS})
    monkeypatch.setattr(amp_measure, "set_tf32", flags.append)
    measured = measure("mlp", "small", 0, 0, CPU)
    warm_up = [number in (2, 3) for number in range(8)]
    timed = [number == int(place) for place in measured[1].order.split() for number in range(4)]
    assert flags == warm_up + timed and measured[1].arm == "tf32"
    gpu = [replace(row, gpu_busy=0.9) for row in measured]
    monkeypatch.setattr(amp_report, "machine", lambda device: "NVIDIA L4")
    over = {base: str(ratio(gpu, "mlp", "fp16", "seconds", base)) for base in ("fp32", "tf32")}
    report = markdown(gpu, conditions("cuda"))
    assert f" | {over['fp32']} | {over['tf32']} | " in report and "| speed-up | against tf32 |" in report
    goal = goals(gpu, conditions("cuda"))[1]
    assert f"against fp32 mlp fp16 {over['fp32']}, " in goal and f"; against tf32 mlp fp16 {over['tf32']}, " in goal
    without = markdown([row for row in gpu if row.arm != "tf32"], replace(conditions("cuda"), no_tf32="T4 has no TF32"))
    assert "- tf32: T4 has no TF32" in without and "against tf32" not in without


@pytest.mark.gpu
def test_gpu_memory_and_load_are_measured_and_goals_reported(tmp_path):
    rows = bench(SCENARIOS, "small", repeats=2, seed=0, device=(cuda := torch.device("cuda")))
    assert {row.arm for row in rows} == set(arms_on(cuda)) and ("tf32" in arms_on(cuda)) == (not no_tf32(cuda))
    assert all(row.memory_mib > 0 and 0 < row.gpu_busy <= 1 and not row.wrong_dtype for row in rows)
    _, report, _ = write(rows, conditions("cuda"), tmp_path)
    assert "not measured" not in report.read_text().partition("## Goals on a GPU")[2]
