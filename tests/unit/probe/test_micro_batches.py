"""The micro-batches of a probe's trainer: those of verl's own engine, and rows that do not depend on each other."""

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from verl.utils import tensordict_utils
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl_precision.probe.model import load
from verl_precision.probe.numerics import build, token_log_probs

ROWS = [([1, 2, 3], [4, 5, 6, 7]), ([8, 9], [10]), ([11, 12, 13, 14], [15, 16])]


def verls_inputs() -> dict[str, torch.Tensor]:
    """Return the model's inputs for the padded rows by verl's engine."""
    rows = [prompt + answer for prompt, answer in ROWS]
    nested = lambda parts: torch.nested.as_nested_tensor([torch.tensor(part) for part in parts], layout=torch.jagged)
    positions = nested([list(range(len(row))) for row in rows])
    batch = TensorDict({"input_ids": nested(rows), "position_ids": positions}, len(rows))
    tensordict_utils.assign_non_tensor(batch, temperature=1.0, use_remove_padding=False)
    engine = SimpleNamespace(pad_to_length=None, use_ulysses_sp=False, _get_packed_pad_size=lambda tokens: 0)
    return FSDPEngineWithLMHead.prepare_model_inputs(engine, batch)[0]


@pytest.mark.parametrize(("tokens", "shapes"), [(21, [(3, 7)]), (14, [(2, 7), (1, 6)]), (7, [(1, 7), (1, 3), (1, 6)])])
def test_micro_batches_are_verls_and_do_not_mix_rows(folder, monkeypatch, tokens, shapes):
    """Rows of at most 7 tokens: three of them fit into 21, one into 7."""
    masters, _ = load(str(folder / "model"))
    model = build(masters, "fp32", "cpu")
    separate = [token_log_probs(model, "fp32", [row])["log_probs"][0] for row in ROWS]
    monkeypatch.setattr("verl_precision.probe.numerics.TOKENS", tokens)
    inputs = []
    model.register_forward_pre_hook(lambda module, args, given: inputs.append(given), with_kwargs=True)
    found = token_log_probs(model, "fp32", ROWS)["log_probs"]
    for ours, expected in zip(found, separate, strict=True):
        assert ours == pytest.approx(expected, abs=1e-5) and len(ours) == len(expected)
    assert [tuple(each["input_ids"].shape) for each in inputs] == shapes
    if tokens == 21:
        theirs = verls_inputs()
        for name in ("input_ids", "attention_mask"):
            assert torch.equal(inputs[0][name], theirs[name].to(torch.int64)), name
