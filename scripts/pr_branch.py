"""Make the stack branches of a clone of verl, ready for a human to review and submit; see docs/upstreaming.md.

Each branch is checked as upstream would: its own pre-commit hooks, the check of the title, and the CPU tests that the
branch's changes touch. Exit code: 0 all branches are green, 1 refused, or a conflict or a failed check, 2 usage.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lib import upstream
from lib.releases import PROJECT, Refused
from lib.stack import git

TITLE = "tests/special_sanity/check_pr_title.py"
DEFAULT = PROJECT / "outputs/pr-branch"


@dataclass(frozen=True)
class Check:
    """One check of a branch: what it is, what came of it in a few words, and its output where it failed."""

    what: str
    result: str
    output: str = ""


def environment(folder: Path) -> dict[str, str]:
    """The environment of upstream's own tools: this Python first, the folder's verl, no accelerator."""
    ours = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(folder)}
    return os.environ | ours | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def make(verl: Path, folder: Path) -> bool:
    """Make and check the branches, and print a report; returns whether all is green. Raises Refused."""
    plan = upstream.load_plan()
    upstream.check_clone(verl, plan)
    if folder.exists() and any(folder.iterdir()):
        upstream.check_line(verl, folder)
    else:
        lines, done = upstream.start(verl, folder, plan)
        print(*lines, sep="\n", flush=True)
        if not done:
            return False
    failed = []
    for branch in upstream.commit_branches(plan, folder, environment(folder)):
        changed = git("diff", "--name-only", "HEAD^", "HEAD", cwd=folder).split()
        counts = git("diff", "--shortstat", "HEAD^", "HEAD", cwd=folder).strip()
        print(f"\n{branch.name}: {branch.title}\n  {counts}", flush=True)
        for check in checks(branch, folder, changed):
            print(f"  {check.what:12} {check.result}", flush=True)
            failed += [(branch, check)] if check.output else []
    upstream.deliver(plan, folder, verl)
    for branch, check in failed:
        print(f"\n--- {branch.name}: {check.what}: {check.result}\n{check.output}")
    print(f"\n{len(plan.branches)} branches in {verl}, each on top of the one before")
    if not failed:
        shutil.rmtree(folder)
    return not failed


def checks(branch: upstream.Branch, folder: Path, changed: list[str]) -> Iterator[Check]:
    yield title(branch, folder)
    yield pre_commit(folder, changed)
    yield tests(folder, changed)


def title(branch: upstream.Branch, folder: Path) -> Check:
    done = run([sys.executable, TITLE], folder, PR_TITLE=branch.title)
    return Check("title", *(("refused", done.stdout) if done.returncode else ("passes",)))


def pre_commit(folder: Path, changed: list[str]) -> Check:
    """Run upstream's hooks on the files that the branch changes."""
    done = run([sys.executable, "-m", "pre_commit", "run", "--color=never", "--files", *changed], folder)
    fates = re.findall(r"^(.*?)\.{3,}(?:\(.*\))?(Passed|Failed|Skipped)$", done.stdout, re.M)
    failed = [name for name, fate in fates if fate == "Failed"]
    if failed or done.returncode:
        return Check("pre-commit", f"failed: {', '.join(failed) or 'it did not run'}", done.stdout)
    return Check("pre-commit", f"{len(fates)} hooks pass: {', '.join(name for name, fate in fates)}")


def tests(folder: Path, changed: list[str]) -> Check:
    """Run the CPU tests that the branch adds and those that import what it changes."""
    found = touched_tests(folder, changed)
    done = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *found], folder)
    last = done.stdout.strip().rpartition("\n")[2].strip("= ")
    result = f"{len(found)} files: {last}"
    return Check("tests", result, done.stdout[-8000:] if done.returncode else "")


def touched_tests(folder: Path, changed: list[str]) -> list[str]:
    """Return the paths of the tests named test_*_on_cpu.py that are changed, or that import a changed module of verl.

    A package stands for the modules in it: ``from verl.workers.config import …`` imports ``verl/workers/config/*.py``.
    """
    modules = {path.removesuffix(".py").replace("/", ".") for path in changed if path.endswith(".py")}
    modules |= {module.rpartition(".")[0] for module in modules}
    there = git("ls-files", "tests/**/test_*_on_cpu.py", "tests/test_*_on_cpu.py", cwd=folder).split()
    return [path for path in there if path in changed or modules & imports_of((folder / path).read_text())]


def imports_of(source: str) -> set[str]:
    """Return the dotted names of all modules that a test may import."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def run(command: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment(folder) | more, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="pr_branch", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("verl", type=Path, metavar="VERL", help="a git clone of verl, clean, with a branch main")
    parser.add_argument("--dir", type=Path, default=DEFAULT, help="where to work; it stays where not all is green")
    args = parser.parse_args()
    try:
        return 0 if make(args.verl, args.dir) else 1
    except (Refused, OSError) as fault:
        print(f"pr_branch: {fault}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
