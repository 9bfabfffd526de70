"""FlowRL's trainer without its workers: the diversity metrics and the refusal of a config without settings."""

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict

from recipes.flowrl.trainer import FlowRLTrainer, diversity

# Prompt, tokens, score, extra information of the reward function.
ROWS = [
    ("a", [1, 2, 3], 1.0, {"answer": "7"}),
    ("a", [1, 4], 1.0, {"answer": "7"}),  # the same answer in other tokens
    ("a", [5], 1.0, {"answer": "8"}),
    ("a", [6], 0.0, {"answer": "9"}),  # wrong
    ("b", [1, 2], 0.5, {}),
    ("b", [1, 2], 0.5, {}),
    ("b", [2, 1], 1.0, {}),
    ("c", [3], -1.0, {}),  # groups without a right answer count as 0
    ("padding", [0], 0.0, {}),
]


def batch(rows: list[tuple]) -> TensorDict:
    """Return the rows as TransferQueue does."""
    nested = lambda rows: torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)  # noqa: E731
    fields = {
        "responses": nested([tokens for _, tokens, *_ in rows]),
        "rm_scores": nested([[0.0] * (len(tokens) - 1) + [score] for _, tokens, score, _ in rows]),
        "extra_fields": NonTensorStack(*({"reward_extra_info": extra} if extra else {} for *_, extra in rows)),
    }
    return TensorDict(fields, batch_size=len(rows))


def test_distinct_answers_are_counted_by_the_rewards_answer_or_by_tokens():
    metrics = diversity(batch(ROWS), [uid for uid, *_ in ROWS], [uid != "padding" for uid, *_ in ROWS])
    assert metrics == {
        "flowrl/distinct_right_answers": pytest.approx((2 + 2 + 0) / 3),
        "flowrl/right_answers": pytest.approx(6 / 8),
    }


def test_trainer_without_settings_names_the_override_that_adds_them():
    config = OmegaConf.create({"actor_rollout_ref": {"actor": {}}, "trainer": {"v1": {"trainer_mode": "flowrl"}}})
    with pytest.raises(ValueError, match=r"^trainer.v1.trainer_mode=flowrl: .* add \+recipe=flowrl$"):
        FlowRLTrainer(config)
