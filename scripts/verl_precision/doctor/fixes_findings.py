"""Findings on defects of upstream's that a job may meet on a tree with only the series ``precision``."""

from collections.abc import Iterator
from typing import Any

from verl_precision.doctor.finding import Finding
from verl_precision.doctor.resolver import MODEL, DtypeResolver
from verl_precision.patch.status import apply_command

SAVES, REJECTION = "trainer.save_freq", "algorithm.rollout_correction.rollout_rs"
KEPT = "trainer.max_actor_ckpt_to_keep"


def fixes_findings(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield a finding for each defect that the configuration can meet and that the series ``fixes`` would correct."""
    for patch, key, value, effect in met_defects(resolver):
        if patch in resolver.tree.missing_fixes:
            command = apply_command(resolver.tree.root, "precision and fixes")
            yield Finding(key, value, effect, f"{patch}: {command}")


def met_defects(resolver: DtypeResolver) -> Iterator[tuple[str, str, Any, str]]:
    """Yield the patch that corrects each defect, the key and the value by which the job meets it, and what happens."""
    get = resolver.config.get
    saves = get(SAVES, -1)
    if isinstance(saves, int) and saves > 0:
        effect = "marks no finished save: a run that was killed while it saved resumes from a torn checkpoint or anew"
        yield "ckpt-resume-from-a-whole-checkpoint", SAVES, saves, effect
        if get(KEPT) == 1:
            effect = "removes the previous checkpoint before the next is whole: a run that is killed there has none"
            yield "ckpt-keep-the-previous-checkpoint-while-saving", KEPT, 1, effect
        if not get("trainer.use_v1") and get("trainer.total_epochs", 1) > 1:
            effect = "saves a data order that is used up at the end of an epoch: resumed there, it repeats the first's"
            yield "data-resume-between-epochs", SAVES, saves, effect
    if get(REJECTION):
        effect = "may mask every token of a batch, whose loss is then NaN"
        yield "worker-give-an-all-masked-batch-a-loss-of-zero", REJECTION, get(REJECTION), effect
    rank = get(f"{MODEL}.lora_rank", 0)
    if rank > 0 and resolver.on_fsdp("actor") and not get(f"{MODEL}.lora.merge"):
        effect = "sends an adapter without tensors where peft returns none (0.21.0 to 0.21.2): the run never ends"
        yield "rollout-refuse-an-empty-lora-adapter", f"{MODEL}.lora_rank", rank, effect
        key = f"{resolver.engine_node('actor')}.param_offload"
        if get(key):
            effect = "loads the base under LoRA beside the rollout's weights: a GPU contains both"
            yield "rollout-offload-the-base-under-lora-before-the-rollout-wakes", key, True, effect
