"""FlowRL's trainer without its workers: metrics, log Z of groups, and the refusal of a config without settings."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta

from recipes.flowrl import trainer as flowrl_trainer
from recipes.flowrl.trainer import FlowRLTrainer, diversity
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl_precision.run.job import compose, parse_job

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


def nested(rows: list[list]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def batch(rows: list[tuple]) -> TensorDict:
    """Return the rows as TransferQueue does."""
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


@pytest.mark.parametrize("reference", [True, False])
def test_actor_is_flowrls_worker_with_and_without_a_reference(reference):
    trainer = object.__new__(FlowRLTrainer)
    job = ["DEVICE=cpu", "RECIPE=flowrl", f"ARGS=actor_rollout_ref.actor.use_kl_loss={reference}"]
    trainer.config = compose(parse_job(job), Path("out"))
    trainer._init_resource_pool_mgr()
    (worker,) = trainer.role_worker_mapping.values()
    assert worker.__ray_metadata__.class_name == "FlowRLWorker"


@pytest.mark.parametrize(("anchor", "expected"), [("ref", [2.0, 4.5, 2.0]), ("old", [1.5, 3.0, 1.5])])
def test_log_z_of_a_group_is_the_mean_of_its_answers(anchor, expected, monkeypatch):
    """Of βr - mean(old - anchor), by hand: two answers of prompt a, with rewards of 1 and 0, and one of prompt b."""
    rows = batch([("a", [1, 2], 1.0, {}), ("b", [3], 1.0, {}), ("a", [4], 0.0, {})])
    rows["uid"] = NonTensorStack("a", "b", "a")
    rows["response_mask"] = nested([[1, 1], [1], [1]])
    rows["advantages"] = rows["rm_scores"]
    rows["old_log_probs"] = nested([[-1.0, -2.0], [-3.0], [-1.0]])
    rows["ref_log_prob"] = nested([[-1.0, -1.0], [-1.5], [-0.5]])
    written = {}
    given = KVBatchMeta(keys=["0", "1", "2"], partition_id="train", tags=[{}, {}, {}])
    monkeypatch.setattr(PPOTrainerSync, "_compute_advantage", lambda self, batch, metrics: batch)
    monkeypatch.setattr(
        flowrl_trainer.tq, "kv_batch_get", lambda select_fields, **_: rows.select(*select_fields, strict=False)
    )
    monkeypatch.setattr(flowrl_trainer.tq, "kv_batch_put", lambda fields, **_: written.update(fields.items()))
    trainer = object.__new__(FlowRLTrainer)
    trainer.flowrl = SimpleNamespace(log_z="group", anchor=anchor, reward="score", beta=3.0, length_normalization=True)
    metrics = {}
    trainer._compute_advantage(given, metrics)
    assert written["group_log_z"].tolist() == expected
    assert metrics["flowrl/right_answers"] == pytest.approx(2 / 3)


def test_spread_of_the_residual_and_effective_samples_are_reported(monkeypatch):
    means = {"delta": 3.0, "delta_square": 25.0, "weight": 2.0, "weight_square": 8.0}
    metrics = {f"actor/flowrl/{name}": mean for name, mean in means.items()}
    monkeypatch.setattr(PPOTrainerSync, "_update_actor", lambda self, batch, metrics: batch)
    object.__new__(FlowRLTrainer)._update_actor(None, metrics)
    reported = {"delta": 3.0, "delta_std": 4.0, "weight": 2.0, "effective_samples": 0.5}
    assert metrics == {f"actor/flowrl/{name}": value for name, value in reported.items()}
