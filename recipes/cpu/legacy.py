"""verl 0.4.1 to 0.8.0 without a GPU: these releases have no platforms, so what they ask a device for is adapted.

Import it before verl. Under Ray, ``RAY_RUNTIME_ENV_HOOK=recipes.cpu.legacy.in_every_process`` does so in the driver and
in every process that Ray starts.
"""

import importlib
import os
from types import ModuleType
from typing import Any

import torch
from omegaconf import OmegaConf

from recipes.cpu import host


def in_every_process(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """The hook of ``ray.init``: takes the environment of its processes and has them import this module."""
    return {**(runtime_env or {}), "worker_process_setup_hook": "recipes.cpu.legacy.loaded"}


def loaded() -> None:
    """Nothing: to call it is to have imported this module."""


def take_the_cpu(device: ModuleType) -> None:
    """verl finds the CPU by itself where there is no GPU, and names nccl, or nothing, for its collectives."""
    host.replace(device, "get_nccl_backend", lambda _: lambda: "gloo")
    if hasattr(device, "get_resource_name"):  # from 0.7.1 on
        host.replace(device, "get_resource_name", lambda _: lambda: "GPU")


def gather_single_numbers() -> None:
    """verl gathers 0-d tensors into 1-d ones of one element, which nccl does and gloo refuses."""

    def wrap(all_gather):
        def gather(tensor_list, tensor, *args, **kwargs):
            return all_gather(tensor_list, tensor.view(tensor_list[0].shape), *args, **kwargs)

        return gather

    host.replace(torch.distributed, "all_gather", wrap)


def find_engines(base: ModuleType) -> None:
    """The FSDP engines are registered for "cuda" and run on any device."""
    host.replace(base, "get_device_name", lambda _: lambda: "cuda")


def name_fused_moe(layer: ModuleType) -> None:
    """verl 0.7.1 and 0.8.0 look for layers of this class, whose name vLLM 0.28 no longer has."""
    layer.FusedMoE = layer.RoutedExperts


def name_device(cpu: ModuleType) -> None:
    """Trainer and server meet at a socket that is named after the device; Ray gives both the same."""
    cpu.CpuPlatform.get_device_uuid = classmethod(lambda cls, index: f"cpu-{os.environ['CUDA_VISIBLE_DEVICES']}")


def register_hf_rollout(base: ModuleType) -> None:
    """verl 0.6.0 to 0.7.0 know the rollout "hf" by name and have no class for it."""
    for mode in ("sync", "async") if hasattr(base, "_ROLLOUT_REGISTRY") else ():  # from 0.6.0 on
        base._ROLLOUT_REGISTRY["hf", mode] = "recipes.cpu.hf_rollout.HFRollout"


def register_hf_replica(replica: ModuleType) -> None:
    """The same in verl 0.7.0, whose trainer talks to servers."""

    def load():
        return importlib.import_module("recipes.cpu.hf_rollout").HFReplica

    replica.RolloutReplicaRegistry.register("hf", load)


def complete_hf_rollout(module: ModuleType) -> None:
    """Three repairs of the HFRollout of verl 0.4.1 and 0.5.0.

    It hands the prompts' positions to generate, and transformers 4.57 takes their last one for every new token: what
    is sampled is nonsense. It drops the probabilities, from which the trainer measures the mismatch. And in 0.5.0 it
    repeats the prompts that its trainer has repeated.
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

            def keep(position_ids, **kwargs):  # generate has them from the attention mask
                outputs.append(generate(**kwargs, output_logits=True))
                return outputs[0]

            self.module.generate = keep
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

    host.replace(module.HFRollout, "__init__", init)
    host.replace(module.HFRollout, "_generate_minibatch", minibatch)


def time_nothing(base: ModuleType) -> None:
    """The sharding manager of verl 0.4.1's HFRollout lacks what its worker reads."""
    base.BaseShardingManager.timing = {}


torch.cpu.manual_seed = torch.manual_seed
torch.cpu.ipc_collect = lambda: None
torch.cpu.current_device = lambda: host.Cpu("cpu")
host.adapt()
gather_single_numbers()
host.when_imported("verl.utils.device", take_the_cpu)
host.when_imported("verl.workers.engine.base", find_engines)
host.when_imported("vllm.model_executor.layers.fused_moe.layer", name_fused_moe)
host.when_imported("vllm.platforms.cpu", name_device)
host.when_imported("verl.workers.rollout.base", register_hf_rollout)
host.when_imported("verl.workers.rollout.replica", register_hf_replica)
host.when_imported("verl.workers.rollout.hf_rollout", complete_hf_rollout)
host.when_imported("verl.workers.sharding_manager.base", time_nothing)
