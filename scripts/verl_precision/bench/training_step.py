"""Time the training step of verl's worker in each regime: forward, backward and optimizer step of a Qwen2 model."""

import tempfile
from collections.abc import Callable
from functools import partial

import torch

from verl_precision.bench.cost_report import RegimeTiming, timings_of
from verl_precision.bench.measurement import alternate
from verl_precision.bench.model_shape import ModelShape
from verl_precision.facts.dtypes import torch_dtype

ROWS = 8
FP32_HEAD = " with fp32 head"  # after a regime's name
LEAST_ROUNDS = 11  # fp32 takes seconds a round on some GPUs


def build_workers(config: dict, regimes: list[str], length: int) -> dict[str, Callable[[], None]]:
    """Return the training step of a worker in each regime, all from the same weights.

    Args:
        config: entries of a Qwen2 model's ``config.json``.
        regimes: their names, some followed by ``FP32_HEAD``.
        length: of the rows of a batch, in tokens.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from recipes.arithmetic.model import build_tokenizer
    from verl.utils import tensordict_utils as tu
    from verl.utils import torch_functional
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    # Without flash-attn verl takes 16-bit log-probabilities token by token in Python, which would be most of the step.
    torch_functional.logprobs_from_logits_v2 = torch_functional.logprobs_from_logits_naive
    tokenizer = build_tokenizer()
    chosen = Qwen2Config(**{key: value for key, value in config.items() if key != "model_type"})
    chosen.eos_token_id = chosen.pad_token_id = tokenizer.pad_token_id
    nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    batch = {
        "input_ids": nested(list(torch.randint(0, 256, (ROWS, length)))),
        "position_ids": nested([torch.arange(length)] * ROWS),
        "loss_mask": nested([torch.ones(length)] * ROWS),
    }

    def worker(folder: str, regime: str) -> TrainingWorker:
        made = TrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=HFModelConfig(
                    path=folder, use_remove_padding=False, override_config={"attn_implementation": "sdpa"}
                ),
                engine_config=FSDPEngineConfig(
                    strategy="fsdp2",
                    dtype=str(torch_dtype(regime.removesuffix(FP32_HEAD))).removeprefix("torch."),
                    keep_fp32_modules=["lm_head"] if regime.endswith(FP32_HEAD) else [],
                    precision_requested=True,  # bf16 by +precision=bf16, too
                    use_dynamic_bsz=False,
                    micro_batch_size_per_gpu=ROWS,
                    use_torch_compile=False,
                ),
                optimizer_config=FSDPOptimizerConfig(lr=1e-6, total_training_steps=10**6, clip_grad=1.0),
            )
        )
        made.reset()
        made.set_loss_fn(lambda model_output, data, dp_group=None: (-model_output["log_probs"].values().mean(), {}))
        return made

    def step(trained: TrainingWorker) -> None:
        trained.train_batch(tu.get_tensordict(dict(batch), {"temperature": 1.0, "update_lr_scheduler": True}))

    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        Qwen2ForCausalLM(chosen).save_pretrained(folder)
        workers = {regime: worker(folder, regime) for regime in regimes}
    return {regime: partial(step, trained) for regime, trained in workers.items()}


def measure_training(config: dict, length: int, regimes: list[str], seconds: float, device: str) -> list[RegimeTiming]:
    """Return the timings of the training step in each of ``regimes``."""
    times = alternate(build_workers(config, regimes, length), seconds, LEAST_ROUNDS, device)
    subject = f"Qwen2, {config['num_hidden_layers']} layers, {ROWS * length} tokens"
    return timings_of(times, "training step", subject, round(ModelShape.of(config, "").total / 1e6, 1))
