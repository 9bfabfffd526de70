"""Checks of a job's data, disk and machine before it starts."""

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import DictConfig, OmegaConf
from transformers import AutoTokenizer

from recipes.arithmetic.model import build_tokenizer
from verl_precision.errors import Refused
from verl_precision.facts import gpus
from verl_precision.facts.gpus import Gpu, has_kernels, query_gpus
from verl_precision.paths import REPO
from verl_precision.run import machine
from verl_precision.run.checks import check_start
from verl_precision.run.job import Job, compose, parse_job
from verl_precision.run.machine import check_gpus, fit_to_gpus
from verl_precision.words import options

T4 = Gpu("Tesla T4", (7, 5), bf16=False, kernels=True)
ROW = {"data_source": "arithmetic", "prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"style": "rule"}}


def parquet(file: Path, rows: int = 64, without: str | None = None, **other: object) -> Path:
    row = {name: value for name, value in (ROW | other).items() if name != without}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * rows), file)
    return file


def check(words: list[str], out: Path) -> None:
    job = parse_job(["DEVICE=cpu", "STEPS=1", "EXPERIMENT=arithmetic", *words])
    check_start(job, compose(job, out), out)


@pytest.mark.subprocess  # a configuration a case
def test_unusable_data_is_refused(tmp_path, monkeypatch):
    broken = tmp_path / "broken.parquet"
    broken.write_text("not a parquet file")
    good, few = parquet(tmp_path / "good.parquet"), parquet(tmp_path / "few.parquet", rows=3)

    def typed(**other: object) -> Path:
        return parquet(tmp_path / f"{len(list(tmp_path.iterdir()))}.parquet", **other)

    cases = {f"lacks the column '{name}'": [f"TRAIN={parquet(tmp_path / name, without=name)}"] for name in ROW}
    cases |= {
        f"^TRAIN={broken}: is not a readable parquet file": [f"TRAIN={broken}"],
        f"^TRAIN={tmp_path}/none: is not a readable": [f"TRAIN={tmp_path}/none"],
        f"^VAL={broken}: ": [f"TRAIN={good}", f"VAL={broken}"],
        "3 rows, but a batch needs 32": [f"TRAIN={few}"],
        "'prompt' of row 0 is '1.1='; it must be a list of messages": [f"TRAIN={typed(prompt='1+1=')}"],
        "'prompt' of row 0 is 'None'; it must be": [f"TRAIN={typed(prompt=None)}"],
        "'prompt' of row 0 is .*'role': 'user'.*; it must be": [f"TRAIN={typed(prompt=[{'role': 'user'}])}"],
        "'data_source' of row 0 is 'None'; it must be a name": [f"TRAIN={typed(data_source=None)}"],
        "'reward_model' of row 0 is '2'; it must be a struct": [f"VAL={typed(reward_model='2')}"],
        "^TRAIN: is not set": ["ARGS=data.train_files=null"],
        "^STEPS: is not set": ["ARGS=trainer.total_training_steps=null"],
    }
    for refusal, words in cases.items():
        with pytest.raises(Refused, match=refusal):
            check(words, tmp_path / "out")
    monkeypatch.setattr("verl_precision.files.FREE_GIB", 1e9)  # a full disk
    with pytest.raises(Refused, match="^OUT=.* GiB free"):
        check([], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["reward.custom_reward_function", "custom_reward_function"])
def test_file_without_the_reward_function_is_refused(key, tmp_path):
    train, reward = f"TRAIN={parquet(tmp_path / 'train.parquet')}", tmp_path / "reward.py"
    words = [train, f"ARGS=++{key}.path=file://{reward} ++{key}.name=score"]
    with pytest.raises(Refused, match=f"^{key}.path=file://{reward}: no such file$"):
        check(words, tmp_path / "out")
    reward.write_text("def other(): ...")
    with pytest.raises(Refused, match=f"^{key}.name=score: is not in file://{reward}$"):
        check(words, tmp_path / "out")
    reward.write_text("from rewards import score")
    check(words, tmp_path / "out")


def test_filter_that_the_sampler_of_a_cpu_ignores_is_refused(tmp_path):
    train, filtered = f"TRAIN={parquet(tmp_path / 'train.parquet')}", "++algorithm.filter_groups.enable=true"
    sampler = "trainer.v1.sampler.custom_sampler.path"
    with pytest.raises(Refused, match=f"^algorithm.filter_groups.enable=true: has no effect .* ARGS={sampler}=null$"):
        check([train, f"ARGS={filtered}"], tmp_path / "out")
    check([train, f"ARGS={filtered} {sampler}=null"], tmp_path / "out")


