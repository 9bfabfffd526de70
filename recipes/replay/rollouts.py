"""Record the rollouts of a run and train another run on them, since vLLM's samples differ from run to run.

Enabled by ``configs/rollouts/{record,replay}.yaml``, for verl's v1 trainers in sync mode. A recording contains the
responses of the rollout server: token ids, log-probabilities and the versions of the weights. Prompts, rewards and all
later steps are computed again. A replay fails at a request that was not recorded; it never samples.

verl's own ``skip.rollout_tq`` is for debugging: it samples what the recording lacks, and assigns recorded answers to
the prompts of a step in the order in which they finished when they were recorded.
"""

import json
import sqlite3
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from transfer_queue import KVBatchMeta

from recipes.cpu.replay_buffer import POLL_S
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput


class RolloutError(RuntimeError):
    """A rollout is not in the recording, or failed."""


class SampleKey(NamedTuple):
    """Identifies an answer in every run over the same data."""

    step: int  # of the training, from 1
    row: int  # ``extra_info.index`` of the prompt in its data set
    sample: int  # index among the ``rollout.n`` answers to the prompt


class Recording:
    """An SQLite file of the requests to a rollout server and its responses.

    Safe against SIGKILL, and for several processes on one machine. A resumed run that repeats a step replaces its
    answers.
    """

    def __init__(self, file: str, mode: str):
        self.file, self.mode = file, mode
        if mode == "replay" and not Path(file).is_file():
            raise RolloutError(f"rollouts.file={file}: there is no such recording")
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        self.connection = sqlite3.connect(file, timeout=60, isolation_level=None)
        self.connection.execute("PRAGMA synchronous = OFF")  # no fsync: if the machine dies, so does the run
        self.connection.execute(
            "CREATE TABLE IF NOT EXISTS answers (step INTEGER, row INTEGER, sample INTEGER, request TEXT,"
            " answer TEXT, PRIMARY KEY (step, row, sample, request)) WITHOUT ROWID"
        )

    def put(self, key: SampleKey, request: str, answer: TokenOutput) -> None:
        values = (*key, request, json.dumps(answer.model_dump()))
        self.connection.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?)", values)

    def get(self, key: SampleKey, request: str) -> TokenOutput:
        """Return the recorded answer; there must be one."""
        query = "SELECT answer FROM answers WHERE step = ? AND row = ? AND sample = ? AND request = ?"
        row = self.connection.execute(query, (*key, request)).fetchone()
        if row is None:
            raise RolloutError(f"{self.file} has no answer for {key} to the request {request}")
        return TokenOutput(**json.loads(row[0]))


recording = cache(Recording)  # opened once per process


class RecordedServer:
    """A rollout server that records the responses of another, or returns recorded ones."""

    def __init__(self, server: LLMServerClient, answers: Recording, key: SampleKey):
        self.server, self.answers, self.key = server, answers, key

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **others: Any
    ) -> TokenOutput:
        # A part of the answer's key: the sampling parameters of validation and training differ.
        request = json.dumps({"prompt_ids": list(prompt_ids), "sampling_params": sampling_params}, sort_keys=True)
        if self.answers.mode == "replay":
            return self.answers.get(self.key, request)
        answer = await self.server.generate(
            request_id=request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **others
        )
        self.answers.put(self.key, request, answer)
        return answer


class RecordedAgentLoop(SingleTurnAgentLoop):
    """verl's single-turn agent loop on a rollout server that records or replays."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        rollouts = self.config.rollouts
        key = SampleKey(int(kwargs["global_steps"]), int(kwargs["extra_info"]["index"]), int(kwargs["session_id"]))
        self.server_manager = RecordedServer(self.server_manager, recording(rollouts.file, rollouts.mode), key)
        return await super().run(sampling_params, **kwargs)


class OrderedReplayBuffer(ReplayBuffer):
    """Returns batches in the order of the data instead of completion, and refuses those with failed rollouts.

    The order determines how a batch is split and losses are summed. verl would train on the remaining rollouts, with
    padding for the failed ones.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs, poll_interval=POLL_S)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        if self.failure_keys[partition_id]:
            failed = len(self.failure_keys[partition_id])
            raise RolloutError(f"step {global_steps}: rollouts of {failed} prompts failed; see the errors above")
        order = {uid: place for place, uid in enumerate(self.prompt_global_steps[partition_id])}

        def place(index: int) -> tuple[int, int, int]:
            uid, sample, output = batch.keys[index].rsplit("_", 2)
            return order[uid], int(sample), int(output)

        batch.reorder(sorted(range(len(batch.keys)), key=place))
        return batch, metrics
