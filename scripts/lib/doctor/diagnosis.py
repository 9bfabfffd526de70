"""What is to be said of a job before it runs: what is ignored or refused, and whether trainer and rollout agree."""

import ast
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lib.cli import options
from lib.doctor import dtype_rules as hops
from lib.doctor.dtype_rules import LEGACY, UNKNOWN, rule_for
from lib.doctor.resolver import (
    HOPS,
    ROLES,
    ROLLOUT,
    SERVER_SPELLINGS,
    SIXTEEN_BITS,
    SPELLINGS,
    Finding,
    Hop,
    Patient,
    Unreadable,
    server_dtype,
)
from lib.doctor.servers import float16_servers
from lib.doctor.tree import Tree, Uncomposable, compose, leaves, select
from lib.paths import CONFIGS


@dataclass(frozen=True)
class Diagnosis:
    tree: Tree
    hops: Mapping[str, Hop]
    scaler: Mapping[str, Mapping[str, Any] | None]
    findings: tuple[Finding, ...]
    refused: str | None
    verdict: str
    sentence: str

    @property
    def sound(self) -> bool:
        """Whether the job may run: trainer and rollout are as asked for."""
        return self.verdict in ("agree", "asked")

    def json(self) -> dict:
        tree = self.tree
        foreign = tree.state == "foreign"
        verl = {
            "release": None if foreign else tree.release,
            "state": tree.state,
            "stack": tree.stack,
            "nearest": tree.release if foreign else None,
        }
        return {
            "verl": verl,
            "hops": {name: hop.holds for name, hop in self.hops.items()},
            "scaler": dict(self.scaler),
            "findings": [asdict(finding) for finding in self.findings],
            "refused": self.refused,
            "verdict": self.verdict,
            "sentence": self.sentence,
        }


# --- what would be refused --------------------------------------------------------------------------------------------


def refusal(patient: Patient) -> str | None:
    """The line with which this verl would refuse the config: its driver, or the first worker that it builds."""
    unknown = unknown_field(patient)
    if unknown:
        return unknown
    try:
        if patient.tree.precision:
            check_patched(patient)
        for role in ROLES:
            if patient.uses(role):
                for what in ("master", "compute", "autocast", "reduce"):
                    if rule_for(f"{role}.{what}", patient.by(role), patient.release):
                        patient.hop(f"{role}.{what}")
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    except Unreadable as error:
        return str(error)
    get = patient.config.get
    rollout, mode = get(f"{ROLLOUT}.name"), get(f"{ROLLOUT}.mode", "sync")
    if rollout == "hf" and patient.release not in ("0.4.1", "0.5.0"):
        return f"AssertionError: Rollout hf with mode {mode} not found"
    for role in ("actor", "critic"):
        if patient.legacy and patient.uses(role) and patient.by(role) == "megatron":
            bridged = get(f"{patient.engine(role)}.use_mbridge")
            if patient.hop(f"{role}.compute").holds == "float16" and not bridged:
                return "AssertionError: fp16 mode requires use_mbridge to be True"
    if patient.release in ("0.6.0", "0.6.1") and patient.uses("critic") and patient.by("critic") == "engine":
        return "AttributeError: 'FSDPCriticModelCfg' object has no attribute 'hf_config'"
    return None


def check_patched(patient: Patient) -> None:
    """What a patched tree's driver checks, by its own module, in its order.

    Raises:
        ValueError, TypeError: its refusal.
    """
    module, config = patient.tree.precision, patient.config
    if patient.legacy:
        return module.check_workers(config.values)
    for role in ("actor", "critic", "ref"):
        if not patient.uses(role):
            continue
        node, strategy = dict(config.get(patient.engine(role), {})), config.get(f"{ROLES[role]}.strategy")
        if patient.by(role) == "engine":
            scaler = {key: value for key, value in (node.get("grad_scaler") or {}).items() if key != "_target_"}
            module.GradScalerConfig(**scaler)
            module.check_engine_dtype(node.get("dtype"), node.get("strategy"))
            compute = module.dtype_name(patient.precision(role).compute)
            module.check_keep_fp32(node.get("keep_fp32_modules", []), strategy)
        else:
            compute = module.check_engine_dtype(node.get("dtype"), strategy)
        engine = SimpleNamespace(dtype=compute, strategy=strategy)
        if role != "ref":
            module.check_role_dtype(config.get(f"{ROLES[role]}.dtype"), patient.engine(role).rpartition(".")[2], engine)
    module.check_rollout_dtype(config.get(f"{ROLLOUT}.dtype"))


