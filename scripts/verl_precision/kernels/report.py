"""Report compiled kernels by generation, and interpreted ones by situation, as Markdown."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from verl_precision.format import markdown_table, significant
from verl_precision.kernels.compiled import Compiled
from verl_precision.kernels.generations import GENERATIONS

ERRORS = {"log_prob": "log p", "entropy": "entropy", "hidden": "gradient of hidden states"}
ERRORS |= {"weight": "gradient of the head", "logits": "gradient of logits", "output": "output"}
INCLUDE_FLASH_ATTN = (
    "export FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE FLASH_ATTENTION_FORCE_BUILD=TRUE",
    ".venv-cuda/bin/python -m pip install --no-deps --no-build-isolation --target outputs/flash-attn flash-attn==2.8.3",
    "PYTHONPATH=$PWD/outputs/flash-attn make check-kernels DEVICE=cuda FLASH_ATTN=no",
)


@dataclass(frozen=True)
class Kernel:
    """A kernel of a group, compiled for a generation in a dtype."""

    generation: str
    dtype: str
    group: str
    kernel: str
    models: tuple[str, ...]
    compiled: Compiled

    @classmethod
    def read(cls, line: dict) -> "Kernel":
        """Return the kernel that a line of a worker describes."""
        own = {name: line.pop(name) for name in ("generation", "dtype", "group", "kernel")}
        return cls(**own, models=tuple(line.pop("models")), compiled=Compiled(**line))

    @property
    def runs(self) -> bool:
        return self.compiled.fits(GENERATIONS[self.generation])

    @property
    def named_models(self) -> str:
        return ", ".join(self.models) if len(self.models) < 4 else f"{len(self.models)} models"


def kib(size: int) -> str:
    return f"{size / 1024:.3g} KiB" if size >= 1024 else f"{size} bytes"


def head(generation: str) -> str:
    """Return the head of a column: ``sm75 (T4)``."""
    return f"{generation} ({GENERATIONS[generation].product})"


def by_generation(kernels: Sequence[Kernel], cell: Callable[[list[Kernel]], str]) -> list[str]:
    """Return a table with a row for each group and a column for each generation."""
    cells: dict[str, dict[str, list[Kernel]]] = defaultdict(lambda: defaultdict(list))
    for each in kernels:
        cells[each.group][each.generation].append(each)
    names = list(dict.fromkeys(each.generation for each in kernels))
    rows = ([group, *(cell(of[name]) if of[name] else "–" for name in names)] for group, of in cells.items())
    return markdown_table(["kernels", *map(head, names)], rows)


def shared_memory(kernels: list[Kernel]) -> str:
    """Return how many kernels run, and the most shared memory that one takes."""
    running = sum(each.runs for each in kernels)
    count = f"{running}" if running == len(kernels) else f"**{running} of {len(kernels)}**"
    return f"{count}, {kib(max(each.compiled.shared for each in kernels))}"


def tensor_cores(kernels: list[Kernel]) -> str:
    return f"{sum(each.compiled.tensor_cores > 0 for each in kernels)} of {len(kernels)}"


def spilled(kernels: list[Kernel]) -> str:
    largest = max(each.compiled.spilled for each in kernels)
    return f"{largest:,} bytes" if largest else "none"


def unfit(kernels: Iterable[Kernel]) -> list[str]:
    """Return a table of the kernels that do not run, or a line if all do."""
    rows: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for each in kernels:
        if not each.runs:
            limit = GENERATIONS[each.generation].shared
            why = each.compiled.error or f"{each.compiled.shared:,} bytes of {limit:,}"
            rows[head(each.generation), each.group, f"`{each.kernel}`", each.named_models, why].append(each.dtype)
    cells = [[*key[:4], ", ".join(dict.fromkeys(dtypes)), key[4]] for key, dtypes in rows.items()]
    return markdown_table(["GPU", "kernels", "kernel", "model", "dtype", "why"], cells) if cells else ["All do."]


def every_kernel(kernels: Iterable[Kernel]) -> list[str]:
    """Return a table of all kernels: shared memory, registers and, if there is some, spilled memory."""
    cells: dict[tuple[str, str, str, int], dict[str, str]] = defaultdict(dict)
    seen: dict[tuple[str, str, str, str], int] = defaultdict(int)
    for each in kernels:
        key = each.group, f"`{each.kernel}`", each.named_models
        found = each.compiled
        text = "does not compile" if found.error else f"{kib(found.shared)}, {found.registers}"
        text += f", {found.spilled:,}" if found.spilled else ""
        cells[(*key, seen[(*key, each.generation)])][each.generation] = text if each.runs else f"**{text}**"
        seen[(*key, each.generation)] += 1
    names = list(dict.fromkeys(name for row in cells.values() for name in row))
    rows = ([*key[:3], *(row.get(name, "–") for name in names)] for key, row in cells.items())
    return markdown_table(["kernels", "kernel", "models", *map(head, names)], rows)


def arithmetic(rows: Iterable[dict]) -> list[str]:
    """Return a table of the errors of interpreted kernels for each of their quantities."""
    cells = []
    for row in rows:
        errors = (f"{text} {significant(row[name], 2)}" for name, text in ERRORS.items() if name in row)
        cells.append([row["kernel"], row["situation"], row["dtype"], "; ".join(errors)])
    return markdown_table(["kernel", "situation", "dtype", "largest error"], cells)


def markdown(
    kernels: list[Kernel], interpreted: list[dict], missing: Sequence[str], versions: str, command: str
) -> str:
    """Return the page. ``missing``: what is not installed, and was neither compiled nor interpreted."""
    fp16 = [each for each in kernels if each.dtype == "float16"] or kernels
    matrices = [each for each in fp16 if each.compiled.dots]
    lines = ["# Triton kernels, compiled and interpreted without a GPU", ""]
    lines += [f"Written by `{command}` on a machine without a GPU, with {versions}.", ""]
    lines += [
        "**No kernel of this page ran on a GPU.** Triton and ptxas compiled each with the types and constants that",
        "verl, vLLM and flash-attn pass to it for the models named below. Which of vLLM's kernels a job launches",
        "depends on its model and GPU: from sm80 on, vLLM prefers other attention. The tables are of fp16, and count",
        "the kernels to which vLLM passes float32. Not covered: CUDA code that was compiled before, such as",
        "flash-attn's attention, what torch.compile generates, and whether these versions start on a GPU. They do not",
        "on a V100.",
    ]
    lines += ["", "flash-attn's Triton kernels need only its Python part, which installs without a compiler:", ""]
    lines += ["```bash", *INCLUDE_FLASH_ATTN, "```"]
    lines += ["", "## Shared memory", ""]
    lines += [
        "The kernels that compile and fit, and the most shared memory that one takes. A kernel that takes more than a"
    ]
    lines += ["block of threads may have raises `OutOfResources` as it is launched.", ""]
    lines += [*by_generation(fp16, shared_memory), "", "What does not compile or does not fit:", "", *unfit(kernels)]
    lines += ["", "## Tensor cores", ""]
    lines += ["How many of the kernels that multiply matrices have an instruction of tensor cores.", ""]
    lines += by_generation(matrices, tensor_cores)
    lines += ["", "## Registers", ""]
    lines += ["The most bytes that a thread spills, as ptxas reports them.", ""]
    lines += by_generation(fp16, spilled)
    lines += ["", "## Arithmetic", ""]
    lines += [
        "Largest error against float64 in Triton's interpreter; of gradients, relative to the largest. inf: not",
        "finite; with and without the fused head, where a gradient exceeds fp16's range. The interpreter multiplies",
        "float32 exactly, for which Triton uses TF32 from sm80 on, and has no approximate exponentials. The reference",
        "of flash-attn and of vLLM's log-probabilities takes the rounded logits. bf16 is left out, because",
        "the interpreter computes it wrongly ([triton#5424](https://github.com/triton-lang/triton/issues/5424)).",
        "",
    ]
    lines += arithmetic(interpreted)
    lines += ["", "## All kernels", ""]
    lines += ["Shared memory, registers of a thread, and the bytes that it spills, if any. Bold: does not fit.", ""]
    lines += every_kernel(fp16)
    if missing:
        lines += ["", "## Left out", "", *(f"- {each}" for each in missing)]
    return "\n".join(lines) + "\n"
