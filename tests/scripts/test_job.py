"""What ``make run`` accepts, what it refuses, and the command it becomes."""

import importlib.util
import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from lib.errors import Refused
from lib.paths import ARITHMETIC, CACHE, REPO
from lib.run import job as jobs
from lib.run import validation

ROW = {"data_source": "arithmetic", "prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"style": "rule"}}


def parquet(file: Path, rows: int = 64, without: str | None = None) -> Path:
    row = {name: value for name, value in ROW.items() if name != without}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * rows), file)
    return file


def test_the_bare_command_is_the_sanity_task_in_fp16():
    job = jobs.parse(["DEVICE=cpu"])
    assert (job.experiment, job.precision, job.algo, job.seed) == ("arithmetic", "fp16", "grpo", 1)
    assert job.made == ARITHMETIC


@pytest.mark.parametrize("experiment", jobs.MADE)
def test_a_model_and_data_are_made_for_the_experiments_that_have_none(experiment, tmp_path):
    job = jobs.parse(["DEVICE=cpu", f"EXPERIMENT={experiment}"])
    assert job.made == CACHE / jobs.MADE[experiment]
    assert {
        f"actor_rollout_ref.model.path={job.made}/model",
        f"data.train_files={job.made}/train.parquet",
        f"data.val_files={job.made}/val.parquet",
        f"trainer.validation_data_dir={tmp_path}/validation",
    } <= set(job.overrides(tmp_path))


def test_a_data_file_of_ones_own_is_trained_with_the_real_experiment(tmp_path):
    job = jobs.parse(["DEVICE=cpu", "MODEL=Qwen/Qwen2.5-0.5B-Instruct", f"TRAIN={parquet(tmp_path / 'gsm8k.parquet')}"])
    assert (job.experiment, job.model) == ("gsm8k_1gpu", "Qwen/Qwen2.5-0.5B-Instruct")
    assert job.made is None


def test_an_empty_variable_is_one_that_is_not_given():
    assert jobs.parse(["DEVICE=cpu", "STEPS=", "PRECISION="]) == jobs.parse(["DEVICE=cpu"])


@pytest.mark.parametrize(
    "word",
    [
        "PRECISION=fp61",
        "ALGO=reinforce",
        "RECIPE=flow",
        "EXPERIMENT=math",
        "DEVICE=tpu",
        "STEPS=0",
        "STEPS=ten",
        "STEPS=-3",
        "SEED=1.5",
        "RETRIES=-1",
        "CARRY=maybe",
        "MODEL=./no/such/model",
        "MODEL=/no/such/model",
        "MODEL=no-such-model",
        "ARGS='trainer.nnodes=1",
        "PRECISON=fp16",
    ],
)
def test_a_bad_value_is_refused_by_name(word):
    name, _, value = word.partition("=")
    with pytest.raises(Refused) as refusal:
        jobs.parse(["DEVICE=cpu", word])
    message = str(refusal.value)
    assert message.startswith(name) and "\n" not in message
    assert value in message or name == "PRECISON"


@pytest.mark.parametrize("recipe", jobs.options("recipe"))
def test_a_recipe_is_one_more_group_and_one_more_module(recipe, tmp_path):
    plain, job = jobs.parse(["DEVICE=cpu"]), jobs.parse(["DEVICE=cpu", f"RECIPE={recipe}"])
    assert set(job.overrides(tmp_path)) - set(plain.overrides(tmp_path)) == {
        f"+recipe={recipe}",
        f"trainer.experiment_name={recipe}-fp16-seed1",
    }
    assert plain.environment(tmp_path)[jobs.MODULES] == "recipes.cpu.platform"
    assert job.environment(tmp_path)[jobs.MODULES] == "recipes.cpu.platform,recipes.flowrl.trainer"
    on_gpu = replace(job, device="cuda").environment(tmp_path)
    assert on_gpu[jobs.MODULES] == "recipes.flowrl.trainer" and "VERL_PLATFORM" not in on_gpu
    assert jobs.MODULES not in replace(plain, device="cuda").environment(tmp_path)
    assert importlib.util.find_spec("recipes.flowrl.trainer")


def test_a_recipe_does_not_replace_another_algorithm_without_a_word():
    with pytest.raises(Refused, match="^ALGO=ppo: RECIPE=flowrl goes with grpo$"):
        jobs.parse(["DEVICE=cpu", "ALGO=ppo", "RECIPE=flowrl"])


def test_a_run_resumes_by_itself_and_makes_its_model_beside_out_on_a_cluster_alone(monkeypatch):
    assert jobs.parse(["DEVICE=cpu"]).retries == 0
    assert jobs.parse(["DEVICE=cpu", "OUT=/tmp/run"]).made == CACHE / "addition"
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    job = jobs.parse(["DEVICE=cpu"])
    assert (job.cluster, job.retries, jobs.parse(["DEVICE=cpu", "RETRIES=0"]).retries) == ("127.0.0.1:6379", 2, 0)
    assert job.settings() == replace(job, cluster=None, retries=5).settings(), "a run is resumed wherever it ran"