def unknown_field(patient: Patient) -> str | None:
    """The error of a dataclass of verl's that gets a key it does not have; the yaml alone takes any with ``+``."""
    classes = dataclasses_of(patient.tree.root)
    values = patient.config.values
    for role, path in {**ROLES, "rollout": ROLLOUT}.items():
        if role != "rollout" and not patient.uses(role):
            continue
        below = [each for each in patient.config.given if each.startswith(f"{path}.")]
        for key in sorted(below, key=lambda each: (-each.count("."), each)):  # Hydra makes the inner ones first
            parts = key.split(".")
            nodes = ((end, select(values, ".".join(parts[:end]))) for end in range(len(parts) - 1, path.count("."), -1))
            for end, node in nodes:
                target = node.get("_target_") if isinstance(node, Mapping) else None
                if target is None:
                    continue
                name = target.rpartition(".")[2]
                fields = fields_of(name, classes) if target.startswith("verl.") else None
                # The ref's worker renames its log_prob_ keys, and a legacy one makes no dataclass of the role's own.
                if path == ROLES["ref"] == ".".join(parts[:end]) and (patient.legacy or "log_prob_" in parts[end]):
                    break
                if fields is not None and parts[end] not in fields:
                    return f"TypeError: {name}.__init__() got an unexpected keyword argument '{parts[end]}'"
                break
    return None


def dataclasses_of(root: Path) -> dict[str, ast.ClassDef]:
    """The classes of the tree's configs by name, read and not imported."""
    found = {}
    for folder in ("workers/config", "trainer/config", "utils/profiler"):
        for file in sorted((root / "verl" / folder).glob("*.py")):
            found |= {node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)}
    return found


def fields_of(name: str, classes: Mapping[str, ast.ClassDef]) -> set[str] | None:
    """The fields of a dataclass and of its bases; None where one of them is not among ``classes``."""
    if name == "BaseConfig":  # verl's, which has none
        return set()
    if name not in classes:
        return None
    fields = {node.target.id for node in classes[name].body if isinstance(node, ast.AnnAssign)}
    for base in classes[name].bases:
        inherited = fields_of(base.id, classes) if isinstance(base, ast.Name) else None
        if inherited is None:
            return None
        fields |= inherited
    return fields


# --- findings and verdict ---------------------------------------------------------------------------------------------

# How the effect of a dtype begins that does not hold where it was asked for.
UNHEEDED = ("is ignored by", "is a word that nothing reads", "reaches one half")
TRAINS = {"actor": "trains", "critic": "trains", "ref": "computes", "reward_model": "scores"}


def findings(patient: Patient) -> Iterator[Finding]:
    yield from overlay(patient)
    for role in ROLES:
        if patient.uses(role):
            yield from ignored(patient, role)
            yield from halves(patient, role)
    yield from scaling(patient)
    yield from of_ref(patient)
    yield from of_critic(patient)
    yield from of_rollout(patient)
    yield from of_export(patient)
    if unread := sorted(path for path, state in patient.tree.files.items() if state == UNKNOWN):
        yield Finding(
            "verl",
            str(patient.tree.root),
            f"has other files than verl {patient.release} where hops are decided, now unknown: {', '.join(unread)}",
            f"make drift VERL={patient.tree.root}",
        )


def overlay(patient: Patient) -> Iterator[Finding]:
    """``+precision=fp16`` and its like where there is no such group: Hydra takes it for a new key."""
    groups = sorted(each.name for each in CONFIGS.iterdir())
    for word in sorted(patient.config.words):
        value = patient.config.get(word)
        effect = f"is a word that nothing reads in {patient.tree.name}"
        near = difflib.get_close_matches(word, groups, n=1)
        mend = f"hydra.searchpath=['file://{CONFIGS}']" if word in groups else f"remove +{word}={value}"
        if word not in groups and near:
            mend = f"+{near[0]}={value}"
        if word == "precision":
            actor, rollout = patient.hop("actor.compute").holds, patient.hop("rollout.weights").holds
            effect += f": trains in {actor}, rolls out in {rollout}"
            mend = f"{hops.KEYS} brings the overlay: {patient.tree.patching}"
        yield Finding(word, value, effect, mend)


