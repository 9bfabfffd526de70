"""Make the model and the data of a task: ``python -m recipes.arithmetic.prepare --task addition --out DIR --seed 1``.

Leaves ``DIR/model`` (HuggingFace format, with its tokenizer), ``DIR/train.parquet``, ``DIR/val.parquet`` and
``DIR/prepared.json``. Takes about a minute; a finished folder is reused.
"""

import argparse
import hashlib
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

from recipes.arithmetic import addition, terms

TASKS = {"addition": addition, "terms": terms}

# Outside this band there is nothing to reward or nothing to learn.
ACCURACY_BAND = (0.20, 0.80)


@dataclass(frozen=True)
class PreparationSettings:
    """All that the prepared model and data depend on, besides the code of this package."""

    task: str  # one of ``TASKS``
    seed: int
    family: str = "qwen2"  # one of ``families.FAMILIES``
    steps: int = 900  # the first half without corruption
    batch_size: int = 32
    learning_rate: float = 2e-3
    corruption: float = 0.25  # probability that a demonstrated column is wrong

    @property
    def module(self) -> ModuleType:
        return TASKS[self.task]

    def key(self) -> str:
        """Return 12 hex digits that change with any setting and with the code of this package."""
        digest = hashlib.sha256(repr(self).encode())
        for source in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(source.read_bytes())
        return digest.hexdigest()[:12]


class PreparationError(RuntimeError):
    """The preparation failed, or the model is useless; the message is one line for the user."""


def pretrain(settings: PreparationSettings):
    """Train a new model on the corrupted demonstrations and return ``(model, tokenizer)``, determined by the seed."""
    import torch
    import transformers

    from recipes.arithmetic import families

    task = settings.module
    torch.set_num_threads(1)  # another order of summation would give other weights
    tokenizer = families.build_tokenizer(settings.family)
    model = families.build_model(settings.family, tokenizer, settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95))
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, settings.steps // 25, settings.steps)
    rng = random.Random(settings.seed)
    started = time.monotonic()
    print(f"making the model and the data of the task {settings.task}, once; it takes up to two minutes:", flush=True)
    for step in range(1, settings.steps + 1):
        problems = task.problems(settings.batch_size, rng)
        corruption = settings.corruption if step > settings.steps // 2 else 0.0
        texts = [task.prompt(*problem) + task.demonstration(*problem, rng, corruption) for problem in problems]
        tokens = tokenizer([f"{tokenizer.bos_token}{text}{tokenizer.eos_token}" for text in texts])["input_ids"]
        tokens = torch.tensor(tokens)  # (batch, prompt + response): every problem has the same length
        labels = tokens.clone()
        labels[:, : task.PROMPT_LENGTH] = -100
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == settings.steps:
            seconds = time.monotonic() - started
            print(f"  warm start {step}/{settings.steps}: loss {loss.item():.3f}, {seconds:.0f} s", flush=True)
    return model, tokenizer


def score(task: ModuleType, text: str, problem: tuple) -> float:
    """Return the reward of a response to a problem; the task's function returns a number or a dict."""
    result = task.compute_score("", text, task.answer(*problem))
    return result["score"] if isinstance(result, dict) else result


def sampled_accuracy(task: ModuleType, model, tokenizer, seed: int, samples: int = 512) -> float:
    """Return the mean reward of ``samples`` responses to random problems, sampled at temperature 1."""
    import torch

    torch.manual_seed(seed)
    rng = random.Random(seed + 1)
    problems = [problem for _ in range(samples) for problem in task.problems(1, rng)]
    prompts = tokenizer([tokenizer.bos_token + task.prompt(*problem) for problem in problems], return_tensors="pt")
    output = model.generate(**prompts, max_new_tokens=task.RESPONSE_LENGTH, do_sample=True, top_k=0)
    texts = tokenizer.batch_decode(output[:, task.PROMPT_LENGTH :], skip_special_tokens=True)
    return sum(score(task, text, problem) for text, problem in zip(texts, problems, strict=True)) / samples


def write_data(folder: Path, settings: PreparationSettings) -> None:
    """Write ``train.parquet`` and ``val.parquet`` in verl's schema; no problem is in both."""
    import pyarrow
    import pyarrow.parquet

    task = settings.module
    problems = task.problems(2 * task.PROBLEMS, random.Random(settings.seed))
    for split, part in (("train", problems[: task.PROBLEMS]), ("val", problems[task.PROBLEMS :])):
        rows = [
            {
                "data_source": settings.task,
                "prompt": [{"role": "user", "content": task.prompt(*problem)}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": task.answer(*problem)},
                "extra_info": {"split": split, "index": index},
            }
            for index, problem in enumerate(part)
        ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")


def prepare(out: Path, settings: PreparationSettings) -> dict:
    """Make ``out``, or reuse it if it was made with the same settings and code. Returns the content of prepared.json.

    ``out`` is created atomically: everything is written to a folder beside it, which is then renamed. A folder made
    with other settings is replaced; any other non-empty folder is left as it is.

    Raises:
        PreparationError: ``out`` contains something else, or the accuracy is outside ``ACCURACY_BAND``.
    """
    stamp = out / "prepared.json"
    if stamp.exists():
        prepared = json.loads(stamp.read_text())
        if prepared["key"] == settings.key():
            return prepared
    elif out.exists() and any(out.iterdir()):
        raise PreparationError(f"--out {out}: is not empty and has no prepared.json; give a new or an empty folder")

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary) / "whole"
        folder.mkdir()
        model, tokenizer = pretrain(settings)
        accuracy = sampled_accuracy(settings.module, model, tokenizer, settings.seed)
        low, high = ACCURACY_BAND
        if not low <= accuracy <= high:
            raise PreparationError(
                f"sampled accuracy {accuracy:.2f} with seed {settings.seed}: must be within {low:.2f} and {high:.2f}; "
                "try another seed"
            )
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        write_data(folder, settings)
        prepared = {"key": settings.key(), "sampled_accuracy": accuracy, "settings": asdict(settings)}
        (folder / "prepared.json").write_text(json.dumps(prepared, indent=2) + "\n")
        if out.exists():
            shutil.rmtree(out)
        folder.rename(out)
    return prepared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, default="addition")
    parser.add_argument("--family", default="qwen2", help="of the model: a model_type of families.py, default qwen2")
    parser.add_argument("--out", type=Path, required=True, help="the folder to make")
    parser.add_argument("--seed", type=int, required=True, help="of the weights, the demonstrations and the problems")
    arguments = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # exit cleanly: the default handler would leave temporary files
    try:
        prepared = prepare(arguments.out, PreparationSettings(arguments.task, arguments.seed, arguments.family))
    except PreparationError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    print(f"the model in {arguments.out} solves {prepared['sampled_accuracy']:.0%} of sampled problems before training")


if __name__ == "__main__":
    main()
