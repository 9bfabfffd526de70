"""Run verl 0.4.1 to 0.8.0 without a GPU: these releases have no platform plugins, so their device calls are adapted.

Import it before verl. ``RAY_RUNTIME_ENV_HOOK=recipes.cpu.legacy.runtime_env_hook`` does so in the driver and in every
process that Ray starts.
"""

import importlib
import os
from types import ModuleType
from typing import Any

import torch
from omegaconf import OmegaConf

from recipes.cpu import host


def runtime_env_hook(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """Add this module to the setup of Ray's worker processes; called by ``ray.init``."""
    return {**(runtime_env or {}), "worker_process_setup_hook": "recipes.cpu.legacy.setup_hook"}


def setup_hook() -> None:
    """Do nothing: Ray imports this module to call it."""


def use_gloo(device: ModuleType) -> None:
    """Set gloo as the backend of the CPU, which verl selects without a GPU, and "GPU" as its Ray resource."""
    host.wrap_attribute(device, "get_nccl_backend", lambda _: lambda: "gloo")
    if hasattr(device, "get_resource_name"):  # from 0.7.1 on
        host.wrap_attribute(device, "get_resource_name", lambda _: lambda: "GPU")


def allow_gathering_scalars() -> None:
    """Gather 0-d tensors into tensors of one element, as verl does with nccl; gloo refuses it."""

    def wrap(all_gather):
        def gather(tensor_list, tensor, *args, **kwargs):
            return all_gather(tensor_list, tensor.view(tensor_list[0].shape), *args, **kwargs)

        return gather

    host.wrap_attribute(torch.distributed, "all_gather", wrap)


def use_cuda_engines(base: ModuleType) -> None:
    """Look up the FSDP engines under "cuda"; they run on any device."""
    host.wrap_attribute(base, "get_device_name", lambda _: lambda: "cuda")


def alias_fused_moe(layer: ModuleType) -> None:
    """Restore the class name by which verl 0.7.1 and 0.8.0 find MoE layers; vLLM 0.28 has renamed it."""
    layer.FusedMoE = layer.RoutedExperts


def name_device_after_ray(cpu: ModuleType) -> None:
    """Derive the device's UUID from Ray's assignment: it names the socket on which trainer and server connect."""
    cpu.CpuPlatform.get_device_uuid = classmethod(lambda cls, index: f"cpu-{os.environ['CUDA_VISIBLE_DEVICES']}")


def register_hf_rollout(base: ModuleType) -> None:
    """Register the rollout "hf" of verl 0.6.0 to 0.7.0, which have the name but no class."""
    for mode in ("sync", "async") if hasattr(base, "_ROLLOUT_REGISTRY") else ():  # from 0.6.0 on
        base._ROLLOUT_REGISTRY["hf", mode] = "recipes.cpu.hf_rollout.HFRollout"


def register_hf_replica(replica: ModuleType) -> None:
    """Register the replica of "hf" in verl 0.7.0, whose trainer calls servers."""

    def load():
        return importlib.import_module("recipes.cpu.hf_rollout").HFReplica

    replica.RolloutReplicaRegistry.register("hf", load)


def repair_hf_rollout(module: ModuleType) -> None:
    """Repair three defects of the HFRollout of verl 0.4.1 and 0.5.0.

    It passes the prompts' positions to generate, where transformers 4.57 uses the last one for every new token and
    samples nonsense. It drops the log-probabilities, from which the trainer computes the mismatch. In 0.5.0 it repeats
    prompts that the trainer has already repeated.
    """
    import verl

    def init(initialize):
        def without_repeats(self, module, config):
            once = {"n": 1} if verl.__version__ == "0.5.0" else {}
            initialize(self, module, OmegaConf.merge(config, once))

        return without_repeats

    def minibatch(generate_minibatch):
        def with_log_probs(self, prompts):
            outputs, generate = [], self.module.generate

            def with_logits(position_ids, **kwargs):  # generate derives positions from the attention mask
                outputs.append(generate(**kwargs, output_logits=True))
                return outputs[0]

            self.module.generate = with_logits
            data = generate_minibatch(self, prompts)
            del self.module.generate
            logits = torch.stack(outputs[0].logits, dim=1).float() / self.config.temperature
            responses = data.batch["responses"]  # padded
            tokens = responses[:, : logits.shape[1]]
            log_probs = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
            missing = (0, responses.shape[1] - logits.shape[1])
            data.batch["rollout_log_probs"] = torch.nn.functional.pad(log_probs, missing)
            return data

        return with_log_probs

    host.wrap_attribute(module.HFRollout, "__init__", init)
    host.wrap_attribute(module.HFRollout, "_generate_minibatch", minibatch)


def add_sharding_manager_timing(base: ModuleType) -> None:
    """Add the timings that the worker of verl 0.4.1 reads from the sharding manager of its HFRollout."""
    base.BaseShardingManager.timing = {}


torch.cpu.manual_seed = torch.manual_seed
torch.cpu.ipc_collect = lambda: None
torch.cpu.current_device = lambda: host.CpuDevice("cpu")
host.adapt()
allow_gathering_scalars()
host.adapt_on_import("verl.utils.device", use_gloo)
host.adapt_on_import("verl.workers.engine.base", use_cuda_engines)
host.adapt_on_import("vllm.model_executor.layers.fused_moe.layer", alias_fused_moe)
host.adapt_on_import("vllm.platforms.cpu", name_device_after_ray)
host.adapt_on_import("verl.workers.rollout.base", register_hf_rollout)
host.adapt_on_import("verl.workers.rollout.replica", register_hf_replica)
host.adapt_on_import("verl.workers.rollout.hf_rollout", repair_hf_rollout)
host.adapt_on_import("verl.workers.sharding_manager.base", add_sharding_manager_timing)
