"""What FlowRL's trainer does without its workers: the count of different right answers, and its refusal."""

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict

from recipes.flowrl.trainer import FlowRLTrainer, diversity

# Prompt, tokens, score, what the reward function says beside it.
ROWS = [
    ("a", [1, 2, 3], 1.0, {"answer": "7"}),
    ("a", [1, 4], 1.0, {"answer": "7"}),  # the same, said otherwise
    ("a", [5], 1.0, {"answer": "8"}),
    ("a", [6], 0.0, {"answer": "9"}),  # wrong
    ("b", [1, 2], 0.5, {}),
    ("b", [1, 2], 0.5, {}),
    ("b", [2, 1], 1.0, {}),
    ("c", [3], -1.0, {}),  # no right answer counts as none
    ("padding", [0], 0.0, {}),
]


def batch(rows: list[tuple]) -> TensorDict:
    """As TransferQueue gives it."""
    nested = lambda rows: torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)  # noqa: E731
    fields = {
        "responses": nested([tokens for _, tokens, *_ in rows]),
        "rm_scores": nested([[0.0] * (len(tokens) - 1) + [score] for _, tokens, score, _ in rows]),
        "extra_fields": NonTensorStack(*({"reward_extra_info": told} if told else {} for *_, told in rows)),
    }
    return TensorDict(fields, batch_size=len(rows))


def test_right_answers_are_told_apart_by_what_the_reward_says_or_by_their_tokens():
    found = diversity(batch(ROWS), [uid for uid, *_ in ROWS], [uid != "padding" for uid, *_ in ROWS])
    assert found == {
        "flowrl/distinct_right_answers": pytest.approx((2 + 2 + 0) / 3),
        "flowrl/right_answers": pytest.approx(6 / 8),
    }


def test_the_trainer_without_its_settings_names_what_adds_them():
    config = OmegaConf.create({"actor_rollout_ref": {"actor": {}}, "trainer": {"v1": {"trainer_mode": "flowrl"}}})
    with pytest.raises(ValueError, match=r"^trainer.v1.trainer_mode=flowrl: .* add \+recipe=flowrl$"):
        FlowRLTrainer(config)
