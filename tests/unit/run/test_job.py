"""The job that the variables of ``make run`` describe: refusals, overrides, environment and command."""

import json
import shlex
import subprocess
from dataclasses import replace

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from verl_precision.errors import Refused
from verl_precision.paths import ARITHMETIC, CACHE
from verl_precision.run.job import GENERATED, MODULES, Job, compose, parse_job, quoted
from verl_precision.words import gpu_present, options


def parsed(*words: str) -> Job:
    return parse_job(["DEVICE=cpu", *words])


@pytest.mark.parametrize("experiment", GENERATED)
def test_experiments_without_a_model_generate_one_and_its_data(experiment, tmp_path):
    job = parsed(f"EXPERIMENT={experiment}")
    root = CACHE / GENERATED[experiment]
    names = {"actor_rollout_ref.model.path": "model", "data.train_files": "train.parquet"}
    assert {f"{key}={root}/{name}" for key, name in names.items()} <= set(job.overrides(tmp_path))
    assert job.generated == root and f"trainer.validation_data_dir={tmp_path}/validation" in job.overrides(tmp_path)


def test_own_data_file_selects_the_gsm8k_experiment(tmp_path):
    (tmp_path / "gsm8k.parquet").write_bytes(b"PAR1")
    job = parsed("MODEL=Qwen/Qwen2.5-0.5B-Instruct", f"TRAIN={tmp_path}/gsm8k.parquet")
    assert (job.experiment, job.model, job.generated) == ("gsm8k_1gpu", "Qwen/Qwen2.5-0.5B-Instruct", None)
    assert f"data.val_files={tmp_path}/gsm8k.parquet" in job.overrides(tmp_path), "the default of VAL is TRAIN"


def test_own_model_trains_on_the_generated_data(tmp_path):
    own = {"actor_rollout_ref.model.path=Qwen/Qwen3-0.6B", f"data.train_files={ARITHMETIC}/train.parquet"}
    assert own <= set(parsed("MODEL=Qwen/Qwen3-0.6B").overrides(tmp_path))


def test_seed_and_number_of_checkpoints_reach_every_role_and_args_win(tmp_path):
    args = "ARGS=trainer.total_training_steps=5 trainer.n_gpus_per_node=2"
    config = compose(parsed("ALGO=ppo", "SEED=0", "STEPS=3", args), tmp_path)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert [config.data.seed, rollout.seed, actor.data_loader_seed, config.critic.data_loader_seed] == [0] * 4
    assert config.trainer.max_actor_ckpt_to_keep == config.trainer.max_critic_ckpt_to_keep == 2
    assert (config.trainer.total_training_steps, config.ray_kwargs.ray_init.num_gpus) == (5, 2)


WORDS = "PRECISION=fp61 ALGO=reinforce RECIPE=flow EXPERIMENT=math DEVICE=tpu CARRY=maybe STEPS=0 SEED=1.5 RETRIES=-1"
FILES = "TRAIN=/etc/hostname VAL=/none.parquet OUT=/proc/out"
MODELS = "MODEL=./no/such/model MODEL=/no/such/model MODEL=no-such-model"


@pytest.mark.parametrize("word", [*WORDS.split(), *FILES.split(), *MODELS.split(), "ARGS='trainer.nnodes=1"])
def test_bad_value_is_refused_by_name(word):
    with pytest.raises(Refused) as refusal:
        parsed(word)
    assert str(refusal.value).startswith(word) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("recipe", options("recipe"))
def test_recipe_adds_a_config_group_and_a_module(recipe, tmp_path, monkeypatch):
    monkeypatch.delenv(MODULES, raising=False)
    plain, job = parsed(), parsed(f"RECIPE={recipe}")
    added = {f"+recipe={recipe}", f"trainer.experiment_name={recipe}-fp16-seed1"}
    assert set(job.overrides(tmp_path)) - set(plain.overrides(tmp_path)) == added
    assert job.environment(tmp_path)[MODULES] == "recipes.cpu.platform,recipes.flowrl.trainer"
    on_gpu = replace(job, device="cuda").environment(tmp_path)
    assert on_gpu[MODULES] == "recipes.flowrl.trainer" and "VERL_PLATFORM" not in on_gpu
    assert MODULES not in replace(plain, device="cuda").environment(tmp_path)
    monkeypatch.setenv(MODULES, "mine.plugin")
    assert job.environment(tmp_path)[MODULES] == "mine.plugin,recipes.cpu.platform,recipes.flowrl.trainer"


