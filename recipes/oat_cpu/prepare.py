"""Make the model and the data for OAT: ``python -m recipes.oat_cpu.prepare --out DIR --seed 1``.

Adds ``DIR/oat`` for OAT's ``--prompt_data`` and ``DIR/oat-model`` for its ``--pretrain`` to the folder that
``recipes.arithmetic.prepare`` makes.
"""

import argparse
import os
from pathlib import Path

os.environ["USE_TF"] = "0"  # as in recipes.oat_cpu.host

import datasets  # noqa: E402
import pyarrow.parquet  # noqa: E402
from tokenizers.processors import TemplateProcessing  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from recipes.arithmetic.prepare import PreparationSettings, prepare  # noqa: E402


def write_model(folder: Path) -> None:
    """Write the model with a tokenizer that adds the start token: OAT strips it and relies on vLLM's."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    start = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{start[0]} $A", special_tokens=[start])
    tokenizer.save_pretrained(folder / "oat-model")
    AutoModelForCausalLM.from_pretrained(folder / "model").save_pretrained(folder / "oat-model")


def write_data(folder: Path) -> None:
    """Write the problems by datasets' ``save_to_disk``, with OAT's default columns ``prompt`` and ``output``."""
    splits = {}
    for split, file in (("train", "train.parquet"), ("test", "val.parquet")):
        rows = pyarrow.parquet.read_table(folder / file).to_pylist()
        prompts = [row["prompt"][0]["content"] for row in rows]
        sums = [row["reward_model"]["ground_truth"] for row in rows]
        splits[split] = datasets.Dataset.from_dict({"prompt": prompts, "output": sums})
    datasets.DatasetDict(splits).save_to_disk(folder / "oat")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder to make")
    parser.add_argument("--seed", type=int, required=True, help="of the weights, the demonstrations and the problems")
    arguments = parser.parse_args()
    prepare(arguments.out, PreparationSettings("addition", arguments.seed))
    write_model(arguments.out)
    write_data(arguments.out)


if __name__ == "__main__":
    main()
