"""A causal language model and prompts for it, as the commands take them that look at a model before any training."""

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lib import cli
from lib.errors import Refused
from lib.paths import ARITHMETIC, REPO
from lib.run.checks import parquet_rows

if TYPE_CHECKING:
    import transformers

SANITY = str(ARITHMETIC / "model")  # the sanity task's, whose data are beside it


def chosen(given: dict[str, str]) -> tuple[str, str]:
    """The model and the prompts that MODEL and DATA of a command name: the sanity task's where they are not given.

    Raises:
        Refused: MODEL is given without DATA, or one of them cannot be used.
    """
    model = cli.model_path(given["MODEL"]) if "MODEL" in given else SANITY
    if "DATA" not in given and model != SANITY:
        raise Refused(f"DATA: is not set; MODEL={given['MODEL']} needs a parquet file of prompts in verl's schema")
    return model, cli.parquet_path(given, "DATA") or str(ARITHMETIC / "train.parquet")


def short_name(model: str) -> str:
    """What a report's files are named after: a folder's name, a name on the Hub with -- for its slash."""
    return Path(model).name if Path(model).is_absolute() else model.replace("/", "--")


def prepare_sanity() -> bool:
    """Make the sanity task's model and data where they are not there; ``False``: it failed and has said why."""
    prepare = [sys.executable, "-m", "recipes.arithmetic.prepare", "--out", str(ARITHMETIC), "--seed", "1"]
    return subprocess.run(prepare, cwd=REPO).returncode == 0


def load(path: str) -> tuple["transformers.PreTrainedModel", "transformers.PreTrainedTokenizerBase"]:
    """The model in fp32 on the CPU, and its tokenizer.

    Raises:
        Refused: there is no causal language model, or its tokenizer cannot write a conversation.
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
        raise Refused(f"MODEL={path}: its tokenizer has no chat template, which verl writes prompts by")
    return model.eval(), tokenizer


def prompts(data: str, rows: int) -> list[list[dict]]:
    """The first prompts of DATA, each a list of messages.

    Raises:
        Refused: DATA is not a parquet file in verl's schema, or has fewer.
    """
    import pyarrow.parquet

    present = parquet_rows("DATA", Path(data), ["prompt"])
    if present < rows:
        raise Refused(f"ROWS={rows}: {data} has {present}; ask for fewer or give more DATA")
    return pyarrow.parquet.read_table(data, columns=["prompt"])["prompt"].slice(0, rows).to_pylist()


def token_ids(tokenizer: "transformers.PreTrainedTokenizerBase", messages: list[dict]) -> list[int]:
    """A prompt as verl gives it to a rollout."""
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False).input_ids
