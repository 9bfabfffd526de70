"""The command ``bench`` runs, counts and writes; timings are not asserted, since machines are noisy."""

import csv
import itertools
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from verl_precision.bench import measurement, regimes, training_step
from verl_precision.bench.cost_report import markdown, write
from verl_precision.bench.measurement import machine_slug, rounds
from verl_precision.bench.regimes import RegimeTiming, profiled, timings_of
from verl_precision.bench.training_step import dtypes_on
from verl_precision.commands import bench
from verl_precision.errors import Refused
from verl_precision.paths import PROGRAM, SCRIPTS

REGIMES = ("bf16", "fp16", "fp32")


@pytest.mark.subprocess
def test_all_parts_are_measured_and_reported(tmp_path):
    run = [*PROGRAM, "bench", "--size", "small", "--sizes", "1,1000000", "--ranks", "2", "--out", tmp_path]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    report = (tmp_path / "cost-cpu.md").read_text()
    for optimizer in ("foreach AdamW", "fused AdamW"):
        assert f"| {optimizer} | 1 | 2 |" in report
        assert f"{optimizer}, 1 M, 2 rank(s): bf16 " in done.stdout
        assert f"{optimizer}, 1e+06 M, 2 rank(s), all: needs 20000.0 GB of memory, " in report
    assert "Kernel launches" not in report, "there is no CUDA device"
    rows = [row for row in csv.DictReader((tmp_path / "cost-cpu.csv").open()) if not row["left_out"]]
    measured = [(row["part"], row["regime"]) for row in rows]
    steps = [("optimizer step", regime) for _ in range(2) for regime in (*REGIMES[:2], "fp16 upstream", "fp32")]
    assert measured == steps + [("training step", regime) for regime in REGIMES]
    for row in rows:
        training = row["part"] == "training step"
        assert int(row["rounds"]) >= (11 if training else 41), "even where the time is over before"
        assert row["launches"] == ""
        assert not training or (float(row["peak_gib"]) > 0 and f"| {row['tokens']} | " in report)
    reads = {(row["subject"], row["regime"]): int(row["host_reads"]) for row in rows[:8]}
    assert all(reads[name, "fp16"] < reads[name, "bf16"] for name, _ in reads), (
        "the norm is the only value that is read"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sizes", "0"], "whole numbers above 0"),
        (["--only", "steps"], "invalid choice: 'steps'"),
        (["--size", "small"], "requires --out"),
    ],
)
def test_invalid_words_are_refused(words, message):
    with pytest.raises(Refused, match=message):
        bench.parse(words)


def test_words_change_the_sizes_of_the_device():
    size = bench.chosen_size(bench.parse(["--ranks", "1,2", "--only", "training"]), "cuda")
    assert (size.ranks, size.parts, size.sizes) == ([1], ["training"], [10, 30, 100, 300, 1000])
    assert bench.chosen_size(bench.parse(["--ranks", "4"]), "cpu").ranks == [4]


def test_call_is_timed_until_the_device_is_done():
    log = []
    timed_calls = {name: lambda name=name: log.append(name) for name in "ab"}
    timed = rounds(timed_calls, lambda: log.append("wait"), lambda name: log.append(f"prepare {name}"))
    orders = ["".join(times) for times in itertools.islice(timed, 20)]
    expected = [f"prepare {name},wait,{name},wait" for order in orders for name in order]
    assert ",".join(log) == ",".join(expected) and set(orders) == {"ab", "ba"}


def test_ratio_is_the_median_over_the_rounds(tmp_path):
    calls = dict.fromkeys(("bf16", "fp16"), {"launches": 20, "synchronizations": 2, "host_reads": 1})
    times = {"bf16": [1.0, 2.0, 3.0], "fp16": [3.0, 1.0, 2.25]}
    about = {"part": "training step", "subject": "Qwen2, 1 layer", "parameters_m": 1, "tokens": 9}
    bf16, fp16 = timings_of(times, calls, {"bf16": 1.0, "fp16": 1.5}, **about)
    assert (bf16.ratio, bf16.seconds, fp16.ratio, fp16.seconds, fp16.rounds) == (1.0, 2.0, 0.75, 2.25, 3)
    report = markdown([bf16, fp16], "NVIDIA H200")
    assert "| Qwen2, 1 layer | 1 | 9 | 2000.0 | 0.750 |" in report
    assert "| Qwen2, 1 layer | 1 | 9 | 1.00 | 1.50 |" in report
    assert "| Qwen2, 1 layer | 1 | 9 | 20 / 2 / 1 | 20 / 2 / 1 |" in report
    (only,) = timings_of({"fp16": times["fp16"]}, calls, {"fp16": 1.0}, **about)
    assert (only.ratio, only.seconds) == (None, 2.25)
    without = RegimeTiming(**about, regime="bf16", left_out="Tesla T4 has no bfloat16")
    written = write([only, without], "Tesla T4", tmp_path / "cost-tesla-t4")
    assert written == [tmp_path / "cost-tesla-t4.csv", tmp_path / "cost-tesla-t4.md"]
    report = written[1].read_text()
    assert "| model | M parameters | tokens | fp16 |" in report and "| 2250.0 ms |" in report
    assert report.endswith("- training step, Qwen2, 1 layer, 1 M, 1 rank(s), bf16: Tesla T4 has no bfloat16\n")
    assert "## Optimizer step" not in report and "## Training step" in report


