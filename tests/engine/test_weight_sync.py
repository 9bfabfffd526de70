"""The check of the first weight sync: batches that it accepts or refuses, and settings that disable it."""

import copy
import re
import textwrap
from types import SimpleNamespace

import hydra
import pytest
import torch
from omegaconf import OmegaConf
from precision import run_requests_precision
from support.selected import every_release
from support.trees import patched_tree
from tensordict import TensorDict
from weight_sync import WeightSyncCheck, WeightSyncError, check_weight_sync

from verl_precision.patch.releases import VERL

SHARE = "training/rollout_logprobs_equal_share"
CONFIG = {
    "trainer": {"check_weight_sync": None},
    "actor_rollout_ref": {
        "actor": {"strategy": "fsdp", "fsdp_config": {"dtype": "float16"}},
        "rollout": {"name": "vllm", "dtype": "float16", "temperature": 1.0, "top_p": 1, "top_k": -1},
    },
}


def check(**changes) -> WeightSyncCheck:
    """Return a check of CONFIG with changed keys of ``actor_rollout_ref``, or of ``trainer`` for ``trainer__x``."""
    config = OmegaConf.create(copy.deepcopy(CONFIG))
    for name, value in changes.items():
        key = name.replace("__", ".")
        key = key if key.startswith("trainer") else f"actor_rollout_ref.{key}"
        OmegaConf.update(config, key, value, force_add=True)
    return WeightSyncCheck(config)


def make_batch(noise: float, spread: float = 0.5) -> dict[str, torch.Tensor]:
    """Return log-probabilities with mean absolute deviation ``spread`` that differ by ``noise`` nats on average."""
    generator = torch.Generator().manual_seed(0)
    trained = -5 + spread * torch.randn(64, 32, generator=generator) / 0.798  # a normal's mean absolute deviation
    mask = torch.ones(64, 32, dtype=torch.long)
    mask[:, 24:] = 0
    sampled = trained + noise * torch.randn(64, 32, generator=generator) / 0.798
    sampled[:, 24:] = -1.0  # verl's padding
    return {"old_log_probs": trained, "rollout_log_probs": sampled, "response_mask": mask}


def test_rounding_is_accepted_and_reported():
    metrics = check()(make_batch(noise=3e-4))
    assert set(metrics) == {"training/weight_sync_diff", "training/weight_sync_spread", SHARE}
    assert metrics["training/weight_sync_diff"] == pytest.approx(3e-4, rel=0.1)
    assert metrics["training/weight_sync_spread"] == pytest.approx(0.5, rel=0.1)


