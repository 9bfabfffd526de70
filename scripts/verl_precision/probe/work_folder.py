"""Store a probe's log-probabilities, one line of JSON per prompt, so that an interrupted probe can resume.

``ROLLOUT.jsonl`` contains a rollout's ``answers`` (token ids) and their ``log_probs``; ``TRAINER-on-ROLLOUT.jsonl`` the
``log_probs`` of the same tokens by a trainer; both, of a mixture, also ``experts`` (``routing``) where these can be
observed. A line with ``overflow`` is the last one of its file.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from verl_precision.errors import Refused
from verl_precision.files import read_jsonl
from verl_precision.probe.numerics import Overflow, RolloutNumerics, TrainerNumerics

if TYPE_CHECKING:
    from transformers import PreTrainedModel


BEFORE = {"TEMPERATURE": 1.0}  # of work that was begun before it was a setting


def open_work_folder(out: Path, settings: dict) -> Path:
    """Return ``out``/work, created or with the work done so far.

    Raises:
        Refused: it contains the work of other settings.
    """
    work = out / "work"
    file = work / "settings.json"
    if file.exists():
        recorded = json.loads(file.read_text())
        for name, value in settings.items():
            earlier = recorded.get(name, BEFORE.get(name, "not set"))
            if earlier != value:
                raise Refused(
                    f"{name}={value}: {out} contains a probe with {name}={earlier}; "
                    "repeat its settings, choose another OUT or remove that folder"
                )
    work.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings, indent=2) + "\n")
    return work


def fingerprint(masters: "PreTrainedModel") -> str:
    """Return 12 hex digits of the weights, the same on every device and with any number of threads."""
    import torch

    digest = hashlib.sha256()
    for weight in masters.parameters():
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:12]


def rollout_file(work: Path, rollout: RolloutNumerics) -> Path:
    return work / f"{rollout.name}.jsonl"


def trainer_file(work: Path, trainer: TrainerNumerics, rollout: RolloutNumerics) -> Path:
    return work / f"{trainer.name}-on-{rollout.name}.jsonl"


def is_complete(file: Path, number: int) -> bool:
    """Return whether ``file`` has a line for each of ``number`` prompts, or ends in an overflow."""
    lines = read_jsonl(file)
    return len(lines) == number or bool(lines and "overflow" in lines[-1])


def drop_incomplete_line(file: Path) -> list[dict]:
    """Rewrite ``file`` without an incomplete last line and return its lines."""
    lines = read_jsonl(file)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def append_missing(file: Path, number: int, make: Callable[[int], dict], label: str) -> None:
    """Append the lines that ``file`` lacks of ``number``, with a progress bar; stops after an overflow.

    Args:
        make: returns the content of a line by its index.
        label: of the progress bar.
    """
    done = len(drop_incomplete_line(file))
    with file.open("a") as out:
        for index in tqdm(range(done, number), label, number, initial=done, unit="prompt"):
            try:
                line = make(index)
            except Overflow as error:
                line = {"overflow": str(error)}
            out.write(json.dumps(line) + "\n")
            out.flush()
            if "overflow" in line:
                return
