"""Compare how many distinct right answers finished runs give.

Reads the answers of their validations, ``FOLDER/validation/STEP.jsonl``, so that every run is measured alike: the same
prompts, as many samples to each, before the first step too (``trainer.val_before_train=true``). Writes ``OUT.png``
and ``OUT.json``. A label may occur more than once, for other seeds of the same.
"""

import json
import math
from collections import Counter
from pathlib import Path
from statistics import fmean

from verl_precision.errors import Refused
from verl_precision.files import read_jsonl, write_json
from verl_precision.report.readers.dispatch import labelled_paths
from verl_precision.run.folder import finished
from verl_precision.words import parse_words

VARIABLES = {"RUNS": "LABEL=FOLDER …, folders of finished runs", "OUT": "the files to write, without their endings"}
SHOWN_PROMPTS = 2  # whose distributions are plotted

Answers = dict[str, list[str | None]]  # of one step: by prompt the answer of each sample, None where it is wrong


def read_validations(folder: Path) -> dict[int, Answers]:
    """Return the answers of a run's validations, by step.

    Two samples are the same answer if the reward function's ``answer`` is the same, or without one their text.

    Raises:
        Refused: there are none, or none before the first step.
    """
    steps: dict[int, Answers] = {}
    for file in sorted((folder / "validation").glob("*.jsonl"), key=lambda file: int(file.stem)):
        step = steps.setdefault(int(file.stem), {})
        for row in read_jsonl(file):
            step.setdefault(row["input"], []).append(row.get("answer", row["output"]) if row["score"] > 0 else None)
    if 0 not in steps or len(steps) == 1:
        raise Refused(
            f"{folder}: has no validations before and after training; set trainer.val_before_train, trainer.test_freq"
        )
    return steps


def run_facts(folder: Path) -> dict:
    """Return the settings of a run, as ``asked``, and its duration.

    Raises:
        Refused: the run is not finished.
    """
    if not finished(folder):
        raise Refused(f"{folder}: is not the folder of a finished run")
    settings = json.loads((folder / "run.json").read_text())["settings"]
    summary = json.loads((folder / "summary.json").read_text())
    return {"asked": {name: value for name, value in settings.items() if value}, "wall_s": summary["wall_s"]}


def shares(answers: list[str | None]) -> dict[str, float]:
    """Return the share of each right answer among the right ones, the largest first."""
    counts = Counter(answer for answer in answers if answer is not None)
    return {answer: count / counts.total() for answer, count in counts.most_common()}


def measure(step: Answers) -> dict[str, float]:
    """Return means over the prompts.

    ``accuracy``: the share of right samples; ``distinct_right_answers``: how many there are among a prompt's samples;
    ``effective_right_answers``: exp of the entropy of their shares, which does not grow with accuracy as that does.
    """
    by_prompt = [shares(answers) for answers in step.values()]
    return {
        "accuracy": fmean(answer is not None for answers in step.values() for answer in answers),
        "distinct_right_answers": fmean(map(len, by_prompt)),
        "effective_right_answers": fmean(
            math.exp(-sum(share * math.log(share) for share in of.values())) if of else 0.0 for of in by_prompt
        ),
    }


def pooled_shares(steps: list[Answers], prompt: str) -> dict[str, float]:
    """Return the shares of the right answers to a prompt in several runs together."""
    return shares([answer for step in steps for answer in step[prompt]])


def plot(curves: list[tuple[str, dict[int, dict]]], bars: dict[str, dict[str, dict[str, float]]], file: Path) -> None:
    """Plot each measure over the steps, and below for each prompt of ``bars`` the shares of right answers, by label."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    first, *labels = next(iter(bars.values()))
    colours = {first: "0.6"} | {label: f"C{index}" for index, label in enumerate(labels)}
    figure = plt.figure(figsize=(11, 3 + 2.5 * len(bars)), layout="constrained")
    grid = figure.add_gridspec(1 + len(bars), 3)
    for column, name in enumerate(("accuracy", "distinct_right_answers", "effective_right_answers")):
        axis = figure.add_subplot(grid[0, column])
        for label, measured in curves:
            axis.plot(list(measured), [of[name] for of in measured.values()], ".-", color=colours[label])
        axis.set(title=name.replace("_", " "), xlabel="step")
        axis.set_ylim(bottom=0)
    for row, (prompt, by_label) in enumerate(bars.items(), start=1):
        axis = figure.add_subplot(grid[row, :])
        answers = list(dict.fromkeys(answer for of in by_label.values() for answer in of))
        for index, (label, of) in enumerate(by_label.items()):
            at = [place + 0.8 * index / len(by_label) for place in range(len(answers))]
            heights = [of.get(answer, 0.0) for answer in answers]
            axis.bar(at, heights, 0.8 / len(by_label), align="edge", color=colours[label], label=label)
        axis.set_xticks([place + 0.4 for place in range(len(answers))], answers, rotation=60, fontsize=7)
        axis.set_ylabel(f"share of right answers\nto {prompt}")
        axis.legend()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def parse(words: list[str]) -> dict[str, str]:
    """Parse ``NAME=VALUE`` words.

    Raises:
        Refused: a name is not allowed, or one is missing.
    """
    variables = parse_words(words, VARIABLES)
    for name in VARIABLES:
        if name not in variables:
            raise Refused(f"{name}: is not set; give RUNS='LABEL=FOLDER …' OUT=FILE")
    return variables


def main(words: list[str]) -> int:
    variables = parse(words)
    out = Path(variables["OUT"])
    several = [
        (label, run_facts(folder), read_validations(folder)) for label, folder in labelled_paths(variables["RUNS"])
    ]
    sizes = [
        {prompt: len(answers) for prompt, answers in step.items()} for *_, steps in several for step in steps.values()
    ]
    if any(size != sizes[0] for size in sizes):
        raise Refused(f"RUNS={variables['RUNS']}: must have the same prompts, with as many samples to each")
    before = [steps[0] for *_, steps in several]
    prompts = sorted(sizes[0], key=lambda prompt: len(pooled_shares(before, prompt)))[-SHOWN_PROMPTS:]
    last = {label: [steps[max(steps)] for of, _, steps in several if of == label] for label, *_ in several}
    bars = {
        prompt: {"before": pooled_shares(before, prompt)}
        | {label: pooled_shares(of, prompt) for label, of in last.items()}
        for prompt in prompts
    }
    curves = [(label, {step: measure(answers) for step, answers in steps.items()}) for label, _, steps in several]
    content = {
        "prompts": len(sizes[0]),
        "samples": sum(sizes[0].values()) // len(sizes[0]),
        "runs": [
            {"label": label, **facts, "steps": measured}
            for (label, measured), (_, facts, _) in zip(curves, several, strict=True)
        ],
        "shares_of_right_answers": bars,
    }
    write_json(out.with_suffix(".json"), content)
    plot(curves, bars, out.with_suffix(".png"))
    for label, measured in curves:
        for step in (0, max(measured)):
            facts = ", ".join(f"{value:.3g} {name.replace('_', ' ')}" for name, value in measured[step].items())
            print(f"{label:<20} step {step:>3}: {facts}")
    return 0
