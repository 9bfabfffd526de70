"""FlowRL's settings: built directly, and composed by Hydra and checked by verl's ``validate_config`` as for a run."""

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from support.waiting import TIMEOUT_S

from recipes.flowrl.config import FlowRLActorConfig, FlowRLConfig, PartitionConfig
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl_precision.run.job import compose, parse_job

ACTOR = "actor_rollout_ref.actor"
FLOWRL = f"{ACTOR}.flowrl"
MEGATRON = f"{ACTOR}.strategy=megatron: FlowRL requires fsdp or fsdp2"


@pytest.fixture(scope="module")
def checked(tiny_model) -> Callable[..., FlowRLActorConfig]:
    """``checked(*overrides)``: the actor's config of the default job with the recipe, after verl's checks."""

    def of(*overrides: str, recipe: str = "flowrl") -> FlowRLActorConfig:
        job = replace(parse_job(["DEVICE=cpu"]), model=str(tiny_model), recipe=recipe, args=overrides)
        config = compose(job, Path("out"))
        validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
        return omega_conf_to_dataclass(config.actor_rollout_ref.actor)

    return of


def test_papers_preset_changes_clip_and_head(checked):
    ours, paper = (checked(recipe=recipe) for recipe in ("flowrl", "flowrl_paper"))
    different = {"importance_clip", "partition"}
    assert {name for name, value in vars(paper.flowrl).items() if value != vars(ours.flowrl)[name]} == different
    assert paper.flowrl.importance_clip == (0.8, 1.2) and ours.flowrl.importance_clip == (0.8, 1.28)
    assert paper.fsdp_config.grad_scaler.init_scale == ours.fsdp_config.grad_scaler.init_scale == 2048
    own = {"lr": paper.optim.lr, "weight_decay": paper.optim.weight_decay, "clip_grad": ours.flowrl.partition.clip_grad}
    own |= {"dropout": 0.1, "zero_init": False, "drop_last_prompt_token": True}
    assert vars(paper.flowrl.partition) == own
    decayed = checked(f"{ACTOR}.optim.weight_decay=0.3", recipe="flowrl_paper")
    assert decayed.flowrl.partition.weight_decay == 0.3


@pytest.mark.parametrize(("clip", "bounds"), [([0.5, 2], (0.5, 2.0)), (10, (0.0, 10.0)), (None, (0.0, inf))])
def test_clip_is_an_interval_a_largest_weight_or_none(clip, bounds):
    assert FlowRLConfig(importance_clip=clip).importance_clip == bounds


INVALID = {
    "beta": [0, -1, nan, inf, "x", True, None],
    "reward": ["scores"],
    "log_z": ["head"],
    "anchor": [None],
    "importance_weight": ["CISPO"],
    "importance_clip": [0, 0.5, nan, "x", True, [1.28, 0.8], [1.1, 2], [1, 1], [-1, 1], [0.8, 1, 1.2], ["low", "high"]],
    "length_normalization": [0],
    "partition.lr": [0],
    "partition.weight_decay": [-0.1, inf],
    "partition.clip_grad": [0],
    "partition.dropout": [-0.1, 1],
    "partition.zero_init": ["maybe"],
    "partition.drop_last_prompt_token": [1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in INVALID.items() for value in values])
def test_invalid_value_is_refused_by_its_key(name, value):
    settings = PartitionConfig if name.startswith("partition.") else FlowRLConfig
    with pytest.raises(ValueError, match=re.escape(f"{FLOWRL}.{name}={value}: must be ")):
        settings(**{name.removeprefix("partition."): value})


def test_settings_of_ppos_loss_are_refused(checked):
    valid = checked()
    others = {"clip_ratio": 0.3, "clip_ratio_low": 0.1, "clip_ratio_high": 0.28, "clip_ratio_c": 10}
    others |= {"entropy_coeff": 0.01, "calculate_entropy": True, "kl_loss_coef": 0.1, "kl_loss_type": "k2"}
    others |= {"loss_agg_mode": "token-sum", "loss_scale_factor": 9}
    for name, value in others.items():
        remedy = f"leave it at {getattr(valid, name)} and set {FLOWRL}"
        with pytest.raises(ValueError, match=f"{ACTOR}.{name}={value}: is not read by FlowRL; {remedy}"):
            replace(valid, **{name: value})


GROUP_OF_ONE = "actor_rollout_ref.rollout.n=1"
MERGED = "actor_rollout_ref.model.lora.merge=true actor_rollout_ref.model.lora.rank=4"
MERGE = "actor_rollout_ref.model.lora.merge=True"
# Overrides, and a regular expression of the refusal.
REFUSED = {
    f"{ACTOR}.use_kl_loss=false": f"{ACTOR}.use_kl_loss=False: .*anchor=ref needs the reference policy; set true, or",
    GROUP_OF_ONE: f"{GROUP_OF_ONE}: a group of one.*reward=score with log_z=learned or none",
    f"{GROUP_OF_ONE} {FLOWRL}.reward=score {FLOWRL}.log_z=group": f"{GROUP_OF_ONE}: a group of one",
    MERGED: f"{MERGE}: .*rollout.dtype=float16; set merge=false",
    f"{MERGED} actor_rollout_ref.rollout.dtype=half": f"{MERGE}: .*rollout.dtype=half; set merge=false",
    "model_engine=megatron": MEGATRON,
    f"{ACTOR}.strategy=megatron": "actor_rollout_ref.actor.megatron",  # verl looks for the key
    "algorithm.adv_estimator=gae": "algorithm.adv_estimator=gae: FlowRL needs grpo",
    "trainer.v1.trainer_mode=sync": "trainer.v1.trainer_mode=sync: FlowRL needs flowrl",
    "trainer.use_v1=false": "trainer.use_v1=False: FlowRL needs True",
    "algorithm.use_kl_in_reward=true": "algorithm.use_kl_in_reward=True: FlowRL needs False",
    "distillation.enabled=true": "distillation.enabled=True: FlowRL needs False",
    f"{ACTOR}.policy_loss.loss_mode=gspo": f"{ACTOR}.policy_loss.loss_mode=gspo: FlowRL has its own loss; keep vanilla",
    f"+{FLOWRL}.betta=3": "betta",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_incompatible_settings_are_refused(checked, overrides):
    with pytest.raises((ValueError, HydraException, OmegaConfBaseException), match=REFUSED[overrides]):
        checked(*overrides.split())


def test_neither_reference_nor_groups_are_needed_without_their_settings(checked):
    words = f"{FLOWRL}.anchor=old {ACTOR}.use_kl_loss=false {ACTOR}.strategy=fsdp2 algorithm.adv_estimator=rloo"
    flowrl = checked(*words.split(), f"{FLOWRL}.reward=score", f"{FLOWRL}.log_z=none", GROUP_OF_ONE).flowrl
    assert (flowrl.anchor, flowrl.reward, flowrl.log_z) == ("old", "score", "none")


@pytest.mark.slow
@pytest.mark.subprocess
def test_main_ppo_refuses_before_ray_starts(tiny_model, tmp_path):
    job = replace(parse_job(["DEVICE=cpu", "RECIPE=flowrl", "ARGS=model_engine=megatron"]), model=str(tiny_model))
    out = tmp_path / "out"
    environment = {**os.environ, **job.environment(out), "RAY_TMPDIR": str(tmp_path / "ray")}
    command = job.command(out)
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1
    assert MEGATRON in done.stderr and "ray init kwargs" not in done.stdout
    allowed = {"out", "hydra", "config.yaml", "hydra.yaml", "overrides.yaml"}
    assert {path.name for path in tmp_path.rglob("*")} <= allowed
