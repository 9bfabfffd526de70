"""Make the model and the data of the task: ``python -m recipes.recall.prepare --length 128 --lift 160 --out DIR``.

Leaves ``DIR/model`` (HuggingFace format, with its tokenizer), ``DIR/train.parquet``, ``DIR/val.parquet`` and
``DIR/prepared.json``. The warm start takes a minute and a half at 128 tokens, 12 minutes at 512, and is cached next to
``DIR`` for other lifts.

The lift is a constant added to all logits. It changes no probability in exact arithmetic, but sets the size of the
numbers that are rounded, as massive activations and large logits do in large models: bf16 rounds a logit of 160 to a
multiple of 1, fp16 to a multiple of 1/8.
"""

import argparse
import hashlib
import json
import math
import random
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from recipes.arithmetic.prepare import PreparationError, PreparationSettings
from recipes.arithmetic.prepare import prepare as prepare_warm_start
from recipes.recall.task import LENGTH, POSITIONS, Recall

LIFT = 160.0
LARGEST = 65504  # the largest float16
LONG = 256  # tokens; longer answers take twice the steps to learn
BATCHES, ROWS = 6, 24  # demonstrations that the lift is fitted to
RIDGE = 1e-4  # relative to the mean square of a hidden state's coordinates, which RMSNorm keeps near 1


@dataclass(frozen=True)
class RecallSettings(PreparationSettings):
    """What the warm start depends on."""

    task: str = "recall"
    seed: int = 1
    steps: int = 500
    batch_size: int = 24
    corruption: float = 0.05  # probability that a demonstrated digit is random
    length: int = LENGTH

    @property
    def module(self) -> Recall:
        return Recall(self.length)

    def key(self) -> str:
        digest = hashlib.sha256(super().key().encode())
        for name in ("prepare.py", "task.py"):
            digest.update((Path(__file__).parent / name).read_bytes())
        return digest.hexdigest()[:12]


def hidden_states(model, tokenizer, settings: RecallSettings, rng: random.Random):
    """Return the last hidden states of one batch of demonstrations, ``(ROWS, tokens, hidden)`` in float64."""
    task = settings.module
    start = tokenizer.bos_token
    texts = [
        start + task.prompt(*problem) + task.demonstration(*problem, rng, settings.corruption)
        for problem in task.problems(ROWS, rng)
    ]
    tokens = tokenizer(texts, return_tensors="pt")["input_ids"]
    return model.model(tokens).last_hidden_state[:, task.PROMPT_LENGTH - 1 :].detach().double()


def lift_logits(model, tokenizer, settings: RecallSettings, lift: float) -> dict[str, float]:
    """Add ``lift`` to all logits of ``model``, by adding a multiple of one direction to every row of its head.

    The direction u is fitted by ridge regression so that h·u is 1 for every hidden state h.

    Returns:
        ``least`` and ``most``, the range over positions of the mean h·u, and ``logits_min`` and ``logits_max`` of the
        lifted model, all on other demonstrations.

    Raises:
        PreparationError: the largest logit would exceed float16.
    """
    import torch

    rng = random.Random(settings.seed + 2)
    # (BATCHES·ROWS·tokens, hidden)
    hidden = torch.cat([hidden_states(model, tokenizer, settings, rng) for _ in range(BATCHES)]).flatten(0, 1)
    ridge = RIDGE * len(hidden) * torch.eye(hidden.shape[1], dtype=hidden.dtype)
    direction = torch.linalg.solve(hidden.T @ hidden + ridge, hidden.sum(0))  # (hidden,)
    others = hidden_states(model, tokenizer, settings, rng)
    share = others @ direction  # (ROWS, tokens): the part of the lift that each position gets
    head = model.lm_head.weight.detach()
    largest = (others @ head.T.double()).max().item()
    most = (LARGEST - largest) / share.max().item()
    if lift > most:
        raise PreparationError(
            f"--lift {lift:g}: logits would exceed {LARGEST}; the largest that fits is {math.floor(most)}"
        )
    head += lift * direction.float()
    logits = others @ head.T.double()
    ends = (*share.mean(0).aminmax(), *logits.aminmax())
    return {name: end.item() for name, end in zip(("least", "most", "logits_min", "logits_max"), ends, strict=True)}


def prepare(out: Path, settings: RecallSettings, lift: float) -> dict:
    """Make ``out``, or reuse it if it was made with the same settings, lift and code. Return prepared.json's content.

    ``out`` and the warm start beside it are created atomically, as by ``recipes.arithmetic.prepare``.

    Raises:
        PreparationError: ``out`` contains something else, or the lift does not fit into float16.
    """
    stamp, warm = out / "prepared.json", out.parent / f"recall-warm-{settings.length}"
    if out == warm:
        raise PreparationError(f"--out {out}: is the folder of the warm start; give another")
    if not stamp.exists() and out.exists() and any(out.iterdir()):
        raise PreparationError(f"--out {out}: is not empty and has no prepared.json; give a new or an empty folder")
    recipe = {"key": settings.key(), "lift": lift}
    if stamp.exists() and recipe.items() <= (prepared := json.loads(stamp.read_text())).items():
        return prepared
    from transformers import AutoModelForCausalLM, AutoTokenizer  # takes seconds

    accuracy = prepare_warm_start(warm, settings)["sampled_accuracy"]
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary) / "whole"
        shutil.copytree(warm, folder)
        model = AutoModelForCausalLM.from_pretrained(warm / "model")
        model.config.max_position_embeddings = POSITIONS
        fit = lift_logits(model, AutoTokenizer.from_pretrained(warm / "model"), settings, lift)
        model.save_pretrained(folder / "model")
        prepared = recipe | {"length": settings.length, "sampled_accuracy": accuracy, "logits": fit}
        (folder / "prepared.json").write_text(json.dumps(prepared, indent=2) + "\n")
        if out.exists():
            shutil.rmtree(out)
        folder.rename(out)
    return prepared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of an answer, such as 64 to 512")
    parser.add_argument("--lift", type=float, default=LIFT, help="constant added to all logits, such as 0 to 192")
    parser.add_argument("--out", type=Path, required=True, help="the folder to make")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the demonstrations")
    arguments = parser.parse_args()
    if not 0 <= arguments.lift < math.inf:
        parser.error(f"--lift {arguments.lift:g}: must be a number of at least 0")
    try:
        Recall(arguments.length)
    except ValueError as error:
        parser.error(f"--length: {error}")
    # exit cleanly: the default handler would leave temporary files
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        steps = RecallSettings.steps * (2 if arguments.length > LONG else 1)
        settings = RecallSettings(seed=arguments.seed, length=arguments.length, steps=steps)
        prepared = prepare(arguments.out, settings, arguments.lift)
    except PreparationError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    fit = prepared["logits"]
    print(
        f"the model in {arguments.out} solves {prepared['sampled_accuracy']:.0%} of sampled problems before training; "
        f"logits from {fit['logits_min']:.0f} to {fit['logits_max']:.0f}"
    )


if __name__ == "__main__":
    main()
