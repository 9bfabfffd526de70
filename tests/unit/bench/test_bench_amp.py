"""The benchmark of the AMP recipes: arms differ in their dtype and in nothing else; timings are not asserted."""

import csv
import math
from dataclasses import replace

import pytest
import torch

from verl_precision.bench import amp_measure, amp_report
from verl_precision.bench.amp_measure import ArmResult, measure
from verl_precision.bench.amp_report import markdown, saved, speed_up
from verl_precision.bench.amp_scenarios import ARMS, SCENARIOS, Arm, BuiltArm, Scenario, arms_on
from verl_precision.bench.measurement import lacks_ampere, peak_memory
from verl_precision.commands.bench_amp import NAMES, main
from verl_precision.errors import Refused

pytestmark = pytest.mark.subprocess  # it trains for seconds
CPU = torch.device("cpu")
ITEMS = {"mlp": 32, "world_model": 4 * 20, "evolution": 64, "ppo": 4 * 32}  # of an update


def report_of(rows: list[ArmResult], device: str = "cpu") -> str:
    return markdown(rows, device, "small", "make bench-amp", seconds=60.0)


@pytest.fixture(scope="module")
def rows() -> list[ArmResult]:
    """All scenarios on the CPU, twice."""
    return [row for name in SCENARIOS for seed in (3, 4) for row in measure(name, "small", seed, CPU)]


def test_every_arm_of_every_scenario_runs_in_its_dtype(rows):
    assert list(NAMES) == list(SCENARIOS)
    assert [row.scenario for row in rows] == [name for name in SCENARIOS for _ in range(2 * len(ARMS))]
    for row in rows:
        assert row.requested_dtype == row.effective_dtype == ARMS[row.arm] and not row.fallback
        assert row.effective_share > 0.5
        assert row.throughput * row.seconds == pytest.approx(ITEMS[row.scenario])
        assert row.seconds > 0 and row.memory_mib > 0


def test_arms_of_a_repeat_have_the_same_weights_and_data(rows):
    for number in range(0, len(rows), len(ARMS)):
        base, *others = arms = rows[number : number + len(ARMS)]
        assert [row.arm for row in arms] == list(ARMS)
        for row in others:
            for key in ("scenario", "seed", "optimizer_steps"):
                assert getattr(row, key) == getattr(base, key), (row.scenario, key)
            if SCENARIOS[row.scenario].outcome == "loss":  # equal up to rounding
                assert row.first == pytest.approx(base.first, rel=1e-2)
    assert len({row.first for row in rows if row.arm == "fp32"}) == 2 * len(SCENARIOS), "another seed, other data"


def test_report_lists_every_scenario_and_arm(rows):
    text = report_of(rows)
    for name in SCENARIOS:
        for arm, dtype in ARMS.items():
            assert f"| {name} | {arm} | {dtype} " in text
    assert "n/a |" not in text and "\n2 repeats" in text


def test_speed_up_is_the_median_ratio_over_the_repeats(rows):
    times = {"fp32": [4.0, 4.0, 40.0], "fp16": [2.0, 1.0, 20.0], "bf16": [4.0, 8.0, 40.0]}
    memory = {"fp32": 8.0, "fp16": 2.0, "bf16": 6.0}
    rows = [
        replace(row, seed=repeat, seconds=times[row.arm][repeat], memory_mib=memory[row.arm])
        for repeat in range(3)
        for row in rows[: len(ARMS)]
    ]
    report = report_of(rows)
    assert "| 2 (2–4) | 2 | 75% |" in report and "| 1 (0.500–1) | 6 | 25% |" in report
    fell_back = [replace(row, effective_dtype="float32") if row.arm == "fp16" else row for row in rows]
    assert speed_up(fell_back, "mlp", "fp16") == saved(fell_back, "mlp", "fp16") == "n/a"
    assert speed_up(fell_back, "mlp", "bf16") == "1 (0.500–1)"
    base = [replace(row, effective_dtype="float16") if row.arm == "fp32" else row for row in rows]
    assert speed_up(base, "mlp", "bf16") == "n/a"


