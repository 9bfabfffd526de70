"""The doctor's verdict against what each release's own workers hold, log and refuse: every regime, and what users get
wrong, on pristine and patched trees."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from behaviours import RELEASES
from conftest import PYTHON, REPO
from doctor_configs import CONFIGS, RARE

from lib.doctor.diagnosis import diagnose
from lib.doctor.tree import look_at
from lib.patches.apply import apply
from lib.patches.wheels import unpacked_wheel

CASES = REPO / "tests/releases/doctor_cases.py"
STATES = ("patched", "pristine")


@pytest.fixture(scope="session")
def held(model, tmp_path_factory, request):
    """``held(release, state)``: the tree as the doctor sees it, and what its workers hold, by configuration.

    Only the configurations that the session's tests read are seen.
    """
    done, begun = {}, set()
    here = [item for item in request.session.items if item.path == Path(__file__)]
    params = [item.callspec.params for item in here if "held" in item.fixturenames]

    def of(release: str, state: str):
        if release not in begun:
            begun.add(release)
            trees = {each: unpacked_wheel(release, tmp_path_factory.mktemp(f"{release}-{each}")) for each in STATES}
            apply(trees["patched"])
            names = sorted({each["config"] for each in params if each["release"] == release})
            for each, records in record(release, trees, model, tmp_path_factory, names).items():
                done[release, each] = look_at(trees[each]), records
        assert (release, state) in done, f"verl {release}'s workers were not seen: the first of its tests says why"
        return done[release, state]

    return of


def record(release: str, trees: dict, model, tmp_path_factory, names: list[str]) -> dict[str, dict]:
    """Run the recorder on both trees, side by side, for the configurations of these names."""
    runs = {}
    for state, tree in trees.items():
        out = tmp_path_factory.mktemp(f"{release}-{state}-held")
        environment = {**os.environ, "PYTHONPATH": f"{tree}:{REPO}", "OMP_NUM_THREADS": "1"}
        environment |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}  # read by verl 0.9 alone
        with (out / "log").open("w") as log:
            command = [PYTHON, CASES, release, model, out, *names]
            runs[state] = out, subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    for out, run in runs.values():
        assert run.wait(900) == 0, (out / "log").read_text()[-4000:]
    return {state: json.loads((out / "held.json").read_text())["seen"] for state, (out, _) in runs.items()}


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
def test_the_doctor_says_what_the_workers_hold(held, release, state, config):
    tree, records = held(release, state)
    seen = records[config]
    told = diagnose(tree, seen["overrides"]).json()
    assert disagreements(seen, told) == []


def disagreements(seen: dict, told: dict) -> list[str]:
    """Where the doctor says something else than the workers, a line each: what they hold, log and refuse."""
    if seen["refused"]:
        return refusals(seen["refused"], told["refused"])
    wrong = [f"refuses what the release takes: {told['refused']}"] if told["refused"] else []
    expected = dict(seen["hops"])
    for report in seen["reports"]:  # what a patched worker logs
        role = report["role"]
        expected |= {f"{role}.{hop}": report[hop] for hop in ("compute", "master", "reduce") if role != "reward_model"}
        assert report["loss_scaling"] == bool(seen["scaler"].get(role)), f"a worker logs what it has not: {report}"
    for hop, value in expected.items():
        if hop in told["hops"] and told["hops"][hop] != value:
            wrong.append(f"{hop}: {value}, and the doctor says {told['hops'][hop]}")
    missing = {hop for hop in expected if hop not in told["hops"]} - UNTOLD
    wrong += [f"{hop}: {expected[hop]}, of which the doctor says nothing" for hop in sorted(missing)]
    for role, scaler in seen["scaler"].items():
        said = told["scaler"].get(role) or {}
        if (scaler is None) != (not said) or any(said[key] != value for key, value in (scaler or {}).items()):
            wrong.append(f"{role}'s scaler: {scaler}, and the doctor says {said or None}")
    if "actor.autocast" in seen["hops"]:
        held = seen["hops"]
        rollout = told["hops"]["rollout.logits"]
        rounded = held.get("wire", "float32") not in ("float32", held["actor.master"], rollout)  # on the way
        agree = {held["actor.compute"], held["actor.autocast"]} == {rollout} and not rounded
        if (
            told["verdict"] in ("agree", "ignored")
        ) != agree:  # ignored: they agree in another dtype than was asked for
            wrong.append(f"verdict {told['verdict']}: the workers hold {held}, and the rollout {rollout}")
    return wrong


# Held by a worker, and no hop of the doctor's.
UNTOLD = {"ref.master", "ref.reduce", "ref.logits", "critic.optimizer"}


def refusals(seen: list[dict], told: str | None) -> list[str]:
    """The doctor names each refusal; a driver's one-line refusal word for word."""
    if told is None:
        return [f"{each['where']} refuses: {each['type']}: {each['text']}" for each in seen]
    first = seen[0]
    if first["where"] == "driver" and first["text"] not in told:
        return [f"the driver refuses by other words: {first['text']!r}, not {told!r}"]
    return []
