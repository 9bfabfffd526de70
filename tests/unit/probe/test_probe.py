"""The command ``probe`` on real small models: its measurements, its report and its refusals."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.waiting import wait_until

from verl_precision.commands import probe
from verl_precision.errors import Refused
from verl_precision.facts.gpus import Gpu
from verl_precision.files import read_jsonl
from verl_precision.paths import PROGRAM, REPO
from verl_precision.probe import log_probs, vllm_generate
from verl_precision.probe.log_probs import ProbeTask, check_regimes, files_of, write_lines
from verl_precision.probe.model import answer_length, load, probe_options
from verl_precision.probe.numerics import Overflow, build, generate, token_log_probs
from verl_precision.probe.report import compare
from verl_precision.spelling import as_options

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}

# rollout_corr/k3_kl of the first step of `make run EXPERIMENT=sanity_cpu PRECISION=bf16`, whose weights are still the
# model's: mean over the recorded runs of docs/results/recommend.md, 128 answers each.
RECORDED_K3 = 8.6e-06

SIZE = ["ROWS=8", "SAMPLES=16", "LENGTH=32"]
SMALL = ["ROWS=2", "SAMPLES=2", "LENGTH=4"]
# Probes that one process makes, by the folder of their report: a model and variables.
PROBES = {
    "every": ("model", *SIZE),
    "overflowing": ("large", "ROWS=3", "SAMPLES=4", "LENGTH=4", "PRECISION=fp16 bf16"),
}
SEVERAL = """
import json, sys
from verl_precision.commands import probe
sys.exit(max(probe.main(probe.parse(words)) for words in json.loads(sys.argv[1])))
"""


def words_of(folder: Path, out: Path, model: str, *words: str) -> list[str]:
    return ["DEVICE=cpu", f"MODEL={folder / model}", f"DATA={folder / 'data.parquet'}", f"OUT={out}", *words]


def command(*words: str) -> list:
    return [*PROGRAM, "probe", *as_options(dict(word.partition("=")[::2] for word in words))]


def rows_of(out: Path) -> dict[str, dict]:
    (file,) = out.glob("probe-*.json")
    return {row["regime"]: row for row in json.loads(file.read_text())["rows"]}


@pytest.fixture(scope="module")
def probes(folder, tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    """The folder of the reports of ``PROBES``, and their process."""
    out = tmp_path_factory.mktemp("probes")
    words = [words_of(folder, out / name, *each) for name, each in PROBES.items()]
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL, json.dumps(words)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT | {"PYTHONPATH": str(REPO / "scripts")},
    )
    assert done.returncode == 0, done.stderr
    return out, done


@pytest.mark.subprocess
def test_fp32_mismatches_far_less_than_fp16_and_fp16_than_bf16(probes):
    k3 = {key: row["k3"]["value"] for key, row in rows_of(probes[0] / "every").items()}
    fp32, fp16, bf16, mixed = (k3[name] for name in ("fp32", "fp16", "bf16", "bf16_train_fp16_infer"))
    assert fp32 * 1e3 < fp16 and fp16 * 10 < bf16, "at least one order of magnitude each"
    assert mixed > bf16 / 4, "only an fp16 rollout does not help"


@pytest.mark.subprocess
def test_report_covers_every_regime(probes):
    out, done = probes[0] / "every", probes[1]
    rows = rows_of(out)
    assert len(rows) == 4 and done.stderr.count("8/8") >= len(rows), "a bar for each"
    row = rows["bf16"]
    assert (row["prompts"], row["sequences"]) == (8, 128) and 64 < row["longest"] * 128 >= row["tokens"]
    mixed = rows["bf16_train_fp16_infer"]
    assert (mixed["train"], mixed["infer"]) == ("bf16", "fp16")
    report = (out / "probe-model.md").read_text()
    table = [re.split(r"(?<!\\)\|", line) for line in report.split("\n\n")[2].splitlines()]
    assert {len(cells) for cells in table} == {2 + 7}, "a bar in a heading must not end its cell"
    (cells,) = [cells for cells in table if cells[1].strip() == "bf16"]
    rates = (row["rate"]["value"], row["rate"]["high"], row["rate"]["low"])
    shares = [[math.exp(-rate * length) for rate in rates] for length in (512, 8192, 32768)]
    assert len({share[0] for share in shares}) == 3
    assert [cell.strip() for cell in cells[4:7]] == ["{:.3f} ({:.3f}–{:.3f})".format(*share) for share in shares]
    findings = json.loads((out / "probe-model.json").read_text())["findings"]
    assert findings["verdict"].startswith("fp16 mismatches least") and findings["verdict"] in report
    assert "at 8192 tokens in bf16: T·k3 " in findings["verdict"]
    assert "The model has 128 positions" in findings["extrapolated"]
    assert findings["verdict"] in done.stdout


@pytest.mark.slow
@pytest.mark.subprocess
def test_interrupted_probe_resumes(folder, tmp_path, probes):
    out = tmp_path / "out"
    words = words_of(folder, out, "model", *SIZE, "PRECISION=bf16 fp16 fp32")
    with (tmp_path / "screen").open("w") as screen:
        process = subprocess.Popen(command(*words), stdout=screen, stderr=screen, env=ENVIRONMENT)
        first = out / "work" / "trainer-bf16-on-rollout-bf16.jsonl"
        wait_until(lambda: first.exists() or process.poll() is not None, "the first variant")
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    assert "interrupted; repeat the command to continue" in (tmp_path / "screen").read_text()
    work = lambda: {each.name: (each.read_bytes(), each.stat().st_mtime_ns) for each in out.glob("work/*.jsonl")}
    before = work()
    assert len(before) < 6, "the probe must have been interrupted"

    for other, recorded in (("LENGTH=16", "LENGTH=32"), ("SEED=2", "SEED=1")):
        with pytest.raises(Refused, match=f"{other}: .* contains a probe with {recorded}; repeat its settings"):
            probe.main(probe.parse([*words, other]))
    assert work() == before

    assert subprocess.run(command(*words), capture_output=True, env=ENVIRONMENT).returncode == 0
    for name, (content, written) in before.items():
        file = out / "work" / name
        assert (file.read_bytes(), file.stat().st_mtime_ns) == (content, written), "nothing is measured twice"
    every = rows_of(probes[0] / "every")
    assert rows_of(out) == {name: every[name] for name in ("bf16", "fp16", "fp32")}


@pytest.mark.subprocess
def test_overflow_is_reported(probes):
    out, done = probes
    rows = rows_of(out / "overflowing")
    assert rows["fp16"]["overflow"] == "the rollout's logits are not finite in fp16"
    assert rows["bf16"]["k3"]["value"] >= 0
    assert "fp16 overflows: the rollout's logits are not finite in fp16 (make preflight)" in done.stdout


def test_sides_are_compared_up_to_an_overflow_of_either(tmp_path):
    trainer, rollout = files_of("fp16", tmp_path)
    line = {"answers": [[1, 2], [3]], "log_probs": [[-0.5, -1.0], [-0.25]]}
    rollout.write_text(f"{json.dumps(line)}\n" * 2)
    trainer.write_text(f"{json.dumps({'log_probs': line['log_probs']})}\n" * 2)
    (found,) = compare(["fp16"], tmp_path)
    assert (found["prompts"], found["sequences"], found["equal"].value) == (2, 4, 1) and "overflow" not in found
    trainer.write_text('{"log_probs": [[-0.5, -1.5], [-0.25]]}\n' * 2)
    (found,) = compare(["fp16"], tmp_path)
    assert (found["equal"].value, found["largest"]) == (2 / 3, 0.5)
    with trainer.open("a") as file:
        file.write('{"overflow": "the trainer\'s"}\n')
    (found,) = compare(["fp16"], tmp_path)
    assert found["overflow"] == "the trainer's", "the rollout did not overflow"


def test_file_exists_once_it_is_complete_and_ends_with_an_overflow(tmp_path):
    file = tmp_path / "rollout.jsonl"

    def line(index: int) -> dict:
        if index == 1:
            raise Overflow("not finite")
        return {"index": index} if not file.exists() else {}

    write_lines(file, 3, line)
    assert file.read_text() == '{"index": 0}\n{"overflow": "not finite"}\n'
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(ZeroDivisionError):
        write_lines(tmp_path / "other.jsonl", 3, lambda index: {"index": 1 / (index - 1)})
    assert not (tmp_path / "other.jsonl").exists()


@pytest.mark.parametrize(("length", "prompt", "expected"), [(None, 28, 100), (64, 28, 64), (100, 28, 100)])
def test_answers_end_at_the_models_positions(length, prompt, expected):
    model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=128))
    assert answer_length(model, prompt, 1024, length) == expected
    with pytest.raises(Refused, match="DATA: a prompt has 128 tokens, but the model has 128 positions; shorten it"):
        answer_length(model, 128, 1024, length)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def test_answers_end_with_the_first_end_token(folder):
    masters, _ = load(str(folder / "model"))
    model, ends = build(masters, "bf16", "cpu"), set(range(64))
    answers, rows = generate(model, "bf16", [1, 2, 3], 16, 12, ends, seeded()).values()
    assert [len(answer) for answer in answers] == [len(row) for row in rows]
    ended = [answer for answer in answers if answer[-1] in ends]
    assert ended and all(ends.isdisjoint(answer[:-1]) for answer in answers)
    assert all(len(answer) == 12 for answer in answers if answer[-1] not in ends)


def test_both_sides_divide_the_logits_by_the_temperature(folder):
    masters, _ = load(str(folder / "model"))
    model = build(masters, "fp32", "cpu")
    line = generate(model, "fp32", [1, 2, 3], 4, 12, set(), seeded(), temperature=0.5)
    pairs = [([1, 2, 3], answer) for answer in line["answers"]]
    found = {at: token_log_probs(model, "fp32", pairs, at)["log_probs"] for at in (0.5, 1)}
    rollout = torch.tensor(line["log_probs"])
    assert torch.allclose(torch.tensor(found[0.5]), rollout, atol=1e-4)
    assert not torch.allclose(torch.tensor(found[1]), rollout, atol=0.1)


def test_weights_are_loaded_in_fp32(folder):
    masters, _ = load(str(folder / "half-0.5B"))
    assert {weight.dtype for weight in masters.parameters()} == {torch.float32}


def test_vllm_answers_all_prompts_in_another_process(tmp_path, monkeypatch):
    options = SimpleNamespace(model="m", samples=2, seed=1, device="cpu", temperature=0.7)
    prompts = [[1], [2], [3]]
    task, file = ProbeTask(options, None, None, prompts, 8, tmp_path), tmp_path / "rollout-fp16.jsonl"
    requests = []

    def run(command: list[str], input: str, **given) -> SimpleNamespace:
        requests.append(json.loads(input))
        Path(requests[-1]["file"]).write_text('{"answers": []}\n')
        given["stdout"].write("ValueError: no memory\n" if len(requests) == 2 else "")
        return SimpleNamespace(returncode=len(requests) - 1)

    monkeypatch.setattr(log_probs.subprocess, "run", run)
    log_probs.generate_by_vllm(task, "fp16", file)
    assert file.read_text() == '{"answers": []}\n'
    assert (requests[0]["prompts"], requests[0]["dtype"], requests[0]["temperature"]) == (prompts, "fp16", 0.7)
    file.unlink()
    with pytest.raises(Refused, match="^BACKEND=vllm: rollout-fp16 failed: ValueError: no memory"):
        log_probs.generate_by_vllm(task, "fp16", file)
    assert not file.exists()


def test_vllms_answers_are_written_up_to_an_overflow(tmp_path, monkeypatch):
    made, asked = [], []

    def answer(parts: list[dict], sampling, use_tqdm: bool) -> list:
        assert sampling["temperature"] == 0.7
        asked.append(len(parts))
        log_prob = -math.inf if len(asked) == 2 else -0.5
        chosen = {7: SimpleNamespace(logprob=log_prob), 8: SimpleNamespace(logprob=-3.0)}
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7], logprobs=[chosen])]) for _ in parts]

    engine = SimpleNamespace(generate=answer)
    fake = SimpleNamespace(LLM=lambda **given: made.append(given) or engine, SamplingParams=lambda **given: given)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    request = {"model": "m", "dtype": "fp16", "prompts": [[1, 2]] * 69 + [[1, 2, 3]], "samples": 1}
    request |= {"temperature": 0.7}
    vllm_generate.generate(request | {"length": 5, "seed": 1, "device": "cuda", "file": str(tmp_path / "answers")})
    assert made[0]["max_model_len"] == 8
    lines = read_jsonl(tmp_path / "answers")
    assert asked == [32, 32] and len(lines) == 33 and lines[0] == {"answers": [[7]], "log_probs": [[-0.5]]}
    assert lines[-1] == {"overflow": "the rollout's log-probabilities are not finite in fp16"}


def test_bf16_is_refused_on_a_gpu_that_emulates_it(monkeypatch, tmp_path):
    options = replace(probe_options(["DEVICE=cpu", f"OUT={tmp_path}"]), device="cuda")
    for bf16, words in ((True, options.precision), (False, ("fp16", "fp32"))):
        monkeypatch.setattr(
            "verl_precision.probe.log_probs.find_gpus", lambda bf16=bf16: (Gpu("T4", (7, 5), bf16, True),)
        )
        check_regimes(replace(options, precision=words))
    refused = "^PRECISION=.*: T4 .sm75. emulates bfloat16; leave out bf16 and bf16_train_fp16_infer: PRECISION='fp16 fp"
    with pytest.raises(Refused, match=refused):
        check_regimes(options)


@pytest.mark.parametrize(
    "words, expected",
    [
        ("MODEL=./no/such/model", "contains no config.json"),
        ("DATA=", "is not set"),
        ("DATA={folder}/data.csv", "is not a readable parquet file"),
        ("PRECISION=fp16 fp8", "PRECISION=fp8: must be one of bf16, bf16_train_fp16_infer, fp16, fp32"),
        ("ROWS=9", "has 8 rows; set fewer ROWS"),
        ("TEMPERATURE=0", "TEMPERATURE=0: must be a number above 0"),
        ("LENGTH=122", "set at most 121"),
        ("MODEL={folder}/bare", "tokenizer"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(folder, tmp_path, words, expected):
    with pytest.raises(Refused) as refused:
        probe.main(probe.parse(words_of(folder, tmp_path / "out", "model", "ROWS=8", words.format(folder=folder))))
    message = str(refused.value)
    assert message.startswith(words.partition("=")[0]) and "\n" not in message and expected in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.subprocess
def test_vllm_mismatch_matches_recorded_runs(tmp_path):
    """Probe the sanity task's model, whose runs are recorded."""
    words = ["DEVICE=cpu", "BACKEND=vllm", f"OUT={tmp_path / 'out'}", "SAMPLES=16", "PRECISION=bf16"]
    done = subprocess.run(command(*words), capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(tmp_path / "out").values()
    assert row["sequences"] == 512 and row["tokens"] / 512 == pytest.approx(26, abs=0.5)
    assert RECORDED_K3 / 2 < row["k3"]["value"] < RECORDED_K3 * 2
