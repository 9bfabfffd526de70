"""The command ``bench`` runs, counts and writes; timings are not asserted, since machines are noisy."""

import csv
import itertools
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from verl_precision.bench import host_calls, interleave, resource_usage
from verl_precision.bench.cost_report import markdown, write
from verl_precision.bench.host_calls import HostCalls, profiled
from verl_precision.bench.interleave import machine_slug, rounds
from verl_precision.bench.layer_pass import dtypes_on
from verl_precision.bench.regime_timing import RegimeTiming, timings_of
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
        assert f"{optimizer}, 1 M, 2 rank(s)" in done.stdout
        assert f"{optimizer}, 1e+06 M, 2 rank(s), all: needs 20000.0 GB of memory, " in report
    # Bytes are the same on any machine: fp16 moves no more than bf16, and fused AdamW little more than the 32 it needs.
    assert "| foreach AdamW | 96.0 | 96.0 | 104.0 | 96.0 |" in report
    assert "| fused AdamW | 44.0 | 36.0 | 52.0 | 44.0 |" in report
    assert "not measured, no CUDA device" in report
    rows = [row for row in csv.DictReader((tmp_path / "cost-cpu.csv").open()) if not row["left_out"]]
    measured = [(row["what"], row["regime"]) for row in rows]
    steps = [("optimizer step", regime) for _ in range(2) for regime in (*REGIMES[:2], "fp16 upstream", "fp32")]
    assert measured == steps + [
        (what, regime) for what in ("forward and backward", "training step") for regime in REGIMES
    ]
    for row in rows:
        passes = row["what"] != "optimizer step"
        assert int(row["rounds"]) >= (11 if passes else 41), "even where the time is over before"
        assert int(row["operators"]) > 0 and row["launches"] == ""
        assert not passes or (float(row["peak_gib"]) > 0 and f"| {row['tokens']} | {row['regime']} |" in report)
    reads = {(row["optimizer"], row["regime"]): int(row["host_reads"]) for row in rows[:8]}
    assert all(reads[name, "fp16"] < reads[name, "bf16"] for name, _ in reads), (
        "the norm is the only value that is read"
    )
    assert (tmp_path / "cost-cpu.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sizes", "0"], "whole numbers above 0"),
        (["--only", "optimizer,steps"], "must be of optimizer,layers,training"),
        (["--size", "small"], "requires --out"),
    ],
)
def test_invalid_words_are_refused(words, message):
    with pytest.raises(Refused, match=message):
        bench.parse(words)


def test_words_change_the_sizes_of_the_device():
    size = bench.chosen_size(bench.parse(["--ranks", "1,2", "--only", "layers"]), "cuda")
    assert (size.ranks, size.parts, size.sizes) == ([1], ["layers"], [10, 30, 100, 300, 1000])
    assert bench.chosen_size(bench.parse(["--ranks", "4"]), "cpu").ranks == [4]


def test_take_is_timed_until_the_device_is_done():
    calls = []
    takes = {name: lambda name=name: calls.append(name) for name in "ab"}
    timed = rounds(takes, lambda: calls.append("wait"), lambda name: calls.append(f"prepare {name}"))
    orders = ["".join(times) for times in itertools.islice(timed, 20)]
    expected = [f"prepare {name},wait,{name},wait" for order in orders for name in order]
    assert ",".join(calls) == ",".join(expected) and set(orders) == {"ab", "ba"}


