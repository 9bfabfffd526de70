"""The experts that a probe records, against the routers' own logits, and their share in its report."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from transformers import PreTrainedModel

from recipes.arithmetic.families import build_model, build_tokenizer
from verl_precision.commands import probe
from verl_precision.files import read_jsonl
from verl_precision.paths import SCRIPTS
from verl_precision.probe.numerics import RolloutNumerics, TrainerNumerics, build, generate, token_log_probs
from verl_precision.probe.report import compare, other_experts
from verl_precision.probe.variants import Variant, rebatched

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 10]]
FP32 = Variant("fp32", "fp32", "none", TrainerNumerics("fp32", False), RolloutNumerics("fp32", "fp32", False))


def mixture(family: str) -> PreTrainedModel:
    torch.set_num_threads(1)
    return build_model(family, build_tokenizer(family), seed=0).float().eval()


def rolled_out(model: PreTrainedModel) -> list[dict]:
    seeded = lambda: torch.Generator().manual_seed(1)
    return [generate(model, "fp32", prompt, 4, 12, set(range(40)), seeded()) for prompt in PROMPTS]


def experts_by_logits(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> list[list[set[int]]]:
    """Return the experts of each layer at each position that predicts a token of the answer."""
    output = model(torch.tensor([prompt + answer]), output_router_logits=True, use_cache=False)
    chosen = [logits.topk(2).indices[len(prompt) - 1 : -1].tolist() for logits in output.router_logits]
    return [list(map(set, layers)) for layers in zip(*chosen, strict=True)]


@torch.no_grad()
def test_share_is_that_of_tokens_whose_routers_chose_others_in_any_layer(tmp_path):
    masters = mixture("qwen3_moe")
    rollout, trainer = build(masters, FP32.rollout, "cpu"), build(copy.deepcopy(masters), FP32.trainer, "cpu")
    for layer, scale in zip(trainer.model.layers, (0.3, 0.1), strict=True):
        layer.mlp.gate.weight += scale * layer.mlp.gate.weight.std() * torch.randn_like(layer.mlp.gate.weight)
    answered = rolled_out(rollout)
    differ = []
    for prompt, line in zip(PROMPTS, answered, strict=True):
        answers = [(prompt, answer) for answer in line["answers"]]
        scored = token_log_probs(trainer, FP32.trainer, answers, [])
        for file, content in zip(FP32.files(tmp_path), (scored, line), strict=True):
            file.open("a").write(json.dumps(content) + "\n")
        for (_, answer), *numbers in zip(answers, scored["experts"], line["experts"], strict=True):
            ours, theirs = (experts_by_logits(model, prompt, answer) for model in (trainer, rollout))
            differ += [one != other for one, other in zip(ours, theirs, strict=True)]
            assert [one != other for one, other in zip(*numbers, strict=True)] == differ[-len(answer) :]
    (found,) = compare([FP32], tmp_path)
    share = found["other_experts"]
    assert share.value == sum(differ) / len(differ) and 0 < share.low < share.value < share.high < 1


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_fp32_trainer_and_rollout_choose_alike_in_every_micro_batch(family):
    model = build(mixture(family), FP32.rollout, "cpu")
    lines = rolled_out(model)
    assert len({len(answer) for line in lines for answer in line["answers"]}) > 3
    for index, line in enumerate(lines):
        answers, others = (
            [(PROMPTS[at], answer) for answer in lines[at]["answers"]] for at in (index, (index + 1) % len(lines))
        )
        for packed, doubled in ((False, False), (False, True), (True, False), (True, True)):
            trainer = TrainerNumerics("fp32", False, packed, doubled)
            assert token_log_probs(model, trainer, answers, others)["experts"] == line["experts"], trainer.name
    assert len({number for line in lines for row in line["experts"] for number in row}) > 20
    assert not any(module._forward_pre_hooks for module in model.modules()), "nothing is recorded afterwards"


@pytest.mark.subprocess
def test_report_has_a_column_only_for_mixtures(folder, tmp_path):
    for part in (build_tokenizer("qwen3_moe"), mixture("qwen3_moe")):
        part.save_pretrained(tmp_path / "mixture")
    words = [f"DATA={folder / 'data.parquet'}", "DEVICE=cpu", "ROWS=2", "SAMPLES=2", "LENGTH=4", "PRECISION=fp32"]
    words += ["WIRE=fp32", "HEAD=none", "BATCH=packing"]
    models = {"dense": folder / "model", "mixture": tmp_path / "mixture"}
    commands = [[*words, f"MODEL={model}", f"OUT={tmp_path / 'out' / name}"] for name, model in models.items()]
    code = f"from verl_precision.commands import probe; [probe.main(probe.parse(words)) for words in {commands}]"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=SCRIPTS)
    dense, text = (next(tmp_path.glob(f"out/{name}/*.md")).read_text() for name in models)
    assert "experts" not in dense + next(tmp_path.glob("out/dense/*.json")).read_text()
    assert text.count("| bitwise equal (95 %) | other experts (95 %) |\n") == 2
    content = json.loads(next(tmp_path.glob("out/mixture/*.json")).read_text())
    for (row,) in (content["rows"], content["rebatched"]):
        assert row["other_experts"] == {"value": 0, "low": 0, "high": 0}
    assert text.count(f"none of {row['tokens']} |\n") == 2

    # vLLM's answers come without experts, and the trainer is still compared with itself.
    work = tmp_path / "out/mixture/work"
    file = FP32.files(work)[1]
    lines = [{name: line[name] for name in ("answers", "log_probs")} for line in read_jsonl(file)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (unobserved,), (itself,) = compare([FP32], work), compare(rebatched(probe.parse(commands[1])), work)
    assert other_experts(unobserved) == "-" and itself["other_experts"].value == 0
