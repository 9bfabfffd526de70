"""Make the model of the jobs with long answers: ``python -m verl_precision.verify.long_model LENGTH FOLDER [tiny]``.

It is the sanity task's Qwen2 with more and wider layers and random weights, 99 M parameters, and its tokenizer. LENGTH
is the number of tokens of an answer; ``tiny`` keeps the sanity task's width and depth.
"""

import sys

from recipes.arithmetic.model import build_model, build_tokenizer

PROMPT = 16  # tokens at most
WIDE = {"hidden_size": 768, "intermediate_size": 2560, "num_hidden_layers": 12}
WIDE |= {"num_attention_heads": 12, "num_key_value_heads": 12}


def main(length: str, folder: str, *tiny: str) -> None:
    tokenizer = build_tokenizer()
    shape = {} if tiny else WIDE
    model = build_model(tokenizer, seed=0, max_position_embeddings=PROMPT + int(length), **shape)
    for part in (model, tokenizer):
        part.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
