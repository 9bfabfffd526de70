"""``scripts/launch/flowrl_7b.sh``: what it refuses, and the command that it becomes."""

import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from lib import job as jobs

SCRIPT = jobs.REPO / "scripts/launch/flowrl_7b.sh"


@pytest.fixture
def data(tmp_path) -> Path:
    """1,000 rows of verl's schema for training and validation."""
    row = {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "reward_model": {"style": "rule"},
    }
    for split in ("train", "test"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 1000), tmp_path / f"{split}.parquet")
    return tmp_path


def launch(*overrides: str, **knobs: object) -> subprocess.CompletedProcess:
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "DEVICE": "cpu"}
    environment |= {name: str(value) for name, value in knobs.items()}
    return subprocess.run([SCRIPT, *overrides], cwd="/", env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("knobs", "refusal"),
    [
        ({"NNODES": "0"}, "flowrl_7b: NNODES=0: must be a whole number of at least 1"),
        ({"GPUS_PER_NODE": "all"}, "flowrl_7b: GPUS_PER_NODE=all: must be a whole number of at least 1"),
        ({"DATA": "/no/data"}, "flowrl_7b: DATA=/no/data: has no train.parquet; make dapo-math writes data/dapo-math"),
        ({"NNODES": "2"}, "flowrl_7b: NNODES=2: RAY_ADDRESS is needed, the dashboard of a running Ray cluster"),
        ({"PRECISION": "fp61"}, "run: PRECISION=fp61: must be one of bf16, bf16_train_fp16_infer, fp16, fp32"),
        ({"RECIPE": "flow"}, "run: RECIPE=flow: must be one of flowrl, flowrl_paper"),
        ({"MODEL": "/no/model"}, "run: MODEL=/no/model: no config.json there"),
        ({"RAY_ADDRESS": "http://127.0.0.1:9"}, "submit: RAY_ADDRESS=http://127.0.0.1:9: no Ray cluster answers there"),
        ({"RAY_ADDRESS": "auto"}, "submit: RAY_ADDRESS=auto: must be the cluster's dashboard, like http://HEAD:8265"),
    ],
)
def test_a_bad_knob_is_refused_by_name(knobs, refusal, data):
    done = launch(**({"DATA": data} | knobs))
    said = [line for line in done.stderr.splitlines() if not line.startswith("make: *** ")]
    assert done.returncode and len(said) == 1 and said[0].startswith(refusal), done.stderr


@pytest.mark.parametrize(("where", "goal"), [({}, "run.py"), ({"RAY_ADDRESS": "http://head:8265"}, "submit.py")])
def test_the_knobs_and_overrides_reach_verl(where, goal, data):
    """By what make would start: each word as it was given, blanks, quotes, dollars and commas included."""
    overrides = ("data.train_batch_size=64", "+note='it costs $5, or more'", "trainer.logger=[console,file]")
    knobs = {"DATA": data, "NNODES": 4 if where else 1, "OUT": data / "out", "STEPS": 7, "PRECISION": "bf16"}
    done = launch(*overrides, MAKEFLAGS="n", **knobs, **where)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if f"scripts/{goal}" in line)
    words = shlex.split(line)[3:]
    job = jobs.parse(words)
    assert job.args == (f"trainer.nnodes={knobs['NNODES']}", "trainer.n_gpus_per_node=8", *overrides)
    config = jobs.compose(job, job.out)
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (knobs["NNODES"], 8)
    assert (config.data.train_batch_size, config.trainer.total_training_steps) == (64, 7)
    assert config.data.train_files == str(data / "train.parquet") and config.data.val_files == str(
        data / "test.parquet"
    )
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen2.5-7B"
    assert config.actor_rollout_ref.actor.dtype == "bfloat16"
    assert config.actor_rollout_ref.actor.flowrl.partition.dropout == 0.1, "the paper's preset"


def test_the_settings_are_the_papers(data):
    words = ["EXPERIMENT=flowrl_7b", "RECIPE=flowrl_paper", "DEVICE=cpu", f"TRAIN={data / 'train.parquet'}"]
    job = replace(jobs.parse(words), device="cuda")
    config = jobs.compose(job, data / "out")
    jobs.validate(job, config)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size, rollout.n, rollout.temperature) == (512, 32, 8, 1)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (2048, 8192)
    assert (actor.optim.lr, actor.optim.lr_warmup_steps, actor.optim.weight_decay, actor.optim.clip_grad) == (
        1e-6,
        10,
        0.1,
        1,
    )
    assert (actor.strategy, config.actor_rollout_ref.ref.strategy, actor.flowrl.beta) == ("fsdp2", "fsdp2", 15)
    for role in (actor.ppo_max_token_len_per_gpu, rollout.log_prob_max_token_len_per_gpu):
        assert role >= config.data.max_prompt_length + config.data.max_response_length
    assert rollout.log_prob_use_dynamic_bsz and config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz
