"""Represent a logged run in the same form for every logger, and check that it ran in its regime's dtypes."""

from dataclasses import dataclass, field

from verl_precision.facts.regime import computing_dtype, effective_regime, named_dtypes
from verl_precision.report.catalog import Steps
from verl_precision.words import options


@dataclass(frozen=True)
class LoggedRun:
    """A run that was read.

    Attributes:
        label: the name under which the report groups runs, such as the regime.
        name: of its folder or file, without the path.
        source: what logged it, in words.
        steps: its training steps.
        notes: what was left out of it, and why.
        config: the composed configuration as ``a.b.c: value``, without seeds, names and the run's folders; {} if it is
            not recorded. A run that a report keeps has only the keys in which the report's runs differ.
        run: content of ``run.json``; {} if there is none.
        summary: content of ``summary.json``; of an unfinished run only the dtypes and the stamp that its workers
            reported; {} if there is neither.
    """

    label: str
    name: str
    source: str
    steps: Steps
    notes: tuple[str, ...] = ()
    seed: int | None = None
    config: dict = field(default_factory=dict)
    run: dict = field(default_factory=dict)
    summary: dict = field(default_factory=dict)

    @property
    def settings(self) -> dict:
        """The variables of ``make run`` that were set, {} if another program started the run."""
        return {name: value for name, value in self.run.get("settings", {}).items() if value != ""}

    @property
    def effective_dtypes(self) -> dict:
        """By role the dtypes that its workers reported, {} if none are recorded."""
        return self.summary.get("effective_dtypes", {})

    @property
    def regime(self) -> str | None:
        """The regime that the run names: PRECISION of ``make run``, or a label that is the name of a regime.

        The label comes first if the workers computed in its dtypes.
        """
        label = self.label if self.label in options("precision") else None
        computed = label is not None and label == effective_regime(self.effective_dtypes)
        return label if computed else self.settings.get("PRECISION") or label

    @property
    def finished(self) -> bool | None:
        """Whether the run made all the steps that it was started for; None if that is not recorded."""
        return "wall_s" in self.summary if "steps" in self.run else None

    @property
    def progress(self) -> str:
        """How many steps the run made, and of how many if that is recorded."""
        of = f" of {self.run['steps']}" if self.finished is False else ""
        return f"{len(self.steps)}{of} steps"

    @property
    def framework(self) -> str:
        return "OAT" if self.source == "OAT" else "verl"

    @property
    def departure(self) -> str:
        """Why the run does not count as one of the regime that it names, "" if its workers reported its dtypes."""
        if self.regime is None:
            return "it names no regime"
        if not self.effective_dtypes:
            return f"effective dtypes unknown: {self.source} records none"
        for role, dtype in named_dtypes(self.regime).items():
            reported = self.effective_dtypes.get(role)
            if reported is None and role in ("actor", "rollout"):
                return f"its {role} reported no dtype"
            if isinstance(reported, list):
                return f"the workers of its {role} report different dtypes"
            if reported and (actual := computing_dtype(role, reported)) != dtype:
                return f"its {role} computed in {actual}"
        return ""
