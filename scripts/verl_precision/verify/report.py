"""Write the report of a verification as Markdown, with a figure of the jobs."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verl_precision.format import duration, markdown_table, number
from verl_precision.verify.record import Verification
from verl_precision.verify.step import Step
from verl_precision.verify.steps import LENGTHS, REGIMES, STAGES, STEPS

LONG = [f"long{length}" for length in LENGTHS]
STATUSES = ("passed", "failed", "skipped", "not run")


def tally(statuses: list[str]) -> str:
    """Return how many steps have each status."""
    return ", ".join(f"{statuses.count(each)} {each}" for each in STATUSES if each in statuses)


def statuses_of(content: dict[str, Any], steps: Iterable[Step]) -> list[str]:
    """Return the status of each step."""
    return [content["steps"].get(step.name, {"status": "not run"})["status"] for step in steps]


def counts(content: dict[str, Any]) -> str:
    """Return how many steps passed, failed, were skipped and were not run."""
    return tally(statuses_of(content, STEPS))


def stages(content: dict[str, Any]) -> str:
    """Return which stages passed, were not run, or were run in part."""
    by_result: dict[str, list[str]] = {}
    for stage in STAGES:
        statuses = statuses_of(content, [step for step in STEPS if step.stage == stage])
        others = [each for each in statuses if each != "passed"]
        part = f"{statuses.count('passed')} of {len(statuses)} passed, {tally(others)}"
        result = statuses[0] if len({*statuses}) == 1 else part
        by_result.setdefault(result, []).append(stage)
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
    header = [
        "job",
        "regime",
        "s a step",
        "k3",
        "mean |Δp|",
        "tokens an answer",
        "reward",
        "GiB",
        "skipped",
        "loss scale",
    ]
    rows = []
    for name, run in values.items():
        job, _, regime = name.partition("-")
        reward = f"{number(run['reward_first'], '.3f')} → {number(run['reward_last'], '.3f')}"
        shown = [number(run["s_per_step"], ".2f"), number(run["k3"], ".1e"), number(run["probs_diff"], ".1e")]
        shown += [number(run["answer_tokens"], ".0f"), reward, number(run["memory_gib"], ".1f")]
        rows.append([job, regime, *shown, number(run["skipped_steps"]), number(run["loss_scale"], "g")])
    notes = [
        "sanity: the sanity task's model of 0.5 M parameters. long: 99 M parameters (on a CPU the sanity task's width)",
        "with random weights, whose reward and gradients are 0: they show mismatch and cost. Medians over the steps,",
        "the time without the first two. k3: nats a token. reward: first step, mean of the last five. GiB: trainer's.",
    ]
    lines = [*markdown_table(header, rows), "", *notes]
    figure = record.file.with_name(f"{record.file.stem}-jobs.png")
    if not any(name.startswith("long") for name in values):
        figure.unlink(missing_ok=True)
        return lines
    plot_jobs(values, record.content["name"], figure)
    return [*lines, "", f"![k3 against the length of the answers]({figure.name})"]


def plot_jobs(values: dict[str, Any], title: str, file: Path) -> None:
    """Draw the seconds of a step, and k3 against the length of the answers, by regime."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    kinds = ["sanity", *LONG]
    for index, regime in enumerate(REGIMES):
        runs = {kind: values[f"{kind}-{regime}"] for kind in kinds if f"{kind}-{regime}" in values}
        seconds = [runs[kind]["s_per_step"] if kind in runs else 0.0 for kind in kinds]
        left.bar([place + 0.25 * index for place in range(len(kinds))], seconds, 0.23, label=regime)
        long = [runs[kind] for kind in LONG if kind in runs]
        right.plot([run["answer_tokens"] for run in long], [run["k3"] for run in long], "o-", label=regime)
    left.set(ylabel="seconds a step", xticks=[place + 0.25 for place in range(len(kinds))], xticklabels=kinds)
    right.set(xlabel="tokens an answer, random weights", ylabel="k3, nats a token", yscale="log")
    left.legend()
    figure.suptitle(title)
    figure.savefig(file, dpi=120)
    plt.close(figure)


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