def ignored(patient: Patient, role: str) -> Iterator[Finding]:
    """Keys that the user set for what a role computes in, and that it does not compute in."""
    if role == "reward_model" and (served := patient.reward_server()):
        holds = patient.hop("reward_model.compute").holds
        for key, value in patient.asked(patient.dtype_keys(role)).items():
            yield Finding(
                key, value, f"is ignored by {patient.tree.name}: a server scores in {holds}", f"{served}={value}"
            )
        return
    compute = patient.hop(f"{role}.compute").holds
    autocast = patient.hop(f"{role}.autocast").holds if role != "reward_model" else compute
    if compute == UNKNOWN or (role == "ref" and patient.ref_in_actor):
        return
    rule = rule_for(f"{role}.compute", patient.by(role), patient.release)
    for key, value in patient.asked(patient.dtype_keys(role)).items():
        asked = next((name for name, spellings in SPELLINGS.items() if value in spellings), None)
        if value is None or (asked is not None and asked in (compute, autocast)):
            continue
        mend = f"{rule.mend or hops.COMPUTE}: {patient.tree.patching}"
        if not patient.legacy and patient.by(role) == "engine" and asked:
            mend += f"; or +{patient.engine(role)}.mixed_precision.param_dtype={value}"
        yield Finding(key, value, f"is ignored by {patient.tree.name}: {TRAINS[role]} in {compute}", mend)


def halves(patient: Patient, role: str) -> Iterator[Finding]:
    """FSDP and autocast in different dtypes; masters or gradient reduction in less than fp32."""
    if role == "reward_model" or patient.by(role) not in ("worker", "engine"):
        return
    engine = patient.engine(role)
    compute, autocast = (patient.hop(f"{role}.{what}").holds for what in ("compute", "autocast"))
    if UNKNOWN not in (compute, autocast) and compute != autocast:
        keys = patient.asked(patient.dtype_keys(role)) or {f"{engine}.mixed_precision.param_dtype": None}
        key, value = list(keys.items())[-1]
        yield Finding(
            key,
            value,
            f"reaches one half of {patient.tree.name}: the {role}'s weights are cast to {compute} and its "
            f"autocast computes in {autocast}",
            f"{hops.COMPUTE}: {patient.tree.patching}",
        )
    if role == "ref":
        return
    master, reduce = (patient.hop(f"{role}.{what}").holds for what in ("master", "reduce"))
    if master in SIXTEEN_BITS:
        effect = {
            "float16": "makes the optimizer's weights and state half precision: AdamW turns them to NaN",
            "bfloat16": "makes the optimizer's weights and state bfloat16: updates below 1/256 of a weight are lost",
        }[master]
        key = f"{engine}.model_dtype"
        yield Finding(key, patient.config.get(key), effect, f"{key}=fp32")
    if reduce in SIXTEEN_BITS:
        key = f"{engine}.mixed_precision.reduce_dtype"
        effect = f"sums the {role}'s gradients over the ranks in {reduce}"
        effect += ", where scaled ones overflow sooner" if reduce == "float16" else ", with 8 bits of mantissa"
        yield Finding(key, patient.config.get(key), effect, f"{key}=fp32")


def scaling(patient: Patient) -> Iterator[Finding]:
    """fp16 without a loss scaler, a scaler that is neither saved nor seen, and settings that nothing reads."""
    for role in ("actor", "critic"):
        if patient.uses(role) and patient.by(role) == "megatron":
            yield from of_megatron(patient, role)
        if not patient.uses(role) or patient.by(role) not in ("worker", "engine"):
            continue
        scaler, engine = patient.scaler(role), patient.engine(role)
        dtypes = [patient.hop(f"{role}.{what}").holds for what in ("compute", "autocast")]
        keys = [key for key in patient.config.given if key.startswith(f"{engine}.grad_scaler")]
        for key in sorted(keys):
            if scaler is None or not scaler["saved"]:
                why = "the loss is not scaled" if scaler is None else "its scaler's settings are fixed"
                value = select(patient.config.values, key)
                yield Finding(
                    key, value, f"is ignored by {patient.tree.name}: {why}", f"{hops.SCALER}: {patient.tree.patching}"
                )
        if "float16" in dtypes and scaler is None:
            key, value = next(iter(patient.asked(patient.dtype_keys(role)).items()), (f"{engine}.dtype", "float16"))
            yield Finding(
                key,
                value,
                f"puts the {role} into fp16 without a loss scaler: small gradients vanish, no overflow is skipped",
                f"{hops.SCALER}: {patient.tree.patching}",
            )
        elif scaler is not None and not scaler["saved"]:
            yield Finding(
                f"{engine}.grad_scaler",
                None,
                f"is no key of {patient.tree.name}, which scales the {role}'s loss by fixed settings and neither saves "
                "the scale nor reports it or a skipped step",
                f"{hops.SCALER}, {hops.SAVED}, {hops.COUNTED}: {patient.tree.patching}",
            )


