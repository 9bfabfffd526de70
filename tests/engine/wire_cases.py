"""Cases of verl's FSDP engine: weights sent to the rollout and exported."""

import json
from pathlib import Path

import torch
from fsdp_worker import PATCHED, RANK, STRATEGY, composed, make_worker, merge, name_of, shared_directory
from transformers import AutoModelForCausalLM

from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWorker, ColocatedCheckpointEngine
from verl.trainer.config import CheckpointConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import ActorRolloutRefWorker


@CheckpointEngineRegistry.register("probe")
class ProbeCheckpointEngine(ColocatedCheckpointEngine):
    """Accept ``rollout_dtype`` as the kimi, mooncake and delta engines do, whose transports need a GPU."""

    def __init__(self, rollout_dtype: torch.dtype = torch.bfloat16, **kwargs):
        super().__init__(**kwargs)
        self.rollout_dtype = rollout_dtype


def wire():
    """Return the dtypes in which weights leave the engine: full tensors and, from FSDP2, delta shards and merged LoRA.

    Of unmerged LoRA over a 16-bit base those of the base and of the adapters, which are sent separately: a bucket of
    nccl, hccl or nixl with two dtypes may crash the receiver (https://github.com/verl-project/verl/pull/7318).
    Also the dtypes that verl's sender and receiver pass to a checkpoint engine if ``rollout.dtype`` is float16.
    """

    def dtypes(tensors):
        return sorted({name_of(entry[1]) for entry in tensors})

    worker = make_worker()
    config = composed("actor_rollout_ref.rollout.dtype=float16").actor_rollout_ref
    sender = ActorRolloutRefWorker(config, role="actor")
    sender.init_model()
    rollout = omega_conf_to_dataclass(config.rollout)
    receiver = CheckpointEngineWorker(rollout, omega_conf_to_dataclass(config.model), server_adapter=object())
    result = {
        "full": dtypes(worker.engine.get_per_tensor_param()[0]),
        "sender": str(sender.checkpoint_engine.rollout_dtype),
        "receiver": str(receiver.checkpoint_engine.rollout_dtype),
    }
    if STRATEGY == "fsdp2":
        worker.engine.wire_dtype = torch.float16  # set by the delta checkpoint engine before it sends
        result["delta"] = dtypes(worker.engine.get_per_tensor_param_shard()[0])
        merged = make_worker(model={"lora_rank": 4, "lora": {"merge": True}})
        result["merged_lora"] = dtypes(merged.engine.get_per_tensor_param()[0])
        if PATCHED:
            kept = {"keep_fp32_modules": ["lm_head", "model.layers.0.mlp.down_proj"]}
            lora = make_worker(model={"lora_rank": 4}, model_dtype="fp16", **kept).engine
            base, adapters = (lora.get_per_tensor_param(base_sync_done=done)[0] for done in (False, True))
            result["lora"] = [dtypes(base), dtypes(adapters)]
    return result


def export():
    """Export and merge a model whose weights are exact in fp16 and not in bf16; return the dtypes and any loss.

    FSDP2 only: torch cannot gather FSDP1's full state dict from CPU parameters (it frees their storage).
    """
    directory = shared_directory()
    contents = ["model", "optimizer", "extra", "hf_model"]
    worker = make_worker(checkpoint=CheckpointConfig(save_contents=contents, load_contents=contents))
    with torch.no_grad():
        for parameter in worker.engine.module.parameters():
            parameter.copy_(parameter.half().float())
    weights = {name: tensor.clone() for name, tensor in worker.engine.get_per_tensor_param()[0]}
    worker.save_checkpoint(directory, global_step=1)
    if RANK != 0:
        return {}

    def lossless(tensors):
        return all(torch.equal(tensors[name].float(), weight) for name, weight in weights.items())

    huggingface = Path(directory) / "huggingface"
    exported = AutoModelForCausalLM.from_pretrained(huggingface, dtype="auto").state_dict()
    config = json.loads((huggingface / "config.json").read_text())
    result = {"config": config["dtype"], "export_lossless": lossless(exported)}
    # One worker's FSDP1 does not shard: its checkpoint contains plain tensors.
    single = Path(directory) / "one_worker"
    single.mkdir()
    torch.save(weights, single / "model_world_size_1_rank_0.pt")
    recorded = json.loads((Path(directory) / "fsdp_config.json").read_text())
    (single / "fsdp_config.json").write_text(json.dumps(recorded | {"world_size": 1}))
    for name, folder in {"merged": Path(directory), "merged_of_one_worker": single}.items():
        tensors = merge(folder, huggingface)
        dtypes = sorted({name_of(t) for t in tensors.values()})
        result[name] = {"dtypes": dtypes, "lossless": lossless(tensors)}
    return result


CASES = {"wire": wire, "export": export}
