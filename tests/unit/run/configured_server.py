"""Print what vLLM configures for the server of each job, on NAMED_GPU: configured_server.py CONFIG.yaml ..."""

import asyncio
import json
import sys

from omegaconf import OmegaConf
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.selector import get_attn_backend

from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.vllm_rollout.vllm_async_server import AsyncEngineArgs, UsageContext, vLLMHttpServer

HEADS = 64, 256, 512


class Configured(vLLMHttpServer):
    """verl's server, which ends where vLLM's engine would start."""

    async def run_server(self, args) -> None:
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
        dtype, refusal = config.model_config.dtype, ""
        try:
            current_platform.check_if_supports_dtype(dtype)  # as vLLM's worker does
        except ValueError as error:
            refusal = str(error)
        with set_current_vllm_config(config):
            attention = [get_attn_backend(head, dtype, None).get_name() for head in HEADS]
        graphs, sleeps = config.compilation_config.cudagraph_mode.name, config.model_config.enable_sleep_mode
        found = {"dtype": str(dtype), "refusal": refusal, "attention": attention, "graphs": graphs, "sleeps": sleeps}
        print(json.dumps(found), flush=True)


for file in sys.argv[1:]:
    ours = OmegaConf.load(file).actor_rollout_ref
    asyncio.run(Configured(ours.rollout, ours.model, RolloutMode.HYBRID, [], 1, 0, 1, 1, "").launch_server())
