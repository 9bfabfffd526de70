"""Load the model and the prompts of the commands that measure a model before training."""

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from verl_precision.errors import Refused
from verl_precision.paths import ARITHMETIC, REPO
from verl_precision.run.checks import read_sample
from verl_precision.run.prompt_lengths import no_chat_template
from verl_precision.words import model_path, parquet_path

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SANITY = str(ARITHMETIC / "model")  # the sanity task's model; its data are beside it


def model_and_data(values: dict[str, str]) -> tuple[str, str]:
    """Resolve MODEL and DATA to paths, by default those of the sanity task.

    Raises:
        Refused: MODEL is set without DATA, or one of them cannot be used.
    """
    model = model_path(values["MODEL"]) if "MODEL" in values else SANITY
    if "DATA" not in values and model != SANITY:
        raise Refused(f"DATA: is not set; MODEL={values['MODEL']} needs a parquet file of prompts in verl's schema")
    return model, parquet_path(values, "DATA") or str(ARITHMETIC / "train.parquet")


def short_name(model: str) -> str:
    """Return the name for files of results: a folder's name, or a Hub name with -- for its slash."""
    return Path(model).name if Path(model).is_absolute() else model.replace("/", "--")


def prepare_sanity() -> bool:
    """Make the sanity task's model and data unless they exist. Returns whether they exist now; prints why not."""
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


def check_positions(model: "PreTrainedModel", longest: int) -> None:
    """Check that a prompt of ``longest`` tokens leaves room for an answer.

    Raises:
        Refused: it does not.
    """
    if longest >= (positions := model.config.max_position_embeddings):
        raise Refused(f"DATA: a prompt has {longest} tokens, but the model has {positions} positions; shorten it")


def sample_answer(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", messages: list[dict], length: int
) -> "tuple[torch.Tensor, int]":
    """Sample an answer of at most ``length`` tokens at temperature 1, as a rollout does.

    Returns:
        Token ids ``(1, prompt + answer)`` and the length of the prompt.

    Raises:
        Refused: the prompt leaves no room for an answer.
    """
    import torch

    prompt = torch.tensor([token_ids(tokenizer, messages)], device=model.device)
    size = prompt.shape[1]
    check_positions(model, size)
    ids = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=min(length, model.config.max_position_embeddings - size),
        pad_token_id=tokenizer.eos_token_id,
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        repetition_penalty=1.0,
    )
    return ids, size
