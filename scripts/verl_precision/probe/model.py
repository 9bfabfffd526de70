"""Load the model and the prompts of the commands that measure a model before training."""

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from verl_precision.errors import Refused
from verl_precision.paths import ARITHMETIC, REPO
from verl_precision.probe.options import ModelOptions
from verl_precision.run.checks import read_sample
from verl_precision.run.prompt_lengths import no_chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def prepare_sanity(options: ModelOptions) -> bool:
    """Make the sanity task's model and data if they are asked for and missing; return False if that failed."""
    if not options.is_sanity:
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


def token_ids(tokenizer: "PreTrainedTokenizerBase", messages: list[dict]) -> list[int]:
    """Tokenize a prompt as verl does for a rollout."""
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False).input_ids


def answer_length(model: "PreTrainedModel", prompt: int, most: int, length: int | None = None) -> int:
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


def end_tokens(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """Return the tokens that end an answer."""
    configured = model.generation_config.eos_token_id
    several = configured if isinstance(configured, list) else [configured, tokenizer.eos_token_id]
    return {token for token in several if token is not None}
