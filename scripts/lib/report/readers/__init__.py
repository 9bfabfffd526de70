"""Runs read from whatever logged them: a folder of ``make run`` or OAT, verl's file logger, TensorBoard, wandb.

Nothing is written and nothing is asked over a network. What cannot be read is refused in one line that names it.
"""

import csv
import glob
import hashlib
import json
import math
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import fmean

from lib.errors import Refused
from lib.paths import CONFIGS
from lib.report.catalog import GRAD_NORM, METRIC, UNTRAINED, Steps, known
from lib.run import folder as runs
from lib.run import job as jobs
from lib.run import log as logs
from lib.run.metrics import K3_KL, LOSS_SCALE, PROBS_DIFF, SKIPPED
from lib.run.summary import agreed, by_role

LABEL = re.compile(r"[A-Za-z0-9][\w.+-]*")
RECORD = "record.json"  # beside the metrics in a report's runs/: what the run's own folder held elsewhere
OAT_ARGS = "args.json"  # beside the metrics of a patched OAT: its arguments, its dtypes, its patches
OAT_ROUND = "train/learning_round"  # what OAT's own steps are called; wandb counts its logs

# Of the composed configuration: what tells the seeds of one label apart, and where a run lies.
OF_ONE_RUN = re.compile(
    r"(.*[._])?seed|trainer\.(project_name|experiment_name|default_local_dir|(validation|rollout)_data_dir)"
    r"|save_path|wb_\w+|master_(addr|port)"  # OAT's
)


@dataclass(frozen=True)
class Run:
    """A run as a report sees it.

    Attributes:
        name: of its folder or file, without the path.
        steps: its training steps.
        notes: what was left out of it, and why.
        config: the composed configuration as ``a.b.c: value``, without seeds, names and the run's own folders, {} where
            it is not recorded; ``config_hash`` is of all of it, even where a report kept only a part.
        told: what the workers of a run that is not finished reported; a finished one has it in its summary.
        run: content of ``run.json``, and ``summary`` of ``summary.json``; {} where there is none.
    """

    label: str
    name: str
    source: str
    steps: Steps
    notes: tuple[str, ...] = ()
    seed: int | None = None
    config: dict = field(default_factory=dict)
    config_hash: str | None = None
    told: tuple[dict, ...] = ()
    run: dict = field(default_factory=dict)
    summary: dict = field(default_factory=dict)

    @property
    def asked(self) -> dict:
        """The variables of ``make run`` that were given, {} where it was not started so."""
        return {name: value for name, value in self.run.get("settings", {}).items() if value != ""}

    @property
    def regime(self) -> str | None:
        """The regime that it names: PRECISION of ``make run``, else a label that is a regime's name."""
        return self.asked.get("PRECISION") or (self.label if self.label in jobs.options("precision") else None)

    @property
    def finished(self) -> bool | None:
        """Whether all steps were made that were asked for; None where that is not recorded."""
        return bool(self.summary) if "steps" in self.run else None

    @property
    def framework(self) -> str:
        """Whose run it is."""
        return "OAT" if self.source.endswith("OAT") else "verl"

    @property
    def effective(self) -> dict:
        """By role the dtypes that its workers reported, {} where none are recorded."""
        reported = {role: agreed(of) for role, of in by_role(list(self.told)).items()}
        return self.summary.get("effective_dtypes", reported)

    @property
    def stamp(self) -> dict | list | None:
        """Of the patched verl or OAT what the workers reported."""
        return self.summary.get("patch_stamp", agreed([report["stamp"] for report in self.told])) or None


def words(given: str) -> list[tuple[str, Path]]:
    """``LABEL=PATH …`` as pairs. A path may be a pattern: ``fp16=outputs/*/grpo-fp16-seed*``.

    Raises:
        Refused: a word is of another form, or there is nothing at a path.
    """
    pairs = []
    for word in jobs.shell_words("RUNS", given):
        label, sign, path = word.partition("=")
        if not sign or not LABEL.fullmatch(label):
            raise Refused(f"{word}: must be LABEL=FOLDER; a label is letters, digits and . _ + - alone")
        if not path:
            raise Refused(f"{word}: {label} has no run; give its folder, or leave it out")
        pattern = str(Path(path).expanduser())
        found = [pattern] if Path(file_and_run(Path(pattern))[0]).exists() else sorted(glob.glob(pattern))
        if not found:
            raise Refused(f"{word}: {label} has no run; there is nothing at {path}")
        pairs += [(label, Path(each)) for each in found]
    return pairs


