"""Split the stack into branches of a clone of verl for a human to review and submit (docs/project/upstreaming.md).

Each branch is checked as upstream does: by its pre-commit hooks, its check of the title, and the CPU tests that the
branch's changes touch. Exit code: 0 all checks pass, 1 refused, or a conflict or a failed check.
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

from verl_precision.patch import upstream
from verl_precision.patch.git import git
from verl_precision.paths import OUTPUTS
from verl_precision.words import Parser

TITLE = "tests/special_sanity/check_pr_title.py"


@dataclass(frozen=True)
class Check:
    """A check of a branch, its result in a few words, and its output."""

    name: str
    passed: bool
    result: str
    output: str = ""


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of upstream's tools: this Python first, the folder's verl, no accelerator.

    Ray offers 128 CPUs, because upstream's tests request up to 100 and would wait indefinitely for the machine's few.
    """
    ours = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(folder)}
    ours["RAY_OVERRIDE_RESOURCES"] = '{"CPU": 128}'
    return os.environ | ours | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def make_branches(verl: Path, folder: Path) -> bool:
    """Make and check the branches, print a report, and return whether all checks pass; raise Refused on bad input."""
    plan = upstream.load_plan()
    upstream.check_clone(verl, plan)
    if folder.exists() and any(folder.iterdir()):
        upstream.check_line(verl, folder, plan)
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
            print(f"  {check.name:12} {check.result}", flush=True)
            failed += [] if check.passed else [(branch, check)]
    upstream.deliver(plan, folder, verl)
    shutil.rmtree(folder)
    for branch, check in failed:
        print(f"\n--- {branch.name}: {check.name}: {check.result}\n{check.output}")
    print(f"\n{len(plan.branches)} branches in {verl}, each on top of the one before; drafts of their descriptions:")
    print(*(f"  {branch.folder / 'description.md'}" for branch in plan.branches), sep="\n")
    return not failed


def checks(branch: upstream.Branch, folder: Path, changed: list[str]) -> Iterator[Check]:
    yield title(branch, folder)
    yield pre_commit(folder, changed)
    yield tests(folder, changed)


def title(branch: upstream.Branch, folder: Path) -> Check:
    done = run([sys.executable, TITLE], folder, PR_TITLE=branch.title)
    return Check("title", not done.returncode, "refused" if done.returncode else "passes", done.stdout)


def pre_commit(folder: Path, changed: list[str]) -> Check:
    """Run upstream's hooks on the files that the branch changes."""
    done = run([sys.executable, "-m", "pre_commit", "run", "--color=never", "--files", *changed], folder)
    passed, failed = (re.findall(rf"^(.*?)\.{{3,}}{each}$", done.stdout, re.M) for each in ("Passed", "Failed"))
    result = f"{len(passed)} passed"
    if done.returncode:
        result += f", {len(failed)} failed: {', '.join(failed)}" if failed else ", pre-commit failed"
    return Check("pre-commit", not done.returncode, result, done.stdout)


def tests(folder: Path, changed: list[str]) -> Check:
    """Run the CPU tests that the branch's changes touch; a test that fails on main too does not fail the check."""
    paths = touched_tests(folder, changed)
    if not paths:
        return Check("tests", False, "none: no test_*_on_cpu.py reads what is changed")
    done = pytest(folder, paths)
    result = f"{len(paths)} files: {summary(done.stdout)}"
    if not done.returncode:
        return Check("tests", True, result)
    failed = failures(done.stdout)
    before = sorted(path for path in {test.partition("::")[0] for test in failed} if path not in changed)
    branch = git("rev-parse", "HEAD", cwd=folder).strip()
    git("checkout", "--quiet", "--force", "--detach", upstream.ONTO, cwd=folder)
    on_main = failures(pytest(folder, before).stdout) if before else set()
    git("checkout", "--quiet", "--force", "--detach", branch, cwd=folder)
    if failed and failed <= on_main:
        return Check("tests", True, f"{result}; those fail on main too")
    return Check("tests", False, f"{result}; {len(failed & on_main)} of them on main too", done.stdout[-8000:])


def pytest(folder: Path, paths: list[str]) -> subprocess.CompletedProcess[str]:
    # Without the last option one file that cannot be imported ends the run before the first test.
    options = ["-q", "-rfE", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    return run([sys.executable, "-m", "pytest", *options, *paths], folder)


def summary(output: str) -> str:
    """Return pytest's last line; output of Ray's processes may follow it."""
    lines = re.findall(r"^(?:=+ )?((?:\d+|no) \w+.* in \d+\.\d+s.*?)(?: =+)?$", output, re.M)
    return lines[-1] if lines else "pytest ended without a summary"


def failures(output: str) -> set[str]:
    """Return the ids of the tests that failed, which may contain spaces, as pytest's summary lists them."""
    return set(re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.M))


def touched_tests(folder: Path, changed: list[str]) -> list[str]:
    """Return the paths of the tests named test_*_on_cpu.py that are changed or that read a changed file.

    A test reads a module that it imports, also through a package's ``__init__``, and the configs if it contains
    "trainer/config".
    """
    modules = {dotted(path) for path in changed if path.endswith(".py")}
    inits = [path for path in git("ls-files", "verl/**/__init__.py", cwd=folder).split() if path.count("/") > 1]
    for init in sorted(inits, key=lambda path: -path.count("/")):  # the innermost first
        if modules & imports_of((folder / init).read_text(), dotted(init)):
            modules.add(dotted(init))
    configs = any(path.startswith(upstream.CONFIGS) for path in changed)

    def reads(source: str) -> bool:
        return bool(modules & imports_of(source)) or (configs and "trainer/config" in source)

    there = [path for path in git("ls-files", "tests", cwd=folder).split() if re.search(r"/test_\w*_on_cpu\.py$", path)]
    return [path for path in there if path in changed or reads((folder / path).read_text())]


def dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports_of(source: str, package: str = "") -> set[str]:
    """Return the dotted names that are imported, modules or not; relative ones are relative to ``package``."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level < 2:
            module = ".".join(filter(None, (package if node.level else "", node.module)))
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def run(command: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment(folder) | more, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


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
