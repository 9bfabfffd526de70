"""Fixtures of the recipes' tests, which train small networks."""

import importlib
import subprocess
import sys
from collections.abc import Callable

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


@pytest.fixture
def prepare(monkeypatch, capsys, tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """``prepare("dapo_math", "--out", folder, …)``: a dataset recipe's command, run in this process without the Hub."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def run(recipe: str, *words: object) -> subprocess.CompletedProcess:
        monkeypatch.setattr(sys, "argv", ["prepare", *map(str, words)])
        try:
            refusal = importlib.import_module(f"recipes.{recipe}.prepare").main()
        except SystemExit as end:
            refusal = end.code
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(sys.argv, int(bool(refusal)), out, f"{err}{refusal or ''}")

    return run