def test_on_a_cluster_the_environment_goes_to_every_node_and_nothing_is_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    job = jobs.parse(["DEVICE=cpu", "RECIPE=flowrl", f"OUT={tmp_path}/it's a run"])
    config = jobs.compose(job, job.out)
    handed = config.ray_kwargs.ray_init.runtime_env.env_vars
    assert {name: handed[name] for name in job.environment(job.out)} == job.environment(job.out)
    assert all(isinstance(value, str) for value in handed.values()), "Ray takes nothing else"
    assert handed.OMP_NUM_THREADS == "1", "the device's own are still there"
    assert config.ray_kwargs.ray_init.num_cpus is None and config.ray_kwargs.ray_init.num_gpus is None
    assert config.transfer_queue.backend.SimpleStorage.required_node_resource == "GPU", "no head that has no CPU"
    assert job.made == tmp_path / ".cache/addition", "every node sees OUT, not this checkout"
    jobs.validate(job, config)


def test_a_gpu_is_not_looked_for_here_when_a_cluster_has_them(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert jobs.parse(["DEVICE=cuda"]).device == "cuda"


@pytest.mark.skipif(jobs.gpu_present(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(Refused, match="^DEVICE=cuda: "):
        jobs.parse(["DEVICE=cuda"])


@pytest.mark.parametrize("value", ["plain", "/a b/c", "a,b", "it's", "[x]=y", "10%", "[file]", "file:///x"])
def test_hydra_reads_back_what_was_quoted(value):
    (override,) = OverridesParser.create().parse_overrides([f"key={jobs.quoted(value)}"])
    assert override.value() == (["file"] if value == "[file]" else value)


def test_the_printed_line_starts_the_same_command(tmp_path):
    """A shell splits the line into the environment and the words with which ``main_ppo`` is started."""
    out = tmp_path / "it's a run"
    job = jobs.parse(["DEVICE=cpu", "ARGS=trainer.nnodes=1 '+note={a: 1}'"])
    program = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['VERL_FILE_LOGGER_PATH']]))"
    line = job.shell_line(out).replace(" -m ", f" -c {shlex.quote(program)} ")
    words, metrics = json.loads(subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout)
    assert words == job.command(out)[2:]
    assert metrics == str(out / "verl.jsonl")


def test_args_win_over_everything_else(tmp_path):
    job = jobs.parse(["DEVICE=cpu", "STEPS=3", "ARGS=trainer.total_training_steps=5 trainer.n_gpus_per_node=2"])
    config = jobs.compose(job, tmp_path)
    assert config.trainer.total_training_steps == 5
    assert config.ray_kwargs.ray_init.num_gpus == 2


@pytest.mark.parametrize("args", ["trainer.n_gpu=2", "foo", "trainer.nnodes=[1", "+precision=bf16", "+experiment=x"])
def test_a_misspelt_override_is_refused_in_one_line(args, tmp_path):
    with pytest.raises(Refused) as refusal:
        jobs.compose(jobs.parse(["DEVICE=cpu", f"ARGS={args}"]), tmp_path)
    assert str(refusal.value).startswith(f"ARGS={shlex.join([args])}: ") and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "words, args, reason",
    [
        ([], "actor_rollout_ref.actor.ppo_mini_batch_size=64", "train_batch_size (32) must be >="),
        ([], "actor_rollout_ref.actor.fsdp_config.model_dtype=float16", "model_dtype=float16 with dtype=float16 makes"),
        (["RECIPE=flowrl"], "actor_rollout_ref.actor.flowrl.beta=0", "actor_rollout_ref.actor.flowrl.beta=0: must be"),
        (["RECIPE=flowrl_paper"], "actor_rollout_ref.actor.use_kl_loss=false", "actor_rollout_ref.actor.use_kl_loss="),
        (["RECIPE=flowrl"], "actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.actor.strategy=megatron: "),
        ([], "actor_rollout_ref.actor.strategy=megatron", "Key 'megatron' is not in struct"),
    ],
)
def test_what_verl_or_a_recipe_would_refuse_is_refused_in_one_line(words, args, reason, tmp_path):
    good = jobs.parse(["DEVICE=cpu", *words])
    assert validation.refusal(jobs.compose(good, tmp_path)) is None
    job = jobs.parse(["DEVICE=cpu", *words, f"ARGS={args}"])
    refusal = validation.refusal(jobs.compose(job, tmp_path))
    assert refusal.startswith(reason) and "\n" not in refusal


