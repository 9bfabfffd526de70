"""Read logged runs, whatever logged them, and check what was read.

Readers write nothing and use no network. A file that cannot be read is refused in one line that names it.
"""

import glob
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from verl_precision.errors import Refused
from verl_precision.facts.regime import effective_regime
from verl_precision.report.catalog import METRIC, UNTRAINED, Steps, report_name
from verl_precision.report.logged_run import LoggedRun
from verl_precision.run.log import reports
from verl_precision.run.summary import agreed, by_role
from verl_precision.words import options, shell_words

LABEL = re.compile(r"[A-Za-z0-9][\w.+-]*")
RECORD = "record.json"  # in a report's runs/, beside the metrics: what the run's folder has in other files
OAT_ARGS = "args.json"  # beside the metrics of a patched OAT: its arguments, its dtypes, its patches
# Keys of seeds, names and folders, which differ between the runs of a label.
OF_ONE_RUN = re.compile(
    r"(.*[._])?seed|trainer\.(project_name|experiment_name|default_local_dir|(validation|rollout)_data_dir)"
    r"|save_path|wb_\w+|master_(addr|port)"  # OAT's
)


def labeled_paths(value: str) -> list[tuple[str, Path]]:
    """Return the pairs of ``LABEL=PATH …``. A path may be a pattern: ``fp16=outputs/*/grpo-fp16-seed*``.

    Raises:
        Refused: a word is of another form, or nothing exists at a path.
    """
    pairs = []
    for word in shell_words("RUNS", value):
        label, sign, path = word.partition("=")
        if not sign or not LABEL.fullmatch(label):
            raise Refused(f"{word}: must be LABEL=FOLDER; a label may contain letters, digits and . _ + -")
        pattern = str(Path(path).expanduser())
        paths = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern))
        if not path or not paths:
            raise Refused(f"{word}: {label} has no run; there is nothing at {path or 'an empty path'}")
        pairs += [(label, Path(each)) for each in paths]
    return pairs


def read_all(pairs: list[tuple[str, Path]]) -> list[LoggedRun]:
    """Read the run of each label and path.

    Raises:
        Refused: one cannot be read, occurs twice, or is not of the regime that its label names.
    """
    runs: list[LoggedRun] = []
    for label, path in pairs:
        run = read(label, path)
        for other in runs:
            if repr(other.steps) == repr(run.steps):  # NaN is not equal to itself
                raise Refused(f"{label}={path}: has exactly the metrics of {other.label}={other.name}; leave one out")
        runs.append(run)
    return runs


def read(label: str, path: Path) -> LoggedRun:
    """Read the run at a path, whatever logged it.

    Raises:
        Refused: there is none, a line of it is broken, or it is not of the regime that its label names.
    """
    run = read_unchecked(label, path)
    run = replace(run, steps={step: data for step, data in run.steps.items() if data.keys() - UNTRAINED})
    if not run.steps:
        raise Refused(f"{label}={path}: has no training step; a report uses none of its metrics")
    named, computed = run.settings.get("PRECISION"), effective_regime(run.effective_dtypes)
    if named and label in options("precision") and label not in (named, computed):
        which = f"{named} that computed in {computed}" if computed not in (named, None) else named
        raise Refused(
            f"{label}={path}: is a run with PRECISION={which}; label it {computed or named}, or unlike any regime"
        )
    return replace(run, notes=tuple(dict.fromkeys((*run.notes, *notes_on_nan(run.steps)))))


def notes_on_nan(steps: Steps) -> list[str]:
    """Return a note on each metric that was not finite at some step."""
    notes = []
    for metric in dict.fromkeys(METRIC.values()):
        logged = [step for step in sorted(steps) if metric in steps[step]]
        bad = [step for step in logged if math.isnan(steps[step][metric])]
        if bad and len(bad) == len(logged):
            notes.append(f"{metric} is NaN or inf at every step: it has no value")
        elif bad:
            where = f"{len(bad)} of {len(logged)} steps, first at {bad[0]}"
            notes.append(f"{metric} is NaN or inf at {where}: left out there")
    return notes


def read_unchecked(label: str, path: Path) -> LoggedRun:
    """Read a file or a folder by the reader that the names of its files choose.

    Raises:
        Refused: nothing exists there, nothing that a reader knows, or several runs.
    """
    if not path.exists():
        raise Refused(f"{path}: does not exist")
    names = {each.name for each in path.iterdir()} if path.is_dir() else set()
    if names & {"metrics.jsonl", "verl.jsonl"}:
        return (read_kept_run if RECORD in names else read_oat if OAT_ARGS in names else read_run_folder)(label, path)
    if files := matching(path, "*.jsonl"):
        if len(files) > 1:
            raise Refused(f"{path}: contains {len(files)} .jsonl files, each a run; give one of them")
        return LoggedRun(label, files[0].stem, "a .jsonl file", *read_metric_lines(files[0]))
    if files := matching(path, "*tfevents*"):
        return read_tensorboard(label, path, files)
    what = "contains no metrics" if path.is_dir() else "is not a run"
    raise Refused(f"{path}: {what}; give a run's folder, TensorBoard events or a .jsonl file")


def matching(path: Path, pattern: str) -> list[Path]:
    """Return the files whose name matches: ``path`` itself, or those below it."""
    return [path] if path.is_file() and path.match(pattern) else sorted(path.rglob(pattern))


def read_json(file: Path) -> dict:
    """Return the content of a JSON file, or refuse what is not JSON."""
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise Refused(f"{file}: is not JSON: {error}") from error


def read_if_present(file: Path) -> dict:
    return read_json(file) if file.exists() else {}


