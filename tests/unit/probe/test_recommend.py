"""``make recommend``: the decision from the numbers of two reports, and the command on real small models."""

import math
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from verl_precision.commands import doctor
from verl_precision.commands import recommend as command
from verl_precision.errors import Refused
from verl_precision.facts.gpus import Gpu
from verl_precision.facts.vllm_float16 import Float16Support
from verl_precision.files import read_jsonl
from verl_precision.paths import PROGRAM, REPO
from verl_precision.probe.mismatch import Answer, Estimate, effective_share, measure
from verl_precision.probe.recommendation import recommend
from verl_precision.sequence_weights import UNTRUNCATED
from verl_precision.spelling import as_options

SCALE = "actor_rollout_ref.actor.fsdp_config.grad_scaler.init_scale=131072"
PREFLIGHT = {
    "findings": {
        "verdict": "fp16 fits",
        "largest activation": "32 at layers.1.mlp",
        "first loss scale": "2^17 = 131072",
    },
    "misfit": False,
    "keep": (),
    "activation": (32.0, "layers.1.mlp"),
    "rollout": Float16Support(True, "vLLM runs qwen2 models in float16"),
    "overrides": [SCALE],
}
RUNS = {"bf16": 6, "bf16_train_fp16_infer": 5, "fp16": 7, "fp32": 5}
WORDS = {"MODEL": "/a b", "ROWS": "16"}


def row(regime: str, k3: tuple, prompts: int = 16, **more) -> dict:
    counts = {"regime": regime, "prompts": prompts, "sequences": 8 * prompts, "block": 64, "longest": 9000}
    independent = Estimate(*(2 * each for each in k3))  # λ is twice k3
    return counts | {"k3": Estimate(*k3), "rate": independent, "growth": Estimate(1, 0.8, 1.2)} | more


def probe_of(*rows: dict, backend: str = "vllm", device: str = "cuda", positions: int = 32768) -> dict:
    return {"settings": {"ROWS": 16, "BACKEND": backend, "DEVICE": device}, "positions": positions, "rows": list(rows)}


FP16, BF16, MIXED = (1e-7, 5e-8, 2e-7), (1e-5, 8e-6, 2e-5), (1.2e-5, 9e-6, 2e-5)
EVERY = [row("bf16", BF16), row("bf16_train_fp16_infer", MIXED), row("fp16", FP16)]


def test_smallest_mismatch_and_its_settings():
    found = recommend(PREFLIGHT, probe_of(*EVERY), 64, WORDS)
    assert found.overrides == ["+precision=fp16", SCALE] and found.unknown == []
    assert found.answers["regime"].startswith("fp16 mismatches least: k3 1e-07 (5e-08–2e-07) in fp16, 1e-05 (8e-06")
    assert found.answers["first loss scale"] == "2^17 = 131072"
    assert found.answers["range of fp16"] == "fp16 fits; the largest activation is 32 at layers.1.mlp"
    assert found.answers["sequence weights"].startswith(
        "hold at 64 tokens in fp16: T·k3 6.4e-06 (3.2e-06–1.3e-05) nats, measured at up to 64 tokens; a model learned"
    )


def test_decision_from_the_recorded_runs_is_the_regime_with_the_smallest_mismatch_in_every_run():
    first_steps = {}
    for file in REPO.glob("docs/results/sanity/*/runs/*/metrics.jsonl"):
        regime = file.parent.name.partition("-")[0]
        first_steps.setdefault(regime, []).append(read_jsonl(file)[0]["data"]["rollout_corr/k3_kl"])
    assert {regime: len(runs) for regime, runs in first_steps.items()} == RUNS
    assert max(first_steps["fp16"]) < min(first_steps["bf16"] + first_steps["bf16_train_fp16_infer"])
    rows = [row(regime, (sum(runs) / len(runs), min(runs), max(runs))) for regime, runs in first_steps.items()]
    assert recommend(PREFLIGHT, probe_of(*rows), 64, WORDS).overrides == ["+precision=fp16", SCALE]
    without_fp16 = [each for each in rows if each["regime"] != "fp16"]
    found = recommend(PREFLIGHT, probe_of(*without_fp16), 64, WORDS)
    assert found.overrides is None, "these runs overlap"
    assert "between bf16 and bf16_train_fp16_infer" in found.answers["regime"]


@pytest.mark.parametrize(
    ("rows", "reason", "prompts"),
    [
        ([row("bf16", (5e-7, 1e-7, 9e-7)), row("fp16", (9e-8, 5e-8, 2e-7))], "between fp16 and bf16, whose k3", 64),
        ([row("bf16", BF16, prompts=7), row("fp16", FP16, prompts=7)], "from 7 prompts, at least 8 are needed", 32),
    ],
)
def test_no_regime_without_a_decision(rows, reason, prompts):
    found = recommend(PREFLIGHT, probe_of(*rows), 64, WORDS)
    assert found.overrides is None and "sequence weights" not in found.answers
    assert found.answers["regime"].startswith(f"not decided {reason}")
    assert found.unknown == [f"the regime: make recommend 'MODEL=/a b' ROWS={prompts}"]


