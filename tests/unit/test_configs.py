"""The shipped experiments, composed against the installed, patched verl and checked by verl itself."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import hydra
import pytest
from omegaconf import DictConfig, OmegaConf

from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl_precision.paths import CONFIGS, REPO
from verl_precision.report.figures import COLORS
from verl_precision.run.job import compose as compose_job
from verl_precision.run.job import parse_job
from verl_precision.run.machine import FLASH_ATTENTION, PRESETS
from verl_precision.words import options

# configs/amp and configs/launch are no Hydra configs
FILES = sorted(file for file in CONFIGS.rglob("*.yaml") if file.parent.name not in ("amp", "launch"))
# Optimizer steps on each batch, by experiment.
UPDATES = dict.fromkeys(("arithmetic", "recall", "sanity_cpu", "terms"), 1) | {"flowrl_7b": 16}
UPDATES |= dict.fromkeys(("gsm8k_1gpu", "gsm8k_8gpu", "sanity_8gpu", "dense_7b", "dense_32b", "moe_30b"), 4)
# By objective: whether a group's spread divides its advantages, the average of the loss, the weights and their bound.
OBJECTIVES = {
    "grpo": (True, "token-mean", None, 2),
    "ppo": (True, "token-mean", None, 2),
    "dr_grpo": (False, "seq-mean-token-sum-norm", None, 2),
    "pg_is": (False, "seq-mean-token-sum-norm", "sequence", 1e6),
}


@pytest.fixture(scope="session")
def compose(tiny_model) -> Callable[..., DictConfig]:
    """``compose(**choices)``: the default job's configuration with ``choices``, after verl's own checks.

    These load the critic's tokenizer and configuration.
    """

    def of(**choices) -> DictConfig:
        job = replace(parse_job(["DEVICE=cpu"]), model=str(tiny_model), **choices)
        config = compose_job(job, Path("out"))
        validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
        omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        return config

    return of


def test_every_regime_has_a_color_and_a_row_in_the_reference():
    assert set(options("precision")) <= COLORS.keys()
    rows = re.findall(r"^\| `(\w+)` \|", (REPO / "docs/reference/keys.md").read_text(), re.M)
    assert set(options("precision")) <= set(rows)


def combined(group: str, least: str) -> list:
    """Return the combinations of an experiment, an option of a group and a device.

    `make test` takes each experiment with ``least`` on a GPU, and each option with "arithmetic": the groups are merged
    one after another, so that the other combinations have no key that these lack.
    """
    marks = lambda each: [] if "arithmetic" in each or {least, "cuda"} <= {*each} else [pytest.mark.slow]
    everything = product(options("experiment"), options(group), ["cpu", "cuda"])
    return [pytest.param(*each, marks=marks(each)) for each in everything]


@pytest.mark.parametrize(("experiment", "algo", "device"), combined("algo", least="ppo"))
def test_an_experiment_is_complete(experiment, algo, device, compose):
    config = compose(experiment=experiment, algo=algo, device=device)
    assert need_critic(config) == (algo == "ppo")
    assert config.trainer.total_training_steps > 0 and config.trainer.device == device
    assert config.actor_rollout_ref.rollout.name == "vllm"
    assert config.trainer.save_freq > 0, "without checkpoints nothing can be resumed"
    actor, critic, weights = config.actor_rollout_ref.actor, config.critic, config.algorithm.rollout_correction
    assert config.data.train_batch_size == UPDATES[experiment] * actor.ppo_mini_batch_size
    objective = (config.algorithm.norm_adv_by_std_in_grpo, actor.loss_agg_mode)
    assert (*objective, weights.rollout_is, weights.rollout_is_threshold) == OBJECTIVES[algo]
    assert "norm" not in actor.loss_agg_mode or actor.loss_scale_factor == config.data.max_response_length
    for key in ("param_offload", "optimizer_offload"):
        assert critic.fsdp[key] == actor.fsdp_config[key], "the rollout needs the memory of both"
    if experiment == "sanity_8gpu":
        assert (config.data.max_prompt_length, config.data.max_response_length) == (1024, 8192), "its authors' own"


@pytest.mark.parametrize(("experiment", "recipe", "device"), combined("recipe", least="flowrl_paper"))
def test_recipe_accepts_every_experiment(experiment, recipe, device, compose):
    config = compose(experiment=experiment, recipe=recipe, device=device)
    assert need_reference_policy(config) and not need_critic(config)
    assert config.trainer.v1.trainer_mode == "flowrl"
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert type(actor).__module__ == "recipes.flowrl.config" and actor.flowrl.beta == 15


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_of_a_gpu_passes_verls_checks(preset, compose):
    config = compose(experiment="gsm8k_8gpu", algo="ppo", device="cuda", gpu_overrides=(f"+device={preset}",))
    old = PRESETS[preset] < FLASH_ATTENTION
    for model in (config.actor_rollout_ref.model, config.critic.model):
        assert model.override_config.get("attn_implementation") == ("sdpa" if old else None)
        assert model.use_remove_padding != old
    assert config.actor_rollout_ref.rollout.enforce_eager == old
    assert config.actor_rollout_ref.actor.fsdp_config.use_torch_compile != old


def test_fp32_needs_no_flash_attention(compose):
    config = compose(experiment="gsm8k_8gpu", algo="ppo", device="cuda", precision="fp32")
    for model in (config.actor_rollout_ref.model, config.critic.model):
        assert model.override_config.attn_implementation == "sdpa" and not model.use_remove_padding


def test_hf_server_overrides_the_mode_of_hf(compose):
    assert compose(args=("+releases=hf_server",)).actor_rollout_ref.rollout.mode == "async"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONFIGS)))
def test_a_file_is_global_and_opens_with_its_command(file):
    first, *lines = file.read_text().splitlines()
    opening = "".join(line for line in lines[: next(i for i, line in enumerate(lines) if line[:1] != "#")])
    assert first == "# @package _global_", "without it the file would silently have no effect"
    assert "make run" in opening or "verl.trainer.main_ppo" in opening


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONFIGS)))
def test_a_file_wins_over_those_that_it_extends(file):
    own = composed = OmegaConf.load(file)
    if own.pop("defaults", None):
        with hydra.initialize_config_dir(str(CONFIGS), version_base=None):
            composed = hydra.compose(overrides=[f"+{file.parent.name}={file.stem}"])
    assert OmegaConf.to_container(OmegaConf.merge(composed, own)) == OmegaConf.to_container(composed)
    for key in ("model.override_config.attn_implementation", "model.use_remove_padding"):
        actor, critic = (OmegaConf.select(composed, f"{role}.{key}") for role in ("actor_rollout_ref", "critic"))
        assert actor == critic, "one of two models would take verl's default, flash attention"
    if agent := OmegaConf.select(composed, "actor_rollout_ref.rollout.agent.default_agent_loop"):
        (loop,) = OmegaConf.load(REPO / composed.actor_rollout_ref.rollout.agent.agent_loop_config_path)
        assert agent == loop.name, "verl would sample by another loop"
