"""Readers of runs, on files of their real loggers: ``make run``, verl's for a file and TensorBoard."""

import json
import math
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.report_runs import made, write_metrics
from support.trees import contents

from verl_precision.errors import Refused
from verl_precision.facts.metrics import K3_KL, LOSS_SCALE, REWARD, SECONDS
from verl_precision.files import write
from verl_precision.report.catalog import METRIC
from verl_precision.report.readers import read, read_all

STEPS = range(1, 7)


def metrics(step: int) -> dict[str, float]:
    """Return the metrics that verl logs of a step; the gradient norm of step 4 overflowed."""
    data = {REWARD: step / 8, K3_KL: 1e-7 * step, LOSS_SCALE: 65536.0, SECONDS: 2.5, "perf/total_num_tokens": 4480}
    return data | {"actor/grad_norm": math.inf if step == 4 else 0.5, "actor/entropy": math.nan}


LOG = """
import json, math, sys
from verl.utils.tracking import Tracking
logger = Tracking("sanity", "one", ["file", "tensorboard"], {})
logger.log({"val-core/acc": 0.1}, 0)
for step, data in enumerate(json.loads(sys.argv[1]), 1):
    logger.log(data, step)
"""


@pytest.fixture(scope="session")
def logged(tmp_path_factory) -> dict[str, Path]:
    """Log the same steps by verl's two local loggers; return the files by logger."""
    out = tmp_path_factory.mktemp("logged")
    environment = os.environ | {"VERL_FILE_LOGGER_ROOT": f"{out}", "TENSORBOARD_DIR": f"{out}/events"}
    command = [sys.executable, "-c", LOG, json.dumps([metrics(step) for step in STEPS])]
    subprocess.run(command, env=environment, cwd=out, check=True, capture_output=True)
    (events,) = out.glob("events/*")
    return {"a .jsonl file": out / "sanity/one.jsonl", "TensorBoard": events}


def assert_same(steps: dict, rel: float = 1e-12) -> None:
    """Check the steps read from ``metrics``: training steps, only those metrics, NaN where it is not finite."""
    assert sorted(steps) == list(STEPS)
    for step, data in steps.items():
        finite = {name: value if math.isfinite(value) else math.nan for name, value in metrics(step).items()}
        wanted = {name: value for name, value in finite.items() if name in METRIC}
        assert data == pytest.approx(wanted, rel, abs=0, nan_ok=True), step


