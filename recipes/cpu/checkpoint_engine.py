"""Send weights through a file to a rollout that has its own workers; verl's own engines for that need accelerators.

For the trainers under ``verl.experimental`` on one machine:
``checkpoint_engine.custom_backend_module=recipes.cpu.checkpoint_engine checkpoint_engine.backend=file``.
"""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import torch

from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

POLL_S = 0.1


@CheckpointEngineRegistry.register("file")
class FileCheckpointEngine(CheckpointEngine):
    """The first actor writes all weights to a file, which every rollout worker loads.

    Args:
        bucket_size: not used: the file contains all weights.
        is_master: whether this is the first actor.
    """

    def __init__(self, bucket_size: int, is_master: bool = False):
        self.is_master = is_master

    def prepare(self) -> str | None:
        return tempfile.mkdtemp(prefix="verl-weights-") if self.is_master else None

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[str | None]
    ) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        return {"folder": metadata[:1] * actor_wg_world_size}, {"folder": metadata[:1] * rollout_world_size}

    def init_process_group(self, folder: str) -> None:
        self.file = Path(folder) / "weights.pt"

    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        tensors = {name: weight.clone() for name, weight in weights}  # every rank gathers
        if self.is_master:
            incomplete = self.file.with_suffix(".incomplete")
            torch.save(tensors, incomplete)
            incomplete.rename(self.file)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor]]:
        while not self.file.exists():
            await asyncio.sleep(POLL_S)
        for name, weight in torch.load(self.file).items():
            yield name, weight

    def finalize(self) -> None:
        if self.is_master:
            self.file.unlink()
            self.file.parent.rmdir()
