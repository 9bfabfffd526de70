"""Diagnose a job before it runs: each hop's dtype, ignored and refused keys, and whether trainer and rollout agree."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from verl_precision.doctor.batch_sizes import uneven_batches
from verl_precision.doctor.bitwise import obstacles
from verl_precision.doctor.config import leaves, load_config
from verl_precision.doctor.determinism import determinism_findings, deterministic_parts
from verl_precision.doctor.dtype_rules import KEYS, UNKNOWN
from verl_precision.doctor.finding import Finding
from verl_precision.doctor.fixes_findings import fixes_findings
from verl_precision.doctor.lora_findings import lora_findings
from verl_precision.doctor.metric_findings import metric_findings, weight_findings
from verl_precision.doctor.model_support import unsupported_models
from verl_precision.doctor.refusals import missing_rollout, refusal, unknown_keys, unknown_strategies
from verl_precision.doctor.resolver import HOPS, ROLLOUT, DtypeResolver, Hop
from verl_precision.doctor.rollout_findings import is_quantized, reinterpreted, rollout_findings, wire_is_lossy
from verl_precision.doctor.routing_findings import routing_findings
from verl_precision.doctor.servers import float16_servers
from verl_precision.doctor.trainer_findings import export_findings, full_names, trainer_findings
from verl_precision.doctor.tree import Tree
from verl_precision.facts.compose import Uncomposable
from verl_precision.facts.gpus import Gpu
from verl_precision.paths import CONFIGS


@dataclass(frozen=True)
class Diagnosis:
    """Diagnosis of a configuration on a tree.

    Args:
        hops: by name, in the order of HOPS.
        scaler: the settings of the loss scalers of actor and critic; None where the loss is not scaled.
        refused: the line with which this verl would refuse the configuration.
        verdict: agree, asked, ignored, differ, refused or unknown.
        sentence: the verdict in one sentence.
        deterministic: for each model, whether full_determinism reaches it.
        bitwise: what keeps trainer and rollout from agreeing to the bit.
        gpus: of this machine; none where they were not looked for.
    """

    tree: Tree
    hops: Mapping[str, Hop]
    scaler: Mapping[str, Mapping[str, Any] | None]
    findings: tuple[Finding, ...]
    refused: str | None
    verdict: str
    sentence: str
    deterministic: Mapping[str, bool] = field(default_factory=dict)
    bitwise: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()

    @property
    def sound(self) -> bool:
        """Return whether the job may run: trainer and rollout compute as requested."""
        return self.verdict in ("agree", "asked")

    def json(self) -> dict:
        """Return the content of ``doctor --json``."""
        tree = self.tree
        foreign = tree.state == "foreign"
        verl = {
            "release": None if foreign else tree.release.name,
            "state": tree.state,
            "stack": tree.stack,
            "nearest": tree.release.name if foreign else None,
        }
        return {
            "verl": verl,
            "hops": {name: hop.effective_dtype for name, hop in self.hops.items()},
            "scaler": dict(self.scaler),
            "deterministic": dict(self.deterministic),
            "bitwise": list(self.bitwise),
            "findings": [finding.json() for finding in self.findings],
            "refused": self.refused,
            "verdict": self.verdict,
            "sentence": self.sentence,
            "hardware": [asdict(gpu) for gpu in self.gpus],
        }


def diagnose(tree: Tree, overrides: Sequence[str], config_name: str = "ppo_trainer") -> Diagnosis:
    """Diagnose a job with these overrides on this tree, without running it.

    Raises:
        Refused: the words are no overrides, or there is no such config.
    """
    try:
        config = load_config(tree.root, overrides, config_name)
    except Uncomposable as error:
        known = list(leaves(load_config(tree.root, [], config_name).values))
        return refused(tree, str(error), tuple(unknown_keys(tree, str(error), overrides, known)))
    resolver = DtypeResolver(tree, config)
    if unknown := next(unknown_strategies(resolver), None):
        return refused_for(tree, unknown)
    if line := refusal(resolver):
        findings = (*unknown_keys(tree, line, overrides, []), *missing_rollout(resolver, line))
        return refused(tree, line, findings)
    if ending := next(chain(unsupported_models(resolver), uneven_batches(resolver)), None):
        return refused_for(tree, ending)
    servers = tuple(float16_servers(resolver))
    if ending := tuple(server for server in servers if server.support.supported is False):
        return refused(tree, ending[0].support.reason, tuple(server.refusal for server in ending))
    hops = {name: resolver.resolve(name) for name in HOPS}
    scaler = {role: resolver.scaler(role) for role in ("actor", "critic")}
    unsure = [each for each in servers if each.support.supported is None and each.model_key in config.user_keys]
    findings = (*all_findings(resolver), *(server.doubt for server in unsure))
    verdict, sentence = judge(resolver)
    for server in unsure:
        sentence += f" Whether vLLM runs the model in float16 is not known: {server.support.reason}."
    unheeded = [f"{finding.key}={finding.value}" for finding in findings if finding.unheeded]
    if unheeded and verdict in ("agree", "asked"):
        verdict, sentence = "ignored", f"{sentence} Not as requested: {', '.join(unheeded)}."
    deterministic = deterministic_parts(resolver)
    bitwise = tuple(obstacles(resolver, deterministic))
    return Diagnosis(tree, hops, scaler, findings, None, verdict, sentence, deterministic, bitwise)


def refused(tree: Tree, line: str, findings: tuple[Finding, ...]) -> Diagnosis:
    """Return the diagnosis of a configuration that this verl refuses with ``line``."""
    hops = {name: Hop(None, {}, "refused") for name in HOPS}
    sentence = f"{tree.title}, refuses this config: {line}"
    return Diagnosis(tree, hops, {"actor": None, "critic": None}, findings, line, "refused", sentence)


def refused_for(tree: Tree, finding: Finding) -> Diagnosis:
    """Return the diagnosis of a configuration that fails on what ``finding`` is about."""
    return refused(tree, f"{finding.key}={finding.value} {finding.effect}", (finding,))


def all_findings(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield the findings in the order in which they are printed."""
    yield from unread_keys(resolver)
    yield from misspelt_keys(resolver)
    yield from trainer_findings(resolver)
    yield from lora_findings(resolver)
    yield from rollout_findings(resolver)
    yield from routing_findings(resolver)
    yield from determinism_findings(resolver)
    yield from metric_findings(resolver)
    yield from weight_findings(resolver)
    yield from export_findings(resolver)
    yield from fixes_findings(resolver)
    tree = resolver.tree
    if unknown := sorted(path for path, state in tree.files.items() if state == UNKNOWN):
        files = ", ".join(unknown)
        effect = f"has other files than verl {tree.release.name} where hops are decided, now unknown: {files}"
        yield Finding("verl", str(tree.root), effect, f"make drift VERL={tree.root}")