def file_and_run(path: Path) -> tuple[Path, str]:
    """``FILE.csv#RUN`` apart: one file of wandb may hold several runs."""
    before, _, name = str(path).partition(".csv#")
    return (Path(f"{before}.csv"), name) if name else (path, "")


def read_all(pairs: list[tuple[str, Path]]) -> list[Run]:
    """All runs.

    Raises:
        Refused: one cannot be read, is there twice, or is not of the regime that its label names.
    """
    seen: dict[Path, str] = {}
    read_runs: list[Run] = []
    for label, path in pairs:
        place = path.resolve()
        if place in seen:
            raise Refused(f"{label}={path}: is there twice, as {seen[place]} too; leave one out")
        seen[place] = label
        run = read(label, path)
        for other in read_runs:
            if repr(other.steps) == repr(run.steps):  # NaN is not equal to itself
                raise Refused(f"{label}={path}: has the very numbers of {other.label}={other.name}; leave one out")
        read_runs.append(run)
    return read_runs


def read(label: str, path: Path) -> Run:
    """The run at a path, whatever logged it.

    Raises:
        Refused: there is none, a line of it is broken, or it is not of the regime that its label names.
    """
    run = reader(path)(label, path)
    run = replace(run, steps={step: data for step, data in run.steps.items() if data.keys() - UNTRAINED})
    if not run.steps:
        raise Refused(f"{label}={path}: has no training step; none of its metrics is one of a report's")
    asked = run.asked.get("PRECISION")
    if asked and label in jobs.options("precision") and asked != label:
        raise Refused(f"{label}={path}: is a run with PRECISION={asked}; name it so, or as no regime is named")
    return with_notes(run)


def reader(path: Path):
    """What reads a path."""
    file, _ = file_and_run(path)
    by_suffix = ((".wandb", read_wandb), (".jsonl", read_file_logger), (".csv", read_csv))
    if file.is_dir():
        inside = [each for each in sorted(file.iterdir()) if each.is_file()]
        if any(each.name in ("metrics.jsonl", "verl.jsonl") for each in inside):
            if (file / RECORD).exists():
                return read_recorded
            return read_oat if (file / OAT_ARGS).exists() else read_make_run
        for suffix, of in by_suffix:
            if any(each.suffix == suffix for each in inside):
                return of
        if any("tfevents" in each.name for each in file.rglob("*")):
            return read_tensorboard
        raise Refused(
            f"{path}: holds no metrics: no metrics.jsonl, no TensorBoard events, no .jsonl, .wandb or .csv file"
        )
    if not file.exists():
        raise Refused(f"{path}: is not there")
    for suffix, of in by_suffix:
        if file.suffix == suffix:
            return of
    if "tfevents" in file.name:
        return read_tensorboard
    raise Refused(f"{path}: is no run; known are a run's folder, TensorBoard events, .jsonl, .wandb and .csv files")


def only(path: Path, suffix: str) -> Path:
    """The one file with this suffix in a folder, or the file itself."""
    if path.is_file():
        return path
    found = sorted(path.glob(f"*{suffix}"))
    if len(found) > 1:
        raise Refused(f"{path}: holds {len(found)} {suffix} files, each a run; name one")
    return found[0]


def with_notes(run: Run) -> Run:
    """The run with a note on each metric that was not finite."""
    notes = []
    for metric in dict.fromkeys(METRIC.values()):
        bad = [step for step in sorted(run.steps) if math.isnan(run.steps[step].get(metric, 0.0))]
        logged = sum(metric in data for data in run.steps.values())
        if bad and len(bad) == logged:
            notes.append(f"{metric} is NaN or inf at every step: it has no value")
        elif bad:
            notes.append(f"{metric} is NaN or inf at {len(bad)} of {logged} steps, first at {bad[0]}: left out there")
    return replace(run, notes=(*run.notes, *(note for note in notes if note not in run.notes)))


def kept(data: dict, where: str) -> dict[str, float]:
    """Of the metrics of a step those that a report uses, by today's name; null, which stands for NaN, as NaN.

    Several names of one metric, as verl has for several sets of validation data, give their mean.

    Raises:
        Refused: one is not a number.
    """
    found: dict[str, list[float]] = {}
    for name, value in data.items():
        if (metric := known(name)) is None:
            continue
        if value is not None and not isinstance(value, int | float):
            raise Refused(f"{where}: {name} is {value!r}, not a number")
        found.setdefault(metric, []).append(float(value) if value is not None and math.isfinite(value) else math.nan)
    return {metric: fmean(values) for metric, values in found.items()}


