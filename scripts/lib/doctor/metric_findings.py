"""Findings on what a run measures: settings that remove the mismatch from its metrics."""

from collections.abc import Iterator

from lib.doctor.finding import Finding
from lib.doctor.resolver import DtypeResolver

BYPASS = "algorithm.rollout_correction.bypass_mode"
MISMATCH_FREQ = "trainer.mismatch_freq"
MEASURES = "verl/utils/mismatch.py"  # of a patched tree: it measures the mismatch in bypass mode


def metric_findings(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield bypass mode, in which the trainer computes no log-probabilities to compare, where nothing measures them."""
    get, measurable = resolver.config.get, (resolver.tree.root / MEASURES).exists()
    if not get(BYPASS) or (measurable and get(MISMATCH_FREQ, -1) > 0):
        return
    hidden = "training/rollout_probs_diff_* (the v1 trainer also rollout_corr/*)"
    effect = f"leaves {hidden} out of the metrics: the rollout's log-probabilities stand in for the trainer's"
    yield Finding(BYPASS, True, effect, f"{MISMATCH_FREQ}=10" if measurable else f"{BYPASS}=false")
