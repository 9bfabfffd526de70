"""Copy the checkout, with patched releases beside it, to put a mutant into it and run tests."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from support.fork_server import ForkServer

from mutants.table import Mutant
from verl_precision.errors import Refused
from verl_precision.patch.apply import apply
from verl_precision.patch.releases import FRAMEWORKS, load_releases
from verl_precision.patch.wheels import unpacked_wheel
from verl_precision.paths import REPO

# pytest's exit codes, 2 and (where a test is named) 4: of an import; with any other the tests did not run.
NO_FAILURE, FAILURES = 0, (1, 2, 4)
LIMIT_S = 1800
PYTEST_IN = REPO / "tests/support/pytest_in.py"
SHARED = (".venv", ".venv-workers", ".cache")  # linked, not copied
SUITE, OF_FIXES = "tests/conformance/verl/", "empty_adapter"  # the case that runs on a tree with both series
MARKERS = "not gpu and not e2e"
# What tests import of others, some 5 s; pytest runs in forks of a process that has.
PRELOAD = ("torch.distributed.fsdp", "torch._dynamo", "transformers.models.auto.modeling_auto")
PRELOAD += ("peft", "tensordict", "torchdata.stateful_dataloader", "datasets", "hydra", "ray", "pytest")
# Fails on every mutant of this repository, whose text it does not find any more.
OF_THE_TABLES = "tests/unit/test_mutants.py::test_every_mutant_changes_the_program"


class Workspace:
    """A copy of the checkout, changes that are not committed included, in ``folder``; a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "checkout"
        self.trees = folder / "trees"
        subprocess.run(["git", "clone", "--quiet", "--shared", REPO, self.root], check=True)
        for listing in (["diff", "--name-only", "HEAD"], ["ls-files", "--others", "--exclude-standard"]):
            changed = subprocess.run(["git", *listing], cwd=REPO, check=True, capture_output=True, text=True).stdout
            for name in changed.splitlines():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                if (REPO / name).exists():
                    shutil.copy2(REPO / name, self.root / name)
                else:
                    (self.root / name).unlink()
        for name in SHARED:
            if (REPO / name).exists():
                (self.root / name).symlink_to(REPO / name)

    @cached_property
    def server(self) -> ForkServer:
        """The process from which pytest is forked."""
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        return ForkServer(PRELOAD, self.folder / "server.log", environment=environment)

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(self, *error: object) -> None:
        if "server" in self.__dict__:
            self.server.__exit__()

    def tree(self, mutant: Mutant) -> Path:
        """Return the folder of the mutant's file: the checkout, or its patched release, by default the newest.

        A release has both series, or only ``precision`` for tests of verl's conformance suite. Tests that need both
        trees are refused: those of the one would pass on the release without the mutant.
        """
        framework = FRAMEWORKS.get(mutant.file.partition("/")[0])
        if not framework:
            return self.root
        release = mutant.release or list(load_releases(framework=framework))[-1]
        kinds = {not test.startswith(SUITE) or OF_FIXES in test for test in mutant.tests} or {True}
        if len(kinds) > 1:
            raise Refused(f"{mutant.name}: some of its tests run on trees with the series fixes, others do not; choose")
        (fixes,) = kinds
        folder = self.trees / f"{framework.name}-{release}{'-fixes' * fixes}"
        if not folder.exists():
            apply(unpacked_wheel(release, folder, framework), framework=framework, fixes=fixes)
        return folder

    def file(self, mutant: Mutant) -> Path:
        """Return the file to mutate."""
        return self.tree(mutant) / mutant.file

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """Put the mutant into its file for the body of the statement."""
        file = self.file(mutant)
        original = file.read_text()
        file.write_text(mutant.source(file))
        try:
            yield
        finally:
            file.write_text(original)

    def first_failure(self, tests: Sequence[str], mutant: Mutant) -> str:
        """Run tests, on the mutant's patched release if its file is in one, until one fails. Return its id, or "".

        Slow tests run only for a mutant that names its tests.

        Raises:
            Refused: the tests did not run, e.g. because a test does not exist, or did not end.
        """
        markers = MARKERS if mutant.tests else f"{MARKERS} and not slow"
        options = ["-x", "-q", "-rfE", "-p", "no:cacheprovider", "-m", markers, f"--deselect={OF_THE_TABLES}"]
        if (tree := self.tree(mutant)) != self.root:
            options.append(f"--{mutant.file.partition('/')[0]}-tree={tree}")
        # pytest cuts its summary to the terminal's width
        environment = os.environ | {"COLUMNS": "1000", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        words = [PYTEST_IN, self.root, *options, *tests]
        finished = self.server.run(words, environment, self.folder, ranks=1, limit_s=LIMIT_S)
        printed = (self.folder / "rank_0.log").read_text()
        if finished.late:
            raise Refused(f"{mutant.name}: its tests did not end within {LIMIT_S} s")
        if finished.codes == [NO_FAILURE]:
            return ""
        summary = [line for line in printed.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        if finished.codes[0] not in FAILURES or not summary:
            raise Refused(f"{mutant.name}: pytest ended with {finished.codes[0]}: {printed[-2000:]}")
        return summary[0].partition(" ")[2].partition(" - ")[0]