def json_lines(file: Path) -> tuple[Steps, tuple[str, ...]]:
    """verl's lines ``{"step": int, "data": {name: value}}``, and a note where the last one is half-written.

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
            raise Refused(f"{file}: line {number} is no line of metrics: {line.strip()[:60]!r}") from error
        if trained := kept(data, f"{file}: line {number}"):
            steps.setdefault(step, {}).update(trained)
    return steps, ()


def read_make_run(label: str, folder: Path) -> Run:
    """A folder of ``make run``, finished or not: as ``merge_metrics`` merges it, without touching it."""
    steps, notes = {}, ()
    for name in ("metrics.jsonl", "verl.jsonl"):
        if (folder / name).exists():
            more, said = json_lines(folder / name)
            notes += said
            for step, data in more.items():
                steps.setdefault(step, {}).update(data)
    log = folder / "train.log"
    live = log.exists() and not runs.finished(folder)
    told = logs.reports(log.read_text(errors="replace").splitlines()) if live else []
    facts = {"name": folder.name, "source": "make run", "notes": notes, "told": told}
    return from_files(label, folder, steps, facts | composed(folder))


def read_oat(label: str, folder: Path) -> Run:
    """The folder of a patched OAT's run: ``metrics.jsonl`` and ``args.json``.

    Raises:
        Refused: ``args.json`` is not what a patched OAT writes.
    """
    written = content(folder / OAT_ARGS)
    if missing := [name for name in ("precision", "stamp", "effective", "args") if name not in written]:
        raise Refused(f"{folder / OAT_ARGS}: has no {missing[0]}; it is not what a patched OAT writes")
    steps, notes = json_lines(folder / "metrics.jsonl")
    told = tuple({"role": role, "stamp": written["stamp"], **of} for role, of in written["effective"].items())
    seed = written["args"].get("seed")
    run = {"settings": {"PRECISION": written["precision"], "SEED": seed}}
    notes += of_oat(steps, written["args"])
    return Run(label, folder.name, "OAT", steps, notes, seed, told=told, run=run, **hashed(written["args"]))


def of_oat(steps: Steps, args: dict) -> tuple[str, ...]:
    """What a step of OAT's is, what was not recorded, and what cannot be used, which is taken out of ``steps``.

    Args:
        args: OAT's arguments, {} where they are not recorded.
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


def read_recorded(label: str, folder: Path) -> Run:
    """A run as a report keeps it."""
    steps, notes = json_lines(folder / "metrics.jsonl")
    facts = content(folder / RECORD)
    return from_files(label, folder, steps, facts | {"notes": (*facts["notes"], *notes)})


def from_files(label: str, folder: Path, steps: Steps, facts: dict) -> Run:
    """A run whose ``run.json`` and ``summary.json``, where it has them, lie in a folder."""
    files = (folder / "run.json", folder / "summary.json")
    run, summary = (content(file) if file.exists() else {} for file in files)
    seed = run.get("settings", {}).get("SEED", facts.get("seed"))
    told, said = tuple(facts.pop("told")), tuple(facts.pop("notes"))
    return Run(
        label=label, steps=steps, **facts | {"seed": seed, "told": told, "notes": said, "run": run, "summary": summary}
    )


def content(file: Path) -> dict:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise Refused(f"{file}: is not JSON: {error}") from error


def record(run: Run) -> dict:
    """What ``read_recorded`` needs beside the metrics, ``run.json`` and ``summary.json``."""
    return {name: getattr(run, name) for name in ("name", "source", "seed", "notes", "told", "config", "config_hash")}


def composed(folder: Path) -> dict:
    """The configuration that Hydra left in a run's folder, and its hash."""
    import yaml

    file = folder / "hydra" / "config.yaml"
    if not file.exists():
        return {"config": {}, "config_hash": None}
    try:
        tree = yaml.load(file.read_text(), Loader=yaml.CSafeLoader)
    except yaml.YAMLError as error:
        raise Refused(f"{file}: is not YAML: {' '.join(str(error).split())}") from error
    return hashed(flattened(tree or {}))


def hashed(flat: dict) -> dict:
    """A configuration without seeds, names and the run's own folders, and its hash."""
    config = {key: value for key, value in flat.items() if not OF_ONE_RUN.fullmatch(key)}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    return {"config": config, "config_hash": digest[:12]}


