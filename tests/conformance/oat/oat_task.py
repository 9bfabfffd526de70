"""Make the tiny model and the prompts of the cases: ``oat_task.py FOLDER``."""

import sys
from pathlib import Path

import torch
from datasets import Dataset, DatasetDict
from transformers import Qwen2Config, Qwen2ForCausalLM

from recipes.arithmetic.model import build_tokenizer


def make_model(folder: Path) -> None:
    """Save a Qwen2 of one block and 29 thousand parameters, with the tokenizer of the arithmetic task."""
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.05,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    for part in (tokenizer, Qwen2ForCausalLM(config)):
        part.save_pretrained(folder)


def make_prompts(folder: Path) -> None:
    """Save 32 prompts, which the learner counts for its schedule; the cases supply the answers."""
    prompts = Dataset.from_dict({"prompt": ["1+1="] * 32, "output": ["2"] * 32})
    DatasetDict(train=prompts, test=prompts.select(range(2))).save_to_disk(folder)


if __name__ == "__main__":
    make_model(Path(sys.argv[1], "model"))
    make_prompts(Path(sys.argv[1], "prompts"))
