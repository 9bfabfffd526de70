"""Import verl's modules by themselves, and run the engine's cases."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from support.engine_rows import Row, upstream_outcomes
from support.fork_server import JobError
from support.recorded import RECORDINGS
from support.selected import live_releases
from support.trees import RELEASE

from verl_precision.patch.precision_module import load_precision
from verl_precision.patch.releases import OAT, VERL
from verl_precision.patch.stack import verbatim_files
from verl_precision.paths import REPO


def load(file: Path) -> ModuleType:
    """Import ``file`` under its stem."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pytest_configure(config):
    """Make these of verl's modules work without the rest of verl: ``precision``, ``lora_merge``, ``lora_sync``,
    ``manifest``, ``mismatch`` and ``weight_sync``."""
    tree, files = config.getoption("verl_tree"), verbatim_files()
    modules = ("checkpoint/manifest", "lora_sync", "lora_merge", "mismatch", "weight_sync")
    paths = [f"verl/utils/{name}.py" for name in modules]
    # a tree with `precision` only has no manifest
    *others, last = (tree / path if tree and (tree / path).exists() else files[path] for path in paths)
    for file in others:
        load(file)
    root = tree or REPO / "patches/verl/files"
    with pytest.MonkeyPatch.context() as patch:  # other tests may have loaded it
        patch.setitem(sys.modules, "verl.utils.precision", load_precision(root, "precision"))
        load(last)


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(config, items):
    """Mark the tests of hooks that `make test` need not run as slow, except for a release whose tree is given."""
    needed = set()
    for framework in (VERL, OAT):
        tree = config.getoption(f"{framework.name}_tree")
        needed |= {json.loads((tree / framework.stamp).read_text())["release"]} if tree else set()
        needed |= live_releases(RECORDINGS[framework])
    for item in items:
        if item.path.name == "test_hooks.py" and item.callspec.params["release"] not in needed:
            item.add_marker("slow")


@pytest.fixture
def one_rank(tmp_path, pytestconfig):
    """Initialize a process group of one rank, and make --device the default of new tensors."""
    device = pytestconfig.getoption("device")
    backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[device]
    dist.init_process_group(backend, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(run_ranks, request, pytestconfig) -> Callable[[str, Row], list]:
    """``outcomes(tree, row)``: what each rank returned; all rows of a file that differ in the case are one job.

    What the pristine tree does is read from tests/expected as long as it is valid, see ``Row.live``.
    """
    folder, done = Path(__file__).parent, {}
    write, upstream = pytestconfig.getoption("write_results"), upstream_outcomes()
    known = {} if write else upstream.of(RELEASE)

    def is_recorded(tree: str, row: Row) -> bool:
        return tree == "pristine" and not row.live and row.key in known

    def run(tree: str, row: Row) -> None:
        """Run the job of a row and keep the outcomes of all its cases, or its error."""
        tests = [item for item in request.session.items if item.path == request.path]
        rows = {item.callspec.params["row"] for item in tests if tree in item.fixturenames}
        job = [each for each in rows if (each.strategy, each.ranks) == (row.strategy, row.ranks)]
        job = [each for each in job if not is_recorded(tree, each)]
        cases = sorted(each.case for each in job)
        try:
            ranks = run_ranks(tree, folder / "engine_cases.py", row.strategy, *cases, ranks=row.ranks)
        except JobError as error:
            done.update({(tree, each): error for each in job})
            return
        for each in job:
            done[tree, each] = [rank[each.case] for rank in ranks]
        if write and tree == "pristine":
            upstream.write(RELEASE, {each.key: done[tree, each] for each in job if not each.live})

    def of(tree: str, row: Row) -> list:
        if is_recorded(tree, row):
            return known[row.key]
        if (tree, row) not in done:
            run(tree, row)
        if isinstance(done[tree, row], JobError):
            raise done[tree, row]
        return done[tree, row]

    return of


@pytest.fixture
def patched(outcomes, row) -> list:
    """The outcomes of the test's row on the patched tree, by rank."""
    return outcomes("patched", row)


@pytest.fixture
def pristine(outcomes, row) -> list:
    """The outcomes of the test's row on the pristine tree, by rank."""
    return outcomes("pristine", row)
