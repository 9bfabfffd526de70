"""Upstream's own CPU tests pass on both stacks of each release as on the unpatched one: none is lost, none gained.

They are not in verl's wheels: VERL_CHECKOUT in the environment is a git checkout of verl with the releases' tags.
"""

import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import Queue

import pytest
from support.fork_server import ForkServer
from support.trees import git

from verl_precision.patch.apply import apply
from verl_precision.patch.releases import load_releases
from verl_precision.paths import REPO

CHECKOUT = os.environ.get("VERL_CHECKOUT")
PYTHON = REPO / ".venv-workers/bin/python"
PRELOAD = ("torch.distributed.fsdp", "transformers", "peft", "tensordict", "datasets", "hydra", "ray", "pytest")
# Ray would wait indefinitely for the CPUs that some tests request.
ENVIRONMENT = {"RAY_OVERRIDE_RESOURCES": '{"CPU": 128}', "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
ENVIRONMENT |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
FILE_S = 240  # some hang without a network, patched or not
PROCESSES = 5  # most of their time is waiting


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[Queue]:
    """Fork servers, from which a file's tests start without the imports of torch and transformers."""
    free: Queue = Queue()
    with ExitStack() as stack:
        for number in range(PROCESSES):
            log = tmp_path_factory.mktemp("server") / f"{number}.log"
            free.put(stack.enter_context(ForkServer(PRELOAD, log, PYTHON)))
        yield free


def passed(servers: Queue, tree: Path, out: Path, file: Path) -> set[str]:
    """Return the names of the tests in a file that pass; of a file that hangs, none."""
    logs = out / file.relative_to(tree).as_posix().replace("/", ".")
    logs.mkdir(parents=True)
    report = logs / "report.xml"
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={tree}", f"--junitxml={report}"]
    path = f"{PYTHON.parent}:{os.environ['PATH']}"
    environment = os.environ | ENVIRONMENT | {"PATH": path, "PYTHONPATH": str(tree)}
    server = servers.get()
    try:
        words = [REPO / "tests/support/pytest_in.py", tree, *options, file]
        server.run(words, environment, logs, ranks=1, limit_s=FILE_S)
    finally:
        servers.put(server)
    if not report.exists():
        return set()
    cases = ElementTree.parse(report).iter("testcase")
    return {f"{file.relative_to(tree)}::{case.get('classname')}::{case.get('name')}" for case in cases if not len(case)}


def passing(servers: Queue, tree: Path, out: Path, files: Iterable[Path]) -> dict[Path, set[str]]:
    """Return by file the names of the tests that pass."""
    files = sorted(files)
    with ThreadPoolExecutor(PROCESSES) as pool:
        return dict(zip(files, pool.map(lambda file: passed(servers, tree, out, file), files), strict=True))


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUT, reason="VERL_CHECKOUT names no git checkout of verl")
@pytest.mark.parametrize("release", load_releases())
def test_upstreams_tests_pass_as_before(release: str, tmp_path: Path, servers: Queue):
    tree = tmp_path / "verl"
    git("clone", "--quiet", "--shared", CHECKOUT, tree, cwd=tmp_path)
    if not git("tag", "--list", f"v{release}", cwd=tree):
        pytest.skip(f"{CHECKOUT} has no tag v{release}")
    git("checkout", "--quiet", f"v{release}", cwd=tree)
    unpatched = passing(servers, tree, tmp_path / "unpatched", tree.glob("tests/**/*_on_cpu.py"))
    before = {file: names for file, names in unpatched.items() if names}
    assert before
    for stack, fixes in (("precision", False), ("precision and fixes", True)):
        apply(tree, fixes=fixes)
        after = passing(servers, tree, tmp_path / stack, before)
        changed = {name for file in before for name in before[file] ^ after[file]}
        print(f"{release}, {stack}: {sum(map(len, after.values()))} tests of {len(before)} files passed")
        assert not changed, f"{stack}: {sorted(changed)}"
