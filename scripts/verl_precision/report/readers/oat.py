"""Read the run folder of a patched OAT, and adapt OAT's metrics to a report, whatever logged them."""

from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.facts.metrics import K3_KL
from verl_precision.report.catalog import GRAD_NORM, Steps
from verl_precision.report.logged_run import LoggedRun
from verl_precision.report.readers.metrics import read_json, read_metric_lines
from verl_precision.report.readers.run_folder import comparable_config, summarize_reports

OAT_ARGS = "args.json"  # beside the metrics of a patched OAT: its arguments, its dtypes, its patches
OAT_ROUND = "train/learning_round"  # OAT's steps; W&B counts its logs instead


def read_oat(label: str, folder: Path) -> LoggedRun:
    """Read the folder of a patched OAT's run: ``metrics.jsonl`` and ``args.json``.

    Raises:
        Refused: ``args.json`` is not what a patched OAT writes.
    """
    written = read_json(folder / OAT_ARGS)
    if missing := [name for name in ("precision", "stamp", "effective", "args") if name not in written]:
        raise Refused(f"{folder / OAT_ARGS}: has no {missing[0]}; it is not what a patched OAT writes")
    args = written["args"]
    steps, notes = read_metric_lines(folder / "metrics.jsonl")
    notes += adapt_oat_metrics(steps, args)
    run = {"settings": {"PRECISION": written["precision"], "SEED": args.get("seed")}}
    reported = [{"role": role, "stamp": written["stamp"], **of} for role, of in written["effective"].items()]
    summary, config = summarize_reports(reported), comparable_config(args)
    return LoggedRun(label, folder.name, "OAT", steps, notes, args.get("seed"), config, run, summary)


def adapt_oat_metrics(steps: Steps, args: dict) -> tuple[str, ...]:
    """Remove from ``steps`` what cannot be compared.

    Args:
        args: OAT's arguments, {} if they are not recorded.

    Returns:
        Notes: what a step of OAT is, and what was removed.
    """
    notes = []
    names = ("rollout_batch_size", "num_samples", "train_batch_size", "num_ppo_epochs")
    if all(name in args for name in names):
        prompts, answers, batch, epochs = (args[name] for name in names)
        updates = epochs * prompts * answers / batch
        meaning = f"{prompts} prompts of {answers} answers, {updates:g} update{'s' * (updates != 1)}"
        notes.append(f"a step is a round of OAT's: {meaning}")
    logged = {metric for data in steps.values() for metric in data}
    if not args and K3_KL not in logged and GRAD_NORM in logged:  # only patched releases log k3
        for data in steps.values():
            data.pop(GRAD_NORM, None)
        why = "an unpatched OAT's is multiplied by the loss scale in fp16, and the dtype is not recorded"
        notes.append(f"{GRAD_NORM} is left out: {why}")
    return tuple(notes)
