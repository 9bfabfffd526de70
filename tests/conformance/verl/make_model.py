"""Save the sanity task's model with its first weights, and its tokenizer:  make_model.py FOLDER

FAMILY in the environment names another family of recipes/arithmetic/families.py.
"""

import os
import sys

from recipes.arithmetic.families import build_model, build_tokenizer

family = os.environ.get("FAMILY", "qwen2")
tokenizer = build_tokenizer(family)
for part in (tokenizer, build_model(family, tokenizer, seed=0)):
    part.save_pretrained(sys.argv[1])