def test_regime_that_runs_out_of_memory_is_left_out(monkeypatch):
    def exhausted():
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 16 * 10**9))
    monkeypatch.setattr(training_step, "alternate", lambda steps, *args: {regime: [2.0] for regime in steps})
    about = {"part": "training step", "subject": "Qwen2, 1 layer", "parameters_m": 1}
    left_out = {"bf16": "Tesla T4 has no bfloat16"}
    for steps in ({"fp16": lambda: torch.ones(4), "fp32": exhausted}, {"fp16": exhausted, "fp32": exhausted}):
        rows = training_step.time_training(dict(steps), left_out, 0.0, "cpu", **about)
        reasons = {row.regime: row.left_out for row in rows if row.left_out}
        exhausting = [regime for regime, run in steps.items() if run is exhausted]
        assert reasons == left_out | dict.fromkeys(exhausting, "needs more than the 16.0 GB of this GPU")
        assert {row.regime for row in rows} == {"bf16", "fp16", "fp32"}


EVENTS = {
    "cudaLaunchKernel": "launches",
    "cudaLaunchKernelExC": "launches",
    "cuLaunchKernelEx": "launches",
    "cudaStreamSynchronize": "synchronizations",
    "cudaDeviceSynchronize": "synchronizations",
    "cudaMemcpyAsync": None,
    "cudaStreamIsCapturing": None,
    "aten::item": None,
    "aten::_local_scalar_dense": "host_reads",
    "Memcpy DtoH (Device -> Pinned)": None,
}


@pytest.mark.parametrize("name", EVENTS)
def test_events_of_cuda_are_counted_by_kind(name, monkeypatch):
    recorded = nullcontext(SimpleNamespace(events=lambda: [SimpleNamespace(name=name)] * 2))
    monkeypatch.setattr(regimes, "profile", lambda activities: recorded)
    assert profiled(lambda: None, "cpu") == ({EVENTS[name]: 2} if EVENTS[name] else {})


def test_values_that_the_host_reads_are_counted():
    x = torch.randn(4, 4, requires_grad=True)
    assert profiled(lambda: (x @ x).sum().item() + float(x[0, 0]), "cpu") == {"host_reads": 2}


@pytest.mark.parametrize(("launches", "expected"), [(5, (5, 2, 1)), (0, (None, None, 1))])
def test_synchronizations_of_the_profiler_itself_are_not_counted(launches, expected, monkeypatch):
    around = Counter(synchronizations=1)
    counted = Counter(host_reads=1, launches=launches, synchronizations=3)
    profiles, done = iter([Counter(synchronizations=4), around, counted]), []
    monkeypatch.setattr(regimes, "profiled", lambda call, device: call() or next(profiles))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("wait"))
    found = regimes.host_calls(lambda: done.append("call"), "cuda", lambda: done.append("prepare"))
    assert tuple(found.values()) == expected and done == ["prepare", "call", "prepare", "wait", "call"]


@pytest.mark.parametrize(("capability", "left_out"), [((7, 5), {"bf16": "Tesla T4 has no bfloat16"}), ((8, 0), {})])
def test_gpu_without_bfloat16_leaves_bf16_out(capability, left_out, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    dtypes, reasons = dtypes_on("cuda")
    assert reasons == left_out and set(dtypes) == set(REGIMES) - set(left_out)
    assert set(dtypes_on("cpu")[0]) == set(REGIMES)


def test_model_that_is_larger_than_the_gpu_is_left_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (15 * 10**9, 16 * 10**9))
    assert measurement.too_large(20 * 10**9, "cuda") == "needs 20.0 GB of memory, 15.0 GB are free"
    assert measurement.too_large(15 * 10**9, "cuda") == ""


def test_results_of_several_gpus_have_different_names(monkeypatch):
    names = {"NVIDIA H100 80GB HBM3": "nvidia-h100-80gb-hbm3", "NVIDIA L4 (MIG)": "nvidia-l4-mig"}
    for name, slug in names.items():
        monkeypatch.setattr(measurement, "machine", lambda device, name=name: name)
        assert machine_slug("cuda") == slug
    assert machine_slug("cpu") == "cpu"


@pytest.mark.subprocess
def test_tf32_is_set_for_products_and_recurrent_layers_alike():
    code = "\n".join(
        [
            "import torch; from verl_precision.bench.measurement import set_tf32; import torch.backends.cudnn.rnn",
            "parts = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn",
            "for on in (True, False, True): set_tf32(on); print({of.fp32_precision == 'tf32' for of in parts} == {on})",
        ]
    )
    run = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, cwd=SCRIPTS)
    assert done.stdout.split() == ["True"] * 3, done.stderr
