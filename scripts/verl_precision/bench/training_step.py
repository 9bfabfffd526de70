"""Time the training step of verl's worker in each regime: forward, backward and optimizer step of a Qwen2 model."""

import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist

from verl_precision.bench.gpu_formats import set_tf32
from verl_precision.bench.host_calls import host_calls
from verl_precision.bench.layer_pass import LEAST_ROUNDS, MARGIN, activation_bytes, dtypes_on
from verl_precision.bench.model_shape import ModelShape, entries
from verl_precision.bench.ranks import alternate, join
from verl_precision.bench.regime_timing import RegimeTiming, one_line, timings_of
from verl_precision.bench.resource_usage import allocate_workspaces, peak_memory, too_large

CLIP = 1.0
ROWS = 8
VOCABULARY = 32000


def needed_bytes(shape: ModelShape, length: int) -> int:
    """Return an estimate of the bytes of three workers: masters, gradients and Adam of each, activations in fp32."""
    logits = 4 * 3 * ROWS * length * shape.vocab  # they, their log-softmax and its gradient
    return round(MARGIN * (3 * 16 * shape.total + activation_bytes(shape, ROWS, length) + logits))


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
                optimizer_config=FSDPOptimizerConfig(lr=1e-6, total_training_steps=10**6, clip_grad=CLIP),
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


def measure_training(
    rank: int, store: str, depths: list[int], width: int, length: int, seconds: float, device: str, queue
) -> None:
    """Time the training step in bf16, fp16 and fp32; puts the timings into ``queue``.

    Args:
        depths: numbers of layers, in descending order: the first whose workers fit into the memory.
        width: of the hidden states; the MLP is four times as wide.
        length: of the rows of a batch, in tokens.
    """
    join(store, rank, 1, device)
    dtypes, left_out = dtypes_on(device)
    configs = {depth: entries("qwen2", VOCABULARY, width, 4 * width, depth, 16, 16) for depth in depths}
    shapes = {depth: ModelShape.of(config, "the model") for depth, config in configs.items()}
    reasons = {depth: too_large(needed_bytes(shape, length), device) for depth, shape in shapes.items()}
    depth = next((depth for depth, reason in reasons.items() if not reason), depths[-1])
    configuration = {"what": "training step", "optimizer": "foreach AdamW", "ranks": 1, "tokens": ROWS * length}
    configuration |= {
        "model": f"Qwen2, {depth} layer{'s' * (depth > 1)}",
        "parameters_m": round(shapes[depth].total / 1e6, 1),
    }
    if reasons[depth]:
        timings = [RegimeTiming(**configuration, regime="all", left_out=reasons[depth])]
    else:
        if device == "cuda":
            set_tf32(False)
            allocate_workspaces()
        takes = build_workers(configs[depth], dtypes, length)
        peaks = {}
        for name, take in takes.items():
            with peak_memory(torch.device(device)) as peak:
                take()  # allocates Adam's state
                take()
                peaks[name] = peak() / 2**30
        times = alternate(takes, lambda name: None, seconds, device, LEAST_ROUNDS)
        calls = {name: host_calls(take, device) for name, take in takes.items()}
        timings = timings_of(times, calls, peaks, **configuration)
        timings += [RegimeTiming(**configuration, regime=name, left_out=why) for name, why in left_out.items()]
    queue.put(timings)
    print(one_line(timings), flush=True)
    dist.destroy_process_group()
