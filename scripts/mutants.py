"""Put the defects of the field back into patched verl, one at a time, and show which test fails on each.

tests/mutants.toml lists them. Each mutant's tests run on a patched tree with that one text replaced, after all of the
tests have passed on the tree as it is. A run of all mutants writes docs/mutants.md. Exit code: 0 every mutant was
killed, 1 one survived or nothing could be said, 2 usage.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lib.errors import Refused
from lib.patches.apply import apply
from lib.patches.wheels import unpacked_wheel
from lib.paths import REPO

RELEASE = "0.9.1"
TABLE = REPO / "tests/mutants.toml"
DOCUMENT = REPO / "docs/mutants.md"
NO_FAILURE, FAILURE = 0, 1  # pytest's exit codes; any other says that the tests did not run


@dataclass(frozen=True)
class Mutant:
    """One defect: ``replace``, there once in ``file`` of the patched tree, becomes ``by``; one of ``tests`` fails."""

    name: str
    defect: str
    seen_in: str
    file: str
    replace: str
    by: str
    tests: tuple[str, ...]

    def source(self, tree: Path) -> str:
        """The mutated file; raises Refused where the text to replace is not there exactly once."""
        text = (tree / self.file).read_text()
        if (found := text.count(self.replace)) != 1:
            raise Refused(f"{self.name}: its text occurs {found} times in {self.file}: mend it in {TABLE.name}")
        return text.replace(self.replace, self.by)


def load(table: Path) -> list[Mutant]:
    """Read a table of mutants, in its order."""
    entries = tomllib.loads(table.read_text())
    return [Mutant(name=name, **{**entry, "tests": tuple(entry["tests"])}) for name, entry in entries.items()]


def patched_tree(folder: Path) -> Path:
    """Unpack the release into ``folder``, apply the stack, and return the folder."""
    tree = unpacked_wheel(RELEASE, folder)
    apply(tree)
    return tree


def first_failure(tests: Iterable[str], tree: Path) -> str | None:
    """Run tests on the tree until one fails.

    Returns:
        its id, with "(stuck)" where one rank waited for another in vain; ``None`` where all passed.

    Raises:
        Refused: the tests did not run, e.g. because one of that name does not exist.
    """
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", f"--verl-tree={tree}"]
    environment = {**os.environ, "COLUMNS": "1000"}  # pytest cuts its summary to the terminal's width
    done = subprocess.run([*pytest, *tests], cwd=REPO, env=environment, capture_output=True, text=True)
    if done.returncode == NO_FAILURE:
        return None
    summary = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode != FAILURE or not summary:
        raise Refused(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    test, _, reason = summary[0].partition(" ")[2].partition(" - ")
    return f"{test} (stuck)" if "stuck:" in reason else test


def killers(mutants: list[Mutant], tree: Path) -> dict[str, str | None]:
    """By mutant: the test that fails on it, ``None`` where none does; a line each while they run.

    Raises:
        Refused: a mutant's text is not in the tree exactly once; the tree as it is does not pass; tests did not run.
    """
    sources = {mutant.name: mutant.source(tree) for mutant in mutants}
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    print(f"without a mutant: {len(tests)} tests", flush=True)
    if failed := first_failure(tests, tree):
        raise Refused(f"{failed} fails on the tree as it is")
    found = {}
    for number, mutant in enumerate(mutants, start=1):
        file, start = tree / mutant.file, time.monotonic()
        original = file.read_text()
        file.write_text(sources[mutant.name])
        found[mutant.name] = killer = first_failure(mutant.tests, tree)
        file.write_text(original)
        verdict = f"killed by {killer}" if killer else "SURVIVED"
        print(f"{number}/{len(mutants)} {mutant.name}: {verdict} ({time.monotonic() - start:.0f} s)", flush=True)
    return found


def document(mutants: list[Mutant], found: dict[str, str | None]) -> str:
    """The table of mutants and of the tests that killed them, as Markdown."""
    survivors = sum(killer is None for killer in found.values())
    lines = [
        "# Mutants",
        "",
        f"Written by `make mutants` on verl {RELEASE}: {len(mutants)} mutants, {survivors} survivors. Each is the",
        "patched tree with one text replaced by a defect, as `tests/mutants.toml` says; the test is the first of those",
        "named there to fail on it. Without a mutant all of them pass. (stuck): a rank waited for the other in vain.",
        "",
        "| mutant | defect | seen in | killed by |",
        "|---|---|---|---|",
    ]
    for mutant in mutants:
        killer = found[mutant.name]
        verdict = f"`{killer.removeprefix('tests/')}`" if killer else "**survived**"
        lines.append(f"| {mutant.name} | {mutant.defect} | {mutant.seen_in} | {verdict} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("name", nargs="?", choices=[mutant.name for mutant in load(TABLE)], metavar="NAME")
    only = parser.parse_args().name
    mutants = [mutant for mutant in load(TABLE) if only in (None, mutant.name)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = killers(mutants, patched_tree(Path(folder)))
    except Refused as fault:
        print(f"mutants: {fault}", file=sys.stderr)
        return 1
    if only is None:
        DOCUMENT.write_text(document(mutants, found))
    return 1 if None in found.values() else 0


if __name__ == "__main__":
    sys.exit(main())