def of_megatron(patient: Patient, role: str) -> Iterator[Finding]:
    """Its own loss scaler, at whose first overflow upstream ends the run."""
    if patient.hop(f"{role}.compute").holds != "float16" or (patient.tree.precision and not patient.legacy):
        return
    key = f"{patient.engine(role)}.dtype"
    mend = f"{ROLES[role]}.strategy=fsdp" if patient.legacy else f"{hops.SKIP}: {patient.tree.patching}"
    yield Finding(key, patient.config.get(key), "ends the run at the first overflow with a NotImplementedError", mend)


def of_ref(patient: Patient) -> Iterator[Finding]:
    if not patient.uses("ref"):
        return
    actor, ref = (patient.hop(f"{role}.compute").holds for role in ("actor", "ref"))
    if UNKNOWN not in (actor, ref) and actor != ref:
        keys = patient.asked(patient.dtype_keys("ref")) or patient.asked(patient.dtype_keys("actor"))
        key, value = next(iter(keys.items()), (patient.dtype_keys("ref")[1], ref))
        same = patient.dtype_keys("ref")[2 if not patient.tree.precision else 0]
        plus = "" if patient.tree.precision else "+"
        mend = f"{plus}{same}={actor}"
        yield Finding(
            key, value, f"leaves the actor in {actor} beside a ref in {ref}: their KL is not that of the policies", mend
        )


def of_critic(patient: Patient) -> Iterator[Finding]:
    """An actor's dtype that leaves the critic behind, where nothing was asked of the critic."""
    if not patient.uses("critic") or patient.asked(patient.dtype_keys("critic")):
        return
    actor, critic = (patient.hop(f"{role}.compute").holds for role in ("actor", "critic"))
    if UNKNOWN in (actor, critic) or actor == critic:
        return
    for key, value in patient.asked(patient.dtype_keys("actor")).items():
        if value is not None and actor in named([value]):
            rule = rule_for("critic.compute", patient.by("critic"), patient.release)
            mend = f"{rule.mend}: {patient.tree.patching}" if rule.mend and not patient.tree.precision else None
            if mend is None:
                mend = f"{patient.engine('critic')}.dtype={value}"
            yield Finding(key, value, f"does not reach the critic, which trains in {critic}", mend)


