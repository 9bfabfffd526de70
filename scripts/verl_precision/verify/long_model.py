"""Make the model of the job with long answers: ``python -m verl_precision.verify.long_model LENGTH FOLDER [--tiny]``.

It is the sanity task's Qwen2 with more and wider layers and random weights, 99 M parameters, and its tokenizer.
"""

import argparse
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("length", type=int, help="tokens of an answer")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true", help="keep the sanity task's width and depth")
    options = parser.parse_args()
    tokenizer = build_tokenizer()
    small = build_model(tokenizer, seed=0)  # seeds torch
    Qwen2ForCausalLM(config(small.config, options.length, options.tiny)).save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)


if __name__ == "__main__":
    main()
