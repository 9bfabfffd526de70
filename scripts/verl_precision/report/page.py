"""Render the page of a report, ``index.html``, from ``page.html.jinja``."""

import json
from pathlib import Path

from verl_precision.format import number, significant
from verl_precision.report.catalog import WINDOW
from verl_precision.report.content import Report, step_range
from verl_precision.report.figures import colors, drawn_series
from verl_precision.report.logged_run import LoggedRun
from verl_precision.report.notes import notes
from verl_precision.report.tables import METHOD, NONE, TITLES, label_rows, summary

TEMPLATE = "page.html.jinja"


def page(report: Report) -> str:
    """Return the page as HTML; it refers only to files in its folder."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["number"] = number
    environment.filters["significant"] = lambda value, digits=3: NONE if value is None else significant(value, digits)
    return environment.get_template(TEMPLATE).render(
        report=report,
        notes=notes(report),
        summary=summary(report),
        colors=colors(list(report.by_label)),
        rows=label_rows(report),
        figures=drawn_series(report),
        titles=TITLES,
        differs=config_by_label(report),
        method=METHOD,
        window=WINDOW,
        common=step_range(report.common),
        provenance={entry.id: provenance(entry.run) for entry in report.entries},
    )


def config_by_label(report: Report) -> dict[str, list[str]]:
    """Return for each key of the configuration in which runs differ its values, by label."""
    rows = {}
    for key, values in report.differs.items():
        by_label = [[values[entry.id] for entry in of if entry.id in values] for of in report.by_label.values()]
        texts = [", ".join(dict.fromkeys(NONE if value is None else value for value in of)) for of in by_label]
        rows[key] = [text or NONE for text in texts]  # the other framework has no such key
    return rows


def provenance(run: LoggedRun) -> dict[str, str]:
    """Return where a run is from, as far as it is recorded."""
    settings = [f"{name}={value}" for name, value in run.settings.items() if name not in ("PRECISION", "SEED")]
    stamp = run.summary.get("patch_stamp")
    release = f"{stamp['release']}, stack {stamp['stack']}" if isinstance(stamp, dict) else json.dumps(stamp)
    facts = {
        "from": f"{run.source}: {run.name}",
        "regime named": run.regime or "none",
        "settings": " ".join(settings),
        run.framework: release if stamp else "not recorded",
    }
    for role, reported in run.effective_dtypes.items():
        dtypes = reported if isinstance(reported, dict) else {"its workers differ": json.dumps(reported)}
        facts[f"{role}, as reported"] = ", ".join(f"{name} {value}" for name, value in dtypes.items())
    versions = ", ".join(f"{name} {value}" for name, value in run.summary.get("versions", {}).items())
    return {name: text for name, text in (facts | {"versions": versions or "not recorded"}).items() if text}