def test_bare_command_is_the_sanity_task_in_fp16_with_retries_on_a_cluster(monkeypatch):
    assert parsed().retries == 0 and parsed("OUT=/tmp/run").generated == CACHE / "addition"
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    job = parsed()
    assert job == parsed("STEPS=", "PRECISION="), "an empty variable is not set"
    assert (job.experiment, job.precision, job.algo, job.seed) == ("arithmetic", "fp16", "grpo", 1)
    assert (job.cluster, job.retries, parsed("RETRIES=0").retries) == ("127.0.0.1:6379", 2, 0)
    assert job.settings() == replace(job, cluster=None, retries=5).settings(), "a run must be resumable on any node"


def test_cluster_run_passes_its_environment_to_every_node_and_counts_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    job = parsed("RECIPE=flowrl", f"OUT={tmp_path}/it's a run")
    config = compose(job, job.out)
    handed = config.ray_kwargs.ray_init.runtime_env.env_vars
    assert {name: handed[name] for name in job.environment(job.out)} == job.environment(job.out)
    assert all(isinstance(value, str) for value in handed.values()), "Ray accepts only strings"
    assert handed.OMP_NUM_THREADS == "1", "the device's own variables must remain"
    assert config.ray_kwargs.ray_init.num_cpus is None and config.ray_kwargs.ray_init.num_gpus is None
    assert config.transfer_queue.backend.SimpleStorage.required_node_resource == "GPU", "never a head without a CPU"
    assert job.generated == tmp_path / ".cache/addition", "every node mounts OUT, but not this checkout"


@pytest.mark.skipif(gpu_present(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused_but_on_a_cluster(monkeypatch):
    with pytest.raises(Refused, match="^DEVICE=cuda: "):
        parse_job(["DEVICE=cuda"])
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert parse_job(["DEVICE=cuda"]).device == "cuda"


def test_hydra_reads_back_quoted_values():
    for value in ("plain", "/a b/c", "a,b", "it's", "[x]=y", "10%", "file:///x"):
        (override,) = OverridesParser.create().parse_overrides([f"key={quoted(value)}"])
        assert override.value() == value
    assert quoted("[file]") == "[file]", "a list remains one"


def test_printed_line_starts_the_same_command(tmp_path):
    """A shell splits the line into the environment and the words with which ``main_ppo`` is started."""
    out = tmp_path / "it's a run"
    job = parsed("ARGS=trainer.nnodes=1 '+note={a: 1}'")
    program = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['VERL_FILE_LOGGER_PATH']]))"
    line = job.shell_line(out).replace(" -m ", f" -c {shlex.quote(program)} ")
    words, metrics = json.loads(subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout)
    assert (words, metrics) == (job.command(out)[2:], str(out / "verl.jsonl"))


@pytest.mark.parametrize(
    "args", ["trainer.n_gpu=2", "foo", "trainer.nnodes=[1", "+precision=bf16", "data.seed=${no.key}"]
)
def test_misspelt_override_is_refused_in_one_line(args, tmp_path):
    with pytest.raises(Refused) as refusal:
        compose(parsed(f"ARGS={args}"), tmp_path)
    assert str(refusal.value).startswith(f"ARGS={shlex.join([args])}: ") and "\n" not in str(refusal.value)
    with pytest.raises(Refused, match="^configuration: "):
        compose(replace(parsed(), experiment="none"), tmp_path)


@pytest.mark.parametrize(("name", "default"), [("RAY_worker_niceness", "0"), ("RAY_raylet_start_wait_time_s", "120")])
def test_variable_of_a_local_ray_is_the_callers_or_the_default(name, default, monkeypatch, tmp_path):
    monkeypatch.setenv(name, "10")
    assert parsed().environment(tmp_path)[name] == "10"
    monkeypatch.delenv(name)
    assert parsed().environment(tmp_path)[name] == default
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")  # its nodes were started elsewhere
    assert name not in parsed().environment(tmp_path)


def test_verl_without_patches_is_refused_with_the_command_that_patches_it(trees, imported, tmp_path):
    root = trees["pristine"]
    imported(root)
    with pytest.raises(Refused, match=f"^the verl in {root} is not patched: make apply-patches VERL={root}$"):
        compose(parsed(), tmp_path)
