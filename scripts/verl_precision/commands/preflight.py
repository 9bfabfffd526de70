"""Predict the effect of fp16 on a model.

Samples answers to prompts, as a rollout does, and runs forward and backward passes over them in fp32. Reports which
modules exceed fp16's range, how many gradients would vanish, a first loss scale, which modules to keep in fp32, and
which ones the model's class keeps so itself.
Writes report.md, modules.csv and preflight.png to the folder OUT. Exit code 0: measured, whatever the verdict; 1:
refused or failed; 130: interrupted.
"""

import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.facts.vllm_float16 import float16_support, ways_out
from verl_precision.files import check_room
from verl_precision.format import duration
from verl_precision.patch.precision_module import load_precision
from verl_precision.paths import OUTPUTS, REPO
from verl_precision.probe.model import SANITY, load, model_and_data, prepare_sanity, prompts, sample_answer, short_name
from verl_precision.words import device, file_path, parse_words, whole_number

VARIABLES = {
    "MODEL": "a causal language model, a folder or a name on the Hugging Face Hub, default the sanity task's",
    "DATA": "a parquet file of prompts in verl's schema, default the sanity task's for its own model",
    "ROWS": "number of prompts, one mini-batch, default 16",
    "LENGTH": "most tokens of an answer, default 128",
    "DEVICE": "cpu or cuda, default: cuda where there is a GPU",
    "OUT": "the folder of the report, default outputs/preflight/MODEL",
}
SEED = 1  # of the answers
QUIET_S = 2  # between progress lines


@dataclass(frozen=True)
class PreflightOptions:
    model: str
    data: str
    rows: int
    length: int
    device: str
    out: Path

    @property
    def name(self) -> str:
        return "arithmetic" if self.is_sanity else short_name(self.model)

    @property
    def is_sanity(self) -> bool:
        return self.model == SANITY


def parse(words: list[str]) -> PreflightOptions:
    """Parse ``NAME=VALUE`` words.

    Raises:
        Refused: a name or a value is not allowed, or DATA is missing.
    """
    values = parse_words(words, VARIABLES)
    model, data = model_and_data(values)
    options = PreflightOptions(
        model=model,
        data=data,
        rows=whole_number(values, "ROWS", 1, 16),
        length=whole_number(values, "LENGTH", 1, 128),
        device=device(values),
        out=Path(file_path(values, "OUT") or "."),
    )
    if "OUT" not in values:
        options = replace(options, out=OUTPUTS / "preflight" / options.name)
    check_room(options.out)
    return options


def main(words: list[str]) -> int:
    options = parse(words)
    if options.is_sanity and not prepare_sanity():
        return 1
    examine(options)
    return 0


def examine(options: PreflightOptions) -> dict:
    """Measure the model, write and print the report, and return ``fp16_report.numbers`` of it.

    Raises:
        Refused: the model or the data cannot be used.
    """
    messages = prompts(options.data, options.rows)

    import torch

    from verl_precision.probe.fp16_range import assess, measure
    from verl_precision.probe.fp16_report import conclusions, markdown, numbers, plot, show, table_csv

    started = printed = time.monotonic()

    def progress(text: str, done: int = 1, total: int = 1) -> None:
        nonlocal printed
        now = time.monotonic()
        if done == total or now - printed > QUIET_S:
            printed = now
            print(f"[{duration(now - started):>6}] {text}{f' {done}/{total}' if total > 1 else ''}", flush=True)

    rollout = float16_support(options.model)
    if rollout.supported is False:
        progress(f"{rollout.reason}; {ways_out()}")
    progress(f"loading {options.model}")
    model, tokenizer = load(options.model)
    model.to(options.device)
    torch.manual_seed(SEED)
    answers = []
    for number, prompt in enumerate(messages, 1):
        ids, size = sample_answer(model, tokenizer, prompt, options.length)
        answers.append((ids, size))
        progress(f"answer of {ids.shape[1] - size} tokens", number, options.rows)

    def progress_of_pass(done: int, ranges: dict) -> None:
        activation = max(record.activation for record in ranges.values())
        gradient = max(max(record.output_gradient, record.weight_gradient) for record in ranges.values())
        progress(f"largest activation {activation:.3g}, gradient {gradient:.2g}, pass", done, options.rows)

    try:
        ranges = measure(model, answers, progress_of_pass)
        assessment = assess(ranges)
    except ValueError as error:
        raise Refused(f"MODEL={options.model}: {error}, so nothing can be predicted") from error

    # After the measurement, because it changes what the modules compute.
    precision = load_precision(REPO / "patches/verl/files", "precision_of_the_preflight")
    listed = precision.keep_in_fp32(model, [], torch.float16, options.device).names()
    findings, overrides = conclusions(ranges, assessment, rollout, listed)
    tokens = sum(ids.shape[1] for ids, _ in answers)
    measured = f"{options.rows} answers of the model, {tokens} tokens, one mini-batch, in fp32 on {options.device}"
    title = f"# fp16 preflight of {options.name}"
    options.out.mkdir(parents=True, exist_ok=True)
    report = markdown(title, findings | {"measured": measured}, overrides, ranges, assessment)
    (options.out / "report.md").write_text(report)
    (options.out / "modules.csv").write_text(table_csv(ranges, assessment))
    plot(ranges, assessment, options.name, options.out / "preflight.png")
    show(ranges, assessment, findings)
    print(f"\n  {shlex.join(overrides)}\n")
    for name in ("preflight.png", "report.md", "modules.csv"):
        print(f"  {options.out / name}")
    return numbers(ranges, assessment, rollout)