def of_rollout(patient: Patient) -> Iterator[Finding]:
    get, tree = patient.config.get, patient.tree
    key = f"{ROLLOUT}.dtype"
    weights, logits, kv_cache = (patient.hop(f"rollout.{what}").holds for what in ("weights", "logits", "kv_cache"))
    asked = get(key)
    if get(f"{ROLLOUT}.name") == "hf" and logits not in (UNKNOWN, server_dtype(asked)) and patient.config.user(key):
        yield Finding(
            key,
            asked,
            f"is ignored by the hf rollout of {tree.name}: samples in {logits}",
            f"{hops.GENERATE}: {patient.tree.patching}",
        )
    elif asked == "auto":
        what = f"here {weights}" if weights != UNKNOWN else "not known before it is loaded"
        yield Finding(key, asked, f"takes the dtype of the model's config.json, {what}", f"{key}=float16 or bfloat16")
    elif server_dtype(asked) not in SPELLINGS:
        yield Finding(
            key, asked, f"is no dtype that a rollout server takes, and {tree.name} does not check it", f"{key}=float16"
        )
    if weights not in SPELLINGS and weights != UNKNOWN:
        keys = [f"{ROLLOUT}.quantization", f"{ROLLOUT}.engine_kwargs.{get(f'{ROLLOUT}.name')}.quantization"]
        quantized = next(each for each in keys if get(each))
        yield Finding(
            quantized,
            weights,
            "samples from quantized weights, which no dtype of the trainer's matches",
            f"{ROLLOUT}.quantization=null, or correct for it (algorithm.rollout_correction)",
        )
    if kv_cache not in SPELLINGS and kv_cache is not None and kv_cache != UNKNOWN:
        cache = f"{ROLLOUT}.engine_kwargs.{get(f'{ROLLOUT}.name')}.kv_cache_dtype"
        yield Finding(
            cache,
            get(cache),
            f"rounds keys and values to {kv_cache}; the trainer has no cache to round",
            f"{cache}=auto",
        )
    if lossy(patient):
        wire = patient.hop("wire")
        yield Finding(
            key,
            asked,
            f"gets weights that passed through {wire.holds} on their way ({wire.because}): the rollout runs "
            f"{wire.holds}'s values in {weights}",
            f"{hops.SEND}: {patient.tree.patching}",
        )


def lossy(patient: Patient) -> bool:
    """Whether the wire rounds the masters to 16 bits other than the rollout's."""
    wire, weights, master = (patient.hop(name).holds for name in ("wire", "rollout.weights", "actor.master"))
    return wire in SIXTEEN_BITS and wire not in (weights, master) and weights in SPELLINGS


def of_export(patient: Patient) -> Iterator[Finding]:
    compute, export = patient.hop("actor.compute").holds, patient.hop("hf_export").holds
    if compute == "float16" and export == "bfloat16":
        yield Finding(
            "hf_export",
            None,
            f"of {patient.tree.name} makes {export} of a model trained in {compute}: each weight loses three bits",
            f"{hops.EXPORT}: {patient.tree.patching}",
        )


def verdict(patient: Patient) -> tuple[str, str]:
    """Whether trainer and rollout compute in the same dtype, and the sentence that says so."""
    tree, config = patient.tree, patient.config
    name = tree.title
    compute, autocast = (patient.hop(f"actor.{what}").holds for what in ("compute", "autocast"))
    trainer = compute if autocast == UNKNOWN else autocast
    hf = config.get(f"{ROLLOUT}.name") == "hf"
    rollout = patient.hop("rollout.logits" if hf else "rollout.weights").holds
    kv_cache = patient.hop("rollout.kv_cache").holds
    if UNKNOWN in (trainer, rollout):
        return UNKNOWN, f"{name}: trainer in {trainer}, rollout in {rollout}: whether they agree cannot be said."
    if autocast not in (UNKNOWN, compute):
        return (
            "differ",
            f"{name}: the trainer casts weights to {compute} and autocasts to {autocast}; rollout {rollout}.",
        )
    quantized = bool(patient.hop("rollout.weights").asked) and rollout not in SPELLINGS
    if trainer == rollout:
        if lossy(patient):
            wire = patient.hop("wire").holds
            return "differ", f"{name}: both compute in {trainer}, but the weights reach the rollout through {wire}."
        if kv_cache not in (rollout, UNKNOWN, None):
            return "asked", f"{name}: trainer and rollout in {trainer}, with a KV cache in {kv_cache} as asked for."
        return "agree", f"{name}: trainer and rollout both compute in {trainer}."
    wanted = named(patient.asked(patient.dtype_keys("actor")).values())
    sampled = named(patient.asked([f"{ROLLOUT}.dtype"]).values())
    said = f"the trainer computes in {trainer} and the rollout in {rollout}"
    if quantized or (trainer in wanted and rollout in sampled):
        return "asked", f"{name}: {said}, as asked for."
    if wanted and trainer not in wanted:
        said += f", and the trainer was asked for {', '.join(sorted(wanted))}"
    elif sampled and rollout not in sampled:
        said += f", and the rollout was asked for {', '.join(sorted(sampled))}"
    else:
        said += ", which nobody asked for"
    other = "+precision=" if tree.precision else tree.patching
    return "differ", f"{name}: {said}: set {ROLLOUT}.dtype={trainer}, or {other}."


