"""The model and the prompts of the commands that measure a model before training: their options, and loading them."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from verl_precision.errors import Refused
from verl_precision.files import check_room
from verl_precision.paths import ARITHMETIC, OUTPUTS, REPO
from verl_precision.run.checks import no_chat_template, read_sample
from verl_precision.words import (
    device,
    file_path,
    finite_number,
    model_path,
    one_of,
    options,
    parquet_path,
    parse_words,
    some_of,
    whole_number,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SANITY = str(ARITHMETIC / "model")  # the sanity task's model; its data are beside it
VARIABLES = {
    "MODEL": "a causal language model, a folder or a name on the Hugging Face Hub, default the sanity task's",
    "DATA": "a parquet file of prompts in verl's schema, default the sanity task's for its own model",
    "PRECISION": "the regimes, default all: {precision}",
    "ROWS": "number of prompts, default 32",
    "SAMPLES": "answers per prompt, default 8",
    "LENGTH": "most tokens of an answer, default as many as the model's positions allow, up to 1024",
    "BACKEND": "the backend that generates: hf, vllm; default hf",
    "DEVICE": "cpu or cuda, default: cuda where there is a GPU",
    "SEED": "seed of the answers, default 1; vLLM's still differ from run to run",
    "TEMPERATURE": "of sampling; the trainer divides its logits by it, too; default 1",
    "OUT": "the folder of the report, default outputs/probe/MODEL-BACKEND",
}


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
    def name(self) -> str:
        """The model's name in files: of its folder, or that on the Hub with -- for its slash."""
        return name_in_files(self.model)


@dataclass(frozen=True)
class ProbeOptions(ModelOptions):
    precision: tuple[str, ...]
    samples: int
    backend: str
    seed: int
    temperature: float

    def report(self, suffix: str) -> Path:
        return self.out / f"probe-{self.name}{'' if self.backend == 'hf' else f'-{self.backend}'}{suffix}"

    def settings(self) -> dict:
        """Return the options that a command must share with the one whose work it resumes."""
        names = ("MODEL", "DATA", "ROWS", "SAMPLES", "BACKEND", "DEVICE", "SEED", "TEMPERATURE")
        return {name: getattr(self, name.lower()) for name in names}


def name_in_files(model: str) -> str:
    if model == SANITY:
        return "sanity"
    return Path(model).name if Path(model).is_absolute() else model.replace("/", "--")


def model_options(values: dict[str, str], folder: Path, rows: int, fewest: int = 1, suffix: str = "") -> ModelOptions:
    """Return the options of every command: at least ``fewest`` ROWS, and OUT in ``folder``, named after the model."""
    model = model_path(values["MODEL"]) if "MODEL" in values else SANITY
    if "DATA" not in values and model != SANITY:
        raise Refused(f"DATA: is not set; MODEL={values['MODEL']} needs a parquet file of prompts in verl's schema")
    out = Path(file_path(values, "OUT") or folder / f"{name_in_files(model)}{suffix}")
    check_room(out)
    data = parquet_path(values, "DATA") or str(ARITHMETIC / "train.parquet")
    numbers = whole_number(values, "ROWS", fewest, rows), whole_number(values, "LENGTH", 1, None)
    return ModelOptions(model, data, *numbers, device(values), out)


def probe_options(words: list[str]) -> ProbeOptions:
    values = parse_words(words, VARIABLES)
    backend = one_of(values, "BACKEND", ["hf", "vllm"], "hf")
    return ProbeOptions(
        **vars(model_options(values, OUTPUTS / "probe", rows=32, fewest=2, suffix=f"-{backend}")),
        precision=some_of(values, "PRECISION", options("precision")),
        samples=whole_number(values, "SAMPLES", 1, 8),
        backend=backend,
        seed=whole_number(values, "SEED", 0, 1),
        temperature=finite_number(values, "TEMPERATURE", 1.0, above=0.0),
    )


def prepare_sanity(options: ModelOptions) -> bool:
    """Make the sanity task's model and data if they are asked for and missing; return False if that failed."""
    if options.model != SANITY:
        return True
    prepare = [sys.executable, "-m", "recipes.arithmetic.prepare", "--out", str(ARITHMETIC), "--seed", "1"]
    return subprocess.run(prepare, cwd=REPO).returncode == 0


def load(path: str) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load a model in fp32 on the CPU, and its tokenizer.

    Raises:
        Refused: ``path`` is not a causal language model, or its tokenizer has no chat template.
    """
    import transformers
    from safetensors import SafetensorError
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        (architecture, *_) = transformers.AutoConfig.from_pretrained(path).architectures or ["?"]
        if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            raise Refused(f"MODEL={path}: is a {architecture}, not a causal language model")
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    except (OSError, ValueError, SafetensorError) as error:
        raise Refused(f"MODEL={path}: cannot be loaded ({str(error).splitlines()[0]})") from error
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise Refused(f"MODEL={path}: has weights that are inf or NaN")
    if tokenizer.chat_template is None:
        raise no_chat_template(path)
    return model.eval(), tokenizer


def prompts(data: str, rows: int) -> list[list[dict]]:
    """Return the first ``rows`` prompts of DATA, each a list of messages.

    Raises:
        Refused: DATA is not a parquet file in verl's schema, or has fewer rows.
    """
    import pyarrow.parquet

    present, _ = read_sample("DATA", Path(data), ["prompt"])
    if present < rows:
        raise Refused(f"ROWS={rows}: {data} has {present} rows; set fewer ROWS or give more DATA")
    return pyarrow.parquet.read_table(data, columns=["prompt"])["prompt"].slice(0, rows).to_pylist()


def answer_length(model: "PreTrainedModel", prompt: int, most: int, length: int | None) -> int:
    """Return the most tokens of an answer: ``length``, by default ``most`` or what the model's positions leave.

    Args:
        prompt: tokens of the longest prompt.

    Raises:
        Refused: the prompt or ``length`` exceeds the model's positions.
    """
    positions = model.config.max_position_embeddings
    left = positions - prompt
    if left <= 0:
        raise Refused(f"DATA: a prompt has {prompt} tokens, but the model has {positions} positions; shorten it")
    if length is not None and length > left:
        raise Refused(
            f"LENGTH={length}: with a prompt of {prompt} tokens, that exceeds the model's {positions} positions; "
            f"set at most {left}"
        )
    return length or min(most, left)


def load_with_prompts(
    options: ModelOptions, longest: int
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase, list[list[int]], int]":
    """Return the model, its tokenizer, the prompts, tokenized as by verl for a rollout, and the length of an answer."""
    messages = prompts(options.data, options.rows)
    model, tokenizer = load(options.model)
    texts = (tokenizer.apply_chat_template(each, add_generation_prompt=True, tokenize=False) for each in messages)
    token_ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    return model, tokenizer, token_ids, answer_length(model, max(map(len, token_ids)), longest, options.length)


def end_tokens(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """Return the tokens that end an answer."""
    configured = model.generation_config.eos_token_id
    several = configured if isinstance(configured, list) else [configured, tokenizer.eos_token_id]
    return {token for token in several if token is not None}