def test_data_that_fill_one_batch_pass(tmp_path):
    """A training batch has 32 rows, of one file or several; one row is enough to validate on."""
    batch, half, row = (parquet(tmp_path / f"{rows}.parquet", rows) for rows in (32, 16, 1))
    check([f"TRAIN={batch}"], tmp_path / "out")
    check([f"TRAIN={half}", f"ARGS=data.train_files=[{half},{half}]", f"VAL={row}"], tmp_path / "out")


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory) -> Path:
    """The folder of a tokenizer of one token per byte; a prompt has one more."""
    folder = tmp_path_factory.mktemp("model")
    build_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    return folder


@pytest.mark.subprocess
@pytest.mark.parametrize(
    ("args", "refused"),
    [
        ("", True),
        ("data.truncation=right", True),
        ("data.truncation=left", False),
        ("data.filter_overlong_prompts=true", False),
        ("data.max_prompt_length=43", True),
        ("data.max_prompt_length=44", False),
    ],
)
def test_prompts_that_verl_would_cut_are_refused(args, refused, byte_model, tmp_path):
    short, long = ([{"role": "user", "content": "1" * length}] for length in (3, 43))
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([ROW | {"prompt": long if row == 5 else short} for row in range(64)]),
        data := tmp_path / "data.parquet",
    )
    words = [f"MODEL={byte_model}", f"TRAIN={data}", *([f"ARGS={args}"] if args else [])]
    if not refused:
        check(words, tmp_path / "out")
        return
    with pytest.raises(Refused, match=" data.truncation=(error|right) is ignored: ") as refusal:
        check(words, tmp_path / "out")
    assert str(refusal.value).startswith(
        f"TRAIN={data}: row 5 has 44 tokens, and 1 of the first 64 rows are too long for data.max_prompt_length="
    )
    assert "give ARGS=data.max_prompt_length=44, ARGS=data.filter_overlong_prompts=true" in str(refusal.value)


SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"


@pytest.mark.subprocess
@pytest.mark.parametrize(
    ("files", "template", "refusal"),
    [
        ({}, None, "its tokenizer has no chat template"),
        ({"tokenizer_config.json": None}, None, ""),  # of the Hub's files only config.json is here
        ({"processor_config.json": "{}"}, None, ""),  # verl renders by the processor
        ({"config.json": '{"model_type": "deepseek_v4"}'}, None, ""),
        ({}, {"default": "1", "tool_use": "2"}, ""),
        ({}, SYSTEM, "row 0: the chat template of MODEL=.* refuses it: System role not supported$"),
    ],
)
def test_prompts_are_rendered_as_verl_renders_them(files, template, refusal, byte_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(byte_model)
    tokenizer.chat_template = template
    model = tmp_path / "model"
    tokenizer.save_pretrained(model)
    shutil.copy(byte_model / "config.json", model)
    for name, content in files.items():
        (model / name).unlink() if content is None else (model / name).write_text(content)
    rows = [ROW | {"prompt": [{"role": "system", "content": "1"}]}] * 32
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), data := tmp_path / "data.parquet")
    with pytest.raises(Refused, match=refusal) if refusal else contextlib.nullcontext():
        check([f"MODEL={model}", f"TRAIN={data}"], tmp_path / "out")


@cache
def default() -> DictConfig:
    return compose(parse_job(["DEVICE=cpu"]), REPO / "out")


def configured(args: str) -> DictConfig:
    """Return the configuration of the default job with these overrides."""
    return OmegaConf.merge(default(), OmegaConf.from_dotlist(args.split()))


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ("n_gpus_per_node=5", "must be at most 4: of the 16 CPUs that Ray is given here, verl reserves 3 a worker"),
        ("n_gpus_per_node=0", "must be a whole number of at least 1"),
        ("n_gpus_per_node=two", "must be a whole number of at least 1"),
        ("nnodes=2", "must be 1 without RAY_ADDRESS"),
        ("n_gpus_per_node=999 ray_kwargs.ray_init.num_cpus=null", "CPUs that Ray counts here"),
    ],
)
def test_more_workers_than_ray_can_place_are_refused(args, reason):
    with pytest.raises(Refused, match=f"^trainer.{args.split()[0]}: .*{reason}"):
        machine.check_machine(configured(f"trainer.{args}"), "cpu")


