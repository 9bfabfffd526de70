"""The same job under several regimes, seeds and objectives, and by several versions of the code.

Each run is ``scripts/run.py`` in a process of its own, one after another, in the folder ``OUT/OBJECTIVE/LABEL-seedN``.
Seeds are outermost, so that what is finished is balanced at any time. Runs that are finished are not repeated, one that
was interrupted is taken up from its checkpoint.

The label is the regime, with TREES and BRANCHES ``NAME-REGIME``. ``OUT/code.json`` has what each NAME stood for.
"""

import ctypes
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean

from lib.errors import Refused
from lib.files import write_json
from lib.format import duration, first_three
from lib.patches.git import git, run_git
from lib.patches.git_objects import package_blobs, package_tree_id
from lib.patches.precision_module import precision_file
from lib.patches.releases import VERL
from lib.patches.status import status
from lib.patches.target import find_target
from lib.patches.wheels import unpacked_wheel
from lib.paths import CACHE, REPO
from lib.run import job as jobs

LISTS = {"PRECISION": "fp16", "ALGO": "grpo", "SEED": "1"}  # the variables that take several values, and their defaults
VARIABLES = jobs.VARIABLES | {
    "PRECISION": "the regimes, default fp16",
    "ALGO": "the objectives, default grpo: a report each",
    "SEED": "the seeds, default 1",
    "OUT": "the folder of all runs and reports, default outputs/compare/EXPERIMENT",
    "TREES": "patched verls to compare, each a folder that holds verl/: TREES='old=/path/to/verl new=/other/verl'",
    "BRANCHES": "branches of this project to compare, each on its own patched verl: BRANCHES='main mine'",
}
NAME = re.compile(r"[\w.+-]+")  # part of a label and of a folder's name
TAIL = 4  # lines of a run that failed which are shown


@dataclass(frozen=True)
class Code:
    """A version of the code: a checkout of this project, and the folder that holds its verl.

    ``verl`` is None for the verl of this environment, ``identity`` what ``name`` stands for, for a reader and to notice
    that it has changed.
    """

    name: str = ""
    project: Path = REPO
    verl: Path | None = None
    identity: Mapping[str, str] = field(default_factory=dict, hash=False)

    def environment(self) -> dict[str, str]:
        paths = filter(None, [str(self.verl or ""), os.environ.get("PYTHONPATH")])
        return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


@dataclass(frozen=True)
class Run:
    """One run of the comparison; ``words`` are those of ``scripts/run.py``."""

    code: Code
    objective: str
    label: str
    seed: str
    words: tuple[str, ...]
    out: Path

    def __str__(self) -> str:
        return f"{self.objective} {self.label} seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    """All runs of a comparison in their order, and those of them that were finished before."""

    experiment: str
    out: Path
    runs: tuple[Run, ...]
    finished: tuple[Run, ...]


@dataclass
class Outcome:
    """What came of a plan: the finished runs' labels and folders by objective, the failed runs, whether it was cut."""

    finished: dict[str, list[tuple[str, Path]]]
    failed: list[Run]
    interrupted: bool

    @property
    def code(self) -> int:
        """The exit code."""
        return 130 if self.interrupted else 1 if self.failed else 0


def plan(given: Mapping[str, str]) -> Plan:
    """The runs that these ``VARIABLES`` ask for, each of which can start, be taken up or is finished.

    Raises:
        Refused: a value, a tree or a branch cannot be used, or one of the runs would be refused; nothing was started.
    """
    lists = {name: several(name, given.get(name, default)) for name, default in LISTS.items()}
    experiment = given.get("EXPERIMENT", "gsm8k_1gpu" if "TRAIN" in given else "arithmetic")
    out = Path(given.get("OUT", REPO / "outputs" / "compare" / experiment)).expanduser().resolve()
    codes = versions(given)
    alike = [name for name in given if name in jobs.VARIABLES and name not in (*LISTS, "OUT")]
    kept = absolute([f"{name}={given[name]}" for name in alike])
    planned = []
    for seed, algo, code, precision in product(lists["SEED"], lists["ALGO"], codes, lists["PRECISION"]):
        objective = given.get("RECIPE", algo)
        label = "-".join(filter(None, [code.name, precision]))
        folder = out / objective / f"{label}-seed{seed}"
        chosen = (f"PRECISION={precision}", f"ALGO={algo}", f"SEED={seed}", f"OUT={folder}")
        planned.append(Run(code, objective, label, seed, (*kept, *chosen), folder))
    remembered = remember(out, codes)
    print(f"checking {len(planned)} runs", flush=True)
    done = {run for code in codes for run in admitted(code, [run for run in planned if run.code == code])}
    if remembered:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "code.json", remembered)
    return Plan(experiment, out, tuple(planned), tuple(run for run in planned if run in done))


def several(name: str, value: str) -> list[str]:
    """The values of a variable that takes more than one.

    Raises:
        Refused: one occurs twice.
    """
    values = value.split()
    if twice := [item for item in values if values.count(item) > 1]:
        raise Refused(f"{name}={value}: has {twice[0]} more than once")
    return values


