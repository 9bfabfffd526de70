"""List the pairs of a trainer and itself with other micro-batches, whose difference is not the rollout's.

In verl it shows as a ``log_prob`` that differs from ``old_log_prob`` on-policy, where
``log_prob_micro_batch_size_per_gpu`` is twice ``ppo_micro_batch_size_per_gpu``, as verl recommends.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from verl_precision.probe.numerics import RolloutNumerics, TrainerNumerics
from verl_precision.probe.options import CHANGES, ProbeOptions
from verl_precision.probe.variants import is_plain, variants
from verl_precision.probe.work_folder import trainer_file


@dataclass(frozen=True)
class Rebatching:
    """A line of the report: a regime's trainer as ``one`` and as ``other``, on the answers of its rollout."""

    regime: str
    change: str
    one: TrainerNumerics
    other: TrainerNumerics
    rollout: RolloutNumerics

    @property
    def trainers(self) -> tuple[TrainerNumerics, ...]:
        return (self.one, self.other)

    def files(self, work: Path) -> tuple[Path, Path]:
        """Return the files of the log-probabilities that are compared: the other trainer's and the first one's."""
        return trainer_file(work, self.other, self.rollout), trainer_file(work, self.one, self.rollout)


def rebatchings(options: ProbeOptions) -> list[Rebatching]:
    """Return every change of micro-batches for each regime's plain variant."""
    plain = [variant for variant in variants(options) if is_plain(variant, options)]
    return [
        Rebatching(
            variant.regime, change, *(replace(variant.trainer, **each) for each in CHANGES[change]), variant.rollout
        )
        for variant in plain
        for change in options.batch
    ]
