"""The command ``preflight`` on real small models; its predictions are compared with fp16 itself."""

import copy
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from transformers import AutoModelForCausalLM

from recipes.arithmetic import families
from recipes.arithmetic.model import build_model
from verl_precision.commands import preflight
from verl_precision.doctor.diagnosis import diagnose
from verl_precision.doctor.tree import identify_tree
from verl_precision.errors import Refused
from verl_precision.facts.vllm_float16 import POOLING_HEADS, Float16Support
from verl_precision.files import write
from verl_precision.patch.precision_module import load_precision
from verl_precision.paths import REPO
from verl_precision.probe import fp16_range
from verl_precision.probe.fp16_range import (
    HEADROOM,
    Fp16Assessment,
    GradientRange,
    ModuleRange,
    assess,
    findings,
    flushed_share,
)

precision = load_precision(REPO / "patches/verl/files", "precision_of_the_stack")
RUNS = Float16Support(True, "vLLM runs it")
PROMPT = 4  # tokens
ROWS = [torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(length)) for length in (12, 13)]


@pytest.fixture(scope="module")
def model(folder) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder / "model").eval()


def changed(model: torch.nn.Module, change: Callable[[torch.nn.Module], None]) -> torch.nn.Module:
    model = copy.deepcopy(model)
    with torch.no_grad():
        change(model)
    return model


def assessed(model: torch.nn.Module) -> Fp16Assessment:
    return assess(fp16_range.measure(model, [(ids, PROMPT) for ids in ROWS]))


def finite_in_fp16(model: torch.nn.Module) -> bool:
    """Return whether a forward pass under autocast with half-precision weights, as FSDP gathers them, is finite."""
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        return all(bool(model(input_ids=ids).logits.isfinite().all()) for ids in ROWS)


def half_except(model: torch.nn.Module, keep: tuple[str, ...]) -> torch.nn.Module:
    """Return the model in half precision, except for the modules that ``keep_fp32_modules`` names.

    A language model's head is in half precision, too, and computes in fp32.
    """
    model = copy.deepcopy(model)
    kept = precision.keep_in_fp32(model, keep, torch.float16, "cpu").values()
    spared = {parameter for module in kept for parameter in module.parameters()}
    for parameter in model.parameters():
        if parameter not in spared:
            parameter.data = parameter.data.half()
    return model


def widen(mlp: torch.nn.Module) -> None:
    """gate * up exceeds 65504 and down brings it back."""
    mlp.gate_proj.weight *= 1000
    mlp.up_proj.weight *= 1000
    mlp.down_proj.weight /= 1e6


def weigh(block: torch.nn.Module) -> None:
    """A weight exceeds 65504 and is multiplied by zero."""
    block.post_attention_layernorm.weight[0] = 0
    block.mlp.up_proj.weight[0, 0] = 1e5


def tied(model: torch.nn.Module) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight
    model.model.norm.weight *= 1e4
    model.lm_head.weight *= 100


@pytest.mark.parametrize(
    "change, keep",
    [
        (lambda model: widen(model.model.layers[1].mlp), ("model.layers.1.mlp",)),
        (lambda model: model.lm_head.weight.mul_(1e5), ("lm_head",)),
        (lambda model: weigh(model.model.layers[1]), ("model.layers.1.mlp.up_proj",)),
        (tied, ("lm_head",)),
    ],
)
def test_keeping_the_named_module_in_fp32_avoids_the_overflow(model, change, keep):
    model = changed(model, change)
    assessment = assessed(model)
    assert assessment.keep == keep and assessment.misfit is None
    assert assessment.verdict() == f"fits with these modules in fp32: {keep[0]}"
    assert not finite_in_fp16(half_except(model, ())), "the model must overflow in fp16"
    assert finite_in_fp16(half_except(model, keep))
    words = assessment.overrides()
    parsed = {each.get_key_element(): each.value() for each in OverridesParser.create().parse_overrides(words)}
    assert parsed["actor_rollout_ref.actor.fsdp_config.keep_fp32_modules"] == list(keep)
    assert parsed["actor_rollout_ref.rollout.dtype"] == "float32", "in float16 it would overflow where the trainer did"
    assert parsed["actor_rollout_ref.rollout.keep_fp32_modules"] == [], "all of it is in fp32"


