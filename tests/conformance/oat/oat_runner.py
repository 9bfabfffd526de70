"""Run ``oat_cases`` on two gloo ranks for one tree after another, in forks of a process that has imported all else.

    oat_runner.py FOLDER

Makes a model and its prompts in FOLDER. Reads a line ``{"tree": ..., "out": ..., "cases": [NAME, ...]}`` for each tree,
and prints the exit codes of its processes: the outcomes are in OUT/rank_R.json, their output in OUT/rank_R.log.
"""

# ruff: noqa: E402 (the CPU setup comes first)
import gc
import importlib
import json
import os
import sys
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # DeepSpeed prints when it is imported

import oat_cpu  # noqa: F401
import torch
from datasets import Dataset, DatasetDict
from transformers import Qwen2Config, Qwen2ForCausalLM

from recipes.arithmetic.model import build_tokenizer

for module in ("Levenshtein", "math_verify", "openai", "pandas", "peft", "rich.pretty", "scipy.special"):
    importlib.import_module(module)
for module in ("sympy.parsing.latex", "transformers.trainer", "tree", "tyro"):
    importlib.import_module(module)


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


def process(number: int, job: dict, ends: tuple[Connection, Connection], folders: list[str]) -> int:
    """Fork a rank of a job, or as number 2 the actor that receives rank 0's weights; return its process id."""
    if pid := os.fork():
        return pid
    out = Path(job["out"])
    log = os.open(out / f"rank_{number}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for end in ends[: number > 0] + ends[1 : 1 + (number < 2)]:
        end.close()
    code = 1
    try:
        sys.path.insert(0, job["tree"])
        os.environ.update(RANK=str(number), LOCAL_RANK="0", WORLD_SIZE="2")
        if number == 2:
            importlib.import_module("oat_rollout").serve(ends[1], out)
        else:
            cases = importlib.import_module("oat_cases")
            outcomes = cases.run(job["cases"], *folders, out, ends[0])
            (out / f"rank_{number}.json").write_text(json.dumps(outcomes))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    folders = [f"{sys.argv[1]}/{name}" for name in ("model", "prompts")]
    make_model(Path(folders[0]))
    make_prompts(Path(folders[1]))
    gc.freeze()  # DeepSpeed calls gc.collect() often: exclude everything imported so far
    for line in sys.stdin:
        ends = Pipe()
        processes = [process(number, json.loads(line), ends, folders) for number in range(3)]
        for end in ends:
            end.close()
        print(
            json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in processes]),
            file=ANSWERS,
            flush=True,
        )


if __name__ == "__main__":
    main()
