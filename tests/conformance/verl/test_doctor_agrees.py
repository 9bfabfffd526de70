"""The doctor's diagnosis against the dtypes, logs and refusals of each release's own workers, patched and unpatched."""

import functools

import pytest
from doctor_configs import CONFIGS, COVERS
from verl_releases import RELEASES

from verl_precision.doctor.diagnosis import diagnose
from verl_precision.doctor.tree import identify_tree

# Hops of a worker that the doctor does not report.
UNREPORTED = {"ref.master", "ref.reduce", "ref.logits", "critic.optimizer"}


@pytest.fixture(scope="module")
def observed(run_workers, tree_of, request):
    """``observed(release, patched)``: the tree as the doctor identifies it, and its workers' records by configuration.

    Only the configurations that the session's tests name are run.
    """
    items = [item for item in request.session.items if item.path == request.path]
    named = {(item.callspec.params["release"], item.callspec.params["config"]) for item in items}

    @functools.cache
    def of(release: str, patched: bool):
        names = [name for name in CONFIGS if (release, name) in named]
        (records,) = run_workers("doctor_cases.py", release, patched, *names, ranks=1)
        return identify_tree(tree_of(release, patched)), records

    return of


@pytest.mark.releases
@pytest.mark.subprocess
@pytest.mark.parametrize(
    ("release", "config"),
    [
        pytest.param(release, name, marks=[] if name in COVERS else [pytest.mark.slow])
        for release in RELEASES
        for name, given in CONFIGS.items()
        if release in given.releases
    ],
)
@pytest.mark.parametrize("patched", [True, False], ids=["patched", "unpatched"])
def test_diagnosis_matches_the_workers(observed, release, patched, config):
    tree, records = observed(release, patched)
    record = records[config]
    diagnosis = diagnose(tree, record["overrides"]).json()
    assert disagreements(record, diagnosis) == []


def disagreements(record: dict, diagnosis: dict) -> list[str]:
    """Return a line for each difference between the workers' dtypes, logs and refusals and the doctor's."""
    if record["refused"]:
        return refusals(record["refused"], diagnosis["refused"])
    wrong = [f"refuses what the release takes: {diagnosis['refused']}"] if diagnosis["refused"] else []
    expected, hops = dict(record["hops"]), diagnosis["hops"]
    for report in record["reports"]:  # logged by patched workers
        role = report["role"]
        expected |= {f"{role}.{hop}": report[hop] for hop in ("compute", "master", "reduce") if role != "reward_model"}
        scaled = bool(record["scaler"].get(role))
        assert report["loss_scaling"] == scaled, f"a worker's log contradicts its scaler: {report}"
    parts = diagnosis["deterministic"] if not diagnosis["refused"] else {}
    hops = hops | {f"{role}.deterministic": on for role, on in parts.items()}
    for hop, dtype in expected.items():
        if hop not in UNREPORTED and hops.get(hop) != dtype:
            wrong.append(f"{hop}: {dtype}, by the doctor {hops.get(hop, 'not reported')}")
    for role, scaler in record["scaler"].items():
        resolved = diagnosis["scaler"].get(role) or {}
        if (scaler is None) != (not resolved) or any(resolved[key] != value for key, value in (scaler or {}).items()):
            wrong.append(f"{role}'s scaler: {scaler}, by the doctor {resolved or None}")
    if "actor.autocast" in record["hops"]:
        wrong += verdict(record["hops"], hops["rollout.weights"], diagnosis["verdict"])
    return wrong


def verdict(dtypes: dict[str, str], rollout: str, verdict: str) -> list[str]:
    """Return a line where the doctor's verdict differs from whether trainer and rollout have the same dtypes."""
    stored = dtypes.get("actor.base", dtypes["actor.master"])
    whole = ("float32", stored, rollout)  # in which weights leave without being rounded
    rounded = dtypes.get("wire", "float32") not in whole
    agree = {dtypes["actor.compute"], dtypes["actor.autocast"]} == {rollout} and not rounded
    # "ignored": trainer and rollout agree in a dtype other than the requested one
    if (verdict in ("agree", "ignored")) == agree:
        return []
    return [f"verdict {verdict}: the workers have {dtypes}, and the rollout {rollout}"]


def refusals(recorded: list[dict], refused: str | None) -> list[str]:
    """Return a line where the doctor misses a refusal, or words a driver's one-line refusal differently.

    It leaves out a field that a dataclass of verl lacks, which verl refuses at once and by its name.
    """
    recorded = [each for each in recorded if "unexpected keyword argument" not in each["text"]]
    if refused is None:
        return [f"{each['where']} refuses: {each['type']}: {each['text']}" for each in recorded]
    first = recorded[0] if recorded else None
    if first and first["where"] == "driver" and first["text"] not in refused:
        return [f"the driver refuses by other words: {first['text']!r}, not {refused!r}"]
    return []
