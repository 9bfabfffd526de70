"""The recording of rollouts; tests/e2e/test_resume.py records and replays those of vLLM."""

import asyncio
from types import SimpleNamespace

import pytest
from transfer_queue import KVBatchMeta

from recipes.cpu.replay_buffer import quick_replay_buffer
from recipes.replay.rollouts import (
    OrderedReplayBuffer,
    RecordedAgentLoop,
    RecordedServer,
    Recording,
    RolloutError,
    SampleKey,
)
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.workers.rollout.replica import TokenOutput

KEY = SampleKey(step=3, row=5, sample=1)
REQUEST = {"prompt_ids": [1, 2], "sampling_params": {"temperature": 1.0}}


class Server:
    """Answers differently each time, like vLLM, and returns the request as part of the answer."""

    def __init__(self):
        self.answers = 0

    async def generate(self, request_id, *, prompt_ids, sampling_params, **others):
        self.answers += 1
        extra = {"request_id": request_id, **others}
        return TokenOutput(token_ids=[self.answers, *prompt_ids], log_probs=[-0.1, -1e-45, -1 / 3], extra_fields=extra)


def ask(server, request_id="a", **changed) -> TokenOutput:
    return asyncio.run(server.generate(request_id=request_id, **REQUEST | changed))


def record(file: str, server: Server | None = None, **changed) -> TokenOutput:
    return ask(RecordedServer(server or Server(), Recording(file, "record"), KEY), **changed)


def replay(file: str, key: SampleKey = KEY, **changed) -> TokenOutput:
    return ask(RecordedServer(None, Recording(file, "replay"), key), **changed)


@pytest.fixture
def file(tmp_path) -> str:
    return str(tmp_path / "made" / "rollouts.sqlite")


def test_replayed_answer_is_bit_exact(file):
    """The order of the request's parameters does not matter."""
    parameters = {"temperature": 1.0, "top_p": 0.5}
    recorded = record(file, priority=7, sampling_params=parameters)
    assert recorded.extra_fields == {"request_id": "a", "priority": 7}
    reordered = dict(reversed(parameters.items()))
    assert replay(file, request_id="b", priority=8, sampling_params=reordered) == recorded


def test_unrecorded_request_is_an_error(file):
    record(file)
    others = [(KEY._replace(step=4), {}), (KEY._replace(row=6), {}), (KEY._replace(sample=0), {})]
    others += [(KEY, {"prompt_ids": [1, 3]}), (KEY, {"sampling_params": {"temperature": 0.0}})]
    for key, changed in others:
        with pytest.raises(RolloutError, match=r"rollouts.sqlite has no answer for SampleKey\(step="):
            replay(file, key, **changed)
    with pytest.raises(RolloutError, match="rollouts.sqlite.gone: there is no such recording"):
        Recording(f"{file}.gone", "replay")


def test_repeated_step_replaces_its_answers(file):
    server = Server()
    first, last = record(file, server), record(file, server)
    assert replay(file) == last != first


def test_agent_loop_replays_each_answer_to_a_prompt(file, monkeypatch):
    async def single_turn(self, sampling_params, **_) -> TokenOutput:
        return await self.server_manager.generate("a", **REQUEST)

    monkeypatch.setattr(SingleTurnAgentLoop, "run", single_turn)
    server = Server()

    def answers(mode: str) -> list[TokenOutput]:
        """Those to three samples of a prompt; verl makes an agent loop for each."""
        outputs = []
        for sample in range(3):
            loop = object.__new__(RecordedAgentLoop)
            loop.config, loop.server_manager = SimpleNamespace(rollouts=SimpleNamespace(file=file, mode=mode)), server
            outputs.append(asyncio.run(loop.run({}, global_steps=1, extra_info={"index": 5}, session_id=sample)))
        return outputs

    recorded = answers("record")
    assert [answer.token_ids[0] for answer in recorded] == [1, 2, 3]
    assert answers("replay") == recorded and server.answers == 3, "a replay must not sample"


def test_batches_are_in_the_order_of_the_data_and_refused_if_rollouts_failed(monkeypatch):
    """Two prompts of twelve answers, "b" being the first of the data, finished last first."""
    keys = [f"{uid}_{sample}_0" for uid in ("b", "a") for sample in reversed(range(12))]
    finished = KVBatchMeta(keys=keys, tags=[{}] * len(keys))
    monkeypatch.setattr(ReplayBuffer, "sample", lambda *_: (finished, {}))
    buffer = object.__new__(OrderedReplayBuffer)
    buffer.prompt_global_steps, buffer.failure_keys = {"train": {"b": 1, "a": 1}}, {"train": set()}
    batch, _ = buffer.sample(1, "train", 2)
    assert batch.keys == [f"{uid}_{sample}_0" for uid in ("b", "a") for sample in range(12)]
    buffer.failure_keys["train"].add("a")
    with pytest.raises(RolloutError, match="^step 1: rollouts of 1 prompts failed"):
        buffer.sample(1, "train", 2)


@pytest.mark.parametrize(("mode", "expected"), [("sync", ReplayBuffer), ("separate_async", ReplayBufferAsync)])
def test_buffer_is_that_of_the_mode_and_polls_ten_times_a_second(mode, expected):
    limits = {"max_off_policy_threshold": None, "max_off_policy_strategy": "drop"}
    buffer = quick_replay_buffer(trainer_mode=mode, trainer_config={}, sampler_kwargs={}, **limits)
    assert type(buffer) is expected and buffer.poll_interval == 0.1
