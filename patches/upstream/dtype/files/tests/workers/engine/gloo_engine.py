# Copyright 2025 Individual Contributor: the verl-precision authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""verl's FSDP engine on CPU processes that talk over gloo, for tests named ``*_on_cpu.py`` in this folder."""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 64


def run_on_gloo(case: Callable[[], Any], ranks: int = 2) -> list[Any]:
    """Run ``case()`` in ``ranks`` fresh processes that form a gloo group and return what each rank returned.

    They share an empty folder, their current one, which is removed in the end.

    Args:
        case: a function of a test module; it must be importable there, and its result picklable.

    Raises:
        AssertionError: a process failed; the message is its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("spawn")
        processes = [context.Process(target=_rank, args=(rank, ranks, folder, case)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        failures = [path.read_text() for path in sorted(Path(folder).glob("failure_*"))]
        assert not failures, failures[0]
        assert all(process.exitcode == 0 for process in processes)
        return [torch.load(Path(folder) / f"result_{rank}", weights_only=False) for rank in range(ranks)]


def _rank(rank: int, ranks: int, folder: str, case: Callable[[], Any]) -> None:
    sys.stdout = open(os.devnull, "w")
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="localhost",  # asked for, and not used: the group is there already
        MASTER_PORT="0",
        CUDA_VISIBLE_DEVICES="",
        VERL_ENGINE_DEVICE="cuda",  # the FSDP engine is registered for it, and runs on any device
    )
    try:
        _use_cpu()
        torch.distributed.init_process_group(
            "cpu:gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(minutes=2)
        )
        os.chdir(folder)
        torch.save(case(), f"{folder}/result_{rank}")
    except BaseException:
        Path(folder, f"failure_{rank}").write_text(traceback.format_exc())
        os._exit(1)  # the other ranks may wait in a collective: their own timeout ends them
    torch.distributed.destroy_process_group()


def _use_cpu() -> None:
    """Make the CPU verl's platform; call it before verl's engines are imported."""
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    for name in ("empty_cache", "max_memory_allocated", "max_memory_reserved"):
        setattr(torch.cpu, name, lambda: 0)
    torch.cpu.get_rng_state, torch.cpu.set_rng_state = torch.get_rng_state, torch.set_rng_state
    torch.Tensor.pin_memory = lambda self, device=None: self  # a forward-only model is offloaded to pinned memory

    class CPUPlatform(PlatformCUDA):
        device_name = "cpu"
        device_module = torch.cpu

        def is_available(self) -> bool:
            return True

        def current_device(self) -> str:
            return "cpu"

        def set_device(self, device_index: int) -> None:
            pass

        def communication_backend_name(self) -> str:
            return "gloo"

        def empty_cache(self) -> None:
            pass

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

    set_platform(CPUPlatform())


def make_worker(model: dict | None = None, checkpoint: dict | None = None, **engine) -> Any:
    """A ``TrainingWorker`` with an FSDP2 engine on a two-layer Qwen2 model of random weights, ready to train.

    Args:
        model: fields of ``HFModelConfig``.
        checkpoint: fields of ``CheckpointConfig``.
        engine: fields of ``FSDPEngineConfig``.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
            tie_word_embeddings=False,
        )
        Qwen2ForCausalLM(config).save_pretrained(folder)
        worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=HFModelConfig(
                    path=folder,
                    load_tokenizer=False,
                    use_remove_padding=False,
                    override_config={"attn_implementation": "sdpa"},
                    **(model or {}),
                ),
                engine_config=FSDPEngineConfig(
                    strategy="fsdp2",
                    use_dynamic_bsz=False,
                    micro_batch_size_per_gpu=2,
                    infer_micro_batch_size_per_gpu=2,
                    use_torch_compile=False,
                    **engine,
                ),
                optimizer_config=FSDPOptimizerConfig(
                    lr=1e-3, lr_warmup_steps=4, total_training_steps=100, clip_grad=1.0
                ),
                checkpoint_config=CheckpointConfig(**(checkpoint or {})),
            )
        )
        worker.reset()
    worker.set_loss_fn(_token_loss)
    return worker


def batch(seed: int = 0, size: int = 4) -> Any:
    """``size`` sequences of 6 to 9 tokens, different on each rank."""
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(1000 * seed + torch.distributed.get_rank())
    rows = [torch.randint(0, VOCABULARY, (6 + i % 4,), generator=generator) for i in range(size)]

    def nested(make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor([make(row) for row in rows], layout=torch.jagged)

    return tu.get_tensordict(
        {
            "input_ids": nested(lambda row: row),
            "position_ids": nested(lambda row: torch.arange(len(row))),
            "loss_mask": nested(lambda row: torch.ones(len(row))),
        },
        non_tensor_dict={"temperature": 1.0, "update_lr_scheduler": True},
    )


def train(worker: Any, seed: int = 0) -> dict[str, Any]:
    """One update of the worker on ``batch(seed)``; its metrics."""
    from verl.utils import tensordict_utils as tu

    return dict(tu.get(worker.train_batch(batch(seed)), "metrics"))


def _token_loss(model_output, data, dp_group=None):
    log_probs = torch.cat([row.float() for row in model_output["log_probs"].unbind()])
    return -log_probs.sum() / data["batch_num_tokens"] * data["dp_size"], {}
