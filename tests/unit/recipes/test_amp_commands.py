"""The commands of PPO, the world model and evolution: settings, files and runs that end them in one line."""

import re

import pytest
import ray
from amp_commands import SMALL, records, refusal, words

from recipes.amp import world_model
from recipes.amp.evolution import __main__ as evolution
from recipes.amp.evolution.member import EvolutionConfig
from recipes.amp.options import parse_config
from recipes.amp.ppo import __main__ as ppo
from recipes.amp.ppo.algorithm import PPOConfig
from verl_precision.paths import REPO

COMMANDS = {"ppo": ppo, "world_model": world_model, "evolution": evolution}
CONFIGS = {"ppo": PPOConfig, "world_model": world_model.WorldModelConfig, "evolution": EvolutionConfig}
QUICK = {
    "ppo": words(**SMALL, eval_episodes=2),
    "world_model": words(steps=300, held_out_steps=300, length=10, context=3, hidden=8, latent=4, device="cpu"),
    "evolution": words(population=3, episodes=1, hidden=8, device="cpu"),
}
INVALID = {
    "ppo world_model evolution": [
        (
            "--env=CartPle-v1",
            "env=CartPle-v1 must be an environment's NAME or MODULE:NAME: Environment `CartPle` doesn't exist. Did",
        ),
        (
            "--env=nowhere:X-v0",
            "env=nowhere:X-v0 must be an environment's NAME or MODULE:NAME: No module named 'nowhere'",
        ),
        ("--env=a:b:C-v1", "env=a:b:C-v1 must be an environment's NAME or MODULE:NAME"),
        ("--device=tpu", "device=tpu must be auto, cpu or cuda"),
        ("--loss-scale=inf", "loss_scale=inf must be positive"),
        ("--seed=-1", "seed=-1 must be "),
    ],
    "ppo": [
        ("--env=Pendulum-v1", "env=Pendulum-v1: actions are Box(-2.0, 2.0, (1,), float32), but must be Discrete"),
        ("--dtype=float32", "dtype=float32 must be float16 or bfloat16"),
        ("--minibatches=5", "minibatches=5 must be a divisor of num_envs * num_steps = 32 into parts of"),
        ("--minibatches=16", "minibatches=16 must be a divisor of num_envs * num_steps = 32 into parts of"),
        ("--num-steps=1", "num_steps=1 must be at least 2"),
        ("--total-steps=31", "total_steps=31 must be at least num_envs * num_steps = 32"),
    ],
    "world_model": [
        ("--context=10", "context=10 must be at least 1 and below length=10"),
        ("--context=9 --env=Counter-v0", "context=9 must be below 7, the longest held-out trajectory"),
        ("--dtype=int8", "dtype=int8 is not a dtype to compute in"),
    ],
    "evolution": [
        ("--env=Restless-v0", "env=Restless-v0 must be deterministic: replaying seed 0 gave other steps"),
        ("--env=Pendulum-v1", "env=Pendulum-v1 has actions Box(-2.0, 2.0, (1,), float32): choose an env"),
        ("--replaced=3", "replaced=3 must be at least 0 and below population=3"),
        ("--mutation=nan", "mutation=nan must be at least 0"),
        ("--gpus=1.5", "gpus=1.5 must be above 0 and at most 1"),
    ],
}


@pytest.fixture
def no_ray(monkeypatch):
    """Refuse to start Ray, as before every refusal of a setting."""
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was started"))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)


@pytest.mark.parametrize(
    "recipe, given, message",
    [(recipe, *row) for recipes, rows in INVALID.items() for recipe in recipes.split() for row in rows],
)
def test_invalid_setting_is_refused_and_nothing_is_written(recipe, given, message, no_ray, tmp_path):
    out = tmp_path / "run"
    refused = refusal(COMMANDS[recipe], f"--out={out}", *QUICK[recipe], *given.split())
    assert refused.startswith(message.format(out=out))
    assert not out.exists()


@pytest.mark.parametrize("recipe", COMMANDS)
def test_missing_folder_is_refused(recipe, no_ray):
    for given in ([], ["--out="]):
        assert refusal(COMMANDS[recipe], *given) == "--out is missing: give a folder for the results"


@pytest.mark.parametrize("recipe", COMMANDS)
def test_folder_with_results_is_refused_and_kept(recipe, monkeypatch, tmp_path):
    monkeypatch.setattr(evolution, "start_ray", lambda config: "cpu")
    (tmp_path / "metrics.jsonl").write_text("of another run")
    refused = refusal(COMMANDS[recipe], f"--out={tmp_path}", *QUICK[recipe])
    assert refused.startswith(f"out={tmp_path} must be a writable folder without results")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["of another run"]


OVERFLOW = "32 optimizer steps in a row overflowed"


@pytest.mark.parametrize(
    "recipe, given, message, recorded",
    [
        ("ppo", "--env=Nan-v0", "env=Nan-v0: observation[0] of environment ", None),
        ("ppo", "--use-amp --loss-scale=3e38 --total-steps=320", OVERFLOW, {"overflow_rate": 1.0}),
        ("world_model", "--dtype=float16 --loss-scale=3e38 --epochs=20", OVERFLOW, {"overflow_steps": 2}),
        ("world_model", "--dtype=float32 --lr=1e30 --epochs=40", "32 updates in a row ", {"train_loss": None}),
    ],
)
def test_error_of_a_run_ends_it_in_one_line(recipe, given, message, recorded, tmp_path):
    assert refusal(COMMANDS[recipe], f"--out={tmp_path}", *QUICK[recipe], *given.split()).startswith(message)
    assert recorded is None or any(recorded.items() <= record.items() for record in records(tmp_path))


def documented() -> list[tuple[str, str]]:
    """Return the commands of the guide and of the committed configs: recipe and words."""
    texts = [path.read_text() for path in (REPO / "docs/how-to/amp.md", *(REPO / "configs/amp").glob("*.yaml"))]
    return re.findall(r"python -m recipes\.amp\.(\w+) ([^#\n]*)", "\n".join(texts))


@pytest.mark.parametrize("recipe, given", documented())
def test_documented_command_is_accepted(recipe, given, monkeypatch):
    monkeypatch.chdir(REPO)
    _, sources = parse_config(CONFIGS[recipe], recipe, "", given.split())
    assert "command line" in sources.values()


def test_every_recipe_and_config_is_documented():
    assert {recipe for recipe, _ in documented()} == set(COMMANDS)
    for path in (REPO / "configs/amp").glob("*.yaml"):
        assert path.read_text().startswith(f"# python -m recipes.amp.{path.stem} --config configs/amp/{path.name} ")
