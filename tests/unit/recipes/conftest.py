"""For the recipes' tests, whose networks are small."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """On tensors this small several threads are many times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_kill_switch(monkeypatch):
    """The switch of recipes/amp/ppo is the tests' own to set."""
    monkeypatch.delenv("DISABLE_AMP", raising=False)