@pytest.mark.subprocess
@pytest.mark.parametrize("vllm", [f'WARNING = "{POOLING_HEADS}"', ""], ids=["ignores", "reads"])
def test_doctor_accepts_the_overrides_of_a_kept_head(vllm, model, trees, tmp_path):
    write(tmp_path / "vllm/config/model.py", vllm.encode())
    write(tmp_path / "vllm/_version.py", b"__version__ = '0.24.0'\n")
    (tmp_path / "vllm/__init__.py").touch()
    (tmp_path / "verl").symlink_to(trees["patched"] / "verl")
    words = assessed(changed(model, lambda model: model.lm_head.weight.mul_(1e5))).overrides()
    found = diagnose(identify_tree(tmp_path), ["+precision=fp16", "actor_rollout_ref.rollout.name=vllm", *words])
    assert (found.verdict, found.findings) == ("asked", ()), found.refused
    assert [found.hops[f"{side}.logits"].effective_dtype for side in ("actor", "rollout")] == ["float32"] * 2


def between(model: torch.nn.Module) -> None:
    model.model.layers[1].post_attention_layernorm.weight *= 1e6
    model.model.layers[1].mlp.gate_proj.weight /= 1e6
    model.model.layers[1].mlp.up_proj.weight /= 1e6


def overload(model: torch.nn.Module) -> None:
    """A weight of the head exceeds 65504."""
    model.lm_head.weight[0, 0] = 1e5


def share(model: torch.nn.Module) -> None:
    """A weight of two norms exceeds 65504 and is multiplied by zero."""
    model.model.embed_tokens.weight[:, 0] = 0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0
        layer.post_attention_layernorm.weight = model.model.layers[0].post_attention_layernorm.weight
    layer.post_attention_layernorm.weight[0] = 1e5


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda model: model.model.embed_tokens.weight.mul_(1e7), r"the residual stream reaches .* at model.layers.\d"),
        (between, r"a value that passes between .* at model\.layers\.1\.\S+;"),
        (share, r"a value reaches 1e\+05 at model\.layers\.\d\.post_attention_layernorm, which shares its weight"),
        (overload, r"a weight reaches 1e\+05 at lm_head, which rounds its weight to fp16 even if kept in fp32"),
    ],
)
def test_model_that_no_kept_module_helps_does_not_fit(model, change, expected):
    model = changed(model, change)
    assessment = assessed(model)
    assert re.match(f"does not fit: {expected}", assessment.verdict()), assessment.verdict()
    assert not finite_in_fp16(copy.deepcopy(model).half()) and not finite_in_fp16(half_except(model, ("lm_head",)))
    assert assessment.overrides() == ["+precision=bf16"]


