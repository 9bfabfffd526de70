"""Time the training step of verl's worker in each regime: forward, backward and optimizer step of a Qwen2 model."""

import tempfile
from collections.abc import Callable, Iterator

import torch

from verl_precision.bench.measurement import lacks_ampere, peak_memory
from verl_precision.bench.model_shape import ModelShape, entries
from verl_precision.bench.regimes import BASE, RegimeTiming, alternate, host_calls, timings_of
from verl_precision.facts.dtypes import torch_dtype

ROWS = 8
VOCABULARY = 32000
LEAST_ROUNDS = 11  # fp32 takes seconds a round on some GPUs


def build_workers(config: dict, dtypes: dict[str, torch.dtype], length: int) -> dict[str, Callable[[], None]]:
    """Return the training step of a worker in each regime, all from the same weights.

    Args:
        config: entries of a Qwen2 model's ``config.json``.
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
    rows = list(torch.randint(0, 256, (ROWS, length)))

    def worker(folder: str, dtype: torch.dtype) -> TrainingWorker:
        made = TrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=HFModelConfig(
                    path=folder, use_remove_padding=False, override_config={"attn_implementation": "sdpa"}
                ),
                engine_config=FSDPEngineConfig(
                    strategy="fsdp2",
                    dtype=str(dtype).removeprefix("torch."),
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
        nested = lambda make: torch.nested.as_nested_tensor([make(r) for r in rows], layout=torch.jagged)  # noqa: E731
        data = {
            "input_ids": nested(lambda r: r),
            "position_ids": nested(lambda r: torch.arange(len(r))),
            "loss_mask": nested(lambda r: torch.ones(len(r))),
        }
        trained.train_batch(tu.get_tensordict(data, {"temperature": 1.0, "update_lr_scheduler": True}))

    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        Qwen2ForCausalLM(chosen).save_pretrained(folder)
        workers = {name: worker(folder, dtype) for name, dtype in dtypes.items()}
    return {name: lambda trained=trained: step(trained) for name, trained in workers.items()}


def dtypes_on(device: str) -> tuple[dict[str, torch.dtype], dict[str, str]]:
    """Return the dtype of each regime that ``device`` can compute in, and the reason for each regime that it cannot."""
    reason = lacks_ampere("bfloat16") if device == "cuda" else ""
    left_out = {BASE: reason} if reason else {}
    return {name: torch_dtype(name) for name in (BASE, "fp16", "fp32") if name not in left_out}, left_out


def time_training(
    steps: dict[str, Callable[[], object]], left_out: dict[str, str], seconds: float, device: str, **configuration
) -> list[RegimeTiming]:
    """Measure each regime's peak memory above the weights, time the regimes in turns, and count their calls.

    Args:
        steps: by regime; a step that runs out of the GPU's memory is removed and left out.
        left_out: the regimes that the device cannot compute in, each with the reason.
    """
    left_out, peaks = dict(left_out), {}
    for regime in list(steps):
        try:
            with peak_memory(torch.device(device)) as peak:
                steps[regime]()  # allocates Adam's state
                steps[regime]()
                peaks[regime] = peak() / 2**30
        except torch.OutOfMemoryError:
            left_out[regime] = f"needs more than the {torch.cuda.mem_get_info()[1] / 1e9:.1f} GB of this GPU"
            del steps[regime]
    times = alternate(steps, lambda regime: None, seconds, device, LEAST_ROUNDS) if steps else {}
    counts = {regime: host_calls(run, device) for regime, run in steps.items()}
    without = [RegimeTiming(**configuration, regime=regime, left_out=why) for regime, why in left_out.items()]
    return timings_of(times, counts, peaks, **configuration) + without


def measure_training(layers: int, width: int, length: int, seconds: float, device: str) -> Iterator[list[RegimeTiming]]:
    """Yield the timings of the training step in bf16, fp16 and fp32.

    Args:
        width: of the hidden states; the MLP is four times as wide.
        length: of the rows of a batch, in tokens.
    """
    dtypes, left_out = dtypes_on(device)
    config = entries("qwen2", VOCABULARY, width, 4 * width, layers, 16, 16)
    yield time_training(
        build_workers(config, dtypes, length),
        left_out,
        seconds,
        device,
        part="training step",
        subject=f"Qwen2, {layers} layer{'s' * (layers > 1)}",
        parameters_m=round(ModelShape.of(config, "the model").total / 1e6, 1),
        tokens=ROWS * length,
    )
