"""Store a probe's log-probabilities, one line of JSON per prompt, so that an interrupted probe can resume.

``ROLLOUT.jsonl`` contains a rollout's ``answers`` (token ids) and their ``log_probs``; ``TRAINER-on-ROLLOUT.jsonl`` the
``log_probs`` of the same tokens by a trainer; both, of a mixture, also ``experts`` (``routing``) where these can be
observed. A line with ``overflow`` is the last one of its file. A file exists once it is complete.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from verl_precision.errors import Refused
from verl_precision.files import write_json
from verl_precision.probe.numerics import Overflow, RolloutNumerics, TrainerNumerics

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def open_work_folder(out: Path, settings: dict) -> Path:
    """Return ``out``/work, created or with the work done so far.

    Raises:
        Refused: it contains the work of other settings.
    """
    work = out / "work"
    file = work / "settings.json"
    recorded = json.loads(file.read_text()) if file.exists() else settings
    for name, value in settings.items():
        if (earlier := recorded.get(name, "not set")) != value:
            raise Refused(
                f"{name}={value}: {out} contains a probe with {name}={earlier}; "
                "repeat its settings, choose another OUT or remove that folder"
            )
    work.mkdir(parents=True, exist_ok=True)
    write_json(file, settings)
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


def write_lines(file: Path, number: int, make: Callable[[int], dict]) -> None:
    """Write ``number`` lines, with a progress bar, under another name until all are written; stop after an overflow.

    Args:
        make: returns the content of a line by its index.
    """
    part = file.with_suffix(".part")
    with part.open("w") as out:
        for index in tqdm(range(number), file.stem, unit="prompt"):
            try:
                line = make(index)
            except Overflow as error:
                line = {"overflow": str(error)}
            out.write(json.dumps(line) + "\n")
            if "overflow" in line:
                break
    part.rename(file)