@pytest.mark.subprocess
def test_files_of_all_loggers_are_read_without_network_or_process(logged, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a connection, or another process")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    for path, source in [(path, source) for source, file in logged.items() for path in (file, file.parent)]:
        run = read("fp16", path)
        assert_same(run.steps, rel=1e-6 if source == "TensorBoard" else 1e-12)  # which has float32
        assert run.source == source and run.finished is None and run.effective_dtypes == {}
        assert run.notes == (
            "actor/grad_norm is NaN or inf at 1 of 6 steps, first at 4: left out there",
            "actor/entropy is NaN or inf at every step: it has no value",
        )
        assert run.departure == f"effective dtypes unknown: {source} records none"


@pytest.mark.subprocess
def test_half_written_last_line_is_left_out_with_a_note(logged, tmp_path):
    for source in ("a .jsonl file", "TensorBoard"):
        write(tmp_path / logged[source].name, logged[source].read_bytes()[:-20])
        run = read("fp16", tmp_path / logged[source].name)
        assert max(run.steps) in (5, 6) and "half-written: left out" in run.notes[0]


@pytest.mark.parametrize(
    ("number", "line"), [(3, '{"step": 3, "data": {"cr\n'), (3, '{"step": 3}\n'), (7, '{"step": 6, "d\n'), (2, "[]\n")]
)
def test_broken_line_is_refused_by_its_number(number, line, tmp_path):
    file = write_metrics(tmp_path / "a.jsonl", dict.fromkeys(range(7), {REWARD: 0.5}))
    lines = file.read_text().splitlines(True)
    file.write_text("".join([*lines[: number - 1], line, *lines[number:]]))
    with pytest.raises(Refused, match=f"a.jsonl: line {number} is not a line of metrics"):
        read("fp16", file)


@pytest.mark.subprocess
def test_damaged_file_is_refused(logged, tmp_path):
    content = bytearray(logged["TensorBoard"].read_bytes())
    content[len(content) // 2] ^= 0xFF
    write(tmp_path / logged["TensorBoard"].name, content)
    with pytest.raises(Refused, match="damaged"):
        read("fp16", tmp_path / logged["TensorBoard"].name)


def test_folder_of_make_run_is_read_and_left_as_it_is(tmp_path):
    _, folder = made(tmp_path / "run", seed=2, **{"actor/entropy": None})
    before = contents(folder)
    run = read("mine", folder)
    with pytest.raises(Refused, match="bf16=.*: is a run with PRECISION=fp16"):
        read("bf16", folder)
    assert (run.seed, run.regime, run.finished, run.source) == (2, "fp16", True, "make run")
    assert run.steps[1][REWARD] == 0.52 and math.isnan(run.steps[1]["actor/entropy"])
    assert run.departure == "" and contents(folder) == before
    write(folder / "hydra/config.yaml", b"a: [1,\nb: {")
    for path, message in (
        (folder, "config.yaml: is not YAML: "),
        (folder / "hydra/config.yaml", "config.yaml: is not a run; give a run's folder"),
        (tmp_path / "nowhere", "does not exist"),
    ):
        with pytest.raises(Refused, match=message) as refusal:
            read("mine", path)
        assert "\n" not in str(refusal.value)


def test_unfinished_run_is_read_with_the_reports_of_its_log(tmp_path):
    _, folder = made(tmp_path / "run", steps=STEPS, **{LOSS_SCALE: 65536.0})
    (folder / "summary.json").unlink()
    reports = ({"role": "actor", "compute": "float16"}, {"role": "rollout", "rollout": "float16"})
    lines = [f"(pid=7) [verl-precision] {json.dumps(report | {'rank': 0, 'stamp': {}})}\nnoise\n" for report in reports]
    (folder / "train.log").write_text("".join(lines))
    with write_metrics(folder / "verl.jsonl", dict.fromkeys((6, 7), {REWARD: 0.9})).open("a") as file:
        file.write('{"step": 8, "da')
    run = read("fp16", folder)
    assert max(run.steps) == 7 and run.finished is False
    assert (run.steps[6][REWARD], run.steps[6][LOSS_SCALE]) == (0.9, 65536.0), "a step that was made again"
    assert run.notes[0] == "the last line of verl.jsonl, line 3, is half-written: left out"
    assert run.effective_dtypes["rollout"]["rollout"] == "float16" and run.departure == "", "from its log"


def test_metric_names_of_older_releases_are_read(tmp_path):
    data = {"mismatch/mismatch_k3_kl": 1e-6, "perf/max_memory_allocated_gb": 40.0}
    run = read("x", write_metrics(tmp_path / "a.jsonl", {1: data}))
    assert run.steps == {1: {K3_KL: 1e-6, "actor/perf/max_memory_allocated_gb": 40.0}}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"notes.txt": "x"}, "contains no metrics"),
        ({"metrics.jsonl": "", "run.json": '{"settings": {"SEED": 1}}'}, "has no training step"),
        ({"a.jsonl": '{"step": 0, "data": {"val-core/acc": 1}}\n'}, "has no training step"),
        ({"metrics.jsonl": "", "run.json": '{"settings": '}, "run.json: is not JSON"),
        ({"a.jsonl": "\udc80\n\n"}, "line 1 is not a line of metrics"),
        ({"a.jsonl": f'{{"step": 1, "data": {{"{REWARD}": "high"}}}}\n'}, "line 1: .* is 'high', not a number"),
        ({"events.out.tfevents.1": "junk" * 100}, "a record is damaged"),
        ({"run-1.wandb": "of W&B"}, "contains no metrics; give .* or a .jsonl file"),
        ({"a.jsonl": "", "b.jsonl": ""}, "contains 2 .jsonl files, each a run; give one of them"),
        ({"1/events.out.tfevents.1": "", "2/events.out.tfevents.1": ""}, "contains events in 2 folders, each a run"),
    ],
)
def test_folder_without_a_run_is_refused(files, message, tmp_path):
    for file, content in files.items():
        write(tmp_path / file, content.encode(errors="surrogateescape"))
    with pytest.raises(Refused, match=message) as refusal:
        read("fp16", tmp_path)
    assert str(tmp_path) in str(refusal.value) and "\n" not in str(refusal.value)


