"""The cases of the weight sync, and of the rollout that samples from the actor's module."""

import asyncio
from collections.abc import Iterable
from unittest import mock

import peft.utils.save_and_load
import torch
from harness import LEGACY, PATCHED, Worker, batch, composed
from observations import inner_dtypes, name, watch
from omegaconf import DictConfig

WIRE = ["+precision=bf16_train_fp16_infer"] if PATCHED else ["actor_rollout_ref.rollout.dtype=float16"]
WIRE += ["actor_rollout_ref.rollout.free_cache_engine=false"]


class Recorder:
    """A rollout that records the dtypes of the weights that it receives."""

    def __init__(self):
        self.dtypes: set[str] = set()

    async def update_weights(self, weights, **kwargs) -> None:
        self.dtypes |= {name(tensor.dtype) for _, tensor in weights}


def wire() -> str:
    """Return the dtype in which weights leave the trainer for an fp16 rollout."""
    return leaves(Worker("actor", composed(*WIRE)))


def leaves(worker: Worker) -> str:
    """Return the dtype in which an actor's weights leave for the rollout, by the release's own code."""
    if hasattr(worker.policy, "get_per_tensor_param"):  # an engine
        return sent(worker.policy.get_per_tensor_param()[0])
    recorder = worker.worker.rollout = Recorder()
    worker.worker.base_sync_done, worker.worker.gen_random_states = True, torch.get_rng_state()
    asyncio.run(worker.worker.rollout_mode())
    return ", ".join(sorted(recorder.dtypes))


def wire_merged_lora() -> str:
    """Return the dtype in which weights leave with adapters merged into them."""
    lora = ["actor_rollout_ref.model.lora_rank=4", "++actor_rollout_ref.model.lora.merge=true"]
    return sent(Worker("actor", composed(*WIRE, *lora)).policy.get_per_tensor_param()[0])


def empty_adapter() -> str:
    """Send a LoRA adapter for which peft returns no tensors, as 0.21.2 does for a nested FSDP1 model."""
    worker = Worker("actor", composed(*WIRE, "actor_rollout_ref.model.lora_rank=4"))
    with mock.patch.object(peft.utils.save_and_load, "get_peft_model_state_dict", lambda *args, **kwargs: {}):
        try:
            if LEGACY:
                leaves(worker)
            else:
                list(worker.policy.get_per_tensor_param(base_sync_done=True)[0])
        except ValueError as error:
            return "refused" if "returned an empty adapter" in str(error) else str(error)
    return "sent"


def sent(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    return ", ".join(sorted({name(tensor.dtype) for _, tensor in weights}))


# The hf rollout samples from the actor's module.
SAMPLED = ["actor_rollout_ref.rollout.response_length=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"]


def sampled(config: DictConfig) -> dict[str, str]:
    """Return the dtypes in which the hf rollout computes, which samples from the trained module itself."""
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor_rollout")
    worker.init_model()
    observed = watch(worker.actor_module_fsdp)
    worker.generate_sequences(batch(0).select(["input_ids", "attention_mask", "position_ids"]))
    return observed


def hf_rollout(overlay: str) -> str:
    keys = ["actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.dtype=float16"]
    return inner_dtypes(sampled(composed(f"+precision={overlay}", *keys, *SAMPLED)))
