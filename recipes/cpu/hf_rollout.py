"""HuggingFace's generate as the rollout of verl 0.6.0 to 0.7.0, whose vLLM has no CPU build: ``rollout.name=hf``.

``recipes.cpu.legacy`` registers it. The policy is copied to ``rollout.dtype``, as in vLLM; temperature is the only
sampling parameter.
"""

from collections.abc import Iterator
from typing import Any

import ray
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from verl import DataProto
from verl.utils.torch_functional import get_response_mask
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput


class HFRollout(BaseRollout):
    """A rollout in the actor's worker, called by the trainer in 0.6 and by ``HFServer`` in 0.7.0."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any):
        super().__init__(config, model_config, device_mesh)
        self.dtype = getattr(torch, self.config.dtype)
        self.model = AutoModelForCausalLM.from_config(self.model_config.hf_config, dtype=self.dtype).eval()

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(self, weights: Iterator[tuple[str, torch.Tensor]], **kwargs: Any) -> None:
        """Copy the actor's fp32 weights, rounded to ``rollout.dtype``."""
        self.model.load_state_dict(dict(weights))

    @torch.no_grad()
    def sample(
        self, prompts: torch.Tensor, mask: torch.Tensor, eos: int, pad: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample one response to each row of ``prompts`` (batch, prompt length), left-padded.

        Returns:
            Tokens and their log-probabilities, (batch, length of the longest response).
        """
        with torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
            output = self.model.generate(
                prompts,
                attention_mask=mask,
                do_sample=True,
                temperature=self.config.temperature,
                top_k=0,
                max_new_tokens=self.config.response_length,
                eos_token_id=eos,
                pad_token_id=pad,
                return_dict_in_generate=True,
                output_logits=True,
            )
        logits = torch.stack(output.logits, dim=1).float() / self.config.temperature
        tokens = output.sequences[:, prompts.shape[1] :]
        return tokens, logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate for verl 0.6 in ``rollout.mode=sync``; its trainer has repeated each prompt ``rollout.n`` times."""
        ids, mask, positions = (prompts.batch[key] for key in ("input_ids", "attention_mask", "position_ids"))
        eos, pad = prompts.meta_info["eos_token_id"], prompts.meta_info["pad_token_id"]
        tokens, log_probs = self.sample(ids, mask, eos, pad)
        missing = (0, self.config.response_length - tokens.shape[1])
        responses = torch.nn.functional.pad(tokens, missing, value=pad)
        response_mask = get_response_mask(response_id=responses, eos_token=eos, dtype=mask.dtype)
        later = positions[:, -1:] + torch.arange(1, responses.shape[1] + 1)
        batch = {
            "prompts": ids,
            "responses": responses,
            "input_ids": torch.cat([ids, responses], dim=1),
            "attention_mask": torch.cat([mask, response_mask], dim=1),
            "position_ids": torch.cat([positions, later], dim=1),
            "rollout_log_probs": torch.nn.functional.pad(log_probs, missing),
        }
        return DataProto(batch=TensorDict(batch, batch_size=len(ids)))

    async def generate(self, prompt_ids: list[int], sampling_params: dict, request_id: str, **data: Any) -> TokenOutput:
        """Generate one response to one prompt for verl 0.7.0."""
        prompt, tokenizer = torch.tensor([prompt_ids]), self.model_config.tokenizer
        tokens, log_probs = self.sample(prompt, torch.ones_like(prompt), tokenizer.eos_token_id, tokenizer.pad_token_id)
        return TokenOutput(token_ids=tokens[0].tolist(), log_probs=log_probs[0].tolist())


@ray.remote
class HFServer:
    """The server that verl 0.7.0 calls; forwards every call to the worker of the ``HFRollout``."""

    def __init__(self, worker: Any):
        self.worker = worker

    async def wake_up(self) -> None:
        await self.worker.wake_up.remote()  # synchronizes the weights

    async def sleep(self) -> None:
        await self.worker.sleep.remote()

    async def generate(self, image_data: None, video_data: None, **request: Any) -> TokenOutput:
        return await self.worker.generate.remote(**request)


class HFReplica(RolloutReplica):
    """One server per worker."""

    def get_ray_class_with_init_args(self):
        raise NotImplementedError("HFReplica runs beside the actor only (hybrid engine)")

    async def launch_servers(self) -> None:
        (worker,) = self.workers
        self._server_handle = HFServer.remote(worker)
        self._server_address = "hf"
        self.servers = [self._server_handle]
