"""The recording of rollouts by itself; tests/e2e/test_resume.py records and replays those of vLLM."""

import asyncio
import os
import signal

import pytest

from recipes.replay.rollouts import Place, Player, Recorder, Recording, RolloutError
from verl.workers.rollout.replica import TokenOutput

PLACE = Place(step=3, row=5, sample=1)
ASKED = {"prompt_ids": [1, 2], "sampling_params": {"temperature": 1.0}}


class Server:
    """Never answers alike twice, as vLLM; that what it was asked arrives is part of the answer."""

    def __init__(self):
        self.answers = 0

    async def generate(self, request_id, *, prompt_ids, sampling_params, **others):
        self.answers += 1
        extra = {"request_id": request_id, **others}
        return TokenOutput(token_ids=[self.answers, *prompt_ids], log_probs=[-0.1, -1e-45, -1 / 3], extra_fields=extra)


def ask(server, request_id="a", **changed) -> TokenOutput:
    return asyncio.run(server.generate(request_id=request_id, **ASKED | changed))


@pytest.fixture
def file(tmp_path) -> str:
    return str(tmp_path / "made" / "rollouts.sqlite")


def test_an_answer_is_given_back_to_the_bit(file):
    recorded = ask(Recorder(Server(), Recording(file, "record"), PLACE), priority=7)
    assert recorded.extra_fields == {"request_id": "a", "priority": 7}
    assert ask(Player(None, Recording(file, "replay"), PLACE), "b", priority=8) == recorded


@pytest.mark.parametrize(
    ("place", "changed"),
    [
        (PLACE._replace(step=4), {}),
        (PLACE._replace(row=6), {}),
        (PLACE._replace(sample=0), {}),
        (PLACE, {"prompt_ids": [1, 3]}),
        (PLACE, {"sampling_params": {"temperature": 0.0}}),
    ],
)
def test_what_was_not_recorded_is_an_error(file, place, changed):
    ask(Recorder(Server(), Recording(file, "record"), PLACE))
    with pytest.raises(RolloutError, match=r"rollouts.sqlite has no answer for Place\(step="):
        ask(Player(None, Recording(file, "replay"), place), **changed)


def test_without_a_recording_nothing_is_replayed(file):
    with pytest.raises(RolloutError, match="rollouts.sqlite: no such recording"):
        Recording(file, "replay")


def test_a_step_that_is_recorded_again_replaces_what_was_there(file):
    server = Server()
    for _ in range(2):
        last = ask(Recorder(server, Recording(file, "record"), PLACE))
    assert last.token_ids[0] == 2
    assert ask(Player(None, Recording(file, "replay"), PLACE)) == last


def test_a_killed_run_leaves_all_that_it_was_answered(file):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answers, server = Recording(file, "record"), Server()
            for step in range(1_000_000):
                ask(Recorder(server, answers, Place(step, 0, 0)))
                os.write(writer, b".")
        finally:
            os._exit(1)
    os.close(writer)
    answered = len(os.read(reader, 20))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as rest:
        answered += len(rest.read())
    replay = Recording(file, "replay")
    for step in range(answered):
        assert ask(Player(None, replay, Place(step, 0, 0))).token_ids[0] == step + 1
