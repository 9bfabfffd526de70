"""verl 0.9.1 as its wheel ships it and with the stack applied, side by side; a test of a fix runs on both."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lib.job import CPU_PLATFORM
from lib.releases import unpacked_wheel
from lib.stack import apply

REPO = Path(__file__).resolve().parents[2]
RELEASE = "0.9.1"


def pytest_configure(config):
    """``import precision`` and ``import manifest`` in a test: the modules by themselves, without the rest of verl."""
    tree = config.getoption("verl_tree") or REPO / "patches/verl/files"
    for source in ("verl/utils/precision.py", "verl/utils/checkpoint/manifest.py"):
        spec = importlib.util.spec_from_file_location(Path(source).stem, tree / source)
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])


@pytest.fixture(scope="session")
def trees(tmp_path_factory, pytestconfig) -> dict[str, Path]:
    """Folders that hold ``verl/``: "pristine" and "patched"."""
    root = tmp_path_factory.mktemp("verl")
    pristine, given = unpacked_wheel(RELEASE, root / "pristine"), pytestconfig.getoption("verl_tree")
    if given:
        return {"pristine": pristine, "patched": given}
    patched = unpacked_wheel(RELEASE, root / "patched")
    apply(patched)
    return {"pristine": pristine, "patched": patched}


@pytest.fixture(scope="session")
def environment(trees) -> Callable[[str], dict[str, str]]:
    """The environment in which a process imports the given tree's verl and runs it on the CPU."""

    def of(state: str) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": f"{trees[state]}:{REPO}",
            "OMP_NUM_THREADS": "1",
            **CPU_PLATFORM,
        }

    return of


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """The sanity task's model with its first weights, and its tokenizer."""
    from recipes.arithmetic.model import build_model, build_tokenizer

    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    build_model(tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def cases(environment, tiny_model, tmp_path_factory, request) -> Callable[..., list[dict]]:
    """``cases(tree, strategy, ranks=2)``: the outcomes of engine_cases.py, one dict a rank; run once a session each.

    Only the cases run that the session's tests read by their parameter ``case``; a test without one may read any.
    """
    done: dict[tuple[str, str, int], list[dict]] = {}
    readers = [item for item in request.session.items if "cases" in item.fixturenames]
    named = {item.callspec.params["case"] for item in readers if "case" in item.fixturenames}
    names = sorted(named) if all("case" in item.fixturenames for item in readers) else []

    def of(state: str, strategy: str, ranks: int = 2) -> list[dict]:
        if (state, strategy, ranks) not in done:
            out = tmp_path_factory.mktemp(f"{state}-{strategy}")
            torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
            torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
            script = Path(__file__).with_name("engine_cases.py")
            run = subprocess.run(
                [*torchrun, script, strategy, tiny_model, out, *names],
                env=environment(state),
                capture_output=True,
                text=True,
                timeout=1800,
            )
            assert "Timed out" not in run.stderr, "stuck: one rank waited for the other\n" + run.stderr[-4000:]
            assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
            outcomes = [json.loads((out / f"rank_{rank}.json").read_text()) for rank in range(ranks)]
            done[state, strategy, ranks] = outcomes
        return done[state, strategy, ranks]

    return of