def absolute(given: list[str]) -> list[str]:
    """Words with their files as seen from here: runs are started in the checkout whose code they run."""
    found = []
    for word in given:
        name, _, value = word.partition("=")
        path = Path(value).expanduser()
        local = name in ("TRAIN", "VAL") or name == "MODEL" and path.exists()
        found.append(f"{name}={path.resolve()}" if local else word)
    return found


def versions(given: Mapping[str, str]) -> list[Code]:
    """The versions of the code that TREES or BRANCHES name, or this one.

    Raises:
        Refused: one cannot be used.
    """
    if "TREES" in given and "BRANCHES" in given:
        raise Refused("TREES, BRANCHES: give one of them; a branch brings its own verl")
    if "TREES" in given:
        pairs = [word.partition("=")[::2] for word in jobs.shell_words("TREES", given["TREES"])]
        several("TREES", " ".join(name for name, _ in pairs))
        return [tree(name, folder) for name, folder in pairs]
    if "BRANCHES" in given:
        commits = {name: committed(name) for name in several("BRANCHES", given["BRANCHES"])}
        return [checkout(name, commit) for name, commit in commits.items()]
    return [Code()]


def tree(name: str, folder: str) -> Code:
    """The verl in ``folder``, with this checkout.

    Raises:
        Refused: there is no verl, or it is not patched: it would train in bf16 whatever the regime.
    """
    word = f"TREES={name}={folder}"
    if not folder or not NAME.fullmatch(name):
        raise Refused(f"{word}: must be NAME=FOLDER; a name is letters, digits and . _ + - alone")
    try:
        root = find_target(Path(folder).expanduser().resolve(), VERL).root
        found = status(root)
    except Refused as refusal:
        raise Refused(f"{word}: {refusal}") from refusal
    # A tree that is no release's may have been patched by make port, which leaves no stamp.
    patched = found.stamp or (found.state == "foreign" and precision_file(root))
    if not patched or found.state in ("half-patched", "interrupted"):
        raise Refused(f"{word}: {found.detail}; make apply-patches VERL={folder} patches it")
    content = package_tree_id(package_blobs(root))
    identity = {"folder": str(root), "state": found.detail, "tree": content}
    return Code(name, verl=root, identity=identity)


def committed(name: str) -> str:
    """The commit of a branch of this project.

    Raises:
        Refused: there is no such branch, or a checkout of it has changes that are not committed.
    """
    found = run_git("rev-parse", "--verify", "--quiet", f"refs/heads/{name}^{{commit}}", cwd=REPO)
    if found.returncode:
        known = run_git("for-each-ref", "--format=%(refname:short)", "refs/heads", cwd=REPO).stdout.decode()
        raise Refused(f"BRANCHES={name}: no such branch here; there are {', '.join(known.split()) or 'none'}")
    checkouts = git("worktree", "list", "--porcelain", cwd=REPO).split("\n\n")
    for lines in map(str.splitlines, checkouts):
        if f"branch refs/heads/{name}" in lines:
            folder = Path(lines[0].removeprefix("worktree "))
            changed = [line[3:] for line in git("status", "--porcelain", cwd=folder).splitlines()]
            if changed:
                raise Refused(f"BRANCHES={name}: {folder} has changes that are not committed: {first_three(changed)}")
    return found.stdout.decode().strip()


def checkout(name: str, commit: str) -> Code:
    """The project as of ``commit``, with a fresh copy of this environment's release of verl, patched by its own tool.

    Both are made in .cache/branches, once a commit: a comparison that was interrupted finds them again. The Python
    environment is that of this checkout.

    Raises:
        Refused: its patches do not apply.
    """
    project = CACHE / "branches" / commit
    if not project.exists():
        print(f"BRANCHES={name}: making {project}", flush=True)
        project.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=project.parent) as scratch:
            whole = Path(scratch) / "whole"
            archive = run_git("archive", "--format=tar", commit, cwd=REPO).stdout
            tarfile.open(fileobj=io.BytesIO(archive)).extractall(whole, filter="data")
            verl = unpacked_wheel(installed_release(), whole / ".cache" / "verl")
            apply = [sys.executable, str(whole / "scripts" / "patchset.py"), "apply", str(verl)]
            done = subprocess.run(apply, capture_output=True, text=True)
            if done.returncode:
                raise Refused(f"BRANCHES={name}: {last_line(done.stderr)}")
            os.replace(whole, project)
    return Code(name.replace("/", "-"), project, project / ".cache" / "verl", {"branch": name, "commit": commit})


def installed_release() -> str:
    """The release of this environment's verl."""
    (verl,) = importlib.util.find_spec("verl").submodule_search_locations
    return status(Path(verl)).release


