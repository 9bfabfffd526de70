"""Time the training step of verl's worker in each regime: forward, backward and optimizer step of a Qwen2 model."""

import tempfile

import torch
import torch.distributed as dist

from lib.bench.cost_report import one_line, timings_of
from lib.bench.ranks import alternate, join

CLIP = 1.0


def measure_training(rank: int, store: str, seconds: float, device: str, layers: int, width: int, queue) -> None:
    """Time the training step in bf16, fp16 and fp32; puts the timings into ``queue``."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from recipes.arithmetic.model import build_tokenizer
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    join(store, rank, 1, device)
    tokenizer = build_tokenizer()
    shape = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    config = Qwen2Config(vocab_size=32000, num_attention_heads=16, num_key_value_heads=16, **shape)
    config.eos_token_id = config.pad_token_id = tokenizer.pad_token_id
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        model = Qwen2ForCausalLM(config)
        millions = sum(p.numel() for p in model.parameters()) / 1e6
        model.save_pretrained(folder)
        del model

        def worker(dtype: str) -> TrainingWorker:
            made = TrainingWorker(
                TrainingWorkerConfig(
                    model_type="language_model",
                    model_config=HFModelConfig(
                        path=folder, use_remove_padding=False, override_config={"attn_implementation": "sdpa"}
                    ),
                    engine_config=FSDPEngineConfig(
                        strategy="fsdp2",
                        dtype=dtype,
                        use_dynamic_bsz=False,
                        micro_batch_size_per_gpu=8,
                        use_torch_compile=False,
                    ),
                    optimizer_config=FSDPOptimizerConfig(lr=1e-6, total_training_steps=10**6, clip_grad=CLIP),
                )
            )
            made.reset()
            made.set_loss_fn(lambda model_output, data, dp_group=None: (-model_output["log_probs"].values().mean(), {}))
            return made

        length = 512 if device == "cuda" else 16
        rows = list(torch.randint(0, 256, (8, length)))
        nested = lambda make: torch.nested.as_nested_tensor([make(r) for r in rows], layout=torch.jagged)  # noqa: E731

        def step(trained: TrainingWorker) -> None:
            data = {
                "input_ids": nested(lambda r: r),
                "position_ids": nested(lambda r: torch.arange(len(r))),
                "loss_mask": nested(lambda r: torch.ones(len(r))),
            }
            trained.train_batch(tu.get_tensordict(data, {"temperature": 1.0, "update_lr_scheduler": True}))

        workers = {"bf16": worker("bfloat16"), "fp16": worker("float16"), "fp32": worker("float32")}
        peaks = {}
        if device == "cuda":
            for name, trained in workers.items():
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                step(trained)
                step(trained)
                peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
        takes = {name: lambda trained=trained: step(trained) for name, trained in workers.items()}
        times = alternate(takes, lambda name: None, seconds, device)
    timings = timings_of(
        times, peaks or None, what="training step", optimizer="foreach AdamW", parameters_m=round(millions, 1), ranks=1
    )
    queue.put(timings)
    print(one_line(timings), flush=True)
    dist.destroy_process_group()
