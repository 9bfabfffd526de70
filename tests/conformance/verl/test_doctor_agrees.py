"""The doctor's diagnosis against the dtypes, logs and refusals of each release's own workers: every regime, and users'
mistakes, on pristine and patched trees."""

import json
import subprocess
from pathlib import Path

import pytest
from behaviours import RELEASES
from doctor_configs import CONFIGS, RARE
from worker_process import worker_environment, worker_python

from lib.doctor.diagnosis import diagnose
from lib.doctor.tree import identify_tree
from lib.patches.apply import apply
from lib.patches.wheels import unpacked_wheel
from lib.paths import REPO

CASES = REPO / "tests/conformance/verl/doctor_cases.py"
STATES = ("patched", "pristine")
# Hops of a worker that the doctor does not report.
UNREPORTED = {"ref.master", "ref.reduce", "ref.logits", "critic.optimizer"}


@pytest.fixture(scope="session")
def observed(model, tmp_path_factory, request):
    """``observed(release, state)``: the tree as the doctor identifies it, and its workers' records by configuration.

    Only the configurations that the session's tests read are run.
    """
    done, begun = {}, set()
    here = [item for item in request.session.items if item.path == Path(__file__)]
    params = [item.callspec.params for item in here if "observed" in item.fixturenames]

    def of(release: str, state: str):
        if release not in begun:
            begun.add(release)
            trees = {each: unpacked_wheel(release, tmp_path_factory.mktemp(f"{release}-{each}")) for each in STATES}
            apply(trees["patched"])
            names = sorted({each["config"] for each in params if each["release"] == release})
            for each, records in record(release, trees, model, tmp_path_factory, names).items():
                done[release, each] = identify_tree(trees[each]), records
        assert (release, state) in done, f"verl {release}'s workers did not run: the first of its tests shows why"
        return done[release, state]

    return of


def record(release: str, trees: dict, model, tmp_path_factory, names: list[str]) -> dict[str, dict]:
    """Run the recorder on both trees, side by side, for the configurations of these names."""
    runs = {}
    for state, tree in trees.items():
        out = tmp_path_factory.mktemp(f"{release}-{state}-records")
        with (out / "log").open("w") as log:
            command = [worker_python(release), CASES, release, model, out, *names]
            run = subprocess.Popen(command, env=worker_environment(tree), stdout=log, stderr=subprocess.STDOUT)
            runs[state] = out, run
    for out, run in runs.values():
        assert run.wait(900) == 0, (out / "log").read_text()[-4000:]
    return {state: json.loads((out / "records.json").read_text())["configs"] for state, (out, _) in runs.items()}


@pytest.mark.releases
@pytest.mark.parametrize(
    ("release", "config"),
    [
        pytest.param(release, name, marks=[pytest.mark.slow] if name in RARE else [])
        for release in RELEASES
        for name, given in CONFIGS.items()
        if release in given.releases
    ],
)
@pytest.mark.parametrize("state", STATES)
def test_diagnosis_matches_the_workers(observed, release, state, config):
    tree, records = observed(release, state)
    record = records[config]
    diagnosis = diagnose(tree, record["overrides"]).json()
    assert disagreements(record, diagnosis) == []


def disagreements(record: dict, diagnosis: dict) -> list[str]:
    """Return a line for each difference between the workers' dtypes, logs and refusals and the doctor's."""
    if record["refused"]:
        return refusals(record["refused"], diagnosis["refused"])
    wrong = [f"refuses what the release takes: {diagnosis['refused']}"] if diagnosis["refused"] else []
    expected = dict(record["hops"])
    for report in record["reports"]:  # logged by patched workers
        role = report["role"]
        expected |= {f"{role}.{hop}": report[hop] for hop in ("compute", "master", "reduce") if role != "reward_model"}
        scaled = bool(record["scaler"].get(role))
        assert report["loss_scaling"] == scaled, f"a worker's log contradicts its scaler: {report}"
    hops = diagnosis["hops"]
    for hop, dtype in expected.items():
        if hop in hops and hops[hop] != dtype:
            wrong.append(f"{hop}: {dtype}, by the doctor {hops[hop]}")
    missing = {hop for hop in expected if hop not in hops} - UNREPORTED
    wrong += [f"{hop}: {expected[hop]}, not reported by the doctor" for hop in sorted(missing)]
    for role, scaler in record["scaler"].items():
        resolved = diagnosis["scaler"].get(role) or {}
        if (scaler is None) != (not resolved) or any(resolved[key] != value for key, value in (scaler or {}).items()):
            wrong.append(f"{role}'s scaler: {scaler}, by the doctor {resolved or None}")
    if "actor.autocast" in record["hops"]:
        dtypes, rollout = record["hops"], hops["rollout.logits"]
        rounded = dtypes.get("wire", "float32") not in (
            "float32",
            dtypes["actor.master"],
            rollout,
        )  # rounded during the weight sync
        agree = {dtypes["actor.compute"], dtypes["actor.autocast"]} == {rollout} and not rounded
        # "ignored": trainer and rollout agree in a dtype other than the requested one
        if (diagnosis["verdict"] in ("agree", "ignored")) != agree:
            wrong.append(f"verdict {diagnosis['verdict']}: the workers have {dtypes}, and the rollout {rollout}")
    return wrong


def refusals(recorded: list[dict], refused: str | None) -> list[str]:
    """Return a line where the doctor misses a refusal, or words a driver's one-line refusal differently."""
    if refused is None:
        return [f"{each['where']} refuses: {each['type']}: {each['text']}" for each in recorded]
    first = recorded[0]
    if first["where"] == "driver" and first["text"] not in refused:
        return [f"the driver refuses by other words: {first['text']!r}, not {refused!r}"]
    return []