def unread_keys(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield ``+precision=fp16`` and its like on a tree without such a group, where Hydra takes it for a new key."""
    tree, groups = resolver.tree, sorted(each.name for each in CONFIGS.iterdir())
    for key in sorted(resolver.config.added_keys):
        value = resolver.config.get(key)
        if "." in key or isinstance(value, Mapping):
            continue
        effect = f"is a key that nothing reads in {tree.name}"
        near = difflib.get_close_matches(key, groups, n=1)
        mend = f"hydra.searchpath=['file://{CONFIGS}']" if key in groups else f"remove +{key}={value}"
        if key not in groups and near:
            mend = f"+{near[0]}={value}"
        if key == "precision":
            actor, rollout = (resolver.effective_dtype(name) for name in ("actor.compute", "rollout.weights"))
            effect += f": trains in {actor}, rolls out in {rollout}"
            mend = f"{KEYS} brings the overlay: {tree.apply_command}"
        yield Finding(key, value, effect, mend, applies=False)


def misspelt_keys(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield a key that ``+`` adds beside one of nearly the same name, which Hydra takes for a new key."""
    config = resolver.config
    for key in sorted(config.added_keys):
        group, _, name = key.rpartition(".")
        known = [each for each in config.get(group, {}) if f"{group}.{each}" not in config.added_keys]
        if near := difflib.get_close_matches(name, known, n=1, cutoff=0.85):
            value = config.get(key)
            yield Finding(key, value, f"is a new key beside {near[0]}", f"{group}.{near[0]}={value}", applies=False)


def judge(resolver: DtypeResolver) -> tuple[str, str]:
    """Return whether trainer and rollout compute in the same dtype, as a verdict and a sentence."""
    tree, config = resolver.tree, resolver.config
    name = tree.title
    compute, autocast = (resolver.effective_dtype(f"actor.{what}") for what in ("compute", "autocast"))
    trainer = compute if autocast == UNKNOWN else autocast
    hf = resolver.server == "hf"
    rollout = resolver.effective_dtype("rollout.logits" if hf else "rollout.weights")
    kv_cache = resolver.effective_dtype("rollout.kv_cache")
    if UNKNOWN in (trainer, rollout):
        return UNKNOWN, f"{name}: trainer in {trainer}, rollout in {rollout}: whether they agree is unknown."
    if autocast not in (UNKNOWN, compute):
        dtypes = f"the trainer casts weights to {compute} and autocasts to {autocast}; rollout {rollout}"
        return "differ", f"{name}: {dtypes}."
    if effect := reinterpreted(resolver):
        return "differ", f"{name}: {effect}."
    if trainer == rollout:
        if wire_is_lossy(resolver):
            wire = resolver.effective_dtype("wire")
            return "differ", f"{name}: both compute in {trainer}, but the weights reach the rollout through {wire}."
        if kv_cache not in (rollout, UNKNOWN, None):
            return "asked", f"{name}: trainer and rollout in {trainer}, with a KV cache in {kv_cache} as requested."
        return "agree", f"{name}: trainer and rollout both compute in {trainer}."
    quantized = is_quantized(resolver)
    trainer_requests = full_names(resolver.requested_dtypes("actor").values())
    rollout_requests = full_names(config.user_values([f"{ROLLOUT}.dtype"]).values())
    dtypes = f"the trainer computes in {trainer} and the rollout in {rollout}"
    if quantized or (trainer in trainer_requests and rollout in rollout_requests):
        return "asked", f"{name}: {dtypes}, as requested."
    if trainer_requests and trainer not in trainer_requests:
        dtypes += f", and {', '.join(sorted(trainer_requests))} was requested for the trainer"
    elif rollout_requests and rollout not in rollout_requests:
        dtypes += f", and {', '.join(sorted(rollout_requests))} was requested for the rollout"
    else:
        dtypes += ", which nobody requested"
    other = "+precision=" if tree.precision else tree.apply_command
    return "differ", f"{name}: {dtypes}: set {ROLLOUT}.dtype={trainer}, or {other}."