def gradients(model: torch.nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the gradients of weights and of leaf modules' outputs, computed by autograd pass by pass."""
    weights, outputs = [], []
    leaves = [module for module in model.modules() if not list(module.children())]
    tokens = sum(ids.shape[1] - PROMPT for ids in ROWS)
    made: list[torch.Tensor] = []
    hooks = [m.register_forward_hook(lambda module, args, output: made.append(output)) for m in leaves]
    for ids in ROWS:
        made.clear()
        probabilities = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[0, :-1]
        loss = -probabilities.gather(1, ids[0, 1:, None])[PROMPT - 1 :].sum() / tokens
        reached = [each for each in made if torch.is_tensor(each) and each.requires_grad]
        slopes = torch.autograd.grad(loss, [*model.parameters(), *reached])
        weights += slopes[: -len(reached)]
        outputs += slopes[-len(reached) :]
    for hook in hooks:
        hook.remove()
    return weights, outputs


def share_flushed(tensors: list[torch.Tensor], scale: float) -> float:
    """Return the share of non-zero elements that a cast to fp16 flushes to zero."""
    lost = sum(((tensor != 0) & ((tensor * scale).half() == 0)).sum().item() for tensor in tensors)
    return lost / sum((tensor != 0).sum().item() for tensor in tensors)


def test_flushed_share_and_loss_scale_match_fp16(model):
    model = changed(model, lambda model: model.lm_head.weight.mul_(1e-5))  # tiny gradients of all below
    assessment = assessed(model)
    found = findings(assessment, RUNS, {})
    weights, outputs = gradients(model)
    for kind, tensors in (("weights", weights), ("activations", outputs)):
        counts = assessment.counts[kind]
        assert found[f"flushed, {kind}"].startswith(f"{flushed_share(counts, 0):.2%} of ")
        at_1, at_scale = (share_flushed(tensors, scale) for scale in (1.0, assessment.scale))
        assert 0.5 < at_1 < 1 and at_scale < at_1, "the gradients must be tiny"
        assert flushed_share(counts, 0) == pytest.approx(at_1, abs=1e-3), kind
        assert flushed_share(counts, assessment.log2_scale) == pytest.approx(at_scale, abs=1e-3), kind
    largest = max(tensor.abs().max().item() for tensor in weights + outputs)
    assert assessment.gradient[0] == pytest.approx(largest, rel=1e-4)
    assert largest * assessment.scale * HEADROOM <= 65504 < 2 * largest * assessment.scale * HEADROOM


def backward_overflows(model: torch.nn.Module, scale: float, keep: tuple[str, ...] = ()) -> bool:
    """Return whether a gradient of ``scale`` times the loss overflows with 16-bit weights under autocast."""
    model = half_except(model, keep)
    for ids in ROWS:
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(input_ids=ids, use_cache=False).logits[0, PROMPT - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.float(), ids[0, PROMPT:], reduction="sum")
        (scale * loss / sum(ids.shape[1] - PROMPT for ids in ROWS)).backward()
    return not all(each.grad.isfinite().all() for each in model.parameters() if each.grad is not None)


def listen(model: torch.nn.Module) -> None:
    """The head's input, and with it the gradient of its weight, is far larger than all gradients below."""
    model.model.embed_tokens.weight *= 1e5
    model.model.norm.weight *= 1e4
    model.lm_head.weight *= 3


def test_gradient_of_a_kept_heads_weight_is_in_fp16(model):
    model = changed(model, listen)
    assessment = assessed(model)
    assert assessment.keep == ("lm_head",) and finite_in_fp16(half_except(model, assessment.keep))
    assert not backward_overflows(model, assessment.scale, assessment.keep)
    weights, _ = gradients(model)
    largest = max(tensor.abs().max().item() for tensor in weights)
    assert assessment.gradient == (pytest.approx(largest, rel=1e-4), "lm_head")
    assert assessment.counts["weights"].sum() == sum((tensor != 0).sum() for tensor in weights)


@pytest.mark.parametrize(("gradient", "scale", "words"), [(8.0, 256, 4), (1e5, 0.03125, 5), (1e-3, 2097152, 4)])
def test_gradient_at_a_kept_module_counts_and_those_inside_do_not(gradient, scale, words):
    def record(**other) -> ModuleRange:
        usual = {"block": False, "head": False, "lm_head": False, "leaf": True, "shared": False}
        usual |= {"weight": 1.0, "output": 1.0}
        gradients = {"output_gradients": GradientRange(1e-3), "weight_gradients": GradientRange(1e-3)}
        return ModuleRange(**usual | gradients | other)

    ranges = {
        "layers.0": record(block=True, leaf=False),
        "layers.0.mlp": record(leaf=False, output_gradients=GradientRange(gradient)),
        "layers.0.mlp.down": record(
            output=1e5, output_gradients=GradientRange(1e7), weight_gradients=GradientRange(1e7)
        ),
    }
    assessment = assess(ranges)
    assert (assessment.keep, assessment.gradient) == (("layers.0.mlp",), (gradient, "layers.0.mlp"))
    assert assessment.scale == scale and len(assessment.overrides()) == words
    scaler = "actor_rollout_ref.actor.fsdp_config.grad_scaler"
    assert f"{scaler}.init_scale={scale}" in assessment.overrides(), "a power of two, to the last digit"
    least = f"{scaler}.min_scale={scale}"
    assert (least in assessment.overrides()) == (scale < 1), "a scale below 1 is below the default of min_scale"


@pytest.mark.subprocess
def test_command_writes_its_report(folder, tmp_path, capsys):
    out = tmp_path / "out"
    words = [f"MODEL={folder / 'model'}", f"DATA={folder / 'data.parquet'}", "ROWS=3", "LENGTH=8", f"OUT={out}"]
    assert preflight.main(preflight.parse(["DEVICE=cpu", *words])) == 0
    assert sorted(file.name for file in out.iterdir()) == ["report.md"]
    report = (out / "report.md").read_text()
    assert "- verdict: fp16 fits" in report and "- measured: 3 answers, " in report
    (activation,) = re.findall(r"^\| model\.layers\.0\.mlp\.down_proj \| (\S+) \|", report, re.MULTILINE)
    assert 0 < float(activation) < 65504
    shown = capsys.readouterr()
    assert re.search("passes: 100%.* 3/3 ", shown.err), "every answer is measured"
    (line,) = [line for line in shown.out.splitlines() if "grad_scaler" in line]
    assert shlex.split(line)[0] in report and "keep_fp32_modules" not in line


def save_mixture(family: str, folder: Path) -> Path:
    """Save a mixture of 8 experts whose weights are ten times as wide as those of ``recipes.arithmetic.families``."""
    tokenizer = families.build_tokenizer("qwen3_moe")
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 0}
    own = experts | {"moe_intermediate_size": 128, "initializer_range": 0.5}
    build_model(tokenizer, 1, family, **own).save_pretrained(folder / family)
    tokenizer.save_pretrained(folder / family)
    return folder / family


