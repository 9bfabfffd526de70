"""Run an update of verl's patched engine on tensors without data: ``python -m verl_precision.bench.traced_step FILE``.

FILE is JSON with the ``config`` of a job, its model's ``config.json`` as ``model``, the number of ``ranks``, the tokens
of a sequence as ``length``, and the sequences of a micro-batch as ``rows``. This process is one rank: torch's fake
process group answers for the others, and FakeTensorMode computes shapes and dtypes instead of numbers. Prints JSON.
"""

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type as is_wrapper
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from recipes.arithmetic.model import build_tokenizer
from recipes.cpu import host
from verl_precision.bench.flash_operators import Attention, in_place_log_probs
from verl_precision.bench.live_tensors import LiveTensors
from verl_precision.process import stdout_of_json

if TYPE_CHECKING:
    from tensordict import TensorDict

    from verl.workers.engine_workers import TrainingWorker

RANK = 1  # verl loads weights on rank 0, and builds the model without data on the others
OPERATORS = {
    "allgather_base": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_base": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "wait_tensor": None,  # sends nothing
}
ATTENTION = "traced"  # registered below


class Tracing(FakeTensorMode):
    """Compute shapes and dtypes, and record each collective and the live tensors.

    A number that is read is 0, and a truth value true: every gradient is finite. Operators whose tensors all have data,
    as the token ids do, compute as always.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.live = LiveTensors()
        self.collectives: Counter[tuple[str, str]] = Counter()  # bytes of the whole tensors, by operator and dtype

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if tensors and all(has_data(each) for each in tensors):
            with unset_fake_temporarily():
                return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1 if tensors[0].dtype is torch.bool else 0
        if func is torch.ops.aten._grouped_mm.default:
            out = self.grouped_mm(*args, **(kwargs or {}))
        else:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace in ("c10d", "_c10d_functional") and (name := OPERATORS[func._opname.strip("_")]):
            whole = max([*tensors, *(each for each in tree_leaves(out) if isinstance(each, torch.Tensor))], key=size)
            self.collectives[name, str(whole.dtype).removeprefix("torch.")] += size(whole)
        self.live.note(out)
        return out

    def grouped_mm(self, left: torch.Tensor, right: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Multiply by experts; torch knows the shapes of bf16 only."""

        def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            copy = torch.ops.aten._to_copy.default
            return super(Tracing, self).__torch_dispatch__(copy, (), (tensor,), {"dtype": dtype})

        operator, in_bf16 = torch.ops.aten._grouped_mm.default, [cast(each, torch.bfloat16) for each in (left, right)]
        return cast(super().__torch_dispatch__(operator, (), (*in_bf16, *args), kwargs), left.dtype)

    def sent(self) -> list[tuple[str, str, int]]:
        """Return the collectives so far, and forget them: operator, dtype, bytes."""
        sent = [(*key, size) for key, size in self.collectives.items()]
        self.collectives.clear()
        return sent

    def over(self, function: Callable) -> Callable:
        """Return ``function`` under this mode."""

        def traced(*args, **kwargs):
            with self:
                return function(*args, **kwargs)

        return traced


def has_data(tensor: torch.Tensor) -> bool:
    return not (is_wrapper(type(tensor)) or isinstance(tensor, FakeTensor) or tensor.is_meta)


def size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def attention(module, query, key, value, attention_mask, **kwargs) -> tuple[torch.Tensor, None]:
    return Attention.apply(query, key, value).transpose(1, 2), None


class WithoutWeights:
    """Stands for transformers' auto class: the model on the meta device."""

    @staticmethod
    def from_pretrained(torch_dtype: torch.dtype, config: Any, **kwargs) -> torch.nn.Module:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=torch_dtype)


def batch(sequences: int, length: int, temperature: float) -> "TensorDict":
    """Return full sequences as a trainer sends them to a worker."""
    from verl.utils import tensordict_utils as tu

    rows = [torch.zeros(length, dtype=torch.int64)] * sequences
    nested = lambda rows: torch.nested.as_nested_tensor(rows, layout=torch.jagged)  # noqa: E731
    tensors = {
        "input_ids": nested(rows),
        "position_ids": nested([torch.arange(length)] * sequences),
        "loss_mask": nested([torch.ones(length)] * sequences),
    }
    return tu.get_tensordict(tensors, non_tensor_dict={"temperature": temperature, "update_lr_scheduler": True})


def loss(model_output, data, dp_group=None):
    rows = torch.stack([row.float().sum() for row in model_output["log_probs"].unbind()])
    return -rows.sum() / data["batch_num_tokens"] * data["dp_size"], {}


def build(job: dict, trace: Tracing) -> "TrainingWorker":
    """Return the actor's worker of a job as verl builds it, except that its weights have no data."""
    host.PRODUCTS = ()  # which the CPU platform multiplies in fp32, in memory that a GPU does not take
    import verl.utils.model
    from verl.workers.engine.fsdp import transformer_impl
    from verl.workers.engine_workers import ActorRolloutRefWorker

    verl.utils.model.get_hf_auto_model_class = lambda hf_config: WithoutWeights
    transformer_impl.fsdp2_load_full_state_dict = trace.over(lambda model, *_: model.to_empty(device="cpu"))
    transformer_impl.logprobs_from_logits = in_place_log_probs
    AttentionInterface.register(ATTENTION, attention)
    model = AutoConfig.for_model(**job["model"])
    model.architectures = ["without weights"]
    config = OmegaConf.create(job["config"]).actor_rollout_ref
    with tempfile.TemporaryDirectory() as folder:
        for part in (model, build_tokenizer()):
            part.save_pretrained(folder)
        config.model.path = folder
        config.model.override_config = {"attn_implementation": ATTENTION}
        worker = ActorRolloutRefWorker(config, role="actor")
        worker.init_model()
    worker.set_loss_fn(loss)
    engine = worker.actor.engine
    kind = type(engine.module)
    kind.__call__ = trace.over(kind.__call__)
    torch.Tensor.backward = trace.over(torch.Tensor.backward)
    engine.optimizer_step = trace.over(engine.optimizer_step)
    return worker.actor


def main(file: str) -> None:
    job = json.loads(Path(file).read_text())
    out = stdout_of_json()
    ranks = {"WORLD_SIZE": job["ranks"], "LOCAL_WORLD_SIZE": job["ranks"], "RANK": RANK, "LOCAL_RANK": RANK}
    os.environ.update({name: str(value) for name, value in ranks.items()}, MASTER_ADDR="none", MASTER_PORT="0")
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=job["ranks"])
    temperature = job["config"]["actor_rollout_ref"]["rollout"]["temperature"]
    trace = Tracing()
    worker = build(job, trace)
    module, found = worker.engine.module, {}
    trace.live.note([*module.parameters(), *module.buffers()])
    found["weights"] = trace.live.total()
    for name, micro_batches in (("one", 1), ("two", 2)):
        trace.live.peak = 0  # of the last update: the first makes Adam's state
        worker.train_batch(batch(micro_batches * job["rows"], job["length"], temperature))
        found[name] = trace.sent()
    found["Adam"] = LiveTensors(list(worker.engine.optimizer.state.values())).total()
    found["peak"] = trace.live.peak - found["Adam"]
    trace.over(lambda: [None for _ in worker.engine.get_per_tensor_param()[0]])()
    found["sync"] = trace.sent()
    print(json.dumps(found), file=out)


if __name__ == "__main__":
    main(*sys.argv[1:])
