"""Models whose attention logits are capped: what sdpa leaves out, the refusal by ``make run``, the doctor's finding."""

import json
from contextlib import nullcontext

import pytest
import torch

from recipes.arithmetic import families
from verl_precision.doctor.diagnosis import diagnose
from verl_precision.doctor.tree import identify_tree
from verl_precision.errors import Refused
from verl_precision.facts.models import ATTENTION
from verl_precision.files import write
from verl_precision.run.checks import check_attention
from verl_precision.run.job import compose, parse_job


def test_sdpa_of_transformers_leaves_out_the_cap():
    tokenizer = families.build_tokenizer("gemma2")
    model = families.build_model("gemma2", tokenizer, seed=1).eval()
    tokens = torch.arange(10, 42)[None]

    def logits(attention: str, cap: float | None) -> torch.Tensor:
        model.set_attn_implementation(attention)
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = cap
        return model(tokens).logits

    capped, uncapped, sdpa = logits("eager", 0.05), logits("eager", None), logits("sdpa", 0.05)
    torch.testing.assert_close(sdpa, uncapped)
    assert (capped - uncapped).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("cap", "words", "lost"),
    [
        (50.0, [], True),  # +device=cpu
        (50.0, [f"{ATTENTION}=eager"], False),
        (None, [], False),
    ],
)
def test_lost_cap_is_refused_and_reported(cap, words, lost, trees, tmp_path):
    model = tmp_path / "gemma2"
    write(model / "config.json", json.dumps({"model_type": "gemma2", "attn_logit_softcapping": cap}).encode())
    job = parse_job(["DEVICE=cpu", "STEPS=1", f"MODEL={model}", *(f"ARGS={word}" for word in words)])
    message = f"^{ATTENTION}=sdpa: .*{model} .attn_logit_softcapping=50.*; give ARGS={ATTENTION}=eager$"
    with pytest.raises(Refused, match=message) if lost else nullcontext():
        check_attention(compose(job, tmp_path))
    path = f"actor_rollout_ref.model.path={model}"
    found = diagnose(identify_tree(trees["patched"]), ["+device=cpu", "+precision=bf16", path, *words])
    assert [finding.fix for finding in found.findings if finding.key == ATTENTION] == [f"{ATTENTION}=eager"] * lost