def test_as_many_workers_as_ray_can_place_pass():
    for args in ("4", "64 ray_kwargs.ray_init.num_cpus=194", "5 trainer.use_v1=false"):  # which has no TransferQueue
        machine.check_machine(configured(f"trainer.n_gpus_per_node={args}"), "cpu")
    units = "transfer_queue.backend.SimpleStorage.num_data_storage_units=7"
    assert machine.cpus_per_node(configured(f"trainer.nnodes=2 trainer.n_gpus_per_node=8 {units}")) == 3 * 8 + 4 + 1


def test_workers_take_all_gpus(monkeypatch):
    monkeypatch.setattr(machine, "find_gpus", lambda: [T4] * 3)
    machine.check_machine(configured("trainer.n_gpus_per_node=3"), "cuda")
    with pytest.raises(Refused, match="^trainer.n_gpus_per_node=4: must be at most 3, the GPUs of this machine"):
        machine.check_machine(configured("trainer.n_gpus_per_node=4"), "cuda")


def a_gpu(capability: tuple[int, int]) -> Gpu:
    return Gpu("NVIDIA X", capability, bf16=capability >= (8, 0), kernels=capability != (7, 0))


@pytest.fixture
def on_gpus(monkeypatch) -> Callable[..., Job]:
    """``on_gpus([(7, 5)], "PRECISION=bf16", flash_attn=False)``: a job on a machine with such GPUs, and its line."""

    def on(capabilities: list[tuple[int, int]], *words: str, flash_attn: bool = True) -> tuple[Job, str]:
        monkeypatch.setattr(machine, "find_gpus", lambda: tuple(map(a_gpu, capabilities)))
        monkeypatch.setattr(machine, "flash_attn_installed", lambda: flash_attn)
        return fit_to_gpus(replace(parse_job(["DEVICE=cpu", *words]), device="cuda"))

    return on


SDPA = {"attn_implementation": "sdpa", "_attn_implementation": "sdpa"}
WITHOUT = "attention sdpa, padding is not removed, because"


@pytest.mark.parametrize(
    ("capabilities", "flash_attn", "preset", "why"),
    [
        ([(7, 5)], True, "+device=turing", f": {WITHOUT} flash attention 2 requires sm80"),
        ([(7, 2)], False, "+device=volta", f": {WITHOUT} flash attention 2 requires sm80"),
        ([(12, 0), (8, 9)], True, "+device=ampere", ""),
        ([(8, 6)], False, "+device=ampere +attention=sdpa", f": {WITHOUT} flash-attn is not installed"),
        ([(9, 0)], True, "+device=hopper", ""),
        ([(12, 0)], False, "+device=hopper +attention=sdpa", f": {WITHOUT} flash-attn is not installed"),
    ],
)
def test_preset_of_the_oldest_gpu_and_the_attention_that_runs_there(
    on_gpus, capabilities, flash_attn, preset, why, tmp_path
):
    job, line = on_gpus(capabilities, flash_attn=flash_attn)
    major, minor = min(capabilities)
    assert line == f"NVIDIA X (sm{major}{minor}): {preset}{why}"
    model = compose(job, tmp_path).actor_rollout_ref.model
    assert dict(model.override_config) == (SDPA if why else {}), "verl's default is flash attention 2"
    assert model.use_remove_padding == (not why)


def test_every_preset_has_its_capability_and_the_highest_comes_first():
    """``preset_of`` takes the first one that a GPU reaches."""
    assert {*machine.PRESETS} == {*options("device")} - {"cpu"}
    capabilities = [*machine.PRESETS.values()]
    assert capabilities == sorted(capabilities, reverse=True)


def test_presets_leave_a_cluster_alone_and_refuse_what_vllm_does_not_support(on_gpus, monkeypatch):
    with pytest.raises(Refused, match=r"^DEVICE=cuda: NVIDIA X \(sm61\): vLLM requires compute capability 7.0"):
        on_gpus([(6, 1)])
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")  # its nodes report their GPUs themselves
    assert on_gpus([(7, 5)])[0].gpu_overrides == ()