def flattened(tree: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def read_file_logger(label: str, path: Path) -> Run:
    """verl's ``trainer.logger=[file]``: ``PROJECT/EXPERIMENT.jsonl``; or OAT's ``metrics.jsonl`` without the folder."""
    file = only(path, ".jsonl")
    steps, notes = json_lines(file)
    oat = OAT_ROUND in file.read_text(errors="replace")
    source, said = ("a file of OAT", of_oat(steps, {})) if oat else ("verl's file logger", ())
    return Run(label, file.stem, source, steps, (*notes, *said))


def read_tensorboard(label: str, path: Path) -> Run:
    """TensorBoard's event files, as verl's ``trainer.logger=[tensorboard]`` writes them: scalars in float32."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util import tensor_util

    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if "tfevents" in each.name)
    logged: dict[int, dict[str, float]] = {}
    notes: tuple[str, ...] = ()
    folders = {file.parent for file in files}
    if len(folders) > 1:
        raise Refused(f"{path}: holds events in {len(folders)} folders, each a run; name one")
    for file in files:
        whole, left = tensorboard_records(file)
        if left and not whole:
            raise Refused(f"{file}: is no event file, or damaged from its first record on")
        events = list(EventFileLoader(str(file)).Load())
        if len(events) < whole:
            raise Refused(f"{file}: record {len(events) + 1} of {whole} is damaged")
        if left:
            notes += (f"the last record of {file.name}, record {whole + 1}, is half-written: left out",)
        for event in events:
            for value in event.summary.value:
                if known(value.tag):
                    logged.setdefault(event.step, {})[value.tag] = float(tensor_util.make_ndarray(value.tensor))
    steps = {step: kept(data, str(path)) for step, data in logged.items()}
    return Run(label, path.name, "TensorBoard", steps, notes)


def tensorboard_records(file: Path) -> tuple[int, bool]:
    """How many whole records an event file has, by their lengths, and whether half a one follows."""
    size, at, whole = file.stat().st_size, 0, 0
    with file.open("rb") as content:
        while at + 12 <= size:
            content.seek(at)
            after = at + 12 + struct.unpack("<Q", content.read(8))[0] + 4
            if after > size:
                break
            at, whole = after, whole + 1
    return whole, at < size


def read_wandb(label: str, path: Path) -> Run:
    """A ``run-ID.wandb`` file, which wandb writes offline as online, or the folder that holds it."""
    from wandb.proto.wandb_internal_pb2 import Record

    file = only(path, ".wandb")
    steps: Steps = {}
    tree: dict = {}
    name, notes = file.stem, ()
    number = 0
    try:
        for number, content in enumerate(wandb_records(file), 1):  # noqa: B007
            record = Record.FromString(content)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                data = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
                if trained := kept(data, f"{file}: record {number}"):
                    step = data.get(OAT_ROUND, record.history.step.num)
                    steps.setdefault(int(step), {}).update(trained)
            elif kind == "run":
                name = record.run.display_name or name
                tree |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "config":
                tree |= {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.config.update}
    except HalfWritten:
        notes = (f"the last record of {file.name}, record {number + 1}, is half-written: left out",)
    tree.pop("_wandb", None)
    flat = flattened(tree)
    oat = {"pretrain", "critic_type"} <= flat.keys()
    seed = flat.get("seed" if oat else "data.seed")
    facts = hashed(flat) if flat else {}
    source, said = ("wandb, of OAT", of_oat(steps, flat)) if oat else ("wandb", ())
    return Run(label, name, source, steps, (*notes, *said), seed if isinstance(seed, int) else None, **facts)


class HalfWritten(Exception):
    """A file ends within a record."""


def wandb_records(file: Path) -> Iterator[bytes]:
    """The records of wandb's log: LevelDB's format (its doc/log_format.md) after a header of seven bytes.

    A block is 32 KiB; a record is one or more chunks, each with checksum, length and kind (whole, first, middle, last).

    Raises:
        HalfWritten: the file ends within a record, as that of a run that is going on does.
        Refused: it is no such file, or a checksum is wrong.
    """
    content, block, at, parts = file.read_bytes(), 32768, 7, b""
    if content[:4] != b":W&B":
        raise Refused(f"{file}: is not a file of wandb's")
    while at < len(content):
        if block - at % block < 7:  # no room for a chunk's head: padding
            at += block - at % block
            continue
        if at + 7 > len(content):
            raise HalfWritten
        checksum, length, kind = struct.unpack_from("<IHB", content, at)
        data = content[at + 7 : at + 7 + length]
        if len(data) < length:
            raise HalfWritten
        if zlib.crc32(data, zlib.crc32(bytes([kind]))) != checksum:
            raise Refused(f"{file}: the checksum of the record at byte {at} is wrong: the file is damaged")
        at += 7 + length
        parts += data
        if kind in (1, 4):
            yield parts
            parts = b""
    if parts:
        raise HalfWritten


CHART = re.compile(r"(?P<run>.+) - (?P<metric>[^-]+?)(?P<bound>__MIN|__MAX)?")


def read_csv(label: str, path: Path) -> Run:
    """wandb's CSV exports: a run's history (``_step`` and a column a metric), or that of a chart (``Step`` and columns
    ``RUN - METRIC``), of which a folder may hold one a metric. ``FILE.csv#RUN`` names one of several runs."""
    given, wanted = file_and_run(path)
    files = [given] if given.is_file() else sorted(given.glob("*.csv"))
    logged: dict[int, dict[str, float]] = {}
    names: set[str] = set()
    oat = False
    for file in files:
        for step, data, name in csv_rows(file, wanted):
            names.add(name)
            oat |= OAT_ROUND in data
            logged.setdefault(int(data.get(OAT_ROUND, step)), {}).update(data)
    if len(names) > 1:
        raise Refused(f"{path}: holds {len(names)} runs, {', '.join(sorted(names))}; name one: FILE.csv#RUN")
    if not names:
        raise Refused(f"{path}: holds no run {wanted or 'at all'}")
    steps = {step: kept(data, str(path)) for step, data in logged.items()}
    source, said = ("wandb's CSV export, of OAT", of_oat(steps, {})) if oat else ("wandb's CSV export", ())
    return Run(label, names.pop(), source, steps, said)


def csv_rows(file: Path, wanted: str) -> Iterator[tuple[int, dict[str, float], str]]:
    """Of each line and run the step, the metrics and the run's name.

    Raises:
        Refused: there is no column of steps, or a cell is not a number.
    """
    with file.open(newline="") as content:
        table = csv.DictReader(content)
        columns = table.fieldnames or []
        axis = next((name for name in ("_step", "Step", "trainer/global_step", "step") if name in columns), None)
        if axis is None:
            raise Refused(f"{file}: has no column of steps (_step or Step); it has {', '.join(columns[:6]) or 'none'}")
        of = {column: (match["run"], match["metric"]) for column in columns if (match := chart_column(column))}
        of |= {column: (file.stem, column) for column in columns if known(column) or column == OAT_ROUND}
        for row in table:
            found: dict[str, dict[str, float]] = {}
            for column, (run, metric) in of.items():
                if row[column] is None:
                    raise Refused(f"{file}: line {table.line_num} is truncated: {column} is missing")
                if row[column] and (not wanted or run == wanted):
                    where = f"{file}: line {table.line_num}, {column}"
                    found.setdefault(run, {})[metric] = as_number(row[column], where)
            step = int(as_number(row[axis], f"{file}: line {table.line_num}, {axis}"))
            yield from ((step, data, run) for run, data in found.items())


def chart_column(column: str) -> re.Match | None:
    """``RUN - METRIC`` where the metric is one of a report's; the bounds of a chart's groups are left out."""
    match = CHART.fullmatch(column)
    return match if match and known(match["metric"]) and not match["bound"] else None


def as_number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise Refused(f"{where}: {text!r} is not a number") from error


@cache
def named_dtypes(regime: str) -> dict[str, str]:
    """By role the dtype that a regime names, from ``configs/precision``."""
    import yaml

    tree = yaml.safe_load((CONFIGS / "precision" / f"{regime}.yaml").read_text())
    roles = {**tree["actor_rollout_ref"], "critic": tree["critic"]}
    return {role: of["dtype"] for role, of in roles.items()}


def departure(run: Run) -> str:
    """Why a run does not count as one of the regime that it names: "" where its workers reported what that names."""
    if run.regime is None:
        return "it names no regime"
    if not run.effective:
        return f"effective dtypes unknown: {run.source} records none" if not run.asked else "its workers reported none"
    for role, dtype in named_dtypes(run.regime).items():
        of, done = run.effective.get(role), {"rollout": "rolled out", "ref": "had its reference"}.get(role, "trained")
        if of is None and role in ("actor", "rollout"):
            return f"its {role} reported no dtype"
        if isinstance(of, list):
            return f"the workers of its {role} report different dtypes"
        if of and (held := of["rollout" if role == "rollout" else "compute"]) != dtype:
            return f"{done}{' its critic' if role == 'critic' else ''} in {held}"
    return ""
