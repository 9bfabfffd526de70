"""Parse the options of the command ``probe`` from ``NAME=VALUE`` words."""

from dataclasses import dataclass, replace
from pathlib import Path

from verl_precision.files import check_room
from verl_precision.paths import OUTPUTS
from verl_precision.probe.model import SANITY, model_and_data, short_name
from verl_precision.words import device, file_path, finite_number, one_of, options, parse_words, whole_number

VARIABLES = {
    "MODEL": "a causal language model, a folder or a name on the Hugging Face Hub, default the sanity task's",
    "DATA": "a parquet file of prompts in verl's schema, default the sanity task's for its own model",
    "PRECISION": "the regimes, default all: {precision}",
    "WIRE": "the dtypes in which weights are sent to the rollout, default all: fp32, bf16, fp16",
    "HEAD": "which sides compute the head in fp32, default all: none, both, trainer, rollout",
    "BATCH": "how micro-batches differ between two passes of the trainer, default all: size, padding, packing; or none",
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
# How the trainer's micro-batches differ in the two passes that are compared: attributes of its numerics.
CHANGES = {
    "size": ({}, {"doubled": True}),
    "padding": ({}, {"packed": True}),
    "packing": ({"packed": True}, {"packed": True, "doubled": True}),
}
HEADS = {"none": (False, False), "both": (True, True), "trainer": (True, False), "rollout": (False, True)}


@dataclass(frozen=True)
class ProbeOptions:
    model: str
    data: str
    precision: tuple[str, ...]
    wire: tuple[str, ...]
    head: tuple[str, ...]
    batch: tuple[str, ...]
    rows: int
    samples: int
    length: int | None
    backend: str
    device: str
    seed: int
    temperature: float
    out: Path

    @property
    def name(self) -> str:
        return "sanity" if self.is_sanity else short_name(self.model)

    @property
    def is_sanity(self) -> bool:
        return self.model == SANITY

    def report(self, suffix: str) -> Path:
        """Return the path of the report with this suffix, e.g. ``.md``."""
        return self.out / f"probe-{self.name}{'' if self.backend == 'hf' else f'-{self.backend}'}{suffix}"

    def settings(self) -> dict:
        """Return the options that interrupted work shares with the command that resumes it, by variable."""
        names = ("MODEL", "DATA", "ROWS", "SAMPLES", "BACKEND", "DEVICE", "SEED", "TEMPERATURE")
        return {name: getattr(self, name.lower()) for name in names}


def several(values: dict[str, str], name: str, allowed: list[str]) -> tuple[str, ...]:
    """Return the words of a variable without repetition, each one of ``allowed``; all of these if it is not set.

    Raises:
        Refused: a word is not allowed.
    """
    words = values.get(name, " ".join(allowed)).split()
    return tuple(dict.fromkeys(one_of({name: word}, name, allowed, "") for word in words))


def parse(words: list[str]) -> ProbeOptions:
    """Parse ``NAME=VALUE`` words.

    Raises:
        Refused: a name or a value is not allowed, or DATA is missing.
    """
    values = parse_words(words, VARIABLES)
    model, data = model_and_data(values)
    parsed = ProbeOptions(
        model=model,
        data=data,
        precision=several(values, "PRECISION", options("precision")),
        wire=several(values, "WIRE", WIRES),
        head=several(values, "HEAD", list(HEADS)),
        batch=several(values, "BATCH", list(CHANGES)) if values.get("BATCH") != "none" else (),
        rows=whole_number(values, "ROWS", 2, 32),
        samples=whole_number(values, "SAMPLES", 1, 8),
        length=whole_number(values, "LENGTH", 1, None),
        backend=one_of(values, "BACKEND", ["hf", "vllm"], "hf"),
        device=device(values),
        seed=whole_number(values, "SEED", 0, 1),
        temperature=finite_number(values, "TEMPERATURE", 1.0, above=0.0),
        out=Path(file_path(values, "OUT") or "."),
    )
    if "OUT" not in values:
        parsed = replace(parsed, out=OUTPUTS / "probe" / f"{parsed.name}-{parsed.backend}")
    check_room(parsed.out)
    return parsed
