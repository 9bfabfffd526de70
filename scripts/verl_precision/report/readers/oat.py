"""Read the run folder of a patched OAT, and adapt OAT's metrics to a report, whatever logged them."""

from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.facts.metrics import K3_KL, LOSS_SCALE, PROBS_DIFF, SKIPPED
from verl_precision.report.catalog import GRAD_NORM, Steps
from verl_precision.report.logged_run import LoggedRun
from verl_precision.report.readers.config import read_json, with_hash
from verl_precision.report.readers.metrics import read_metric_lines

OAT_ARGS = "args.json"  # beside the metrics of a patched OAT: its arguments, its dtypes, its patches
OAT_ROUND = "train/learning_round"  # OAT's own steps; wandb counts its logs


def read_oat(label: str, folder: Path) -> LoggedRun:
    """Read the folder of a patched OAT's run: ``metrics.jsonl`` and ``args.json``.

    Raises:
        Refused: ``args.json`` is not what a patched OAT writes.
    """
    written = read_json(folder / OAT_ARGS)
    if missing := [name for name in ("precision", "stamp", "effective", "args") if name not in written]:
        raise Refused(f"{folder / OAT_ARGS}: has no {missing[0]}; it is not what a patched OAT writes")
    steps, notes = read_metric_lines(folder / "metrics.jsonl")
    reports = tuple({"role": role, "stamp": written["stamp"], **of} for role, of in written["effective"].items())
    seed = written["args"].get("seed")
    run = {"settings": {"PRECISION": written["precision"], "SEED": seed}}
    notes += adapt_oat_metrics(steps, written["args"])
    return LoggedRun(
        label, folder.name, "OAT", steps, notes, seed, reports=reports, run=run, **with_hash(written["args"])
    )


def adapt_oat_metrics(steps: Steps, args: dict) -> tuple[str, ...]:
    """Remove from ``steps`` what cannot be compared.

    Args:
        args: OAT's arguments, {} where they are not recorded.

    Returns:
        Notes: what a step of OAT's is, what was removed, what was not recorded.
    """
    notes = []
    names = ("rollout_batch_size", "num_samples", "train_batch_size", "num_ppo_epochs")
    if all(name in args for name in names):
        prompts, answers, batch, epochs = (args[name] for name in names)
        updates = epochs * prompts * answers / batch
        meaning = f"{prompts} prompts of {answers} answers, {updates:g} update{'s' * (updates != 1)}"
        notes.append(f"a step is a round of OAT's: {meaning}")
    fp16 = args.get("fp16")
    logged = {metric for data in steps.values() for metric in data}
    if K3_KL not in logged and GRAD_NORM in logged and (fp16 or not args):
        for data in steps.values():
            data.pop(GRAD_NORM, None)
        notes.append(
            f"{GRAD_NORM} is left out: an unpatched OAT's is multiplied by the loss scale in fp16"
            + ("" if args else ", and the dtype is not recorded")
        )
    wanted = (K3_KL, PROBS_DIFF, *((LOSS_SCALE, SKIPPED) if fp16 else ()))
    if missing := [metric for metric in wanted if metric not in logged]:
        notes.append(f"OAT recorded no {', '.join(missing)}; a patched one does")
    return tuple(notes)