IN_FP32, NO_LIST = "actor_rollout_ref.rollout.dtype=float32", "actor_rollout_ref.rollout.keep_fp32_modules=[]"
KEPT = PREFLIGHT | {
    "keep": ("layers.1.mlp",),
    "overrides": ["a.keep_fp32_modules=[layers.1.mlp]", SCALE, NO_LIST, IN_FP32],
}
REFUSED = PREFLIGHT | {
    "rollout": Float16Support(False, "vLLM refuses gemma2 models in float16"),
    "overrides": [SCALE, IN_FP32],
}
MISFIT = PREFLIGHT | {"misfit": True, "overrides": ["+precision=bf16"]}
OVERFLOW = {"regime": "fp16", "overflow": "the rollout's logits are not finite in fp16"}


@pytest.mark.parametrize(
    ("preflight", "rows", "reason", "nevertheless"),
    [
        (KEPT, EVERY, "fp16 needs modules in fp32", f"a.keep_fp32_modules=[layers.1.mlp]' {SCALE} '{NO_LIST}'"),
        (REFUSED, EVERY, "bf16_train_fp16_infer has a rollout in float16, which vLLM refuses", SCALE),
        (MISFIT, [row("bf16", BF16), OVERFLOW], "fp16 overflows: the rollout's logits", None),
        (PREFLIGHT, [row("bf16", BF16), OVERFLOW], "fp16 overflows: the rollout's logits", None),
    ],
)
def test_bf16_where_fp16_does_not_run_on_both_sides(preflight, rows, reason, nevertheless):
    found = recommend(preflight, probe_of(*rows), 64, WORDS)
    assert found.overrides == ["+precision=bf16"] and reason in found.answers["regime"]
    assert found.answers["regime"].startswith("bf16 is the only 16-bit regime that was measured: k3 1e-05")
    assert "first loss scale" not in found.answers, "bf16 needs none"
    in_fp16 = found.answers.get("fp16 in the trainer")
    if nevertheless:
        assert f"{nevertheless} {IN_FP32}: twice" in in_fp16 and "bfloat16" not in in_fp16
    assert bool(in_fp16) == bool(nevertheless)
    assert bool(found.unknown) == (preflight is PREFLIGHT), "only the probe overflowed"


@pytest.mark.parametrize(
    ("k3", "verdict"),
    [(1e-6, "hold"), (5e-5, "may or may not hold"), (4e-4, "may or may not hold"), (1e-2, "do not hold")],
)
def test_weights_at_a_length_beyond_the_answers(k3, verdict):
    interval = (k3, k3 / 1.1, k3 * 1.1)
    rows = [row("bf16", (1, 0.9, 1.1)), row("fp16", interval, growth=Estimate(2, 1.5, 3))]
    found = recommend(PREFLIGHT, probe_of(*rows), 8192, WORDS)
    sentence = found.answers["sequence weights"]
    assert sentence.startswith(f"{verdict} at 8192 tokens in fp16: T·k3 ") and "up to 64 tokens and widened" in sentence
    total = re.search(r"T·k3 (\S+) \((\S+)–(\S+)\) nats", sentence).groups()
    assert [float(each) for each in total] == pytest.approx([8192 * k3 * each for each in (1, 1 / 2.2, 2.2)], rel=0.06)
    assert sentence.endswith("; sums of 64 tokens vary more than independent ones: fewer, if that goes on")
    assert found.unknown == [
        "sequence weights at 8192 tokens: make recommend 'MODEL=/a b' ROWS=16 TOKENS=8192, "
        "and DATA whose answers are that long"
    ]
    within = recommend(PREFLIGHT, probe_of(*rows), 64, WORDS)
    assert within.unknown == [] and "up to 64 tokens; a model" in within.answers["sequence weights"]
    (doubt,) = recommend(PREFLIGHT, probe_of(*rows, positions=128), 8192, WORDS).unknown
    assert doubt.endswith("the model has 128 positions; set LENGTH to what your run has")


