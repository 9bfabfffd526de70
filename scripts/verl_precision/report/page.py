"""Render the page of a report, ``index.html``, from ``page.html.jinja``."""

import json
from pathlib import Path

from verl_precision.format import number, significant
from verl_precision.report.catalog import WINDOW
from verl_precision.report.figures import colours, drawn_series
from verl_precision.report.logged_run import LoggedRun
from verl_precision.report.report import Entry, Report, step_range
from verl_precision.report.tables import NONE, label_rows, method, pairs_with_verdicts, summary, verdict_rows

TEMPLATE = "page.html.jinja"


def page(report: Report) -> str:
    """Return the page as HTML; it refers to files of its own folder alone."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["number"] = number
    environment.filters["significant"] = lambda value, digits=3: NONE if value is None else significant(value, digits)
    return environment.get_template(TEMPLATE).render(
        report=report,
        summary=summary(report),
        colours=colours(report.labels),
        rows=label_rows(report),
        figures=drawn_series(report),
        verdicts=verdict_rows(report),
        pairs=pairs_with_verdicts(report),
        differs=config_by_label(report),
        method=method(report),
        window=WINDOW,
        common=step_range(report.common),
        provenance={entry.id: provenance(entry) for entry in report.entries},
        state=state,
    )


def config_by_label(report: Report) -> dict[str, list[str]]:
    """Return for each key of the configuration in which runs differ its values, by label."""
    rows = {}
    for key, values in report.differs.items():
        by_label = [[values[entry.id] for entry in report.of(label) if entry.id in values] for label in report.labels]
        texts = [", ".join(dict.fromkeys(NONE if value is None else value for value in of)) for of in by_label]
        rows[key] = [text or NONE for text in texts]  # the other framework has no such key
    return rows


def state(entry: Entry) -> str:
    """Return how many steps the run made, of how many."""
    run = entry.run
    if run.finished is None:
        return f"{len(run.steps)} steps"
    return f"{len(run.steps)} of {run.run['steps']} steps" if not run.finished else f"all {len(run.steps)} steps"


def provenance(entry: Entry) -> dict[str, str]:
    """Return where a run is from, as far as it is recorded."""
    run = entry.run
    settings = {name: value for name, value in run.settings.items() if name not in ("PRECISION", "SEED")}
    facts = {
        "from": f"{run.source}: {run.name}",
        "regime named": run.regime or "none",
        "settings": " ".join(f"{name}={value}" for name, value in settings.items()),
        "config": run.config_hash or "not recorded",
        run.framework: stamp_text(run),
    }
    for role, reported in run.effective_dtypes.items():
        dtypes = reported if isinstance(reported, dict) else {"its workers differ": json.dumps(reported)}
        facts[f"{role}, as reported"] = ", ".join(f"{name} {value}" for name, value in dtypes.items())
    if not run.effective_dtypes:
        facts["effective dtypes"] = "unknown"
    versions = run.summary.get("versions", {})
    facts["versions"] = ", ".join(f"{name} {value}" for name, value in versions.items()) or "not recorded"
    return {name: text for name, text in facts.items() if text}


def stamp_text(run: LoggedRun) -> str:
    """Return the release and the patch stack that the workers reported."""
    if isinstance(run.stamp, dict):
        return f"{run.stamp['release']}, stack {run.stamp['stack']}"
    return "its workers report different stamps" if run.stamp else "not recorded"
