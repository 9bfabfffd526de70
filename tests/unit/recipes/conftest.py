"""Fixtures of the recipes' tests, which train small networks."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Use one thread: several are many times slower on small tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_kill_switch(monkeypatch):
    """Unset the kill switch of recipes/amp/ppo, which tests set themselves."""
    monkeypatch.delenv("DISABLE_AMP", raising=False)
