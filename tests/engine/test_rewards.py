"""Rewards that are inf or NaN are refused."""

import pytest
import torch
from precision import check_rewards


def test_nonfinite_rewards_are_refused_by_row():
    rewards = torch.zeros(5, 3)
    check_rewards(rewards, {})
    rewards[1, 2], rewards[4, 0] = float("nan"), float("-inf")
    labels = {"uid": list("abcde"), "data_source": ["sum"] * 5, "other": [0] * 5}
    with pytest.raises(ValueError) as refusal:
        check_rewards(rewards, labels)
    assert str(refusal.value).startswith("2 of 5 rewards are not finite") and "\n" not in str(refusal.value)
    assert str(refusal.value).endswith("row 1, data_source=sum, uid=b; row 4, data_source=sum, uid=e")
    rewards[:] = float("nan")
    with pytest.raises(ValueError, match="5 of 5 .* row 0; row 1; row 2 …"):
        check_rewards(rewards, {})
