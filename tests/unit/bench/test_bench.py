"""The command ``bench`` runs, counts and writes; timings are not asserted, since machines are noisy."""

import itertools
import re
import subprocess
import sys
import time

import pytest
import torch

from verl_precision.bench import measurement
from verl_precision.bench.cost_report import markdown, timings_of
from verl_precision.bench.measurement import alternate, machine_slug, rounds
from verl_precision.commands import bench
from verl_precision.errors import Refused
from verl_precision.paths import PROGRAM, SCRIPTS


@pytest.mark.slow
@pytest.mark.subprocess
def test_all_parts_are_measured_and_reported(tmp_path):
    run = [*PROGRAM, "bench", "--size", "small", "--sizes", "1,1000000", "--out", tmp_path]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    report = (tmp_path / "cost-cpu.md").read_text()
    assert "- optimizer step, 1000000 M: needs 20000.0 GB of memory, " in report
    measured = dict.fromkeys(("foreach AdamW", "fused AdamW"), ("bf16", "fp16", "fp16 upstream", "fp32"))
    measured["Qwen2, 1 layers, 128 tokens"] = ("bf16", "fp16", "fp32", "bf16 with fp32 head", "fp16 with fp32 head")
    rows = [line.split(" | ") for line in report.splitlines() if re.search(r"\.\d{3} \|$", line)]
    assert [(row[0][2:], row[2]) for row in rows] == [(of, regime) for of in measured for regime in measured[of]]
    assert all(f", {of}, " in done.stdout for of in measured)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sizes", "0"], "whole numbers above 0"),
        (["--only", "steps"], "choose from 'optimizer', 'training'"),
        (["--size", "small"], "requires --out"),
    ],
)
def test_invalid_words_are_refused(words, message):
    with pytest.raises(Refused, match=message):
        bench.parse(words)


def test_call_is_timed_until_the_device_is_done():
    log = []
    timed_calls = {name: lambda name=name: log.append(name) for name in "ab"}
    timed = rounds(timed_calls, lambda: log.append("wait"), lambda name: log.append(f"prepare {name}"))
    orders = ["".join(times) for times in itertools.islice(timed, 20)]
    expected = [f"prepare {name},wait,{name},wait" for order in orders for name in order]
    assert ",".join(log) == ",".join(expected) and set(orders) == {"ab", "ba"}


def test_rounds_go_on_until_time_and_number_are_reached():
    calls = []
    times = alternate({"a": lambda: calls.append("a")}, seconds=0.0, least_rounds=3, device="cpu")
    assert (len(times["a"]), len(calls)) == (3, 4), "the first round is not timed"
    assert sum(alternate({"a": lambda: time.sleep(0.01)}, 0.1, 1, "cpu")["a"]) >= 0.09


def test_ratio_is_the_median_over_the_rounds(capsys):
    times = {"bf16": [1.0, 2.0, 3.0], "fp16": [3.0, 1.0, 2.25]}
    about = ("training step", "Qwen2, 1 layers", 1)
    bf16, fp16 = timings_of(times, *about)
    assert (bf16.ratio, bf16.seconds, fp16.ratio, fp16.seconds) == (1.0, 2.0, 0.75, 2.25)
    report = markdown([bf16, fp16], [], "NVIDIA H200")
    assert "| Qwen2, 1 layers | 1 | fp16 | 2250.0 | 0.750 |" in report and "## Left out" not in report
    (only,) = timings_of({"fp16": times["fp16"]}, *about)
    assert capsys.readouterr().out.endswith("training step, Qwen2, 1 layers, 1 M: fp16 2250.0 ms\n")
    report = markdown([only], ["bf16: Tesla T4 has no bfloat16"], "Tesla T4")
    assert "| Qwen2, 1 layers | 1 | fp16 | 2250.0 | - |" in report
    assert report.endswith("## Left out\n\n- bf16: Tesla T4 has no bfloat16\n")
    assert "## Optimizer step" not in report and "## Training step" in report


@pytest.mark.parametrize(("capability", "reason"), [((7, 5), "Tesla T4 has no bfloat16"), ((8, 0), "")])
def test_gpu_before_ampere_has_no_bfloat16(capability, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    assert measurement.lacks_ampere("bfloat16") == reason


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
