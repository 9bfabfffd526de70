"""Diagnose a job before it runs: each hop's dtype, ignored and refused keys, and whether trainer and rollout agree."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from verl_precision.doctor import refusals
from verl_precision.doctor.config import leaves, load_config
from verl_precision.doctor.dtype_rules import UNKNOWN
from verl_precision.doctor.findings import DETERMINISM, FINDINGS, Finding, full_names, requested_determinism
from verl_precision.doctor.resolver import HOPS, ROLLOUT, TRAINED, DtypeResolver, Hop
from verl_precision.doctor.tree import Tree
from verl_precision.facts.compose import Uncomposable
from verl_precision.facts.gpus import Gpu

SOUND = ("agree", "asked")  # the verdicts under which trainer and rollout compute as requested


@dataclass(frozen=True)
class Diagnosis:
    """Diagnosis of a configuration on a tree.

    Args:
        verdict: agree, asked, ignored, differ, refused or unknown.
        refused: the line with which this verl would refuse the configuration.
        scaler: the settings of the loss scalers of actor and critic; None where the loss is not scaled.
        deterministic: for each model, whether full_determinism reaches it.
    """

    tree: Tree
    verdict: str
    sentence: str
    findings: tuple[Finding, ...]
    refused: str | None = None
    hops: Mapping[str, Hop] = field(default_factory=lambda: dict.fromkeys(HOPS, Hop(None, "refused")))
    scaler: Mapping[str, Mapping[str, Any] | None] = field(default_factory=lambda: dict.fromkeys(TRAINED))
    deterministic: Mapping[str, bool] = field(default_factory=dict)

    def json(self, gpus: Sequence[Gpu] = ()) -> dict:
        """Return the content of ``doctor --json`` on a machine with these GPUs."""
        tree, name = self.tree, self.tree.release.name
        release, nearest = (None, name) if tree.state == "foreign" else (name, None)
        return {
            "verl": {"release": release, "state": tree.state, "stack": tree.stack, "nearest": nearest},
            "hops": {name: hop.effective_dtype for name, hop in self.hops.items()},
            "scaler": dict(self.scaler),
            "deterministic": dict(self.deterministic),
            "findings": [finding.json() for finding in self.findings],
            "refused": self.refused,
            "verdict": self.verdict,
            "sentence": self.sentence,
            "hardware": [asdict(gpu) for gpu in gpus],
        }


def diagnose(tree: Tree, overrides: Sequence[str], config_name: str = "ppo_trainer") -> Diagnosis:
    """Diagnose a job with these overrides on this tree, without running it.

    Raises:
        Refused: the words are no overrides, or there is no such config.
    """

    def refused(line: str, *findings: Finding) -> Diagnosis:
        return Diagnosis(tree, "refused", f"{tree.title}, refuses this config: {line}", findings, line)

    try:
        job = DtypeResolver(tree, load_config(tree.root, overrides, config_name))
    except Uncomposable as error:
        known = list(leaves(load_config(tree.root, [], config_name).values))
        return refused(str(error), *refusals.unknown_keys(tree, str(error), overrides, known))
    if findings := list(refusals.unavailable(job)):
        return refused(findings[0].sentence, *findings)
    if line := refusals.refusal(job):
        return refused(line, *refusals.unknown_keys(tree, line, overrides, []))
    for ends in refusals.ENDINGS:
        if findings := list(ends(job)):
            return refused(findings[0].sentence, *findings)
    doubts = tuple(refusals.float16_doubts(job))
    findings = (*(finding for find in FINDINGS for finding in find(job)), *doubts)
    verdict, sentence = judge(job)
    sentence += "".join(f" {doubt.sentence}." for doubt in doubts)
    unheeded = [f"{finding.key}={finding.value}" for finding in findings if finding.unheeded]
    if unheeded and verdict in SOUND:
        verdict, sentence = "ignored", f"{sentence} Not as requested: {', '.join(unheeded)}."
    hops = {name: job.resolve(name) for name in HOPS}
    scaler = {role: job.scaler(role) for role in TRAINED}
    deterministic = dict.fromkeys(job.used("actor", "ref", "critic"), False) | requested_determinism(job)
    deterministic["rollout"] = bool(job.get(DETERMINISM)) and job.server == "vllm"
    return Diagnosis(tree, verdict, sentence, findings, None, hops, scaler, deterministic)


def judge(job: DtypeResolver) -> tuple[str, str]:
    """Return whether trainer and rollout compute in the same dtype, as a verdict and a sentence."""
    name = job.tree.title
    compute, autocast, kv_cache = job.dtypes("actor.compute", "actor.autocast", "rollout.kv_cache")
    trainer = compute if autocast == UNKNOWN else autocast
    rollout = job.effective_dtype("rollout.weights")
    if UNKNOWN in (trainer, rollout):
        return UNKNOWN, f"{name}: trainer in {trainer}, rollout in {rollout}: whether they agree is unknown."
    if autocast not in (UNKNOWN, compute):
        dtypes = f"the trainer casts weights to {compute} and autocasts to {autocast}; rollout {rollout}"
        return "differ", f"{name}: {dtypes}."
    if effect := job.misread_cache:
        return "differ", f"{name}: {effect}."
    if trainer == rollout:
        if job.wire_is_lossy:
            wire = job.effective_dtype("wire")
            return "differ", f"{name}: both compute in {trainer}, but the weights reach the rollout through {wire}."
        if kv_cache not in (rollout, UNKNOWN, None):
            return "asked", f"{name}: trainer and rollout in {trainer}, with a KV cache in {kv_cache} as requested."
        return "agree", f"{name}: trainer and rollout both compute in {trainer}."
    trainer_requests = full_names(job.requested_dtypes("actor").values())
    rollout_requests = full_names(job.config.user_values(f"{ROLLOUT}.dtype").values())
    dtypes = f"the trainer computes in {trainer} and the rollout in {rollout}"
    if job.is_quantized or (trainer in trainer_requests and rollout in rollout_requests):
        return "asked", f"{name}: {dtypes}, as requested."
    if trainer_requests and trainer not in trainer_requests:
        dtypes += f", and {', '.join(sorted(trainer_requests))} was requested for the trainer"
    elif rollout_requests and rollout not in rollout_requests:
        dtypes += f", and {', '.join(sorted(rollout_requests))} was requested for the rollout"
    else:
        dtypes += ", without a request"
    other = "+precision=" if job.tree.precision else job.tree.apply_command
    return "differ", f"{name}: {dtypes}: set {ROLLOUT}.dtype={trainer}, or {other}."
