"""List what the doctor finds in a job that verl would start. FINDINGS is the table: one function a finding.

A finding on roles, optimizer or export belongs in ``trainer_findings.py``, one on the server, the wire or the mismatch
in ``rollout_findings.py``. A defect that a patch of the series ``fixes`` corrects is a row of UPSTREAM_DEFECTS.
"""

import difflib
from collections.abc import Iterator, Mapping

from verl_precision.doctor import rollout_findings, trainer_findings
from verl_precision.doctor.dtype_rules import KEYS, UNKNOWN
from verl_precision.doctor.finding import Finding
from verl_precision.doctor.resolver import MODEL, ROLES, DtypeResolver
from verl_precision.patch.status import apply_command
from verl_precision.paths import CONFIGS

SAVES, KEPT = "trainer.save_freq", "trainer.max_actor_ckpt_to_keep"
REJECTION, RANK = "algorithm.rollout_correction.rollout_rs", f"{MODEL}.lora_rank"
OFFLOAD = f"{ROLES['actor']}.fsdp_config.param_offload"


def saves(job: DtypeResolver) -> bool:
    return isinstance(every := job.get(SAVES, -1), int) and every > 0


def sends_adapters(job: DtypeResolver) -> bool:
    return job.get(RANK, 0) > 0 and job.on_fsdp("actor") and not job.get(f"{MODEL}.lora.merge")


# The patch of the series ``fixes``, the key by which a job meets the defect, whether it does, and what happens then.
# fmt: off
UPSTREAM_DEFECTS = (
    ("ckpt-resume-from-a-whole-checkpoint", SAVES, saves,
     "marks no finished save: a run that was killed while it saved resumes from a torn checkpoint or anew"),
    ("ckpt-keep-the-previous-checkpoint-while-saving", KEPT, lambda job: saves(job) and job.get(KEPT) == 1,
     "removes the previous checkpoint before the next is whole: a run that is killed there has none"),
    ("data-resume-between-epochs", SAVES,
     lambda job: saves(job) and not job.get("trainer.use_v1") and job.get("trainer.total_epochs", 1) > 1,
     "saves a data order that is used up at the end of an epoch: resumed there, it repeats the first's"),
    ("worker-give-an-all-masked-batch-a-loss-of-zero", REJECTION, lambda job: job.get(REJECTION),
     "may mask every token of a batch, whose loss is then NaN"),
    ("rollout-refuse-an-empty-lora-adapter", RANK, sends_adapters,
     "sends an adapter without tensors where peft returns none (0.21.0 to 0.21.2): the run never ends"),
    ("rollout-offload-the-base-under-lora-before-the-rollout-wakes", OFFLOAD,
     lambda job: sends_adapters(job) and job.get(OFFLOAD),
     "loads the base under LoRA beside the rollout's weights: a GPU contains both"),
)
# fmt: on


def uncorrected_defects(job: DtypeResolver) -> Iterator[Finding]:
    """Yield the defects that the job meets and that the series ``fixes``, which is not applied, would correct."""
    for patch, key, meets, effect in UPSTREAM_DEFECTS:
        if patch in job.tree.missing_fixes and meets(job):
            yield Finding(key, job.get(key), effect, f"{patch}: {apply_command(job.tree.root, 'precision and fixes')}")


def unread_keys(job: DtypeResolver) -> Iterator[Finding]:
    """Yield keys that ``+`` adds and nothing reads: a group that this tree lacks, and a misspelt name."""
    tree, added = job.tree, sorted(job.config.added_keys)
    groups = sorted(each.name for each in CONFIGS.iterdir())
    for key, value in ((key, job.get(key)) for key in added if "." not in key):
        if isinstance(value, Mapping):
            continue
        effect, near = f"is a key that nothing reads in {tree.name}", difflib.get_close_matches(key, groups, n=1)
        if key == "precision":
            effect += ": trains in {}, rolls out in {}".format(*job.dtypes("actor.compute", "rollout.weights"))
            fix = f"{KEYS} brings the overlay: {tree.apply_command}"
        elif key in groups:
            fix = f"hydra.searchpath=['file://{CONFIGS}']"
        else:
            fix = f"+{near[0]}={value}" if near else f"remove +{key}={value}"
        yield Finding(key, value, effect, fix, applies=False)
    for key in added:
        group, _, name = key.rpartition(".")
        known = [each for each in job.get(group, {}) if f"{group}.{each}" not in added]
        if near := difflib.get_close_matches(name, known, n=1, cutoff=0.85):
            value = job.get(key)
            yield Finding(key, value, f"is a new key beside {near[0]}", f"{group}.{near[0]}={value}", applies=False)


def unknown_files(job: DtypeResolver) -> Iterator[Finding]:
    """Yield the files by which hops cannot be resolved, because they are not the release's."""
    tree = job.tree
    if unknown := sorted(path for path, state in tree.files.items() if state == UNKNOWN):
        files = f"has other files than verl {tree.release.name} where hops are decided, now unknown: "
        yield Finding("verl", str(tree.root), files + ", ".join(unknown), f"make drift VERL={tree.root}")


# Each function yields the findings of one kind; they are printed in this order.
FINDINGS = (
    unread_keys,
    trainer_findings.ignored_dtypes,
    trainer_findings.split_dtypes,
    trainer_findings.low_masters,
    trainer_findings.loss_scaling,
    trainer_findings.megatron,
    trainer_findings.roles_beside_the_actor,
    trainer_findings.uncapped_attention,
    trainer_findings.ignored_truncation,
    trainer_findings.negative_ranks,
    rollout_findings.requested_dtype,
    rollout_findings.quantization,
    rollout_findings.kv_cache,
    rollout_findings.lossy_wire,
    rollout_findings.routers,
    rollout_findings.determinism,
    rollout_findings.bypass_mode,
    rollout_findings.sequence_weights,
    trainer_findings.rounded_export,
    uncorrected_defects,
    unknown_files,
)