def named(values: Iterable[Any]) -> set[str]:
    """The full names of dtypes as users spell them, for a trainer or a server."""
    full = {spelling: name for name, spellings in SPELLINGS.items() for spelling in spellings} | SERVER_SPELLINGS
    return {full.get(value, str(value)) for value in values}


def refused(tree: Tree, line: str, found: tuple[Finding, ...]) -> Diagnosis:
    """The diagnosis of a config that this verl does not take."""
    nothing = {name: Hop(None, {}, "refused") for name in HOPS}
    sentence = f"{tree.title}, refuses this config: {line}"
    return Diagnosis(tree, nothing, {"actor": None, "critic": None}, found, line, "refused", sentence)


def diagnose(tree: Tree, overrides: list[str], config_name: str = "ppo_trainer") -> Diagnosis:
    """Everything that can be said of ``overrides`` on this tree without running it.

    Raises:
        Refused: the words are no overrides, or there is no such config.
    """
    try:
        config = compose(tree.root, overrides, config_name)
    except Uncomposable as error:
        known = list(leaves(compose(tree.root, [], config_name).values))
        return refused(tree, str(error), tuple(unknown_key(tree, str(error), overrides, known)))
    patient = Patient(tree, config)
    if line := refusal(patient):
        return refused(tree, line, tuple(unknown_key(tree, line, overrides, [])))
    in_float16 = tuple(float16_servers(patient))
    if ended := tuple(each for each in in_float16 if each.support.supported is False):
        return refused(tree, ended[0].support.reason, tuple(each.refusal for each in ended))
    held = {name: patient.hop(name) for name in HOPS}
    scaler = {role: patient.scaler(role) for role in ("actor", "critic")}
    doubts = [each for each in in_float16 if each.support.supported is None and config.user(each.model_key)]
    found = (*findings(patient), *(each.doubt for each in doubts))
    said, sentence = verdict(patient)
    for each in doubts:
        sentence += f" Whether vLLM runs the model in float16 is not known: {each.support.reason}."
    unheeded = [f"{each.key}={each.value}" for each in found if each.effect.startswith(UNHEEDED) and is_dtype(each)]
    if unheeded and said in ("agree", "asked"):
        said, sentence = "ignored", f"{sentence} Not as asked for: {', '.join(unheeded)}."
    return Diagnosis(tree, held, scaler, found, None, said, sentence)


def is_dtype(finding: Finding) -> bool:
    """Whether it is on a key that asks for what something computes in: a dtype's, or a regime, misspelt or not."""
    keys = ("dtype", "param_dtype", "precision")
    return finding.key.rpartition(".")[2] in keys or finding.value in options("precision")


# The ends of keys that some verl does not have, and which patch brings them.
BROUGHT = {
    r"\.grad_scaler(\.\w+)?": hops.SCALER,
    r"\.keep_fp32_modules": hops.KEEP,
    r"(_ref\.(actor|ref)|critic|reward_model)(\.model)?(\.fsdp_config|\.fsdp|\.megatron)?\.dtype": hops.KEYS,
}


def unknown_key(tree: Tree, line: str, overrides: list[str], known: list[str]) -> Iterator[Finding]:
    """For a refusal of a key that this verl does not have: which patch brings it, where it is here, or what is near.

    Args:
        known: the keys of its config, where that did not compose.
    """
    legacy = tree.release in LEGACY
    for word in overrides:
        key, _, value = word.lstrip("+~").partition("=")
        if not any(f"'{part}'" in line for part in (key, *key.split("."))):
            continue
        patch = next((patch for end, patch in BROUGHT.items() if re.search(f"{end}$", key)), None)
        near = difflib.get_close_matches(key, known, n=1)
        if legacy and key.startswith("critic.fsdp."):
            mend = f"{key.replace('critic.fsdp.', 'critic.model.fsdp_config.', 1)}={value}"
        elif not legacy and key.startswith("critic.model.fsdp_config."):
            mend = f"{key.replace('critic.model.fsdp_config.', 'critic.fsdp.', 1)}={value}"
        elif patch and tree.state != "patched" and not (legacy and patch == hops.KEEP):
            mend = f"{patch}: {tree.patching}"
        elif near:
            mend = f"the nearest key is {near[0]}"
        else:
            continue
        yield Finding(key, value, f"is not in {tree.name}", mend)
