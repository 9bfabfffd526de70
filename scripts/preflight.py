"""Predict what fp16 does to a model: ``scripts/preflight.py [NAME=VALUE ...]``.

Lets the model answer prompts, as a rollout does, and runs forward and backward passes over its answers in fp32. Says
which modules leave fp16's range, how many gradients would vanish, a first loss scale, and what to keep in fp32. Leaves
report.md, modules.csv and preflight.png in the folder OUT. Exit code 0: measured, whatever the verdict; 1: refused or
failed; 130: interrupted.
"""

import csv
import io
import shlex
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from lib import cli
from lib.errors import Refused
from lib.format import duration
from lib.paths import REPO
from lib.probe import model as models
from lib.run.checks import check_room
from lib.run.vllm_float16 import Float16Support, float16_support, ways_out

VARIABLES = {
    "MODEL": "a causal language model, a folder or a name on the Hugging Face Hub, default the sanity task's",
    "DATA": "a parquet file in verl's schema, whose prompts are answered; the sanity model's default is its own",
    "ROWS": "how many of its prompts, one mini-batch, default 16",
    "LENGTH": "tokens an answer has at most, default 128",
    "DEVICE": "default: a GPU where there is one: cpu, cuda",
    "OUT": "the folder of the report, default outputs/preflight/MODEL",
}
WORST = 12  # modules that the screen shows
SEED = 1  # of the answers
QUIET_S = 2


@dataclass(frozen=True)
class Options:
    model: str
    data: str
    rows: int
    length: int
    device: str
    out: Path

    @property
    def name(self) -> str:
        return "arithmetic" if self.is_sanity else models.short_name(self.model)

    @property
    def is_sanity(self) -> bool:
        return self.model == models.SANITY


def usage() -> str:
    return "\n".join(f"  {name:<7} {text}" for name, text in VARIABLES.items())


def parse(words: list[str]) -> Options:
    """Options from ``NAME=VALUE`` words.

    Raises:
        Refused: a name or a value is not among those allowed, or DATA is missing.
    """
    given = cli.parse_words(words, VARIABLES)
    model, data = models.chosen(given)
    options = Options(
        model=model,
        data=data,
        rows=cli.whole_number(given, "ROWS", 1, 16),
        length=cli.whole_number(given, "LENGTH", 1, 128),
        device=cli.device(given),
        out=Path(cli.file_path(given, "OUT") or "."),
    )
    if "OUT" not in given:
        options = replace(options, out=REPO / "outputs" / "preflight" / options.name)
    check_room(options.out)
    return options


def answer(model, tokenizer, messages: list[dict], length: int):
    """Let the model answer at temperature 1: what reinforcement learning trains on, whatever answers a data set has.

    Returns:
        token ids ``(1, prompt + answer)`` and the prompt's length.

    Raises:
        Refused: the prompt leaves no room for an answer.
    """
    import torch

    prompt = torch.tensor([models.token_ids(tokenizer, messages)], device=model.device)
    tokens, positions = prompt.shape[1], model.config.max_position_embeddings
    if tokens >= positions:
        raise Refused(f"DATA: a prompt has {tokens} tokens, but the model takes {positions}; give shorter ones")
    ids = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=min(length, positions - tokens),
        pad_token_id=tokenizer.eos_token_id,
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        repetition_penalty=1.0,
    )
    return ids, tokens


def conclusions(seen: dict, outlook, rollout: Float16Support) -> tuple[dict[str, str], list[str]]:
    """Return the summary's lines by name, and the overrides of verl: of the trainer and of a vLLM as its rollout."""
    from lib.probe import fp16_range as ranges

    facts = ranges.summary(seen, outlook)
    if not rollout.supported:
        unknown = "not known whether vLLM runs it in float16: " if rollout.supported is None else ""
        facts = {"verdict": facts.pop("verdict"), "rollout": unknown + rollout.reason} | facts
    return facts, ranges.overrides(outlook, bf16_rollout=rollout.supported is False)


def report(
    options: Options, tokens: int, seen: dict, outlook, facts: dict[str, str], overrides: list[str]
) -> tuple[str, str]:
    """The report as Markdown, and all modules as CSV."""
    from lib.probe import fp16_range as ranges

    header, table = ranges.columns(outlook), ranges.lines(seen, outlook)
    head = [f"# fp16 preflight of {options.name}", ""]
    facts = facts | {
        "measured": f"{options.rows} answers of the model, {tokens} tokens, one mini-batch, in fp32 on {options.device}"
    }
    head += [f"- {name}: {text}" for name, text in facts.items()]
    head += ["", "```", *overrides, "```", ""]
    body = [header, ["---"] * len(header), *(ranges.cells(line, outlook) for line in table)]
    markdown = "\n".join([*head, *(f"| {' | '.join(row)} |" for row in body), ""])
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows([header, *table])
    return markdown, written.getvalue()


def main(words: list[str]) -> int:
    if words in (["--help"], ["-h"]):
        print(f"{__doc__}\n{usage()}")
        return 0
    options = parse(words)
    if options.is_sanity and not models.prepare_sanity():
        return 1
    messages = models.prompts(options.data, options.rows)

    import torch

    from lib.probe import fp16_range as ranges

    started = spoken = time.monotonic()

    def say(text: str, done: int = 1, of: int = 1) -> None:
        nonlocal spoken
        now = time.monotonic()
        if done == of or now - spoken > QUIET_S:
            spoken = now
            print(f"[{duration(now - started):>6}] {text}{f' {done}/{of}' if of > 1 else ''}", flush=True)

    rollout = float16_support(options.model)
    if rollout.supported is False:
        say(f"{rollout.reason}; {ways_out()}")
    say(f"loading {options.model}")
    model, tokenizer = models.load(options.model)
    model.to(options.device)
    torch.manual_seed(SEED)
    rows = []
    for number, prompt in enumerate(messages, 1):
        rows.append(answer(model, tokenizer, prompt, options.length))
        say(f"answer of {rows[-1][0].shape[1] - rows[-1][1]} tokens", number, options.rows)

    def show(done: int, seen: dict) -> None:
        value = max(record.activation for record in seen.values())
        gradient = max(max(record.output_gradient, record.weight_gradient) for record in seen.values())
        say(f"largest activation {value:.3g}, gradient {gradient:.2g}, pass", done, options.rows)

    try:
        seen = ranges.measure(model, rows, show)
        outlook = ranges.judge(seen)
    except ValueError as error:
        raise Refused(f"MODEL={options.model}: {error}: there is nothing to predict") from error

    facts, overrides = conclusions(seen, outlook, rollout)
    markdown, table = report(options, sum(ids.shape[1] for ids, _ in rows), seen, outlook, facts, overrides)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "report.md").write_text(markdown)
    (options.out / "modules.csv").write_text(table)
    ranges.plot(seen, outlook, options.name, options.out / "preflight.png")

    shown = [ranges.columns(outlook)] + [ranges.cells(line, outlook) for line in ranges.lines(seen, outlook)[:WORST]]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    print()
    for name, *cells in shown:
        print(f"  {name:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)))
    print()
    for name, text in facts.items():
        print(f"  {name:<20} {text}")
    print(f"\n  {shlex.join(overrides)}\n")
    for name in ("preflight.png", "report.md", "modules.csv"):
        print(f"  {options.out / name}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Refused as refusal:
        sys.exit(f"preflight: {refusal}")
    except KeyboardInterrupt:
        sys.exit(130)
