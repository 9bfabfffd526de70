"""FlowRL's settings, composed by Hydra and checked by verl's own ``validate_config``, as in ``main_ppo``."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from support.waiting import TIMEOUT_S

from lib import cli
from lib.errors import Refused
from lib.run.job import compose as compose_job
from lib.run.job import parse_job
from recipes.flowrl.config import FlowRLActorConfig
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

ACTOR = "actor_rollout_ref.actor"
FLOWRL = f"{ACTOR}.flowrl"


@pytest.fixture(scope="module")
def compose(tiny_model) -> Callable[..., DictConfig]:
    """``compose(*overrides)``: the default job with the recipe."""

    def of(*overrides: str, recipe: str = "flowrl", precision: str = "fp16") -> DictConfig:
        job = replace(parse_job(["DEVICE=cpu"]), model=str(tiny_model), precision=precision)
        return compose_job(replace(job, args=(f"+recipe={recipe}", *overrides)), Path("out"))

    return of


@pytest.fixture(scope="module")
def changed(compose) -> Callable[..., DictConfig]:
    """``changed(*overrides)``: the same with other values of the actor that no other key reads, after verl's checks."""
    config = compose()

    def of(*overrides: str) -> DictConfig:
        other = config.copy()
        for override in OverridesParser.create().parse_overrides(list(overrides)):
            OmegaConf.update(other, override.key_or_group, override.value())
        return validated(other)

    return of


def validated(config: DictConfig) -> DictConfig:
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    return config


def actor(config: DictConfig) -> FlowRLActorConfig:
    """Return the actor's config as the workers build it."""
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


@pytest.mark.parametrize("precision", cli.options("precision"))
@pytest.mark.parametrize("recipe", ["flowrl", "flowrl_paper"])
def test_both_recipes_compose_in_every_regime(compose, recipe, precision):
    config = validated(compose(recipe=recipe, precision=precision))
    assert need_reference_policy(config) and not need_critic(config)
    assert isinstance(actor(config), FlowRLActorConfig)


def test_papers_preset_changes_clip_and_head(compose):
    ours, paper = (actor(compose(recipe=recipe)) for recipe in ("flowrl", "flowrl_paper"))
    different = {"importance_clip", "partition"}
    assert {name for name, value in vars(paper.flowrl).items() if value != vars(ours.flowrl)[name]} == different
    assert paper.flowrl.importance_clip == (0.8, 1.2) and ours.flowrl.importance_clip == (0.8, 1.28)
    assert vars(paper.flowrl.partition) == {
        "lr": paper.optim.lr,
        "weight_decay": paper.optim.weight_decay,
        "clip_grad": ours.flowrl.partition.clip_grad,
        "dropout": 0.1,
        "zero_init": False,
        "drop_last_prompt_token": True,
    }