@pytest.mark.parametrize(
    ("capability", "flash_attn", "words", "refusal"),
    [
        ((7, 5), True, [], None),
        ((8, 0), True, ["PRECISION=bf16", "ALGO=ppo"], None),
        ((7, 5), True, ["PRECISION=bf16"], "PRECISION=bf16: actor, rollout would compute in bfloat16, which NVIDIA X"),
        ((7, 5), True, ["PRECISION=bf16_train_fp16_infer"], "PRECISION=bf16_train_fp16_infer: actor would compute in"),
        ((7, 5), False, ["ALGO=ppo"], None),
        (
            (7, 5),
            True,
            ["ARGS=device=ampere"],
            "actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2: flash attention 2 requires",
        ),
        (
            (7, 5),
            True,
            ["ALGO=ppo", "ARGS=critic.model.override_config.attn_implementation=flash_attention_2"],
            "critic.model.override_config.attn_implementation=flash_attention_2: flash attention 2 requires sm80",
        ),
        ((7, 0), True, [], "DEVICE=cuda: torch [0-9.]*(.cpu)? has no kernels for NVIDIA X .sm70."),
    ],
)
def test_job_that_the_gpu_cannot_run_is_refused(on_gpus, capability, flash_attn, words, refusal, tmp_path):
    job, _ = on_gpus([capability], *words, flash_attn=flash_attn)
    config = compose(job, tmp_path)
    if refusal is None:
        check_gpus(job, config)
        return
    with pytest.raises(Refused, match=f"^{refusal}") as refused:
        check_gpus(job, config)
    assert "\n" not in str(refused.value)


HEAD_OF_512 = "attention heads of 512, at most 256 are"
LATENT = "latent attention of rank 512 .kv_lora_rank., at most 256 is"


@pytest.mark.parametrize(
    ("config", "capability", "excess"),
    [
        ({"head_dim": 128}, (7, 5), None),
        ({"head_dim": 256}, (7, 5), None),
        ({"hidden_size": 896}, (7, 5), None),
        ({"text_config": {"head_dim": 256, "global_head_dim": 512}}, (7, 5), HEAD_OF_512),
        ({"head_dim": 512}, (7, 5), HEAD_OF_512),
        ({"head_dim": 512}, (8, 0), None),
        ({"kv_lora_rank": 256}, (7, 5), None),
        ({"kv_lora_rank": 512}, (7, 5), LATENT),
        ({"kv_lora_rank": None}, (7, 5), None),
        ({"text_config": {"kv_lora_rank": 512}}, (7, 5), LATENT),
        ({"kv_lora_rank": 512}, (8, 0), None),
        ({"head_dim": 512}, (7, 0), None),
        ({"kv_lora_rank": 512}, (7, 0), LATENT),
    ],
)
def test_attention_beyond_the_shared_memory_is_refused(on_gpus, monkeypatch, config, capability, excess, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    job, _ = on_gpus([capability], f"MODEL={tmp_path}")
    monkeypatch.setattr(machine, "find_gpus", lambda: (replace(a_gpu(capability), kernels=True),))
    composed = compose(job, tmp_path)
    if excess is None:
        check_gpus(job, composed)
        return
    with pytest.raises(
        Refused, match=f"^MODEL={tmp_path}: has {excess} possible on NVIDIA X .sm7[05].: vLLM's attention"
    ):
        check_gpus(job, composed)


def test_job_is_compared_with_the_gpus_before_it_starts(on_gpus, monkeypatch, tmp_path):
    job, _ = on_gpus([(7, 5)], "PRECISION=bf16", "ARGS=ray_kwargs.ray_init.num_cpus=16")
    monkeypatch.setattr(machine, "find_gpus", lambda: [T4])
    with pytest.raises(Refused, match="^PRECISION=bf16: "):
        check_start(job, compose(job, tmp_path), tmp_path / "out")


def test_gpus_are_queried_for_what_their_hardware_computes(monkeypatch):
    """A T4 answers that it supports bfloat16 unless emulation is left out."""
    fake = {
        "device_count": lambda: 1,
        "device": lambda index: contextlib.nullcontext(),
        "is_bf16_supported": lambda including_emulation=True: including_emulation,
        "get_device_capability": lambda index: (7, 5),
        "get_arch_list": lambda: ["sm_75", "sm_80"],
        "get_device_name": lambda index: "Tesla T4",
    }
    for name, function in fake.items():
        monkeypatch.setattr(f"torch.cuda.{name}", function)
    assert query_gpus() == [T4] and str(T4) == "Tesla T4 (sm75)"
    monkeypatch.setattr(gpus, "find_gpus", gpus.find_gpus.__wrapped__)
    assert gpus.find_gpus() == (), "this torch has no CUDA: the process that asks it finds none"


@pytest.mark.parametrize(
    ("archs", "running"),
    [
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 3), (12, 0)]),
        ("sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90", [(7, 0), (7, 5), (8, 0), (8, 9), (9, 0)]),
        ("sm_80 sm_90a compute_90", [(8, 0), (8, 9), (9, 0), (10, 3), (12, 0)]),
    ],
)
def test_kernels_run_on_later_gpus_of_the_same_generation(archs, running):
    known = [(7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 3), (12, 0)]
    assert [capability for capability in known if has_kernels(capability, archs.split())] == running
