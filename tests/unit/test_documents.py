"""README.md, CONTRIBUTING.md, CHANGELOG.md and docs/: links, commands, paths, keys, lengths and numbers are right.

Each check returns the faults of a page. The lab book and the mutants are history: of these only the links are checked.
"""

import importlib
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import ROUND_HALF_DOWN, ROUND_HALF_UP, Decimal
from functools import cache, partial
from pathlib import Path

import pytest

import command
from lib.doctor.config import leaves, load_config
from lib.paths import REPO

PAGES = sorted(file for file in REPO.glob("*.md")) + sorted((REPO / "docs").rglob("*.md"))
HISTORY = re.compile(r"docs/(log/.*|reference/mutants)\.md")
UNLIMITED = re.compile(rf"(CONTRIBUTING|CHANGELOG|docs/results/.*|docs/reference/support-\w+)\.md|{HISTORY.pattern}")
# The most words of a page, code included.
BUDGETS = {
    **{"README": 1300, "docs/README": 800, "docs/tutorials/first-run-cpu": 800, "docs/tutorials/first-run-gpu": 800},
    **{"docs/how-to/patch": 900, "docs/how-to/port": 900, "docs/how-to/doctor": 900, "docs/how-to/preflight": 600},
    **{"docs/how-to/probe": 900, "docs/how-to/compare": 1000, "docs/how-to/plan-memory": 900, "docs/how-to/oat": 1200},
    **{"docs/how-to/cluster": 1200, "docs/how-to/flowrl": 1000, "docs/how-to/amp": 1400, "docs/how-to/faq": 1000},
    **{"docs/how-to/troubleshooting": 2000, "docs/reference/keys": 1500, "docs/reference/limits": 1500},
    **{"docs/reference/metrics": 700, "docs/reference/checkpoints": 800, "docs/explanation/why-fp16": 900},
    **{"docs/explanation/evidence": 2300, "docs/explanation/design": 2600, "docs/project/upstreaming": 1300},
}
README_LINES = 150
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1``` *$", re.M | re.S)
SPAN = re.compile(r"(`+)(.+?)\1", re.S)
PATH = re.compile(r"(?:scripts|configs|tests|patches|recipes|docs|requirements)/(?:\{[^}]*\}|[^\s,;:#()'\"{])*")
ANY = re.compile(r"…|\*|\b[A-Z]{2,}\b|\bv\d+(?:\.\d+)+")  # what stands for another name, as a release's does
ROOTS = "actor_rollout_ref|critic|trainer|algorithm|data|reward_model|engine"
KEY = re.compile(rf"(?<![\w./-])(?:{ROOTS})(?:\.(?:[\w*…]|\{{[\w.,]+\}})+)+(?![\w(/])")
FILE = re.compile(r"\.(py|md|yaml|jsonl?|parquet|sqlite|csv|toml)$")
NUMBER = re.compile(r"(?<![\w.])(\d*\.?\d+(?:[eE][+-]?\d+)?)(?:(\s?%)|(?!\.?\d|[a-wyz_]))")
MARKER = re.compile(r"^<!-- numbers: (\S.*?) -->\n+(.*?)(?=\n\n|\Z)", re.M | re.S)
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (REPO / "Makefile").read_text(), re.M))
ARGUMENT = re.compile(r"[A-Za-z_]+=")
# Paths of verl's repository, too: of the branches for upstream.
UPSTREAM = [REPO / "scripts/pr_branch.py", *(REPO / "patches/upstream").rglob("*.md")]


def spans(text: str) -> list[str]:
    """Return the code in the prose of a page."""
    return [" ".join(code.split()) for _, code in SPAN.findall(FENCE.sub("", text))]


def split(code: str) -> Iterator[list[str]]:
    """Yield the words of each simple command, without the variables before it; of an open quotation ``'`` and it."""
    pending = ""
    for line in code.replace("\\\n", " ").splitlines():
        pending += line.strip().removeprefix("$ ")
        lexer = shlex.shlex(pending, posix=True, punctuation_chars="();|&<>")
        lexer.whitespace_split = True
        try:
            tokens = list(lexer)
        except ValueError:
            pending += " "
            continue
        pending = ""
        for is_end, group in itertools.groupby(tokens, key=lambda token: set(token) <= set("();|&<>")):
            if words := [] if is_end else list(itertools.dropwhile(ARGUMENT.match, group)):
                yield words
    if pending:
        yield ["'", pending.strip()]


def braces(text: str) -> list[str]:
    """Return what a shell makes of ``a{b,c}``."""
    if not (match := re.fullmatch(r"(.*?)\{(.*?)\}(.*)", text)):
        return [text]
    return [f"{match[1]}{each}{tail}" for each in match[2].split(",") for tail in braces(match[3])]


