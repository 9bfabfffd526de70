"""verl's SFT trainer on two gloo ranks: fp16, an overflow, a storm and a resume.

The conformance suite tests the dtypes of SFT, upstream's included.
"""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from support.fork_server import JobError


@pytest.fixture(scope="module")
def train(fork_server, environment, tiny_model, tmp_path_factory):
    """``train(out, *overrides, ranks=2)``: train with patched verl; return the metrics by step, and the error."""
    data = tmp_path_factory.mktemp("data") / "train.parquet"
    sums = [(i, j) for i in range(8) for j in range(8)]
    messages = [
        [{"role": "user", "content": f"{i}+{j}="}, {"role": "assistant", "content": str(i + j)}] for i, j in sums
    ]
    pd.DataFrame({"messages": messages}).to_parquet(data)

    def run(out: Path, *overrides: str, ranks: int = 2) -> tuple[dict[int, dict], str]:
        words = [
            *("-m", "verl.trainer.sft_trainer"),
            f"data.train_files={data}",
            "data.train_batch_size=4",
            "data.micro_batch_size_per_gpu=2",
            "data.use_dynamic_bsz=false",
            "data.max_length=64",
            "data.num_workers=0",
            "data.ignore_input_ids_mismatch=true",  # the template adds its first token to every turn
            f"model.path={tiny_model}",
            "model.use_remove_padding=false",
            "+model.override_config.attn_implementation=sdpa",
            "engine.use_torch_compile=false",
            "optim.lr=1e-3",
            "optim.lr_warmup_steps=4",
            "trainer.device=cpu",
            "trainer.logger=[file]",
            f"trainer.default_local_dir={out}/checkpoints",
            f"hydra.run.dir={out}",
            *overrides,
        ]
        log, error = out / "verl.jsonl", ""
        try:
            fork_server.check(words, environment("patched") | {"VERL_FILE_LOGGER_PATH": str(log)}, out, ranks=ranks)
        except JobError as failure:
            error = str(failure)
        rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return {row["step"]: row["data"] for row in rows}, error

    return run


def saved(out: Path, step: int, kind: str, rank: int) -> dict:
    folder = out / "checkpoints" / f"global_step_{step}"
    return torch.load(folder / f"{kind}_world_size_2_rank_{rank}.pt", weights_only=False)


# The first step overflows once; from two steps later the scale is always too large.
FP16 = ["+precision=fp16", "engine.grad_scaler.init_scale=1e13", "engine.grad_scaler.growth_interval=1"]
ONE_OVERFLOW = [*FP16, "engine.grad_scaler.backoff_factor=1e-9", "trainer.total_training_steps=2"]
STORM = [
    *FP16,
    "engine.grad_scaler.growth_factor=1e20",
    "engine.grad_scaler.max_consecutive_skips=2",
    "trainer.total_training_steps=9",
]


def test_sft_trains_in_fp16_and_saves_after_a_storm(train, tmp_path):
    steps, error = train(tmp_path, *ONE_OVERFLOW)
    assert not error, error
    skipped, taken = steps[1], steps[2]
    assert (skipped["train/skipped_steps"], skipped["train/loss_scale"]) == (1.0, pytest.approx(1e4))
    assert "train/grad_norm" not in skipped and skipped["train/lr"] == 0, "the learning rate moved on"
    assert (taken["train/skipped_steps"], taken["train/loss_scale"]) == (0.0, pytest.approx(2e4))
    assert taken["train/grad_norm"] > 0 and taken["train/lr"] == pytest.approx(1e-3 / 4)
    for rank in (0, 1):
        scaler = saved(tmp_path, 2, "extra_state", rank)["grad_scaler"]
        assert scaler["scale"] == pytest.approx(2e4) and scaler["consecutive_skips"] == 0

    steps, error = train(tmp_path, *STORM)
    assert "LossScaleError: 2 optimizer steps in a row overflowed" in error
    assert steps[3]["train/loss_scale"] == pytest.approx(2e24), "the scale was not restored"
    assert steps[4]["train/skipped_steps"] == 1.0 and 5 not in steps
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "5"
    for rank in (0, 1):
        assert saved(tmp_path, 5, "extra_state", rank)["grad_scaler"] is None, (
            "the scale of the storm must not be saved"
        )
        assert all(tensor.to_local().isfinite().all() for tensor in saved(tmp_path, 5, "model", rank).values())


@pytest.mark.slow
def test_sft_trains_adapters_in_fp32_over_a_base_in_fp16(train, tmp_path):
    lora = ["engine.model_dtype=fp16", "model.lora_rank=4", "model.target_modules=all-linear"]
    # Adapters start at random: with the preset's 65536 a step overflows in some draws, with 98304 in most.
    lora += ["+precision=fp16", "engine.grad_scaler.init_scale=1024"]
    for last in (1, 2):  # the second run resumes
        steps, error = train(tmp_path, *lora, f"trainer.total_training_steps={last}")
        assert not error, error
        assert list(steps) == [last] and steps[last]["train/grad_norm"] > 0
        for rank in (0, 1):
            dtypes = {("lora_" in name, each.dtype) for name, each in saved(tmp_path, last, "model", rank).items()}
            assert dtypes == {(True, torch.float32), (False, torch.float16)}


@pytest.mark.slow
def test_sft_refuses_contradicting_dtypes(train, tmp_path):
    steps, error = train(tmp_path, "+precision=bf16", "engine.dtype=float16", ranks=1)
    assert not steps and "dtype=bfloat16 and engine.dtype=float16 contradict each other" in error


@pytest.mark.slow
def test_sft_refuses_kept_modules_that_are_no_list(train, tmp_path):
    steps, error = train(tmp_path, "engine.keep_fp32_modules=lm_head", ranks=1)
    assert not steps and "keep_fp32_modules=lm_head" in error
    assert "full_key: engine" in error, "Hydra refuses the config, before the model is loaded"
