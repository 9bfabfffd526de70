"""README.md, CONTRIBUTING.md, CHANGELOG.md and docs/: links, commands, paths, keys, lengths and numbers are right.

A check takes the name of a page and its text, which need not be the file's, and yields the faults. The lab book and the
mutants are history: of these only the links are checked.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from pathlib import Path

import pytest

from verl_precision import make
from verl_precision.doctor.config import leaves, load_config
from verl_precision.patch.stack import load_stacks
from verl_precision.paths import PACKAGE, REPO

FILES = [
    file for pattern in ("*.md", "docs/**/*.md", "patches/upstream/README.md") for file in sorted(REPO.glob(pattern))
]
PAGES = [file.relative_to(REPO).as_posix() for file in FILES]
HISTORY = re.compile(r"docs/(log/.*|results/mutants)\.md")
VERL = Path(importlib.util.find_spec("verl").origin).parents[1]  # 0.9.1, patched

FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1``` *$", re.M | re.S)
SPAN = re.compile(r"(`+)(.+?)\1", re.S)


def prose(text: str) -> str:
    """Return a page without its blocks of code."""
    return FENCE.sub("", text)


def blocks(text: str, language: str = "") -> list[str]:
    """Return the blocks of code, those in a language or all."""
    return [code for _, name, code in FENCE.findall(text) if language in (name, "")]


def spans(text: str) -> list[str]:
    """Return the code in the prose of a page."""
    return [" ".join(code.split()) for _, code in SPAN.findall(prose(text))]


def expand(code: str) -> str:
    """Return code with ``ab ac`` for ``a{b,c}``."""
    words = lambda found: " ".join(f"{found[1]}{each}{found[3]}" for each in found[2].split(","))
    return re.sub(r"(\S*?)\{([^\s{}]*,[^\s{}]*)\}(\S*)", words, code)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page, of equal ones the first's."""
    headings = re.findall(r"^#{1,6} +(.+?)[ #]*$", prose(text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def local_links(text: str) -> list[str]:
    """Return the links of a page to files of the repository or to its headings, as written."""
    return re.findall(r"\]\(<?(?![a-z]+:)([^)\s>]+)", SPAN.sub("code", prose(text)))


def links(page: str, text: str) -> Iterator[str]:
    for link in local_links(text):
        name, _, anchor = link.partition("#")
        file = (REPO / page).parent.joinpath(name).resolve()
        if not (file.exists() and file.is_relative_to(REPO)):
            yield f"{name}: no such file"
        elif anchor and anchor not in anchors(file.read_text() if name else text):
            yield f"{link}: no such heading"


TARGETS = set(re.findall(r"^([a-z0-9-]+):", (REPO / "Makefile").read_text(), re.M))
# A line's continuation, a comment, or a quotation, whose first word counts.
UNREAD = re.compile(r"\\\n|(?<!\S)#.*|(['\"])(\S*?)(?: .*?)?\1")
# A command of make up to its end, on a separate line or after an operator; before it prompt and variables.
MAKE = re.compile(r"(?:^|[;|&(]) *(?:\$ )?(?:\w+=\S* +)*make(?=\s|$)([^();|&<>\n]*)", re.M)


def variables(target: str) -> set[str]:
    """Return the variables that a target of the Makefile takes."""
    if target not in make.TARGETS:
        return {"DEVICE", "PYTHON"}
    return {*make.variables(target), "DEVICE", "PYTHON", *make.SOURCES}


def makes(page: str, text: str) -> Iterator[str]:
    for line in MAKE.findall(UNREAD.sub(r"\2", "\n".join([*spans(text), *blocks(text)]))):
        targets = re.findall(r"(?<!\S)[a-z][a-z0-9-]*(?!\S)", line)
        unknown = [each for each in targets if each.removeprefix("help-") not in TARGETS]
        yield from (f"make {each}: no such target" for each in unknown)
        wrong = set(re.findall(r"(?<!\S)([A-Za-z_]+)=", line)).difference(*map(variables, targets or ["help"]))
        yield from (f"make {' '.join(targets)}: {name} is not its variable" for name in sorted(wrong))


QUOTED = re.compile(r"(?<!\S)#.*|'[^']*'|\"[^\"]*\"")  # which the shell does not expand, and comments


def programs(page: str, text: str) -> Iterator[str]:
    """Check the quotation marks, the brackets, and the modules of recipes and of verl, in the ```bash blocks."""
    for code in blocks(text, "bash"):
        try:
            shlex.split(code, comments=True)
        except ValueError as error:
            yield f"{error}: {code.strip()}"
        yield from (f"{word}: zsh needs quotes" for word in re.findall(r"\S*\[\S*", QUOTED.sub("", code)))
        for module in re.findall(r"-m ((?:verl|recipes)\.[\w.]+)", code):
            file = (VERL if module.startswith("verl.") else REPO) / module.replace(".", "/")
            if not (file.with_suffix(".py").exists() or (file / "__main__.py").exists()):
                yield f"python -m {module}: no such module"


ROOMS = "|".join(sorted(each.name for each in PACKAGE.iterdir() if (each / "__init__.py").exists()))
FILE_OF_ROOM = re.compile(rf"(?:{ROOMS})/\S+\.(?:py|jinja)")
PATH = re.compile(r"(?:scripts|configs|tests|patches|recipes|docs|requirements)/[^\s,;:#()'\"{]*")
ANY = re.compile(r"…|\*|\b[A-Z]{2,}\b|\bv\d+(?:\.\d+)+")  # what stands for another name, as a release's does
# Paths of verl's repository, too: of the branches for upstream.
READ = (PACKAGE / "commands/pr_branch.py", *REPO.glob("patches/upstream/**/*.md"))
UPSTREAM = "".join(file.read_text() for file in READ)


def paths(page: str, text: str) -> Iterator[str]:
    words = {word for code in [*spans(text), *blocks(text, "bash")] for word in expand(code).split()}
    for path in sorted({match[0].rstrip("./") for word in words if (match := PATH.match(word))}):
        if not any(REPO.glob(ANY.sub("*", path))) and path not in UPSTREAM:
            yield f"{path}: no such file"
    for path in sorted(filter(FILE_OF_ROOM.fullmatch, words)):
        if not any(PACKAGE.glob(path)):
            yield f"{path}: no such file in the package"


ROOTS = "actor_rollout_ref|critic|trainer|algorithm|data|reward_model|engine"
KEY = re.compile(rf"(?<![\w./-])(?:{ROOTS})(?:\.[\w*…]+)+(?![\w(/])")
PATCHES = ["".join(map(Path.read_text, stack.iterdir())) for stack in REPO.glob("patches/verl/v[0-9]*")]  # by release
FILE = re.compile(r"\.(py|md|yaml|jsonl?|parquet|sqlite|csv|toml)$")


@cache
def known_keys() -> dict[str, bool]:
    """Return the keys of 0.9.1, and of each whether it is a dictionary that takes any key."""
    jobs = {"ppo_trainer": ["+recipe=flowrl", "+rollouts=record"], "ppo_megatron_trainer": [], "sft_trainer_engine": []}
    configs = [load_config(VERL, words, name) for name, words in jobs.items()]
    return {key: config.get(key) == {} for config in configs for key in leaves(config.values)}


def is_key(key: str) -> bool:
    """Return whether 0.9.1 has a key, or a path to keys, or the patches of another release have all its parts."""
    pattern = re.compile(re.sub(r"…|\\\*", r"[\\w.]+", re.escape(key)) + r"(\.|$)")
    if any(pattern.match(each) or takes_any and key.startswith(f"{each}.") for each, takes_any in known_keys().items()):
        return True
    return any(all(re.search(rf"\b{part}\b", patches) for part in re.findall(r"\w+", key)) for patches in PATCHES)


def keys(page: str, text: str) -> Iterator[str]:
    if page != "docs/how-to/amp.md":  # of another trainer
        written = {key for span in spans(text) for key in KEY.findall(expand(span)) if not FILE.search(key)}
        yield from (f"{key}: no release has this key" for key in sorted(written) if not is_key(key))


UNLIMITED = re.compile(r"(CONTRIBUTING|CHANGELOG|docs/results/.*)\.md")
# The most words of a page, code included.
BUDGETS = {
    "README": 1300, "docs/README": 700, "docs/tutorials/first-run-cpu": 700, "docs/tutorials/first-run-gpu": 800,
    "docs/how-to/patch": 1100, "docs/how-to/fork": 1050, "docs/how-to/choose-a-regime": 1500,
    "docs/how-to/cluster": 1500, "docs/how-to/gpus": 1450, "docs/how-to/lora": 420, "docs/how-to/flowrl": 1050,
    "docs/how-to/oat": 950, "docs/how-to/amp": 1100, "docs/how-to/troubleshooting": 1820,
    "docs/reference/commands": 1750, "docs/reference/keys": 1400, "docs/reference/outputs": 1350,
    "docs/reference/limits": 1550, "docs/explanation/why-fp16": 800, "docs/explanation/evidence": 2000,
    "docs/explanation/design": 2000, "patches/upstream/README": 1100,
}  # fmt: skip


STACKS = {stack.id for stack in load_stacks()}


def stacks(page: str, text: str) -> Iterator[str]:
    """Check that the stacks in samples of output are those of the patches; results keep the stack that they are of."""
    if not page.startswith("docs/results/"):
        shown = re.findall(r"(?:stack |^- `)([0-9a-f]{8,})", text, re.M)
        yield from (f"{each}: is no stack" for each in shown if each not in STACKS)


def lengths(page: str, text: str) -> Iterator[str]:
    words, most = len(re.findall(r"\S*\w\S*", text)), BUDGETS.get(page.removesuffix(".md"), 0)
    if words > most and not UNLIMITED.fullmatch(page):
        yield f"{words} words, at most {most}"
    if page == "README.md" and (lines := len(text.splitlines())) > 150:
        yield f"{lines} lines, at most 150"


NUMBER = re.compile(r"(?<![\w.])(\d*\.?\d+(?:[eE][+-]?\d+)?)(?:(\s?%)|(?!\.?\d|[a-wyz_]))")
MARKER = re.compile(r"^<!-- numbers: (\S.*?) -->\n+(.*?)(?=\n\n|\Z)", re.M | re.S)


def is_rounded(shown: str, percent: str, measured: set[Decimal]) -> bool:
    """Return whether a number, which may be a share in percent, rounds one of those measured; a half either way."""
    value, scales = Decimal(shown), (1, 100) if percent else (1,)
    half = Decimal(5).scaleb(value.as_tuple().exponent - 1)
    return any(abs(scale * number - value) <= half for number in measured for scale in scales)


def numbers(page: str, text: str) -> Iterator[str]:
    """Check the decimal numbers and percentages of each marked paragraph or table against the files that it names."""
    marked = MARKER.findall(prose(text))
    if len(marked) != SPAN.sub("", prose(text)).count("<!-- numbers"):
        yield "a marker is not <!-- numbers: FILE … --> in a line"
    for names, block in marked:
        files = [REPO / name for name in names.split()]
        if not all(file.is_file() for file in files):
            yield f"numbers: {names}: no such file"
            continue
        measured = {Decimal(number) for file in files for number, _ in NUMBER.findall(file.read_text())}
        for shown, percent in sorted(set(NUMBER.findall(re.sub(r"\]\([^)]*\)", "]", block)))):
            if (percent or not shown.isdecimal()) and not is_rounded(shown, percent, measured):
                yield f"{shown} is not in {names}"


def faults(text: str, page: str = "README.md") -> list[str]:
    """Return all faults of a text that replaces a page."""
    checks = [links] if HISTORY.fullmatch(page) else [links, makes, programs, paths, keys, stacks, lengths, numbers]
    return [fault for check in checks for fault in check(page, text)]


@pytest.mark.parametrize("page", PAGES)
def test_page_is_right(page):
    assert "\n".join(faults((REPO / page).read_text(), page)) == ""


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
    "`scripts/verl_precision/{cli,no}.py`": "scripts/verl_precision/no.py: no such file",
    "`run/{log,deaths}.py`": "run/deaths.py: no such file in the package",
    "`tests/mutants/AREA.tml`": "tests/mutants/AREA.tml: no such file",
    "`+actor_rollout_ref.actor.dtpye=float16`": "actor_rollout_ref.actor.dtpye: no release has this key",
    "`critic.….{dtype,dtpye}`": "critic.….dtpye: no release has this key",
    "word " * 1301: "1301 words, at most 1300",
    "\n" * 151: "151 lines, at most 150",
    f"{MARKED.replace('sanity', 'no')}\n1.5\n": "numbers: docs/results/no/README.md: no such file",
    f"{MARKED}\n| 77.125 |\n": "77.125 is not in docs/results/sanity/README.md",
    f"{MARKED}\n77.5 %": "77.5 is not in docs/results/sanity/README.md",
    MARKED.replace(":", ""): "a marker is not <!-- numbers: FILE … --> in a line",
    "```bash\nmain 'a=[1]' b=[1] # [c]\n```": "b=[1]: zsh needs quotes",
    "stack 0123456789ab": "0123456789ab: is no stack",
    "```bash\necho 'a\n```": "No closing quotation: echo 'a",
    "```bash\ncd /a && X=1 python3 -m verl.trainer.no a=1\n```": "python -m verl.trainer.no: no such module",
    "```bash\nSTEPS=2 scripts/launch/no.sh\n```": "scripts/launch/no.sh: no such file",
}


@pytest.mark.parametrize("text", WRONG, ids=WRONG.values())
def test_wrong_page_has_one_fault(text):
    assert faults(text) == [WRONG[text]]


MAP = "docs/README.md"
ELSEWHERE = ("docs/results/", "docs/log/")  # the folders of docs/ whose pages are not counted
MOST_PAGES = 20


def linked(page: str, text: str) -> set[str]:
    """Return the paths in the repository to which a page links."""
    names = (link.partition("#")[0] for link in local_links(text))
    return {os.path.normpath(Path(page).parent / name) for name in names if name}


def unmapped(text: str) -> set[str]:
    """Return the pages of docs/ that are linked neither by a text of the map nor by a README.md beside them that is."""
    mapped = linked(MAP, text)
    for index in [page for page in mapped if page.endswith("/README.md")]:
        folder = Path(index).parent
        mapped |= {page for page in linked(index, (REPO / index).read_text()) if Path(page).parent == folder}
    return {page for page in PAGES if page.startswith("docs/")} - mapped - {MAP}


def test_map_links_to_every_page():
    assert unmapped((REPO / MAP).read_text()) == set()


@pytest.mark.parametrize("page", ["how-to/lora.md", "results/stack.md", "results/gpu/README.md"])
def test_page_without_a_link_is_not_mapped(page):
    text = (REPO / MAP).read_text().replace(f"({page})", "")
    assert f"docs/{page}" in unmapped(text)


def test_log_is_mapped_through_its_own_page():
    months = {page for page in PAGES if page.startswith("docs/log/")}
    assert months <= unmapped((REPO / MAP).read_text().replace("(log/README.md)", ""))


def test_documents_are_few():
    pages = [page for page in PAGES if page.startswith("docs/") and not page.startswith(ELSEWHERE)]
    assert len(pages) <= MOST_PAGES, pages


def first_cells(page: str, heading: str) -> set[str]:
    """Return the code in the first cells of the first table below a heading."""
    table = re.search(r"(?:^\|.*\n)+", (REPO / page).read_text().partition(heading)[2], re.M)
    return set(re.findall(r"^\| `(\w+)`", table[0], re.M))


def test_tables_name_what_there_is():
    modules = {file.stem for file in (REPO / "patches/verl/files/verl/utils/precision").glob("*.py")} - {"__init__"}
    assert first_cells("docs/explanation/design.md", "The modules of [`verl/utils/precision`]") == modules
    options = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    markers = {line.partition(":")[0] for line in options["markers"]}
    assert first_cells("CONTRIBUTING.md", "To run a part:") == markers


@pytest.mark.parametrize(
    ("line", "more"),
    [
        ("make status VERL=", "{trees[patched]}"),
        pytest.param("make check", "", marks=pytest.mark.slow),
        pytest.param("make report FROM=docs/results/sanity/grpo", " OUT={out}", marks=pytest.mark.slow),
    ],
)
def test_documented_command_runs(line, more, trees, tmp_path):
    words = f"{line}{more}".format(trees=trees, out=tmp_path / "out").split()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(words, cwd=REPO, env=inherited, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert any(line in (REPO / page).read_text() for page in PAGES), "is documented"