APPLIED = {"rollout__temperature": 0.7, "rollout__logprobs_mode": "processed_logprobs"}
BF16 = {"actor__fsdp_config__dtype": "bfloat16"}
# Changed keys, and the noise and spread in nats. The limit follows the coarser side's dtype and the spread.
ACCEPTED = {
    "bf16 trainer": (BF16, 0.05, 0.5),
    "rollout in auto": ({"rollout__dtype": "auto"}, 0.05, 0.5),
    "Megatron's dtype": ({"actor__strategy": "megatron", "actor__dtype": "bfloat16"}, 0.05, 0.5),
    "Megatron's default": ({"actor__strategy": "megatron"}, 0.05, 0.5),
    "bf16 trainer by its role": ({"actor__dtype": "bfloat16", **BF16}, 0.05, 0.5),
    "without spread": ({}, 1e-3, 1e-6),
}
REFUSED = {
    "scrambled experts of a tiny Qwen3-MoE": ({}, 0.057, 0.4),
    "FSDP2": ({"actor__strategy": "fsdp2"}, 0.057, 0.4),
    "fp16 trainer by its role": ({"actor__dtype": "float16", **BF16}, 0.057, 0.4),
    "Megatron in fp16 by its role": ({"actor__strategy": "megatron", "actor__dtype": "float16"}, 0.057, 0.4),
    "Megatron in fp16": ({"actor__strategy": "megatron", "actor__megatron": {"dtype": "float16"}}, 0.057, 0.4),
    "fp32 on both sides": ({"actor__fsdp_config__dtype": "fp32", "rollout__dtype": "float32"}, 0.05, 0.5),
    "param_dtype beside it": ({"actor__fsdp_config__mixed_precision": {"param_dtype": "fp16"}, **BF16}, 0.05, 0.5),
    "without spread": ({}, 0.02, 1e-6),
    "a top_k of 0, which cuts nothing": ({"rollout__top_k": 0}, 0.057, 0.4),
    "a server that applies the temperature": (APPLIED, 1.0, 0.5),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_difference_below_the_limit_is_accepted(name):
    changes, noise, spread = ACCEPTED[name]
    metrics = check(**changes)(make_batch(noise, spread))
    assert metrics["training/weight_sync_spread"] == pytest.approx(spread, rel=0.1), "the trainer's, not the rollout's"


@pytest.mark.parametrize("name", REFUSED)
def test_different_weights_end_the_run_and_name_the_key(name):
    changes, noise, spread = REFUSED[name]
    with pytest.raises(WeightSyncError, match="differ by .* nats a token.*trainer.check_weight_sync=false"):
        check(**changes)(make_batch(noise, spread))


@pytest.mark.parametrize(("name", "side"), [("rollout_log_probs", "rollout"), ("old_log_probs", "trainer")])
def test_nan_is_refused_and_its_side_is_named(name, side):
    batch = make_batch(noise=0)
    batch[name][0, 0] = float("nan")
    with pytest.raises(WeightSyncError, match=f"the {side}'s log-probabilities of the first batch are not finite"):
        check()(batch)


def test_only_the_first_batch_with_a_response_is_compared():
    trainer, wrong = SimpleNamespace(config=OmegaConf.create(CONFIG)), make_batch(noise=1.0)
    empty = wrong | {"response_mask": torch.zeros(64, 32)}
    assert check_weight_sync(trainer, empty) == {}
    assert len(check_weight_sync(trainer, make_batch(noise=0))) == 3
    for batch, share in ((wrong, 0), (make_batch(noise=0), 1)):
        assert check_weight_sync(trainer, batch) == {SHARE: share}, "of every batch"


@pytest.mark.parametrize("release", ["0.9.0", "0.9.1"])
def test_answers_of_older_weights_are_left_out(release, tmp_path, pytestconfig):
    """Or a resumed asynchronous run, which begins with them, would end."""
    tree = patched_tree(release, tmp_path, pytestconfig.getoption("verl_tree"))
    text = (tree / "verl/trainer/ppo/v1/trainer_base.py").read_text()
    statements = textwrap.dedent(re.search(r" +current = .*\n.*check_weight_sync\(self, .*\n", text)[0])
    rows = TensorDict(make_batch(noise=0), [64])
    rows["rollout_log_probs"][:32] += 1.0
    trainer = SimpleNamespace(config=OmegaConf.create(CONFIG), global_steps=3)
    names = {
        "self": trainer,
        "data": SimpleNamespace(batch=rows),
        "torch": torch,
        "check_weight_sync": check_weight_sync,
    }
    for versions, expected in (([1] * 64, {}), ([1] * 32 + [2] * 32, {SHARE: 1.0, "training/weight_sync_diff": 0.0})):
        batch, metrics = SimpleNamespace(tags=[{"min_global_steps": version} for version in versions]), {}
        exec(statements, names | {"batch": batch, "metrics": metrics})
        metrics.pop("training/weight_sync_spread", None)
        assert metrics == expected


UNREQUESTED = {**BF16, "rollout__dtype": "bfloat16"}


@pytest.mark.parametrize("wanted", [None, True, False])
@pytest.mark.parametrize(
    ("changes", "requested"),
    [
        (UNREQUESTED, False),
        (BF16 | {"rollout__dtype": "auto"}, False),
        ({}, True),
        (UNREQUESTED | {"actor__dtype": "bfloat16"}, True),
        (UNREQUESTED | {"trainer__mismatch_freq": 1}, True),
    ],
    ids=str,
)
def test_check_is_on_where_a_precision_is_requested_or_by_its_key(changes, requested, wanted):
    """With a precision, the share of equal log-probabilities is reported without the check too."""
    checked = check(**changes, trainer__check_weight_sync=wanted)
    if requested if wanted is None else wanted:
        with pytest.raises(WeightSyncError):
            checked(make_batch(noise=5.0))
    else:
        assert checked(make_batch(noise=5.0)) == ({SHARE: 0} if requested else {})


@pytest.mark.parametrize(
    "off",
    [
        {"rollout__top_p": 0.9},
        {"rollout__top_k": 50},
        {"rollout__temperature": 0.7},
        {"rollout__quantization": "fp8"},
        {"rollout__engine_kwargs__vllm__quantization": "fp8"},
        {"rollout__engine_kwargs__vllm__kv_cache_dtype": "fp8_e5m2"},
        {"rollout__qat__enable": True},
        {"rollout__name": "trtllm"},
        {"rollout__name": "sglang", "rollout__multi_turn__enable": True},
        {"rollout__name": "sglang", **APPLIED},
        {"rollout__name": "trtllm", "rollout__dtype": "unknown"},
    ],
)
def test_check_is_off_if_log_probs_are_not_comparable(off):
    assert check(**off, trainer__check_weight_sync=True)(make_batch(noise=1.0)) == {SHARE: 0}


# An override that turns the check on, or none, and the rollout.
REQUESTS = {"": "vllm", "trainer.check_weight_sync=true": "sglang", "++actor_rollout_ref.actor.dtype=bfloat16": "vllm"}


@pytest.mark.parametrize("release", every_release(VERL))
def test_every_trainer_of_a_release_checks_its_first_batch(release, tmp_path, pytestconfig):
    tree = patched_tree(release, tmp_path, pytestconfig.getoption("verl_tree"))
    compares = re.compile(r"calculate_debug_metrics\(\w+\)|if \"rollout_log_probs\" in batch\.batch\.keys\(\)")
    trainers = [file for file in (tree / "verl").rglob("*.py") if ".precision" not in str(file)]
    found = [file for file in trainers if "rollout_probs_diff" in (text := file.read_text()) or compares.search(text)]
    found = [file for file in found if file.name in ("ray_trainer.py", "trainer_base.py", "main_ppo_sync.py")]
    assert found
    for file in found:
        assert file.read_text().count("metrics.update(check_weight_sync(self, ") == 1, file
    folder = tree / "verl/trainer/config"
    with hydra.initialize_config_dir(config_dir=str(folder), version_base=None):
        names = [name for name in ("ppo_trainer", "ppo_megatron_trainer") if (folder / f"{name}.yaml").exists()]
        for name in names:
            for request, rollout in REQUESTS.items():
                overrides = [f"actor_rollout_ref.rollout.name={rollout}", *([request] if request else [])]
                trainer = SimpleNamespace(config=hydra.compose(name, overrides))
                if request:
                    with pytest.raises(WeightSyncError):
                        check_weight_sync(trainer, make_batch(noise=5.0))
                else:
                    assert not run_requests_precision(trainer.config), "verl's defaults request none"
                    assert check_weight_sync(trainer, make_batch(noise=5.0)) == {}
