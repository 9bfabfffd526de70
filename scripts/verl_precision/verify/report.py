"""Write the report of a verification as Markdown."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verl_precision.format import duration, markdown_table, number
from verl_precision.verify.record import Verification
from verl_precision.verify.step import Step
from verl_precision.verify.steps import STAGES, STEPS

JOB_COLUMNS = {  # the result of a job and its format, by heading
    "s a step": ("s_per_step", ".2f"),
    "k3": ("k3", ".1e"),
    "mean |Δp|": ("probs_diff", ".1e"),
    "tokens an answer": ("answer_tokens", ".0f"),
    "first reward": ("reward_first", ".3f"),
    "last reward": ("reward_last", ".3f"),
    "GiB": ("memory_gib", ".1f"),
    "skipped": ("skipped_steps", "g"),
    "loss scale": ("loss_scale", "g"),
}
STATUSES = ("passed", "failed", "skipped", "not run")


def statuses(content: dict[str, Any], steps: Iterable[Step]) -> list[str]:
    """Return the status of each step."""
    return [content["steps"].get(step.name, {"status": "not run"})["status"] for step in steps]


def tally(found: list[str]) -> str:
    """Return how many steps have each status."""
    return ", ".join(f"{found.count(each)} {each}" for each in STATUSES if each in found)


def counts(content: dict[str, Any]) -> str:
    """Return how many steps passed, failed, were skipped and were not run."""
    return tally(statuses(content, STEPS))


def stages(content: dict[str, Any]) -> str:
    """Return which stages passed, were not run, or were run in part."""
    by_result: dict[str, list[str]] = {}
    for stage in STAGES:
        found = statuses(content, [step for step in STEPS if step.stage == stage])
        others = [each for each in found if each != "passed"]
        part = f"{found.count('passed')} of {len(found)} passed, {tally(others)}"
        by_result.setdefault(found[0] if len({*found}) == 1 else part, []).append(stage)
    return "; ".join(f"{', '.join(names)} {result}" for result, names in by_result.items())


def markdown(record: Verification) -> str:
    """Return the report."""
    content, steps = record.content, record.content["steps"]
    rows = []
    for step in STEPS:
        result = steps.get(step.name, {"status": "not run"})
        seconds = duration(result["seconds"]) if "seconds" in result else ""
        rows.append([STAGES[step.stage], step.name, result["status"], seconds, result.get("reason", "")])
    lines = [
        f"# {content['name']}",
        "",
        f"Written by `make verify-gpu`: {counts(content)}. "
        + ", ".join(f"{name} {version}" for name, version in content["versions"].items())
        + ".",
        "",
        *markdown_table(["stage", "step", "result", "min:s", "reason"], rows),
    ]
    writers = {"machine": machine, "numerics": numerics, "job": jobs}
    for stage, title in STAGES.items():
        values = {name: each["values"] for name, each in steps.items() if each["stage"] == stage and "values" in each}
        if values:
            lines += ["", f"## {title}", "", *writers.get(stage, embedded)(values, record)]
    return "\n".join(lines) + "\n"


def machine(values: dict[str, Any], record: Verification) -> list[str]:
    lines = markdown_table(["", ""], values.get("hardware", {}).get("hardware", {}).items())
    if found := values.get("doctor"):
        lines += ["", f"The doctor on a job of the sanity task in fp16: {found['verdict']}: {found['sentence']}"]
    return lines


def numerics(values: dict[str, Any], record: Verification) -> list[str]:
    lines = []
    for name, found in values.items():
        by_outcome: dict[str, list[str]] = {}
        for test, each in found["tests"].items():
            by_outcome.setdefault(each["outcome"], []).append(test)
        parts = [f"{len(by_outcome.pop('passed', []))} tests passed"]
        parts += [f"{outcome}: {', '.join(tests)}" for outcome, tests in by_outcome.items()]
        lines.append(f"- {name}: {'; '.join(parts)}")
    errors = [
        [re.search(r"\[(.*)\]", test)[1], dtype, *(f"{error:.1e}" for error in found.values())]
        for test, each in values.get("engine", {"tests": {}})["tests"].items()
        for dtype, found in each.get("errors", {}).items()
    ]
    if errors:
        lines += ["", "Distance from fp32, relative, of one batch of a tiny model:", ""]
        lines += markdown_table(["strategy", "dtype", "log-probabilities", "gradients"], errors)
    return lines


def jobs(values: dict[str, Any], record: Verification) -> list[str]:
    rows = [
        [*name.partition("-")[::2], *(number(run[key], form) for key, form in JOB_COLUMNS.values())]
        for name, run in values.items()
    ]
    notes = [
        "sanity: the sanity task's model of 0.5 M parameters. long: 99 M parameters (on a CPU the sanity task's width)",
        "with random weights, whose reward and gradients are 0: they show mismatch and cost. Medians over the steps,",
        "the time without the first two. k3: nats a token. Last reward: mean of the last five. GiB: trainer's.",
    ]
    return [*markdown_table(["job", "regime", *JOB_COLUMNS], rows), "", *notes]


def embedded(values: dict[str, Any], record: Verification) -> list[str]:
    """Return the reports of the programs, their headings deeper and their titles replaced, and their figures."""
    lines = []
    for name, found in values.items():
        text = re.sub(r"\A# .*\n+", f"# {name}\n\n", found["report"])
        text = re.sub(r"^#", "###", text, flags=re.M)
        text = re.sub(r"^!\[.*\n?", "", text, flags=re.M)
        lines += ["", *text.strip().splitlines()]
        for file in record.content["steps"][name]["files"]:
            lines += ["", f"{'!' * file.endswith('.png')}[{name}]({file})"]
    return lines[1:]


def write(record: Verification) -> Path:
    """Write the report beside the record and return its path."""
    file = record.file.with_suffix(".md")
    file.write_text(markdown(record))
    return file
