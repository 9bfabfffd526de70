"""Make the model of the jobs with long answers: ``python -m verl_precision.verify.long_model LENGTH FOLDER [tiny]``.

It is the sanity task's Qwen2 with more and wider layers and random weights, 99 M parameters, and its tokenizer. LENGTH
is the number of tokens of an answer; ``tiny`` keeps the sanity task's width and depth.
"""

import sys
from pathlib import Path

from transformers import Qwen2Config, Qwen2ForCausalLM

from recipes.arithmetic.model import build_model, build_tokenizer

PROMPT = 16  # tokens at most
WIDE = {"hidden_size": 768, "intermediate_size": 2560, "num_hidden_layers": 12, "num_attention_heads": 12}


def config(small: Qwen2Config, length: int, tiny: bool) -> Qwen2Config:
    """Return the configuration of a model for answers of ``length`` tokens, from that of the sanity task's model."""
    shape = {} if tiny else {**WIDE, "num_key_value_heads": WIDE["num_attention_heads"], "layer_types": None}
    shape["max_position_embeddings"] = PROMPT + length
    return Qwen2Config(**small.to_diff_dict() | shape)


def main(length: int, folder: Path, tiny: bool) -> None:
    tokenizer = build_tokenizer()
    small = build_model(tokenizer, seed=0)  # seeds torch
    Qwen2ForCausalLM(config(small.config, length, tiny)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), "tiny" in sys.argv[3:])
