"""Record the rollouts of a run and train another on the same ones: vLLM's samples do not repeat from run to run.

``configs/rollouts/{record,replay}.yaml`` turn it on. What is kept is what the rollout server answered: token ids, their
log-probabilities and the versions of the weights that sampled them. Prompts, rewards and all that follows are computed
anew. A replay that asks for what was not recorded fails; it never samples. For verl's v1 trainers in sync mode.

verl has ``skip.rollout_tq`` for debugging: it samples where the recording has a gap, and hands recorded answers to the
prompts of a step in the order in which they once finished.
"""

import json
import sqlite3
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from transfer_queue import KVBatchMeta

from recipes.cpu.replay_buffer import QuickReplayBuffer
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput


class RolloutError(RuntimeError):
    """A rollout is not in the recording, or failed."""


class Place(NamedTuple):
    """Where in a run an answer belongs; the same in every run over the same data.

    Args:
        step: training step, from 1.
        row: ``extra_info.index`` of the prompt in its data set.
        sample: which of the ``rollout.n`` answers to the prompt.
    """

    step: int
    row: int
    sample: int


class Recording:
    """An SQLite file of what a rollout server was asked and answered.

    Safe against SIGKILL and for several processes of one machine. A step that is recorded again, by a run that was
    interrupted and resumed, replaces what was there.
    """

    def __init__(self, file: str, mode: str):
        self.file = file
        if mode == "record":
            Path(file).parent.mkdir(parents=True, exist_ok=True)
        elif not Path(file).is_file():
            raise RolloutError(f"rollouts.file={file}: no such recording")
        self.connection = sqlite3.connect(file, timeout=60, isolation_level=None)
        self.connection.execute("PRAGMA synchronous = OFF")  # not waiting for the disk: a dead machine loses its run
        if mode == "record":
            self.connection.execute(
                "CREATE TABLE IF NOT EXISTS answers (step INTEGER, row INTEGER, sample INTEGER, request TEXT,"
                " answer TEXT, PRIMARY KEY (step, row, sample, request)) WITHOUT ROWID"
            )

    def put(self, place: Place, request: str, answer: TokenOutput) -> None:
        values = (*place, request, json.dumps(answer.model_dump()))
        self.connection.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?)", values)

    def get(self, place: Place, request: str) -> TokenOutput:
        """The recorded answer.

        Raises:
            RolloutError: there is none.
        """
        query = "SELECT answer FROM answers WHERE step = ? AND row = ? AND sample = ? AND request = ?"
        found = self.connection.execute(query, (*place, request)).fetchone()
        if found is None:
            raise RolloutError(f"{self.file} has no answer for {place} to the request {request}")
        return TokenOutput(**json.loads(found[0]))


@cache
def recording(file: str, mode: str) -> Recording:
    """One connection a process."""
    return Recording(file, mode)


class Recorder:
    """Stands before the rollout server and writes down what it answers."""

    def __init__(self, server: LLMServerClient, answers: Recording, place: Place):
        self.server, self.answers, self.place = server, answers, place

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **others: Any
    ) -> TokenOutput:
        request = as_text(prompt_ids, sampling_params)
        answer = await self.server.generate(
            request_id=request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **others
        )
        self.answers.put(self.place, request, answer)
        return answer


class Player:
    """Stands in for the rollout server and gives back what it once answered."""

    def __init__(self, server: LLMServerClient, answers: Recording, place: Place):
        self.answers, self.place = answers, place

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **others: Any
    ) -> TokenOutput:
        return self.answers.get(self.place, as_text(prompt_ids, sampling_params))


def as_text(prompt_ids: list[int], sampling_params: dict[str, Any]) -> str:
    """What an answer depends on besides the weights; part of its key: a validation is not taken for training."""
    return json.dumps({"prompt_ids": list(prompt_ids), "sampling_params": sampling_params}, sort_keys=True)


class RecordedAgentLoop(SingleTurnAgentLoop):
    """verl's default agent loop, one question and one answer, on a rollout server that records or is recorded."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        rollouts = self.config.rollouts
        place = Place(int(kwargs["global_steps"]), int(kwargs["extra_info"]["index"]), int(kwargs["session_id"]))
        server = {"record": Recorder, "replay": Player}[rollouts.mode]
        self.server_manager = server(self.server_manager, recording(rollouts.file, rollouts.mode), place)
        return await super().run(sampling_params, **kwargs)


class OrderedReplayBuffer(QuickReplayBuffer):
    """Gives a batch in the order of the data, not in that in which answers finished, and none with a failed rollout.

    Order decides how a batch is split and in which order losses are summed. verl trains on what is left where rollouts
    failed, with padding in the place of the rest.
    """

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        if self.failure_keys[partition_id]:
            failed = len(self.failure_keys[partition_id])
            raise RolloutError(f"step {global_steps}: rollouts of {failed} prompts failed, see the errors above")
        order = {uid: place for place, uid in enumerate(self.prompt_global_steps[partition_id])}

        def place(index: int) -> tuple[int, int, int]:
            uid, sample, output = batch.keys[index].rsplit("_", 2)
            return order[uid], int(sample), int(output)

        batch.reorder(sorted(range(len(batch.keys)), key=place))
        return batch, metrics
