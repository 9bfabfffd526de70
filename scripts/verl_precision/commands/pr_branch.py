"""Split the stack into branches of a clone of verl for a human to review and submit (patches/upstream/README.md).

Each branch is checked by upstream's pre-commit hooks, upstream's check of the title, and the branch's own tests. Exit
code: 0 all checks pass, 1 refused, or a conflict or a failed check.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from verl_precision.patch import upstream
from verl_precision.patch.git import git
from verl_precision.paths import OUTPUTS
from verl_precision.words import Parser

TITLE = "tests/special_sanity/check_pr_title.py"


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of upstream's tools: this Python first, the folder's verl, no accelerator."""
    ours = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(folder)}
    return os.environ | ours | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def make_branches(verl: Path, folder: Path) -> bool:
    """Make and check the branches, print a report, and return whether all checks pass; raise Refused on bad input."""
    plan = upstream.load_plan()
    upstream.check_clone(verl, plan)
    if folder.exists() and any(folder.iterdir()):
        upstream.check_line(verl, folder, plan)
    elif conflicts := upstream.start(verl, folder, plan):
        print(*conflicts, sep="\n")
        return False
    passed = True
    for branch in upstream.commit_branches(plan, folder, environment(folder)):
        counts = git("diff", "--shortstat", "HEAD^", "HEAD", cwd=folder).strip()
        print(f"\n{branch.name}: {branch.title}\n  {counts}", flush=True)
        for name, fault in checks(branch, folder):
            print(f"  {name:12} {'failed' if fault else 'passes'}\n{fault}", end="", flush=True)
            passed = passed and not fault
    upstream.deliver(plan, folder, verl)
    shutil.rmtree(folder)
    print(f"\n{len(plan.branches)} branches in {verl}, each on top of the one before; drafts of their descriptions:")
    print(*(f"  {branch.folder / 'description.md'}" for branch in plan.branches), sep="\n")
    return passed


def checks(branch: upstream.Branch, folder: Path) -> Iterator[tuple[str, str]]:
    """Run the checks of the branch, which is checked out in ``folder``, and yield the output of each that fails."""
    changed = git("diff", "--name-only", "HEAD^", "HEAD", cwd=folder).split()
    tests = [path for path in changed if path.endswith("_on_cpu.py")]
    commands = {
        "title": [TITLE],
        "pre-commit": ["-m", "pre_commit", "run", "--color=never", "--files", *changed],
        "tests": ["-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
    }
    for name, command in commands.items():
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env=environment(folder) | {"PR_TITLE": branch.title},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        yield name, (done.stdout or "no output\n") if done.returncode else ""


def parse(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser("verl-precision pr-branch", __doc__)
    parser.add_argument("verl", type=Path, metavar="VERL", help="a clean git clone of verl with a branch main")
    folder = "working folder; kept if there is a conflict"
    parser.add_argument("--dir", type=Path, default=OUTPUTS / "pr-branch", help=folder)
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    args = parse(words)
    return 0 if make_branches(args.verl, args.dir) else 1