def test_weights_of_correlated_mismatches_are_judged_by_their_variance():
    """Answers of 128 tokens with an offset of their own, as a layer norm's rounding gives: ESS/N is far below k3's."""
    rng = np.random.default_rng(1)
    ratios = [rng.normal(rng.normal(0, 0.02), 0.05, 128) for _ in range(128)]
    answers = [Answer(at // 8, ratio, np.zeros(128)) for at, ratio in enumerate(ratios)]
    measured = measure(answers)
    sentence = recommend(PREFLIGHT, probe_of({"regime": "fp16", **measured}), 128, WORDS).answers["sequence weights"]
    assert sentence.startswith("may or may not hold at 128 tokens") and 128 * measured["k3"].high < UNTRUNCATED.learned
    ess = effective_share(measured["rate"], 128).value
    assert float(re.search(r"T·k3 (\S+)", sentence)[1]) == pytest.approx(-math.log(ess) / 2, rel=0.1)


def test_weights_of_equal_log_probabilities_hold():
    rows = [row("bf16", BF16), row("fp16", (0.0, 0.0, 0.0))]
    assert recommend(PREFLIGHT, probe_of(*rows), 8192, WORDS).answers["sequence weights"].startswith("hold at 8192")


def test_what_the_machine_and_a_small_margin_leave_open():
    near = PREFLIGHT | {"activation": (32752.0, "layers.1.mlp")}
    found = recommend(near, probe_of(*EVERY, backend="hf", device="cpu"), 64, WORDS)
    model, kernels, margin = found.unknown
    assert "so its k3 is too small: make recommend 'MODEL=/a b' ROWS=16 BACKEND=vllm" in model
    assert kernels.endswith("make recommend 'MODEL=/a b' ROWS=16 BACKEND=vllm DEVICE=cuda")
    assert "as the weights change, 2 times below 65504" in margin


def accepted(capsys, line: str) -> str:
    """Return what the doctor reports of a line, which it must accept."""
    capsys.readouterr()
    assert doctor.main([f"--args={line}"]) == 0, capsys.readouterr().out
    return capsys.readouterr().out


def recommended(words: list[str]) -> list[str]:
    """Return the lines that the command prints, in a separate process: on a CPU a probe replaces torch's autocast."""
    line = [*PROGRAM, "recommend", *as_options(dict(word.partition("=")[::2] for word in words))]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.slow
@pytest.mark.subprocess
def test_command_recommends_a_line_that_verl_accepts_and_resumes(folder, tmp_path, capsys):
    shutil.copytree(folder / "model", tmp_path / "wide")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    for weight, factor in zip(model.model.layers[1].mlp.parameters(), (1e3, 1e3, 1e-6), strict=True):
        weight.data *= factor
    model.save_pretrained(tmp_path / "wide")
    size = ["DEVICE=cpu", f"DATA={folder / 'data.parquet'}", "ROWS=8", "SAMPLES=4", "TOKENS=16", "LENGTH=16"]
    lines = {}
    for path in (folder / "model", tmp_path / "wide"):
        words = [*size, f"MODEL={path}", f"OUT={tmp_path / path.name}-out"]
        *_, last = recommended(words)
        page = (tmp_path / f"{path.name}-out/recommendation.md").read_text()
        assert page.splitlines()[-3:] == ["```", last, "```"]
        lines[path.name] = last
    fits = accepted(capsys, lines["model"])
    assert lines["model"].startswith("+precision=fp16 ") and "both compute in float16" in fits
    report = (tmp_path / "model-out/preflight/report.md").read_text()
    (scale,) = re.findall(r"first loss scale: 2\^\d+ = (\d+):", report)
    assert f"loss scaler of the actor: init_scale {scale}" in fits
    assert lines["wide"] == "+precision=bf16" and "both compute in bfloat16" in accepted(capsys, lines["wide"])
    in_fp16 = next(line for line in page.splitlines() if "keep_fp32_modules" in line).split(": ")[1]
    assert "model.layers.1.mlp]" in in_fp16 and shlex.split(in_fp16)[-2:] == [NO_LIST, IN_FP32]
    accepted(capsys, in_fp16)

    measured = [file.stat().st_mtime_ns for file in tmp_path.glob("wide-out/probe/work/*.jsonl")]
    assert recommended(words)[-1] == last
    assert [file.stat().st_mtime_ns for file in tmp_path.glob("wide-out/probe/work/*.jsonl")] == measured
    with pytest.raises(Refused, match="SAMPLES=5: .* contains a probe with SAMPLES=4"):
        command.main(command.parse([*words, "SAMPLES=5"]))


def test_regimes_that_vllm_or_the_gpu_refuses_are_not_probed(tmp_path, monkeypatch):
    model = tmp_path / "gemma2"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "gemma2"}')
    data = REPO / "pyproject.toml"
    with pytest.raises(Refused, match="DATA=.*is not a readable parquet file"):
        command.parse([f"MODEL={model}", f"DATA={data}"])
    Path(tmp_path / "data.parquet").write_bytes(b"PAR1")
    words = [f"MODEL={model}", f"DATA={tmp_path / 'data.parquet'}", f"OUT={tmp_path / 'out'}", "DEVICE=cpu"]
    probes = {name: command.parse([*words, f"BACKEND={name}"])[0] for name in ("hf", "vllm")}
    regimes = {name: command.runnable(options).precision for name, options in probes.items()}
    assert regimes == {"hf": ("bf16", "bf16_train_fp16_infer", "fp16"), "vllm": ("bf16",)}
    monkeypatch.setattr("verl_precision.probe.log_probs.find_gpus", lambda: (Gpu("T4", (7, 5), False, True),))
    assert command.runnable(replace(probes["hf"], device="cuda")).precision == ("fp16",)
    with pytest.raises(Refused, match=r"no 16-bit regime runs here: T4 \(sm75\) emulates bfloat16; vLLM .* refuses"):
        command.runnable(replace(probes["vllm"], device="cuda"))
    assert command.parse([*words[:2], "DEVICE=cpu"])[0].out.name == "gemma2-hf-cpu-32x8", "one for each DEVICE"