def test_ratio_is_the_median_over_the_rounds(tmp_path):
    calls = dict.fromkeys(("bf16", "fp16"), HostCalls(9, 1, 20, 2, 1))
    times = {"bf16": [1.0, 2.0, 3.0], "fp16": [3.0, 1.0, 2.25]}
    about = {"what": "training step", "optimizer": "foreach AdamW", "parameters_m": 1, "ranks": 1, "tokens": 9}
    bf16, fp16 = timings_of(times, calls, {"bf16": 1.0, "fp16": 1.0}, **about)
    assert (bf16.ratio, bf16.seconds, fp16.ratio, fp16.seconds, fp16.rounds) == (1.0, 2.0, 0.75, 2.25, 3)
    (alone,) = timings_of({"fp16": times["fp16"]}, calls, {"fp16": 1.0}, **about)
    assert (alone.ratio, alone.seconds) == (None, 2.25)
    without = RegimeTiming(**about, regime="bf16", left_out="Tesla T4 has no bfloat16")
    files = [tmp_path / f"cost-tesla-t4.{suffix}" for suffix in ("csv", "md", "png")]
    assert write([alone, without], {}, "cuda", "Tesla T4", files) == files[:2], "no optimizer step, no figure"
    report = files[1].read_text()
    assert "| fp16 | 2250.00 | - | 4 | 1.00 | 3 |" in report and "1 rank(s) | 20 / 2 / 1 |" in report
    assert "1 rank(s) | 9 / 1 |" in markdown([alone], {}, "cpu", "CPU"), "operators / reads"
    assert "- training step, foreach AdamW, 1 M, 1 rank(s), bf16: Tesla T4 has no bfloat16" in report
    assert "## Forward and backward" not in report and "## Training step" in report


GPU_EVENTS = {
    "aten::item": "operators",
    "cudaLaunchKernel": "launches",
    "cudaLaunchKernelExC": "launches",
    "cuLaunchKernelEx": "launches",
    "cudaStreamSynchronize": "synchronizations",
    "cudaDeviceSynchronize": "synchronizations",
    "cudaMemcpyAsync": "",
    "cudaStreamIsCapturing": "",
    "aten::_local_scalar_dense": "host_reads",
    "Memcpy DtoH (Device -> Pinned)": "host_copies",
    "Memcpy HtoD (Pageable -> Device)": "",
}


@pytest.mark.parametrize("name", GPU_EVENTS)
def test_events_of_cuda_are_counted_by_kind(name):
    on_gpu = DeviceType.CUDA if name.startswith("Memcpy") else DeviceType.CPU
    assert host_calls.kind_of(SimpleNamespace(name=name, device_type=on_gpu, cpu_parent=None)) == GPU_EVENTS[name]


def test_operators_of_a_call_are_counted_without_those_they_call():
    x = torch.randn(4, 4, requires_grad=True)
    counted = profiled(lambda: (x @ x).sum().item(), "cpu")
    assert counted == {"operators": 3, "host_reads": 1, "": counted[""]}, "matmul, sum, item"


@pytest.mark.parametrize(
    ("launches", "expected"), [(5, HostCalls(7, 1, 5, 2, 1)), (0, HostCalls(7, 1, None, None, None))]
)
def test_synchronizations_of_the_profiler_itself_are_not_counted(launches, expected, monkeypatch):
    around = Counter(synchronizations=1)
    counted = Counter(operators=7, host_reads=1, launches=launches, synchronizations=3, host_copies=1)
    profiles, done = iter([Counter(synchronizations=4), around, counted]), []
    monkeypatch.setattr(host_calls, "profiled", lambda call, device: call() or next(profiles))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("wait"))
    found = host_calls.host_calls(lambda: done.append("call"), "cuda", lambda: done.append("prepare"))
    assert found == expected and done == ["prepare", "call", "prepare", "wait", "call"]


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
    assert resource_usage.too_large(20 * 10**9, "cuda") == "needs 20.0 GB of memory, 15.0 GB are free"
    assert resource_usage.too_large(15 * 10**9, "cuda") == ""


def test_results_of_several_gpus_have_different_names(monkeypatch):
    names = {"NVIDIA H100 80GB HBM3": "nvidia-h100-80gb-hbm3", "NVIDIA L4 (MIG)": "nvidia-l4-mig"}
    for name, slug in names.items():
        monkeypatch.setattr(interleave, "machine", lambda device, name=name: name)
        assert machine_slug("cuda") == slug
    assert machine_slug("cpu") == "cpu"


@pytest.mark.subprocess
def test_tf32_is_set_for_products_and_recurrent_layers_alike():
    code = "\n".join(
        [
            "import torch; from verl_precision.bench.gpu_formats import set_tf32; import torch.backends.cudnn.rnn",
            "parts = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn",
            "for on in (True, False, True): set_tf32(on); print({of.fp32_precision == 'tf32' for of in parts} == {on})",
        ]
    )
    run = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, cwd=SCRIPTS)
    assert done.stdout.split() == ["True"] * 3, done.stderr