def remember(out: Path, codes: list[Code]) -> dict:
    """The content of ``OUT/code.json`` with these versions.

    Raises:
        Refused: runs there are of another version under the same name.
    """
    file = out / "code.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    for code in codes:
        for what, value in code.identity.items():
            held = known.get(code.name, {}).get(what, value)
            if held != value:
                raise Refused(
                    f"OUT={out}: holds runs of another {code.name}, {what} {held}, not {value}; choose another folder"
                )
    return known | {code.name: dict(code.identity) for code in codes if code.name}


def admitted(code: Code, planned: list[Run]) -> list[Run]:
    """Those of the runs that are finished; the others can start or be taken up.

    Raises:
        Refused: one of them cannot.
    """
    platform = jobs.platform(jobs.parse([*planned[0].words]))  # they differ in neither device nor recipe
    asked = subprocess.run(
        [sys.executable, Path(__file__).with_name("admission.py"), code.project],
        input=json.dumps([run.words for run in planned]),
        env=code.environment() | platform,
        cwd=code.project,
        capture_output=True,
        text=True,
    )
    if asked.returncode:
        raise Refused(f"{code.name and f'{code.name}: '}{last_line(asked.stderr)}")
    return [run for run, done in zip(planned, json.loads(asked.stdout), strict=True) if done]


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "it ended without a word")


class Screen:
    """What the user sees: what is done, left and under way. On a terminal the run under way has one line."""

    def __init__(self, chosen: Plan):
        self.plan, self.done = chosen, list(chosen.finished)
        self.started = time.monotonic()
        self.live = sys.stdout.isatty()

    def say(self, text: str) -> None:
        elapsed = duration(time.monotonic() - self.started)
        print(f"{self.cleared()}[{elapsed:>6}] {text}", flush=True)

    def show(self, line: str) -> None:
        """A line of the run under way."""
        if self.live:
            width = shutil.get_terminal_size().columns - 3
            print(f"{self.cleared()}  {line[:width]}", end="", flush=True)
        else:
            print(f"  {line}", flush=True)

    def cleared(self) -> str:
        return "\r\x1b[2K" if self.live else ""

    def left(self, ahead: list[Run]) -> str:
        """How many runs are ahead and how long they take, judged by those finished, of the same objective if any."""
        if not ahead:
            return "none left"
        if not self.done:
            return f"{len(ahead)} left"
        seconds: dict[str, list[float]] = {}
        for run in self.done:
            seconds.setdefault(run.objective, []).append(summary(run)["wall_s"])
        every = [value for values in seconds.values() for value in values]
        expected = sum(fmean(seconds.get(run.objective, every)) for run in ahead)
        return f"{len(ahead)} left, about {duration(expected)}"


def summary(run: Run) -> dict:
    return json.loads((run.out / "summary.json").read_text())


def perform(run: Run, screen: Screen) -> tuple[int, deque[str]]:
    """Run ``scripts/run.py`` to its end: its exit code and its last lines.

    Raises:
        KeyboardInterrupt: after the run was ended in order, as if it alone had been interrupted.
    """
    process = subprocess.Popen(
        [sys.executable, run.code.project / "scripts" / "run.py", *run.words],
        env=run.code.environment(),
        cwd=run.code.project,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C reaches us alone, and we hand it on
        preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM),  # PR_SET_PDEATHSIG: it does not outlive us
    )
    tail: deque[str] = deque(maxlen=TAIL)

    def follow() -> int:
        for line in filter(None, map(str.rstrip, process.stdout)):
            tail.append(line.strip())
            screen.show(line)
        return process.wait()

    try:
        return follow(), tail
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        process.send_signal(signal.SIGINT)
        follow()
        raise


def run(chosen: Plan) -> Outcome:
    """Do what is planned, as far as it comes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    screen, failed, interrupted = Screen(chosen), [], False
    ahead = [run for run in chosen.runs if run not in chosen.finished]
    screen.say(f"{len(screen.done)} of {len(chosen.runs)} runs are finished, {screen.left(ahead)}; all in {chosen.out}")
    try:
        while ahead:
            current = ahead[0]
            number = len(chosen.runs) - len(ahead) + 1
            screen.say(f"run {number}/{len(chosen.runs)}: {current}")
            code, tail = perform(current, screen)
            ahead = ahead[1:]
            if code:
                failed.append(current)
                screen.say(f"{current} failed with exit code {code}, {screen.left(ahead)}")
                print("\n".join(f"    {line}" for line in tail), flush=True)
            else:
                screen.done.append(current)
                told = summary(current)
                first, last = (number(told[name], ".3f") for name in ("reward_first", "reward_last"))
                took = duration(told["wall_s"])
                screen.say(f"{current}: reward {first} to {last} in {took}; {screen.left(ahead)}")
    except KeyboardInterrupt:
        interrupted = True
        screen.say(f"interrupted, {len(screen.done)} of {len(chosen.runs)} runs are finished")
    finished: dict[str, list[tuple[str, Path]]] = {}
    for each in chosen.runs:
        if each in screen.done:
            finished.setdefault(each.objective, []).append((each.label, each.out))
    return Outcome(finished, failed, interrupted)
