"""Put known defects of fp16 training back into patched verl, one at a time, and report the test that fails on each.

tests/mutants.toml lists them. All tests first pass on the patched tree; then each mutant's tests run on the tree with
one text replaced. A run of all mutants writes docs/mutants.md. Exit code: 0 every mutant was killed, 1 a mutant
survived or the tests could not run, 2 usage.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
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
NO_FAILURE, FAILURE = 0, 1  # pytest's exit codes; with any other the tests did not run


@dataclass(frozen=True)
class Mutant:
    """One defect: ``replace``, which occurs exactly once in ``file``, becomes ``by``, and one of ``tests`` fails."""

    name: str
    defect: str
    seen_in: str
    file: str
    replace: str
    by: str
    tests: tuple[str, ...]

    def source(self, tree: Path) -> str:
        """Return the mutated content of ``file``.

        Raises:
            Refused: the text to replace does not occur exactly once.
        """
        text = (tree / self.file).read_text()
        if (count := text.count(self.replace)) != 1:
            raise Refused(f"{self.name}: its text occurs {count} times in {self.file}, not once; edit {TABLE.name}")
        return text.replace(self.replace, self.by)


def load(table: Path) -> list[Mutant]:
    """Read a table of mutants, in its order."""
    import tomllib  # 3.11: --help runs on 3.10

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
        Its id, with "(stuck)" if one rank waited for another that never came; None if all passed.

    Raises:
        Refused: the tests did not run, e.g. because a test does not exist.
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
    """Return the test that kills each mutant, None for a survivor; prints a line for each.

    Raises:
        Refused: a mutant's text does not occur exactly once, the unmutated tree fails, or tests did not run.
    """
    sources = {mutant.name: mutant.source(tree) for mutant in mutants}
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    print(f"without a mutant: {len(tests)} tests", flush=True)
    if failed := first_failure(tests, tree):
        raise Refused(f"{failed} fails on the tree without a mutant")
    killed_by = {}
    for number, mutant in enumerate(mutants, start=1):
        file, start = tree / mutant.file, time.monotonic()
        original = file.read_text()
        file.write_text(sources[mutant.name])
        killed_by[mutant.name] = killer = first_failure(mutant.tests, tree)
        file.write_text(original)
        verdict = f"killed by {killer}" if killer else "SURVIVED"
        print(f"{number}/{len(mutants)} {mutant.name}: {verdict} ({time.monotonic() - start:.0f} s)", flush=True)
    return killed_by


def document(mutants: list[Mutant], killed_by: dict[str, str | None]) -> str:
    """Return the table of mutants and the tests that killed them, as Markdown."""
    survivors = sum(killer is None for killer in killed_by.values())
    lines = [
        "# Mutants",
        "",
        f"Written by `make mutants` on verl {RELEASE}: {len(mutants)} mutants, {survivors} survivors. Each is the",
        "patched tree with one text replaced by a defect, as in `tests/mutants.toml`; the test is the first of those",
        "named there to fail on it. Without a mutant all of them pass. (stuck): one rank waited for the other forever.",
        "",
        "| mutant | defect | seen in | killed by |",
        "|---|---|---|---|",
    ]
    for mutant in mutants:
        killer = killed_by[mutant.name]
        verdict = f"`{killer.removeprefix('tests/')}`" if killer else "**survived**"
        lines.append(f"| {mutant.name} | {mutant.defect} | {mutant.seen_in} | {verdict} |")
    return "\n".join(lines) + "\n"


def parse(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("name", nargs="?", metavar="NAME", help="a mutant of tests/mutants.toml; without it, all")
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    only, table = parse(words).name, load(TABLE)
    mutants = [mutant for mutant in table if only in (None, mutant.name)]
    try:
        if not mutants:
            raise Refused(f"{only}: is not a mutant; the mutants are {', '.join(mutant.name for mutant in table)}")
        with tempfile.TemporaryDirectory() as folder:
            killed_by = killers(mutants, patched_tree(Path(folder)))
    except Refused as fault:
        print(f"mutants: {fault}", file=sys.stderr)
        return 1
    if only is None:
        DOCUMENT.write_text(document(mutants, killed_by))
    return 1 if None in killed_by.values() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