def test_run_that_occurs_twice_is_refused(tmp_path):
    label, folder = made(tmp_path / "run", **{"actor/entropy": None})
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(Refused, match="b=.*link: has exactly the metrics of a=run"):
        read_all([("a", folder), ("b", tmp_path / "link")])
    shutil.copytree(folder, tmp_path / "copy")
    with pytest.raises(Refused, match="b=.*copy: has exactly the metrics of a=run"):
        read_all([("a", folder), ("b", tmp_path / "copy")])


ACTOR, ROLLOUT = {"compute": "float16"}, {"rollout": "float16"}


@pytest.mark.parametrize(
    "effective, message",
    [
        ({"ref": ACTOR, "critic": ACTOR}, ""),
        ({"actor": {"compute": "bfloat16"}}, "its actor computed in bfloat16"),
        ({"rollout": {"rollout": "bfloat16"}}, "its rollout computed in bfloat16"),
        ({"critic": {"compute": "bfloat16"}}, "its critic computed in bfloat16"),
        ({"ref": {"compute": "float32"}}, "its ref computed in float32"),
        ({"rollout": None}, "its rollout reported no dtype"),
        ({"actor": None}, "its actor reported no dtype"),
        ({"actor": [ACTOR, {"compute": "bfloat16"}]}, "the workers of its actor report different"),
        ({"actor": None, "rollout": None}, "effective dtypes unknown: make run records none"),
    ],
)
def test_run_counts_as_its_regime_if_its_workers_reported_the_dtypes(effective, message, tmp_path):
    reported = {role: of for role, of in ({"actor": ACTOR, "rollout": ROLLOUT} | effective).items() if of}
    found = read("x", made(tmp_path / "run", dtypes=reported)[1]).departure
    assert found.startswith(message) and bool(message) == bool(found)


def test_configuration_does_not_depend_on_the_seed(tmp_path):
    text = "data:\n  seed: {0}\ncritic:\n  data_loader_seed: {0}\ntrainer:\n  default_local_dir: /x/{0}\n  lr: {1}\n"
    label, folder = made(tmp_path / "run")
    for seed, rate in ((1, 1.0), (2, 1.0), (1, 2.0)):
        write(folder / "hydra/config.yaml", text.format(seed, rate).encode())
        assert read(label, folder).config == {"trainer.lr": rate}


def test_run_is_labelled_by_the_regime_that_was_effective(tmp_path):
    """ARGS may set a role's dtype beside PRECISION=fp16."""
    effective = {"actor": {"compute": "bfloat16"}, "rollout": {"rollout": "bfloat16"}}
    _, folder = made(tmp_path / "run", dtypes=effective)
    assert (run := read("bf16", folder)).departure == "" and run.regime == "bf16"
    assert (run := read("fp16", folder)).departure == "its actor computed in bfloat16" and run.regime == "fp16"
    advice = "is a run with PRECISION=fp16 that computed in bf16; label it bf16, or unlike any regime"
    with pytest.raises(Refused, match=f"^fp32={folder}: {advice}$"):
        read("fp32", folder)
