"""The micro-batches of a probe's trainer: those of verl's own engine, and rows that do not depend on each other."""

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from verl.utils import tensordict_utils
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl_precision.probe.model import load
from verl_precision.probe.numerics import TrainerNumerics, build, model_inputs, token_log_probs

ROWS = [([1, 2, 3], [4, 5, 6, 7]), ([8, 9], [10]), ([11, 12, 13, 14], [15, 16])]


@pytest.mark.parametrize("packed", [False, True])
def test_inputs_are_those_of_verls_engine(packed):
    rows = [prompt + answer for prompt, answer in ROWS]
    nested = lambda parts: torch.nested.as_nested_tensor([torch.tensor(part) for part in parts], layout=torch.jagged)
    positions = nested([list(range(len(row))) for row in rows])
    batch = TensorDict({"input_ids": nested(rows), "position_ids": positions}, len(rows))
    tensordict_utils.assign_non_tensor(batch, temperature=1.0, use_remove_padding=packed)
    engine = SimpleNamespace(pad_to_length=None, use_ulysses_sp=False, _get_packed_pad_size=lambda tokens: 0)
    theirs, _ = FSDPEngineWithLMHead.prepare_model_inputs(engine, batch)
    ours = model_inputs(rows, packed, torch.device("cpu"))
    assert ours.keys() == theirs.keys() and (ours["attention_mask"] is None) == packed
    for name, tensor in ours.items():
        assert tensor is theirs[name] is None or torch.equal(tensor, theirs[name].to(tensor.dtype)), name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", [21, 7])
def test_micro_batches_do_not_mix_rows(folder, monkeypatch, packed, tokens):
    """Rows of at most 7 tokens: three of them fit into 21, one into 7; a doubled micro-batch has twice as many."""
    masters, _ = load(str(folder / "model"))
    model = build(masters, TrainerNumerics("fp32", False), "cpu")
    separate = [token_log_probs(model, TrainerNumerics("fp32", False), [row], [])["log_probs"][0] for row in ROWS]
    monkeypatch.setattr("verl_precision.probe.numerics.TOKENS", tokens)
    shapes = []
    model.register_forward_pre_hook(
        lambda module, args, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    for doubled in (False, True):
        trainer = TrainerNumerics("fp32", False, packed, doubled)
        found = token_log_probs(model, trainer, ROWS, [([20, 21], [22, 23, 24])])["log_probs"]
        for ours, expected in zip(found, separate, strict=True):
            assert ours == pytest.approx(expected, abs=1e-5) and len(ours) == len(expected)
    padded = {21: [(3, 7), (4, 7)], 7: [(1, 7), (1, 3), (1, 6), (2, 7), (2, 6)]}
    in_one_row = {21: [(1, 16), (1, 21)], 7: [(1, 7), (1, 3), (1, 6), (1, 10), (1, 11)]}
    assert shapes == (in_one_row if packed else padded)[tokens]