@cache
def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    count: Counter[str] = Counter()
    for heading in re.findall(r"^#{1,6} +(.+?)[ #]*$", FENCE.sub("", text), re.M):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        count[re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")] += 1
    return {slug if not number else f"{slug}-{number}" for slug in count for number in range(count[slug])}


def links(page: Path, text: str) -> list[str]:
    faults = []
    for link in re.findall(r"\]\(<?(?![a-z]+:)([^)\s>]+)", SPAN.sub("code", FENCE.sub("", text))):
        name, _, anchor = link.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not (file.exists() and file.is_relative_to(REPO)):
            faults.append(f"{name}: no such file")
        elif anchor and anchor not in anchors(text if file == page else file.read_text()):
            faults.append(f"{link}: no such heading")
    return faults


def variables(target: str) -> set[str]:
    """Return the variables that a target of the Makefile takes."""
    if not (chosen := command.COMMANDS.get(target)):
        return {"DEVICE", "PYTHON"}
    parser = chosen.parser.partition(":")[0]
    takes = importlib.import_module(parser).VARIABLES if chosen.takes is None else chosen.takes
    return {*takes, "DEVICE", "PYTHON", "TORCH_INDEX_URL"}


def makes(page: Path, text: str) -> list[str]:
    faults = []
    for words in itertools.chain(*map(split, [*spans(text), *(code for _, _, code in FENCE.findall(text))])):
        if words[0] == "make":
            targets = [word for word in words[1:] if re.fullmatch(r"[a-z][a-z0-9-]*", word)]
            faults += [f"make {each}: no such target" for each in targets if each.removeprefix("help-") not in TARGETS]
            names = {word.partition("=")[0] for word in words if ARGUMENT.match(word)}
            wrong = sorted(names.difference(*map(variables, targets or ["help"])))
            faults += [f"make {' '.join(targets)}: {name} is not its variable" for name in wrong]
    return faults


def exists(path: str) -> bool:
    """Return whether a path of this repository exists, or one that it stands for, or verl's own has it."""
    found = (REPO / path).exists() or bool(ANY.search(path)) and any(REPO.glob(ANY.sub("*", path)))
    return found or any(path in file.read_text() for file in UPSTREAM)


def paths(page: Path, text: str) -> list[str]:
    words = {word.rstrip(".") for span in spans(text) for word in span.split()}
    named = sorted({match[0] for word in words if (match := PATH.match(word))})
    return [f"{path}: no such file" for path in named if not all(map(exists, braces(path.rstrip("/"))))]


def programs(page: Path, text: str, verl: Path) -> list[str]:
    """Check the scripts, and the modules of recipes and of verl, in the ```bash blocks."""
    faults = []
    for words in itertools.chain(*(split(code) for _, language, code in FENCE.findall(text) if language == "bash")):
        faults += [f"a quotation mark is not closed: {words[1]}"] if words[0] == "'" else []
        faults += [f"{word}: no such file" for word in words if word.startswith("scripts/") and not exists(word)]
        modules = {after for option, after in itertools.pairwise(words) if option == "-m"}
        for module in filter(re.compile(r"(verl|recipes)\.").match, modules):
            file = (verl if module.startswith("verl.") else REPO) / module.replace(".", "/")
            if not (file.with_suffix(".py").exists() or (file / "__main__.py").exists()):
                faults.append(f"python -m {module}: no such module")
    return faults


@cache
def words_of_patches() -> list[set[str]]:
    """Return the words in the patches of each release."""
    stacks = (REPO / "patches/verl").glob("v[0-9]*")
    return [set(re.findall(r"\w+", "".join(file.read_text() for file in stack.iterdir()))) for stack in stacks]


def keys(page: Path, text: str, known: set[str]) -> list[str]:
    """Check each key against those of 0.9.1, or look for all its parts in the patches of another release.

    Args:
        known: the keys and all paths to them; with a dot at the end, a dictionary that takes any key.
    """
    found = {match[0] for span in spans(text) for match in KEY.finditer(span)} if page.name != "amp.md" else set()
    free, unknown = tuple(key for key in known if key.endswith(".")), []
    for key in sorted(each for written in found if not FILE.search(written) for each in braces(written)):
        pattern, parts = re.sub(r"…|\\\*", r"[\\w.]+", re.escape(key)), set(re.findall(r"\w+", key))
        in_0_9_1 = key.startswith(free) or any(re.fullmatch(pattern, each) for each in known)
        if not in_0_9_1 and not any(parts <= words for words in words_of_patches()):
            unknown.append(f"{key}: no release has this key")
    return unknown


def lengths(page: Path, text: str) -> list[str]:
    name, words = page.relative_to(REPO).as_posix(), len(re.findall(r"\S*\w\S*", text))
    most = BUDGETS.get(name.removesuffix(".md"), 0)
    faults = [f"{words} words, at most {most}"] if words > most and not UNLIMITED.fullmatch(name) else []
    if name == "README.md" and (lines := len(text.splitlines())) > README_LINES:
        faults.append(f"{lines} lines, at most {README_LINES}")
    return faults


@cache
def numbers_of(file: Path) -> set[Decimal]:
    return {Decimal(number) for number, _ in NUMBER.findall(file.read_text())}


def is_rounding(shown: str, percent: bool, measured: set[Decimal]) -> bool:
    """Return whether a number, which may be a share in percent, rounds one of those measured."""
    value = Decimal(shown)
    unit = Decimal((0, (1,), value.as_tuple().exponent))
    scaled = measured | {100 * number for number in measured} if percent else measured
    near = [number for number in scaled if abs(number - value) <= unit]
    return any(value == number.quantize(unit, way) for number in near for way in (ROUND_HALF_UP, ROUND_HALF_DOWN))


def numbers(page: Path, text: str) -> list[str]:
    """Check the decimal numbers and percentages of each marked paragraph or table against the files that it names."""
    marked, faults = MARKER.findall(FENCE.sub("", text)), []
    if len(marked) != SPAN.sub("", FENCE.sub("", text)).count("<!-- numbers"):
        faults.append("a marker is not <!-- numbers: FILE … --> in a line")
    for names, block in marked:
        files = [REPO / name for name in names.split()]
        if not all(file.is_file() for file in files):
            faults.append(f"numbers: {names}: no such file")
            continue
        measured = set().union(*map(numbers_of, files))
        found = NUMBER.findall(re.sub(r"\]\([^)]*\)", "]", block))
        shown = {(each, bool(percent)) for each, percent in found if percent or not each.isdecimal()}
        faults += [f"{each[0]} is not in {names}" for each in sorted(shown) if not is_rounding(*each, measured)]
    return faults


@pytest.fixture(scope="module")
def faults_of(trees) -> Callable[..., list[str]]:
    """``faults_of(text, page)``: all faults of a text in the place of a page, by default of README.md."""
    jobs = {"ppo_trainer": ["+recipe=flowrl", "+rollouts=record"], "ppo_megatron_trainer": [], "sft_trainer_engine": []}
    known: set[str] = set()
    for name, words in jobs.items():
        config = load_config(trees["patched"], words, name)
        for key in leaves(config.values):
            known |= {".".join(parts) for parts in itertools.accumulate([part] for part in key.split("."))}
            known |= {f"{key}."} if config.get(key) == {} else set()
    checks = [makes, paths, lengths, numbers, partial(programs, verl=trees["patched"]), partial(keys, known=known)]

    def of(text: str, page: Path = REPO / "README.md") -> list[str]:
        history = HISTORY.fullmatch(page.relative_to(REPO).as_posix())
        return [fault for check in [links, *([] if history else checks)] for fault in check(page, text)]

    return of


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPO).as_posix())
def test_page_is_right(page, faults_of):
    faults = faults_of(page.read_text(), page)
    assert not faults, "\n".join(faults)