GROUP_OF_ONE = "actor_rollout_ref.rollout.n=1"
# Overrides, a setting and its value.
ACCEPTED = {
    "a list": ([f"{FLOWRL}.importance_clip=[0.5,2]"], "importance_clip", (0.5, 2.0)),
    "the largest alone": ([f"{FLOWRL}.importance_clip=10"], "importance_clip", (0.0, 10.0)),
    "no clip": ([f"{FLOWRL}.importance_clip=null"], "importance_clip", (0.0, float("inf"))),
    "a whole beta": ([f"{FLOWRL}.beta=3"], "beta", 3),
    "no reference": ([f"{FLOWRL}.anchor=old", f"{ACTOR}.use_kl_loss=false"], "anchor", "old"),
    "a group of one": ([f"{FLOWRL}.reward=score", f"{FLOWRL}.log_z=none", GROUP_OF_ONE], "reward", "score"),
    "other advantages": ([f"{FLOWRL}.reward=score", "algorithm.adv_estimator=rloo"], "reward", "score"),
    "fsdp2": ([f"{ACTOR}.strategy=fsdp2"], "beta", 15),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_valid_settings_are_accepted(compose, name):
    overrides, setting, value = ACCEPTED[name]
    assert getattr(actor(validated(compose(*overrides))).flowrl, setting) == value


INVALID = {
    "beta": "0 -1 nan inf x true null",
    "reward": "scores",
    "log_z": "head",
    "anchor": "null",
    "importance_weight": "CISPO",
    "importance_clip": "0 0.5 -1 nan x true [1.28,0.8] [1.1,2] [1,1] [-1,1] [0.8,1,1.2] [low,high]",
    "length_normalization": "0",
    "partition.lr": "0 -1 nan x",
    "partition.weight_decay": "-0.1 inf x",
    "partition.clip_grad": "0 x",
    "partition.dropout": "-0.1 1 x",
    "partition.zero_init": "maybe",
    "partition.drop_last_prompt_token": "1",
}


@pytest.mark.parametrize(("name", "given"), [(name, value) for name in INVALID for value in INVALID[name].split()])
def test_invalid_value_is_refused_in_one_line(changed, name, given):
    value = OverridesParser.create().parse_override(f"x={given}").value()
    with pytest.raises(HydraException) as refused:
        changed(f"{FLOWRL}.{name}={given}")
    assert f"{FLOWRL}.{name}={value}: must be " in str(refused.value.__cause__)
    assert "\n" not in str(refused.value.__cause__)


MERGED = ["actor_rollout_ref.model.lora.merge=true", "actor_rollout_ref.model.lora.rank=4"]
# Overrides, and a regular expression of the refusal.
REFUSED = {
    "no reference policy": (
        [f"{ACTOR}.use_kl_loss=false"],
        f"{ACTOR}.use_kl_loss=False: .*anchor=ref needs the reference policy; set true, or anchor=old",
    ),
    "fp16 masters": ([f"{ACTOR}.fsdp_config.model_dtype=fp16"], "model_dtype=fp16.*set model_dtype=fp32"),
    "a group of one": ([GROUP_OF_ONE], f"{GROUP_OF_ONE}: a group of one.*reward=score with log_z=learned or none"),
    "a group of one for its mean": (
        [GROUP_OF_ONE, f"{FLOWRL}.reward=score", f"{FLOWRL}.log_z=group"],
        f"{GROUP_OF_ONE}: a group of one",
    ),
    "merged adapters": (MERGED, "actor_rollout_ref.model.lora.merge=True: .*rollout.dtype=float16; set merge=false"),
    "merged adapters for half": (
        [*MERGED, "actor_rollout_ref.rollout.dtype=half"],
        "actor_rollout_ref.model.lora.merge=True: .*rollout.dtype=half; set merge=false",
    ),
    "an unknown strategy": ([f"{ACTOR}.strategy=ddp"], f"{ACTOR}.strategy=ddp: FlowRL requires fsdp or fsdp2"),
    "GAE": (["algorithm.adv_estimator=gae"], "algorithm.adv_estimator=gae: FlowRL needs grpo"),
    "another trainer": (["trainer.v1.trainer_mode=sync"], "trainer.v1.trainer_mode=sync: FlowRL needs flowrl"),
    "the legacy trainer": (["trainer.use_v1=false"], "trainer.use_v1=False: FlowRL needs True"),
    "a KL in the reward": (["algorithm.use_kl_in_reward=true"], "algorithm.use_kl_in_reward=True: FlowRL needs False"),
    "distillation": (["distillation.enabled=true"], "distillation.enabled=True: FlowRL needs False"),
    "another loss": (
        [f"{ACTOR}.policy_loss.loss_mode=gspo"],
        f"{ACTOR}.policy_loss.loss_mode=gspo: FlowRL has its own loss; keep vanilla",
    ),
}
# PPO's settings, another value and the default.
UNREAD = [
    ("clip_ratio", "0.3", "0.2"),
    ("clip_ratio_low", "0.1", "0.2"),
    ("clip_ratio_high", "0.28", "0.2"),
    ("clip_ratio_c", "10", "3.0"),
    ("entropy_coeff", "0.01", "0"),
    ("calculate_entropy", "True", "False"),
    ("kl_loss_coef", "0.1", "0.001"),
    ("kl_loss_type", "k2", "low_var_kl"),
    ("loss_agg_mode", "token-sum", "token-mean"),
    ("loss_scale_factor", "9", "None"),
]
MEGATRON = ["model_engine=megatron"], f"{ACTOR}.strategy=megatron: FlowRL requires fsdp or fsdp2"


@pytest.mark.parametrize("name", REFUSED)
def test_incompatible_settings_are_refused_in_one_line(compose, name):
    overrides, message = REFUSED[name]
    with pytest.raises((ValueError, HydraException), match=message):
        validated(compose(*overrides))


@pytest.mark.parametrize(("name", "value", "default"), UNREAD)
def test_settings_of_ppos_loss_are_refused_in_one_line(changed, name, value, default):
    message = f"{ACTOR}.{name}={value}: is not read by FlowRL; leave it at {default} and set {FLOWRL}"
    with pytest.raises(HydraException, match=message):
        changed(f"{ACTOR}.{name}={value}")


def test_megatron_is_refused(compose):
    overrides, message = MEGATRON
    with pytest.raises(HydraException, match=message):
        validated(compose(*overrides))
    with pytest.raises(OmegaConfBaseException, match="actor_rollout_ref.actor.megatron"):  # verl looks for it
        validated(compose(f"{ACTOR}.strategy=megatron"))


def test_misspelt_setting_is_refused(compose):
    with pytest.raises(Refused, match="betta"):
        compose(f"{FLOWRL}.betta=3")
    with pytest.raises(HydraException, match="betta"):
        validated(compose(f"+{FLOWRL}.betta=3"))


@pytest.mark.subprocess
@pytest.mark.parametrize(
    ("overrides", "message"),
    [pytest.param(*REFUSED["no reference policy"], marks=pytest.mark.slow), MEGATRON],
    ids=["no reference policy", "Megatron"],
)
def test_main_ppo_refuses_before_ray_starts(overrides, message, tiny_model, tmp_path):
    out = tmp_path / "out"
    job = replace(parse_job(["DEVICE=cpu"]), model=str(tiny_model), args=("+recipe=flowrl", *overrides))
    environment = {**os.environ, **job.environment(out), "RAY_TMPDIR": str(tmp_path / "ray")}
    environment["VERL_USE_EXTERNAL_MODULES"] = "recipes.cpu.platform,recipes.flowrl.trainer"
    command = job.command(out)
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1
    assert message.partition(".*")[0] in done.stderr and "ray init kwargs" not in done.stdout
    allowed = {"out", "hydra", "config.yaml", "hydra.yaml", "overrides.yaml"}
    assert {path.name for path in tmp_path.rglob("*")} <= allowed
