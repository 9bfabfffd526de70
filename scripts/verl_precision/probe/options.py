"""Parse the options of the commands that measure a model before training, from ``NAME=VALUE`` words."""

from dataclasses import dataclass
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.files import check_room
from verl_precision.paths import ARITHMETIC, OUTPUTS
from verl_precision.words import (
    device,
    file_path,
    finite_number,
    model_path,
    one_of,
    options,
    parquet_path,
    parse_words,
    whole_number,
)

SANITY = str(ARITHMETIC / "model")  # the sanity task's model; its data are beside it
VARIABLES = {
    "MODEL": "a causal language model, a folder or a name on the Hugging Face Hub, default the sanity task's",
    "DATA": "a parquet file of prompts in verl's schema, default the sanity task's for its own model",
    "PRECISION": "the regimes, default all: {precision}",
    "WIRE": "the dtypes in which weights are sent to the rollout, default all: fp32, bf16, fp16",
    "HEAD": "which sides compute the head in fp32, default all: none, both, trainer, rollout",
    "ROWS": "number of prompts, default 32",
    "SAMPLES": "answers per prompt, default 8",
    "LENGTH": "most tokens of an answer, default as many as the model's positions allow, up to 1024",
    "BACKEND": "the backend that generates: hf, vllm; default hf",
    "DEVICE": "cpu or cuda, default: cuda where there is a GPU",
    "SEED": "seed of the answers, default 1; vLLM's still differ from run to run",
    "TEMPERATURE": "of sampling; the trainer divides its logits by it, too; default 1",
    "OUT": "the folder of the report, default outputs/probe/MODEL-BACKEND",
}
WIRES = ["fp32", "bf16", "fp16"]
HEADS = {"none": (False, False), "both": (True, True), "trainer": (True, False), "rollout": (False, True)}


@dataclass(frozen=True)
class ModelOptions:
    """The options of every command that measures a model."""

    model: str
    data: str
    rows: int
    length: int | None
    device: str
    out: Path

    @property
    def is_sanity(self) -> bool:
        return self.model == SANITY

    @property
    def name(self) -> str:
        """The model's name in files."""
        return name_in_files(self.model)


@dataclass(frozen=True)
class ProbeOptions(ModelOptions):
    precision: tuple[str, ...]
    wire: tuple[str, ...]
    head: tuple[str, ...]
    samples: int
    backend: str
    seed: int
    temperature: float

    def report(self, suffix: str) -> Path:
        """Return the path of the report with this suffix, e.g. ``.md``."""
        return self.out / f"probe-{self.name}{'' if self.backend == 'hf' else f'-{self.backend}'}{suffix}"

    def settings(self) -> dict:
        """Return the options, by variable, that a command must share with the one whose work it resumes."""
        names = ("MODEL", "DATA", "ROWS", "SAMPLES", "BACKEND", "DEVICE", "SEED", "TEMPERATURE")
        return {name: getattr(self, name.lower()) for name in names}


def name_in_files(model: str) -> str:
    """Return a folder's name, or a name on the Hub with -- for its slash."""
    if model == SANITY:
        return "sanity"
    return Path(model).name if Path(model).is_absolute() else model.replace("/", "--")


def several(values: dict[str, str], name: str, allowed: list[str]) -> tuple[str, ...]:
    """Return the words of a variable without repetition; all that are allowed if it is not set."""
    words = values.get(name, " ".join(allowed)).split()
    return tuple(dict.fromkeys(one_of({name: word}, name, allowed, "") for word in words))


def model_options(
    values: dict[str, str], folder: Path, rows: int, fewest: int = 1, length: int | None = None, suffix: str = ""
) -> ModelOptions:
    """Return the options of every command; refuses values that are not allowed, and MODEL without DATA.

    Args:
        folder: in which OUT is by default named after the model, with ``suffix``.
        rows, length: default values.
        fewest: the least number of ROWS.
    """
    model = model_path(values["MODEL"]) if "MODEL" in values else SANITY
    if "DATA" not in values and model != SANITY:
        raise Refused(f"DATA: is not set; MODEL={values['MODEL']} needs a parquet file of prompts in verl's schema")
    out = Path(file_path(values, "OUT") or folder / f"{name_in_files(model)}{suffix}")
    check_room(out)
    data = parquet_path(values, "DATA") or str(ARITHMETIC / "train.parquet")
    numbers = whole_number(values, "ROWS", fewest, rows), whole_number(values, "LENGTH", 1, length)
    return ModelOptions(model, data, *numbers, device(values), out)


def parse(words: list[str]) -> ProbeOptions:
    """Parse the options of ``probe``."""
    values = parse_words(words, VARIABLES)
    backend = one_of(values, "BACKEND", ["hf", "vllm"], "hf")
    return ProbeOptions(
        **vars(model_options(values, OUTPUTS / "probe", rows=32, fewest=2, suffix=f"-{backend}")),
        precision=several(values, "PRECISION", options("precision")),
        wire=several(values, "WIRE", WIRES),
        head=several(values, "HEAD", list(HEADS)),
        samples=whole_number(values, "SAMPLES", 1, 8),
        backend=backend,
        seed=whole_number(values, "SEED", 0, 1),
        temperature=finite_number(values, "TEMPERATURE", 1.0, above=0.0),
    )