MARKED = "<!-- numbers: docs/results/sanity/README.md -->"
WRONG = {
    "[a](docs/no.md)": "docs/no.md: no such file",
    "[a](../outside)": "../outside: no such file",
    "[`a`](Makefile) [b](docs/log/README.md#no)": "docs/log/README.md#no: no such heading",
    "# A\n[a](#a) [b](#a-1)": "#a-1: no such heading",
    "`make rnu`": "make rnu: no such target",
    "`make help-rnu`": "make help-rnu: no such target",
    "`DEVICE=cpu make run PRECISON=fp16`": "make run: PRECISON is not its variable",
    "```text\n$ make status STEPS=2 | cat\n```": "make status: STEPS is not its variable",
    "`scripts/{run,no}.py`": "scripts/{run,no}.py: no such file",
    "`tests/mutants/AREA.tml`": "tests/mutants/AREA.tml: no such file",
    "`+actor_rollout_ref.actor.dtpye=float16`": "actor_rollout_ref.actor.dtpye: no release has this key",
    "`critic.….{dtype,dtpye}`": "critic.….dtpye: no release has this key",
    "word " * 1301: "1301 words, at most 1300",
    "\n" * 151: "151 lines, at most 150",
    f"{MARKED.replace('sanity', 'no')}\n1.5\n": "numbers: docs/results/no/README.md: no such file",
    f"{MARKED}\n| 77.125 |\n": "77.125 is not in docs/results/sanity/README.md",
    f"{MARKED}\n77.5 %": "77.5 is not in docs/results/sanity/README.md",
    MARKED.replace(":", ""): "a marker is not <!-- numbers: FILE … --> in a line",
    "```bash\necho 'a\n```": "a quotation mark is not closed: echo 'a",
    "```bash\ncd /a && X=1 python3 -m verl.trainer.no a=1\n```": "python -m verl.trainer.no: no such module",
    "```bash\nSTEPS=2 scripts/launch/no.sh\n```": "scripts/launch/no.sh: no such file",
}


@pytest.mark.parametrize("text", WRONG, ids=WRONG.values())
def test_wrong_page_has_one_fault(text, faults_of):
    assert faults_of(text) == [WRONG[text]]


SLOW = ["make check", "make report FROM=docs/results/sanity/grpo", "python scripts/run.py --check PRECISION=fp16"]


@pytest.mark.parametrize(
    "line", ["make status VERL=/path/to/verl", *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_documented_command_runs(line, trees, tmp_path):
    words = line.replace("/path/to/verl", str(trees["patched"])).replace("python", sys.executable).split()
    words += [f"OUT={tmp_path / 'out'}"] if "=" in line and "status" not in line else []
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(words, cwd=REPO, env=inherited, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert line.startswith("python") or any(line in page.read_text() for page in PAGES), "is documented"