def test_outcomes_are_the_first_update_and_the_mean_of_the_last_ones(monkeypatch):
    def build(arm: Arm) -> BuiltArm:
        shown = iter([None, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 17.0])
        run = SCENARIOS["mlp"].build(arm, width=8, layers=1, batch=4)
        return run._replace(update=lambda: run.update() is not None and next(shown))

    counted = Scenario(build, "samples", "return", {"small": {"updates": 6}})
    monkeypatch.setitem(SCENARIOS, "counted", counted)
    rows = measure("counted", "small", 0, CPU)
    assert [row.last for row in rows] == [7.0] * 3 and all(math.isnan(row.first) for row in rows)
    assert "| return not finite in 1 of 1 repeats | 7 (7–7) |" in report_of(rows)


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
        (["--repeats", "4"], "4: must be at least 5"),
        (["--only", "mlp,nlp"], "mlp,nlp: must be of mlp,world_model,evolution,ppo, separated by commas"),
        (["--size", "small"], "--size requires --out: docs/results is for the size of this machine's device"),
        (["--out", "file"], "File exists: 'file'"),
        (["--out", "out"], "DISABLE_AMP is set in the environment, and PPO would not train in 16 bits: unset it"),
    ],
)
def test_invalid_words_are_refused(words, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    if "DISABLE_AMP" in message:
        monkeypatch.setenv("DISABLE_AMP", "1")
    with pytest.raises(Refused) as refused:
        main(words)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_command_writes_csv_and_report(tmp_path, capsys):
    assert main(["--size", "small", "--only", "mlp,mlp", "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:-2]] == [f"mlp {number}/5" for number in range(1, 6)], "named twice"
    files = {file.suffix: file for file in (tmp_path / "out").iterdir()}
    assert {file.name for file in files.values()} == {"amp-bench-cpu.csv", "amp-bench-cpu.md"}
    assert [row["arm"] for row in csv.DictReader(files[".csv"].open())] == [*ARMS] * 5
    assert "make bench-amp ARGS='--size small --only mlp" in files[".md"].read_text()


def test_tf32_is_on_in_the_updates_of_its_arm_alone_and_is_the_second_base(monkeypatch):
    flags, taken = [], []
    with_tf32 = {"fp32": "float32", "tf32": "float32", **ARMS}
    monkeypatch.setattr(amp_measure, "arms_on", lambda device: with_tf32)
    monkeypatch.setattr(amp_measure, "set_tf32", flags.append)

    def build(arm: Arm) -> BuiltArm:
        run = SCENARIOS["mlp"].build(arm, width=8, layers=1, batch=4)
        number = len(built)
        built.append(run)
        return run._replace(update=lambda: taken.append(list(with_tf32)[number]) or run.update())

    built = []
    monkeypatch.setitem(SCENARIOS, "watched", Scenario(build, "samples", "loss", {"small": {"updates": 6}}))
    measured = measure("watched", "small", 0, CPU)
    assert flags == [arm == "tf32" for arm in taken] and len(taken) == 4 * 8 and measured[1].arm == "tf32"
    assert [set(taken[place : place + 4]) for place in range(8, 32, 4)] == [set(with_tf32)] * 6, "they take turns"
    monkeypatch.setattr(amp_report, "machine", lambda device: "NVIDIA L4")
    over = [speed_up(measured, "watched", "fp16", base) for base in ("fp32", "tf32")]
    report = report_of(measured, "cuda")
    assert f" | {over[0]} | {over[1]} | " in report and "| speed-up | against tf32 |" in report
    assert "against tf32" not in report_of([row for row in measured if row.arm != "tf32"], "cuda")


@pytest.mark.gpu
def test_gpu_memory_is_measured():
    cuda = torch.device("cuda")
    rows = [row for name in SCENARIOS for row in measure(name, "small", 0, cuda)]
    assert {row.arm for row in rows} == set(arms_on(cuda)) and ("tf32" in arms_on(cuda)) == (not lacks_ampere("TF32"))
    assert all(row.memory_mib > 0 and row.effective_dtype == row.requested_dtype for row in rows)
    assert "| mlp | fp16 | float16 " in report_of(rows, "cuda")
