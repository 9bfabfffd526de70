"""Small models and prompts for the probe and the preflight."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification


@pytest.fixture(scope="package")
def folder(tmp_path_factory) -> Path:
    """``model``; the same in bf16, without a tokenizer, as a critic, and too large for fp16; files of prompts."""
    from recipes.arithmetic.model import build_model, build_tokenizer

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0)
    model.save_pretrained(folder / "bare")
    model.save_pretrained(folder / "model")
    AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16).save_pretrained(folder / "half-0.5B")
    AutoModelForTokenClassification.from_config(model.config).save_pretrained(folder / "critic")
    with torch.no_grad():
        model.lm_head.weight *= 1e5
    model.save_pretrained(folder / "large")
    for name in ("model", "half-0.5B", "critic", "large"):
        tokenizer.save_pretrained(folder / name)
    prompts = [[{"role": "user", "content": f"{number}+1="}] for number in (1, 22, 333, 4, 55, 666, 7, 88)]
    for name, rows in {"data": [{"prompt": prompt} for prompt in prompts], "other": [{"text": "1+1="}]}.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")
    (folder / "data.csv").write_text("prompt\n1+1=\n")
    return folder
