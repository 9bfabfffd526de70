"""Predict the effect of fp16 on a model.

Samples answers to prompts, as a rollout does, and runs forward and backward passes over them in fp32. Reports which
modules exceed fp16's range, how many gradients would vanish, a first loss scale, which modules to keep in fp32, and
which ones the model's class keeps so itself.
Writes report.md to the folder OUT. Exit code 0: measured, whatever the verdict; 1: refused or
failed; 130: interrupted.
"""

import shlex

from verl_precision.errors import Refused
from verl_precision.facts.vllm_float16 import float16_support, ways_out
from verl_precision.format import markdown_table
from verl_precision.patch.precision_module import load_precision
from verl_precision.paths import OUTPUTS, REPO
from verl_precision.probe.model import VARIABLES as PROBE
from verl_precision.probe.model import ModelOptions, end_tokens, load_with_prompts, model_options, prepare_sanity
from verl_precision.probe.page import publish
from verl_precision.words import parse_words

LENGTH = 128  # the default, if the model has the positions
VARIABLES = {
    "MODEL": PROBE["MODEL"],
    "DATA": PROBE["DATA"],
    "ROWS": "number of prompts, one mini-batch, default 16",
    "LENGTH": f"most tokens of an answer, default {LENGTH}",
    "DEVICE": PROBE["DEVICE"],
    "OUT": "the folder of the report, default outputs/preflight/MODEL",
}
SEED = 1  # of the answers


def examine(options: ModelOptions) -> dict:
    """Measure the model, write and print the report, and return what a recommendation is derived from.

    Returns:
        ``findings``; ``misfit``, whether no list of modules helps; ``keep``, the modules in fp32; ``activation``, the
        largest and its module; ``rollout``, the model's ``Float16Support``; ``overrides``.

    Raises:
        Refused: the model or the data cannot be used.
    """
    import torch
    from tqdm import tqdm

    from verl_precision.probe.fp16_range import assess, findings, measure, table
    from verl_precision.probe.numerics import generate

    rollout = float16_support(options.model)
    if rollout.supported is False:
        print(f"{rollout.reason}; give {ways_out()}", flush=True)
    model, tokenizer, prompts, length = load_with_prompts(options, LENGTH)
    rollout = float16_support(options.model)  # from here on a model of the Hub is on this machine, too
    model.to(options.device)
    generator, ends = torch.Generator(options.device).manual_seed(SEED), end_tokens(model, tokenizer)
    answers = []
    for prompt in tqdm(prompts, "answers", unit="answer"):
        (answer,) = generate(model, "fp32", prompt, 1, length, ends, generator)["answers"]
        answers.append((torch.tensor([prompt + answer], device=options.device), len(prompt)))
    try:
        assessment = assess(measure(model, answers))
    except ValueError as error:
        raise Refused(f"MODEL={options.model}: {error}, so nothing can be predicted") from error

    # After the measurement, because it changes what the modules compute.
    precision = load_precision(REPO / "patches/verl/files", "precision_of_the_preflight")
    listed = precision.keep_in_fp32(model, [], torch.float16, options.device).names()
    found, rows = findings(assessment, rollout, listed), table(assessment)
    tokens = sum(ids.shape[1] for ids, _ in answers)
    found["measured"] = f"{options.rows} answers, {tokens} tokens, one mini-batch, in fp32 on {options.device}"
    options.out.mkdir(parents=True, exist_ok=True)
    overrides = assessment.overrides(rollout)
    blocks = ["```", shlex.join(overrides), "```"], markdown_table(rows[0], rows[1:])
    publish(options.out / "report.md", f"fp16 preflight of {options.name}", found, *blocks)
    return {
        "findings": found,
        "misfit": assessment.misfit is not None,
        "keep": assessment.keep,
        "activation": assessment.largest_activation,
        "rollout": rollout,
        "overrides": overrides,
    }


def parse(words: list[str]) -> ModelOptions:
    return model_options(parse_words(words, VARIABLES), OUTPUTS / "preflight", rows=16)


def main(options: ModelOptions) -> int:
    if not prepare_sanity(options):
        return 1
    examine(options)
    return 0