def select_metrics(data: dict, where: str) -> dict[str, float]:
    """Return the metrics of one step that a report uses, under its names; null, which stands for NaN, as NaN.

    Several names of one metric, as verl has for several sets of validation data, give their mean.

    Args:
        where: the file and line of ``data``, for errors.

    Raises:
        Refused: a value is not a number.
    """
    values: dict[str, list[float]] = {}
    for name, value in data.items():
        if (metric := report_name(name)) is None:
            continue
        if value is not None and not isinstance(value, int | float):
            raise Refused(f"{where}: {name} is {value!r}, not a number")
        values.setdefault(metric, []).append(float(value) if value is not None and math.isfinite(value) else math.nan)
    return {metric: fmean(several) for metric, several in values.items()}


def read_metric_lines(file: Path) -> tuple[Steps, tuple[str, ...]]:
    """Read lines ``{"step": int, "data": {name: value}}``.

    Returns:
        The steps, and a note if the last line is half-written.

    Raises:
        Refused: another line is broken.
    """
    steps: Steps = {}
    lines = file.read_text(errors="replace").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            step, data = int(row["step"]), dict(row["data"])
        except (ValueError, KeyError, TypeError) as error:
            if not line.endswith("\n"):
                return steps, (f"the last line of {file.name}, line {number}, is half-written: left out",)
            raise Refused(f"{file}: line {number} is not a line of metrics: {line.strip()[:60]!r}") from error
        if selected := select_metrics(data, f"{file}: line {number}"):
            steps.setdefault(step, {}).update(selected)
    return steps, ()


def read_run_folder(label: str, folder: Path) -> LoggedRun:
    """Read a folder of ``make run``: the metrics merged as by ``merge_metrics``, without touching the folder.

    The workers' reports of an unfinished run are in its log.
    """
    steps: Steps = {}
    notes: tuple[str, ...] = ()
    for name in ("metrics.jsonl", "verl.jsonl"):
        if (folder / name).exists():
            more, more_notes = read_metric_lines(folder / name)
            notes += more_notes
            for step, data in more.items():
                steps.setdefault(step, {}).update(data)
    run, summary = (read_if_present(folder / name) for name in ("run.json", "summary.json"))
    log = folder / "train.log"
    if not summary and log.exists():
        summary = summarize_reports(reports(log.read_text(errors="replace").splitlines()))
    seed = run.get("settings", {}).get("SEED")
    return LoggedRun(label, folder.name, "make run", steps, notes, seed, read_composed_config(folder), run, summary)


def read_kept_run(label: str, folder: Path) -> LoggedRun:
    """Read a run as a report keeps it: as ``make run`` writes it, with what else the report knew in ``record.json``."""
    record = read_json(folder / RECORD)
    return replace(read_run_folder(label, folder), **record | {"notes": tuple(record["notes"])})


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
    sizes = [args.get(name) for name in ("rollout_batch_size", "num_samples", "train_batch_size", "num_ppo_epochs")]
    if all(sizes):
        prompts, answers, batch, epochs = sizes
        updates = epochs * prompts * answers / batch
        meaning = f"{prompts} prompts of {answers} answers, {updates:g} update{'s' * (updates != 1)}"
        notes += (f"a step is a round of OAT's: {meaning}",)
    run = {"settings": {"PRECISION": written["precision"], "SEED": args.get("seed")}}
    reported = [{"role": role, "stamp": written["stamp"], **of} for role, of in written["effective"].items()]
    summary, config = summarize_reports(reported), comparable_config(args)
    return LoggedRun(label, folder.name, "OAT", steps, notes, args.get("seed"), config, run, summary)


def summarize_reports(reported: list[dict]) -> dict:
    """Return what a summary has of the workers' reports, {} without any."""
    if not reported:
        return {}
    dtypes = {role: agreed(of_role) for role, of_role in by_role(reported).items()}
    return {"effective_dtypes": dtypes, "patch_stamp": agreed([each["stamp"] for each in reported])}


def read_composed_config(folder: Path) -> dict:
    """Return the configuration that Hydra wrote into a run's folder; {} if it is missing."""
    import yaml

    file = folder / "hydra" / "config.yaml"
    if not file.exists():
        return {}
    try:
        return comparable_config(yaml.load(file.read_text(), Loader=yaml.CSafeLoader) or {})
    except yaml.YAMLError as error:
        raise Refused(f"{file}: is not YAML: {' '.join(str(error).split())}") from error


def comparable_config(tree: dict, prefix: str = "") -> dict:
    """Return a configuration as flat keys ``a.b.c``, without seeds, names and folders; an empty dict stays a value."""
    flat = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            flat |= comparable_config(value, f"{key}.")
        elif not OF_ONE_RUN.fullmatch(key):
            flat[key] = value
    return flat


def read_tensorboard(label: str, path: Path, files: list[Path]) -> LoggedRun:
    """Read the event files of one folder, as several attempts of one run leave them: scalars in float32.

    Raises:
        Refused: a record is damaged, or several folders contain events.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.errors import DataLossError, OutOfRangeError
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

    folders = {file.parent for file in files}
    if len(folders) > 1:
        raise Refused(f"{path}: contains events in {len(folders)} folders, each a run; give one of them")
    steps: Steps = {}
    notes: tuple[str, ...] = ()
    for file in files:
        records = PyRecordReader_New(str(file))
        while True:
            try:
                records.GetNext()
            except OutOfRangeError:
                break
            except DataLossError as error:
                if "truncated record" not in str(error):
                    raise Refused(f"{file}: a record is damaged: {error}") from error
                notes += (f"the last record of {file.name} is half-written: left out",)
                break
            event = Event.FromString(records.record())
            data = {value.tag: value.simple_value for value in event.summary.value if report_name(value.tag)}
            steps.setdefault(event.step, {}).update(select_metrics(data, str(file)))
    return LoggedRun(label, path.name, "TensorBoard", steps, notes)