def test_lora_is_validated_on_the_platform_of_the_job(tmp_path):
    """verl looks for vLLM to check a LoRA's rank, and finds its CPU build on the CPU platform alone."""
    loaded = sys.modules.keys() & {"recipes.cpu.platform", "vllm"}
    good, bad = (jobs.parse(["DEVICE=cpu", f"ARGS=actor_rollout_ref.model.lora_rank={rank}"]) for rank in (8, 513))
    jobs.validate(good, jobs.compose(good, tmp_path))
    bad = replace(bad, device="cuda")  # submitted to a cluster whose GPUs this machine may lack
    with pytest.raises(Refused, match="^ARGS=.*=513: lora_rank must be less than or equal to 512, but got 513$"):
        jobs.validate(bad, jobs.compose(bad, tmp_path))
    assert sys.modules.keys() & {"recipes.cpu.platform", "vllm"} == loaded, "this process is left as it was"


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ("trainer.save_freq=1 trainer.n_gpu=2 trainer.test_freq=5", "ARGS=trainer.n_gpu=2: Could not override"),
        (
            "data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=16 trainer.save_freq=1",
            "ARGS=actor_rollout_ref.actor.ppo_mini_batch_size=16: train_batch_size (8) must be >=",
        ),
    ],
)
def test_a_refusal_names_the_word_at_fault_alone(args, word, tmp_path):
    job = jobs.parse(["DEVICE=cpu", f"ARGS={args}"])
    with pytest.raises(Refused) as refusal:
        jobs.validate(job, jobs.compose(job, tmp_path))
    assert str(refusal.value).startswith(word) and "save_freq" not in str(refusal.value)


def test_a_refusal_that_no_word_of_args_is_for_names_the_configuration(tmp_path):
    job = replace(jobs.parse(["DEVICE=cpu", "ARGS=trainer.save_freq=1"]), experiment="none")
    with pytest.raises(Refused, match="^configuration: "):
        jobs.compose(job, tmp_path)


def test_ray_gives_its_workers_the_niceness_of_the_run_on_this_machine(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_worker_niceness", raising=False)
    assert jobs.parse(["DEVICE=cpu"]).environment(tmp_path)["RAY_worker_niceness"] == "0"
    monkeypatch.setenv("RAY_worker_niceness", "10")
    assert jobs.parse(["DEVICE=cpu"]).environment(tmp_path)["RAY_worker_niceness"] == "10"
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")  # whose nodes were started by somebody else
    assert "RAY_worker_niceness" not in jobs.parse(["DEVICE=cpu"]).environment(tmp_path)


def test_gpu_nodes_are_validated_for_without_the_cpu_platform(monkeypatch):
    """A head node without a GPU has the CUDA set: the CPU platform fits neither its torch nor its vLLM."""
    monkeypatch.setattr(jobs.importlib.metadata, "distributions", lambda name: [])
    job = replace(jobs.parse(["DEVICE=cpu"]), device="cuda")
    assert jobs.platform(job) == {}
    assert jobs.platform(replace(job, recipe="flowrl")) == {jobs.MODULES: "recipes.flowrl.trainer"}
    assert jobs.platform(replace(job, device="cpu")) == jobs.CPU_PLATFORM


def refusal_of_check(words: list[str], out: Path) -> str:
    with pytest.raises(Refused) as refusal:
        job = jobs.parse(["DEVICE=cpu", "STEPS=1", "EXPERIMENT=arithmetic", *words])
        jobs.check(job, jobs.compose(job, out), out)
    return str(refusal.value)


def test_data_that_cannot_be_used_are_refused(tmp_path):
    broken = tmp_path / "broken.parquet"
    broken.write_text("not a parquet file")
    good = parquet(tmp_path / "good.parquet")
    out = tmp_path / "out"
    assert refusal_of_check([f"TRAIN={broken}"], out).startswith(f"TRAIN={broken}: is not a readable parquet file")
    assert refusal_of_check([f"TRAIN={tmp_path}/none"], out).startswith(f"TRAIN={tmp_path}/none: is not a readable")
    assert refusal_of_check([f"TRAIN={good}", f"VAL={broken}"], out).startswith(f"VAL={broken}: ")
    for column in ROW:
        lacking = parquet(tmp_path / "lacking.parquet", without=column)
        assert f"lacks the column '{column}'" in refusal_of_check([f"TRAIN={lacking}"], out)
    assert "3 rows, but a batch has 32" in refusal_of_check([f"TRAIN={parquet(tmp_path / 'few.parquet', rows=3)}"], out)
    assert refusal_of_check(["ARGS=data.train_files=null"], out).startswith("TRAIN: is not set")
    assert not out.exists()


@pytest.mark.parametrize("words", ["TRAIN=/etc/hostname", "VAL=/none.parquet", "OUT=/proc/out", "PRECISION=fp61"])
def test_bad_input_is_refused_before_anything_is_installed(words):
    """``make run`` asks this of the bare Python, before it makes the environment."""
    command = [sys.executable, "-S", "-m", "lib.run.job", words]  # -S: no installed package
    done = subprocess.run(command, cwd=REPO / "scripts", capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith(f"run: {words}: ") and done.stderr.count("\n") == 1


def test_a_folder_that_cannot_be_made_and_a_full_disk_are_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert refusal_of_check([], tmp_path / "file" / "out").startswith(f"OUT={tmp_path}/file/out: cannot be written to")
    monkeypatch.setattr(jobs, "FREE_GIB", 1e9)
    assert "GiB free" in refusal_of_check([], tmp_path / "out")


def test_usable_data_pass(tmp_path):
    job = jobs.parse(["DEVICE=cpu", "STEPS=1", "EXPERIMENT=arithmetic", f"TRAIN={parquet(tmp_path / 'good.parquet')}"])
    jobs.check(job, jobs.compose(job, tmp_path), tmp_path)
