"""Represent a logged run in the same form for every logger, and check that it ran in its regime's dtypes."""

from dataclasses import dataclass, field

from verl_precision.facts.regime import computing_dtype, effective_regime, named_dtypes
from verl_precision.report.catalog import Steps
from verl_precision.run.summary import agreed, by_role
from verl_precision.words import options


@dataclass(frozen=True)
class LoggedRun:
    """A run that was read.

    Attributes:
        label: the name under which the report groups runs, as the regime.
        name: of its folder or file, without the path.
        source: what logged it, in words.
        steps: its training steps.
        notes: what was left out of it, and why.
        config: the composed configuration as ``a.b.c: value``, without seeds, names and the run's own folders; {} where
            it is not recorded. ``config_hash`` is of all of it, even where a report kept only a part.
        reports: what the workers of an unfinished run reported; a finished one has that in its summary.
        run: content of ``run.json``, and ``summary`` of ``summary.json``; {} where there is none.
    """

    label: str
    name: str
    source: str
    steps: Steps
    notes: tuple[str, ...] = ()
    seed: int | None = None
    config: dict = field(default_factory=dict)
    config_hash: str | None = None
    reports: tuple[dict, ...] = ()
    run: dict = field(default_factory=dict)
    summary: dict = field(default_factory=dict)

    @property
    def settings(self) -> dict:
        """The variables of ``make run`` that were set, {} where another program started the run."""
        return {name: value for name, value in self.run.get("settings", {}).items() if value != ""}

    @property
    def regime(self) -> str | None:
        """The regime that the run names: PRECISION of ``make run``, or a label that is the name of a regime.

        The label comes first where the workers computed in its dtypes.
        """
        label = self.label if self.label in options("precision") else None
        return label if label and label == self.effective_regime else self.settings.get("PRECISION") or label

    @property
    def effective_regime(self) -> str | None:
        """The regime that the workers reported, whatever was requested; None where that is not known."""
        return effective_regime(self.effective_dtypes)

    @property
    def finished(self) -> bool | None:
        """Return whether the run made all the steps that it was started for; None where that is not recorded."""
        return bool(self.summary) if "steps" in self.run else None

    @property
    def framework(self) -> str:
        """``OAT`` or ``verl``."""
        return "OAT" if self.source.endswith("OAT") else "verl"

    @property
    def effective_dtypes(self) -> dict:
        """By role the dtypes that its workers reported, {} where none are recorded."""
        reported = {role: agreed(of_role) for role, of_role in by_role(list(self.reports)).items()}
        return self.summary.get("effective_dtypes", reported)

    @property
    def stamp(self) -> dict | list | None:
        """The stamp of the patched verl or OAT, as the workers reported it."""
        return self.summary.get("patch_stamp", agreed([report["stamp"] for report in self.reports])) or None


def departure(run: LoggedRun) -> str:
    """Return why a run does not count as one of the regime that it names, "" where its workers reported its dtypes."""
    if run.regime is None:
        return "it names no regime"
    if not run.effective_dtypes:
        nothing = f"effective dtypes unknown: {run.source} records none"
        return "its workers reported none" if run.settings else nothing
    for role, dtype in named_dtypes(run.regime).items():
        reported = run.effective_dtypes.get(role)
        if reported is None and role in ("actor", "rollout"):
            return f"its {role} reported no dtype"
        if isinstance(reported, list):
            return f"the workers of its {role} report different dtypes"
        if reported and (actual := computing_dtype(role, reported)) != dtype:
            verb = {"rollout": "rolled out", "ref": "had its reference"}.get(role, "trained")
            return f"{verb}{' its critic' if role == 'critic' else ''} in {actual}"
    return ""
