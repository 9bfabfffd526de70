"""Measure the peak memory of real training workers on gloo ranks; run with verl on PYTHONPATH.

    memory_worker.py NAME TOKENIZER_DIR OUT_DIR SETTINGS_JSON

Builds verl's ``TrainingWorker`` around a model for each setting of a list, trains two steps and writes the largest sum
of live tensors, in bytes, to OUT_DIR/rank_r.json.
"""

import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from support.waiting import TIMEOUT_S
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type as is_wrapper
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.precision import GradScalerConfig
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine_workers import TrainingWorker
from verl_precision.bench.flash_operators import in_place_log_probs
from verl_precision.bench.live_tensors import LiveTensors

TOKENIZER, OUT, SETTINGS = sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4])
RANK = int(os.environ["RANK"])
logprobs_from_logits = transformer_impl.logprobs_from_logits


def make_worker(setting: dict, folder: Path) -> TrainingWorker:
    critic = setting["role"] == "critic"
    if RANK == 0:
        config = AutoConfig.for_model(**setting["model"], **({"num_labels": 1} if critic else {}))
        kind = AutoModelForTokenClassification if critic else AutoModelForCausalLM
        kind.from_config(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)
    dist.barrier()
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="value_model" if critic else "language_model",
            model_config=HFModelConfig(
                path=str(folder),
                use_remove_padding=False,
                enable_gradient_checkpointing=setting["checkpointing"],
                override_config={"attn_implementation": "sdpa"},
                lora_rank=setting["lora_rank"],
                target_modules="all-linear",
            ),
            engine_config=FSDPEngineConfig(
                strategy=setting["strategy"],
                dtype=setting["dtype"],
                model_dtype=setting["base"],
                use_dynamic_bsz=False,
                micro_batch_size_per_gpu=setting["micro_batch"],
                infer_micro_batch_size_per_gpu=setting["micro_batch"],
                use_torch_compile=False,
                use_no_sync_for_gradient_accumulation=setting["deferred"],
                grad_scaler=GradScalerConfig(init_scale=1.0),  # no step is skipped, so the second has Adam's state
            ),
            optimizer_config=FSDPOptimizerConfig(lr=1e-4, lr_warmup_steps=0, total_training_steps=10, clip_grad=1.0),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    key = "values" if critic else "log_probs"

    def loss(model_output, data, dp_group=None):
        rows = torch.stack([row.float().sum() for row in model_output[key].unbind()])
        return -rows.sum() / data["batch_num_tokens"] * data["dp_size"], {}

    worker.set_loss_fn(loss)
    return worker


def batch(rows: int, length: int, **more):
    generator = torch.Generator().manual_seed(RANK)
    tokens = [torch.randint(0, 64, (length,), generator=generator) for _ in range(rows)]
    nested = lambda make: torch.nested.as_nested_tensor([make(r) for r in tokens], layout=torch.jagged)  # noqa: E731
    return tu.get_tensordict(
        {
            "input_ids": nested(lambda r: r),
            "position_ids": nested(lambda r: torch.arange(len(r))),
            "loss_mask": nested(lambda r: torch.ones(len(r))),
        },
        non_tensor_dict={"temperature": 1.0, "update_lr_scheduler": True} | more,
    )


class Recorded(TorchDispatchMode):
    """Note what operators return."""

    def __init__(self, live: LiveTensors) -> None:
        super().__init__()
        self.live = live

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(is_wrapper(each) for each in types):
            return NotImplemented  # for DTensor and nested tensors, operators on the inner tensors are dispatched here
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.split.Tensor:  # called by gloo on its copy of reduced tensors
            self.live.note(out)
        return out


def measure(setting: dict, folder: Path) -> dict:
    """Return bytes of this rank's tensors: the ``peak`` of two steps, that of log-probabilities (``scored``), weights
    (``parameters``) and ``Adam``."""
    worker = make_worker(setting, folder)
    transformer_impl.logprobs_from_logits = in_place_log_probs if setting["in_place"] else logprobs_from_logits
    gc.collect()
    module = worker.engine.module
    live = LiveTensors([*module.parameters(), *module.buffers()])
    parameters = live.total()
    with Recorded(live):
        for _ in range(2):
            worker.train_batch(batch(setting["rows"], setting["length"]))
    gc.collect()
    scored = LiveTensors([])
    scored.storages = live.storages
    with Recorded(scored):
        worker.infer_batch(batch(setting["rows"], setting["length"], compute_loss=False, calculate_entropy=True))
    states = [value for state in worker.engine.optimizer.state.values() for value in state.values()]
    return {
        "peak": live.peak,
        "scored": scored.peak,
        "parameters": parameters,
        "Adam": LiveTensors(states).total(),
    }


def main() -> None:
    initialize_global_process_group_ray(timeout_second=TIMEOUT_S)
    results = []
    for index, setting in enumerate(SETTINGS):
        results.append(measure(setting, OUT / f"model-{index}"))
        gc.collect()
    (OUT / f"rank_{RANK}.json").write_text(json.dumps(results))
    dist.barrier()


if __name__ == "__main__":
    main()