@pytest.mark.parametrize(
    "family, listed", [("qwen3_moe", None), ("ernie4_5_moe", "model.layers.*.mlp.gate: the trainer follows the class")]
)
def test_mixture_whose_backward_overflows_at_the_default_scale_gets_a_lower_one(folder, tmp_path, family, listed):
    path = save_mixture(family, tmp_path)
    words = [f"MODEL={path}", f"DATA={folder / 'data.parquet'}", "ROWS=3", "LENGTH=8", f"OUT={tmp_path / 'out'}"]
    assert preflight.main(preflight.parse(["DEVICE=cpu", *words])) == 0
    report = (tmp_path / "out/report.md").read_text()
    scale = float(re.search(r"^\S+\.grad_scaler\.init_scale=(\d+)$", report, re.MULTILINE)[1])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert "- verdict: fp16 fits" in report and scale < precision.GradScalerConfig().init_scale == 2**16
    assert backward_overflows(model, 2**16) and not backward_overflows(model, scale)
    (found,) = re.findall(r"^- in fp32 by the model's class: (.*)", report, re.MULTILINE) or [None]
    assert found is None if listed is None else found.startswith(listed)


def refusal(folder: Path, tmp_path: Path, *words: str) -> str:
    """Return the line of a refusal, after which nothing is written."""
    usual = ["DEVICE=cpu", f"DATA={folder / 'data.parquet'}", "ROWS=2", "LENGTH=8", f"OUT={tmp_path / 'out'}"]
    with pytest.raises(Refused) as refused:
        preflight.main(preflight.parse([*usual, f"MODEL={folder / 'model'}", *words]))
    assert not (tmp_path / "out").exists() and "\n" not in str(refused.value)
    return str(refused.value)


def test_rollout_is_in_fp32_if_vllm_refuses_float16(model):
    assessment = assessed(model)
    refused = Float16Support(False, "vLLM refuses gemma2 models in float16")
    found = findings(assessment, refused, {})
    assert list(found)[:2] == ["verdict", "rollout"] and found["rollout"] == refused.reason
    assert assessment.overrides(refused) == [*assessment.overrides(), "actor_rollout_ref.rollout.dtype=float32"]
    unknown = "not known whether vLLM runs it in float16: no vLLM is installed here"
    for rollout, text in ((RUNS, None), (Float16Support(None, "no vLLM is installed here"), unknown)):
        assert findings(assessment, rollout, {}).get("rollout") == text
        assert assessment.overrides(rollout) == assessment.overrides()


def test_vllms_refusal_of_float16_is_printed_before_the_model_is_loaded(folder, tmp_path, capsys):
    model = tmp_path / "gemma2"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}')
    assert "cannot be loaded" in refusal(folder, tmp_path, f"MODEL={model}")
    (line,) = capsys.readouterr().out.splitlines()
    assert "refuses gemma2 models in float16" in line and "; give actor_rollout_ref.rollout.dtype=float32 (" in line
    assert line.endswith(", or +precision=bf16") and "dtype=bfloat16" not in line, "which gains nothing over bf16"


def test_rows_and_model_that_cannot_be_measured_are_refused(folder, tmp_path, model):
    for word in (f"DATA={folder / 'none.parquet'}", f"DATA={folder / 'other.parquet'}", "ROWS=9"):
        assert refusal(folder, tmp_path, word).startswith(word.partition("=")[0])
    message = refusal(folder, tmp_path, f"MODEL={folder / 'critic'}")
    assert message == f"MODEL={folder / 'critic'}: is a Qwen2ForTokenClassification, not a causal language model"
    shutil.copytree(folder / "model", tmp_path / "empty", ignore=shutil.ignore_patterns("*.safetensors"))
    assert "cannot be loaded" in refusal(folder, tmp_path, f"MODEL={tmp_path / 'empty'}")
    shutil.copytree(folder / "model", tmp_path / "nan")
    changed(model, lambda model: model.model.norm.weight.fill_(float("nan"))).save_pretrained(tmp_path / "nan")
    assert "has weights that are inf or NaN" in refusal(folder, tmp_path, f"MODEL={tmp_path / 'nan'}")


def test_overflow_in_fp32_is_an_error(model):
    with pytest.raises(ValueError, match="the loss of row 1 is nan in fp32"):
        assessed(changed(model, lambda model: model.lm_head.weight.fill_(3e38)))
    with pytest.raises(ValueError, match="a gradient is not finite in fp32"):
        fp16_range.exponent_counts(torch.tensor([1.0, float("inf")]))
