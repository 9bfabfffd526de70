"""Save the sanity task's model with its first weights, and its tokenizer:  make_model.py FOLDER"""

import sys

from recipes.arithmetic.model import build_model, build_tokenizer

tokenizer = build_tokenizer()
for part in (tokenizer, build_model(tokenizer, seed=0)):
    part.save_pretrained(sys.argv[1])
