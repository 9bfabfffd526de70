"""Extend verl's FSDP engine by the partition head, which a hook feeds and which is stepped and saved with the model."""

import math
import os
from typing import Any, Mapping, Optional

import torch
import torch.distributed as dist

from recipes.flowrl.config import FlowRLConfig
from recipes.flowrl.partition import PartitionHead, PartitionTraining, mean_over_prompts
from verl.utils.device import get_device_id
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

FILE = "flowrl_partition.pt"


@EngineRegistry.register(model_type="flowrl_model", backend=["fsdp", "fsdp2"], device=["cuda", "npu"])
class FlowRLEngine(FSDPEngineWithLMHead):
    """Adds ``log_z`` (rows,), fp32, to the model's outputs in training if log Z is learned."""

    flowrl: FlowRLConfig  # set before initialize()
    partition: Optional[PartitionTraining] = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model_config.model_type = "language_model"  # what verl expects beyond the registry

    def initialize(self):
        super().initialize()
        if self.flowrl.log_z != "learned":
            return
        settings = self.flowrl.partition
        model = getattr(self.module, "_fsdp_wrapped_module", self.module)
        model = model.get_base_model() if self._is_lora else model
        hidden_size = model.config.get_text_config().hidden_size
        head = PartitionHead(hidden_size, settings.dropout, settings.zero_init).to(get_device_id())
        self.partition = PartitionTraining(head, settings.lr, settings.weight_decay, settings.clip_grad)
        self.partition_schedule = self._build_lr_scheduler(self.partition.optimizer)
        model.get_decoder().register_forward_hook(self._keep_hidden_states)

    def _keep_hidden_states(self, decoder, inputs, output) -> None:
        self._hidden = output[0] if self.mode == "train" else None  # (rows, tokens, hidden size)

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        model_output = super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        if self.partition is not None and self.mode == "train":
            hidden, self._hidden = self._hidden, None
            if "pad_size" in output_args:  # all rows without padding in one: (1, tokens of all rows, hidden size)
                packed = self._gather_and_unpad_packed(hidden.squeeze(0), output_args["pad_size"])
                rows = packed.split(micro_batch["input_ids"].offsets().diff().tolist())
            else:
                rows = hidden.unbind()
            lengths = micro_batch["prompts"].offsets().diff().tolist()
            drop_last = self.flowrl.partition.drop_last_prompt_token
            model_output["log_z"] = self.partition.head(mean_over_prompts(rows, lengths, drop_last))
        return model_output

    def optimizer_zero_grad(self):
        super().optimizer_zero_grad()
        if self.partition is not None:
            self.partition.optimizer.zero_grad()

    def optimizer_step(self):
        """Step the model and the head, or neither; returns what the base class returns."""
        if self.partition is None:
            return super().optimizer_step()
        if not self.partition.average_gradients(self.scaler.get_scale() if self.scaler else 1.0):
            print("WARN: the gradient of log Z's head is not finite: the model does not step either", flush=True)
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(math.nan)  # the model's own check then skips the step
        grad_norm = super().optimizer_step()
        if grad_norm is not None:
            self.partition.step()
        return grad_norm

    def lr_scheduler_step(self):
        before = self.lr_scheduler.last_epoch
        lr = super().lr_scheduler_step()
        if self.partition is not None and self.lr_scheduler.last_epoch > before:
            self.partition_schedule.step()
        return lr

    def update_metrics(self) -> Mapping[str, float]:
        metrics = dict(super().update_metrics())
        if self.partition is not None and math.isfinite(self.partition.grad_norm):
            metrics["flowrl/partition_grad_norm"] = self.partition.grad_norm
        return metrics

    def save_checkpoint(self, local_path: str, *args, **kwargs) -> None:
        super().save_checkpoint(local_path, *args, **kwargs)
        if self.partition is None:
            return
        if self.rank == 0:
            state = {**self.partition.state_dict(), "schedule": self.partition_schedule.state_dict()}
            torch.save(state, os.path.join(local_path, FILE))
        dist.barrier()

    def load_checkpoint(self, local_path: str, *args, **kwargs) -> None:
        """Load the head's state on rank 0, broadcast it, and load the rest by the base class; obeys ``load_contents``.

        Raises:
            ValueError: the checkpoint has no head, or a head of another width; nothing has been loaded.
        """
        if self.partition is not None:
            file = os.path.join(local_path, FILE)
            exists = self.rank == 0 and os.path.exists(file)
            received: list[Any] = [torch.load(file, map_location="cpu") if exists else None]
            dist.broadcast_object_list(received, src=0)
            (state,) = received
            if state is None:
                raise ValueError(f"{file} is missing: only actor_rollout_ref.actor.flowrl.log_z=learned saves it")
            self.partition.load_state_dict(state, file, self.checkpoint_manager.should_load_optimizer)
            if self.checkpoint_manager.should_load_extra:  # includes the model's schedule in verl
                self.partition_schedule.load_state_dict(state["schedule"])
        super().load_checkpoint(local_path, *args, **kwargs)
