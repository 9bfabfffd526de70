"""Measure the mismatch of a model before any training.

Samples answers to prompts as a rollout does, in the rollout's dtype and with a KV cache, and computes the
log-probabilities of the same tokens as verl's trainer does. Reports for each regime how far the two differ, and the
effective sample size of sequence weights at 512 to 32k tokens. Writes probe-MODEL.md, .png and .json to the folder OUT.
Exit code 0: measured, whatever the verdict; 1: refused or failed; 130: interrupted, with a report on the work so far.
"""

import sys
from typing import TYPE_CHECKING

from verl_precision.errors import Refused
from verl_precision.paths import REPO
from verl_precision.probe.model import check_positions, load, prepare_sanity, prompts, token_ids
from verl_precision.probe.options import VARIABLES as VARIABLES  # its options
from verl_precision.probe.options import ProbeOptions, parse

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LONGEST = 1024  # the default LENGTH, if the model has the positions


def answer_length(options: ProbeOptions, model: "PreTrainedModel", longest_prompt: int) -> int:
    """Return the most tokens of an answer.

    Raises:
        Refused: LENGTH, or the longest prompt alone, exceeds the model's positions.
    """
    check_positions(model, longest_prompt)
    positions = model.config.max_position_embeddings
    if options.length is not None and longest_prompt + options.length > positions:
        raise Refused(
            f"LENGTH={options.length}: with a prompt of {longest_prompt} tokens, that exceeds the model's "
            f"{positions} positions; set at most {positions - longest_prompt}"
        )
    return options.length or min(LONGEST, positions - longest_prompt)


def measure(options: ProbeOptions) -> int:
    """Measure all variants, report, and return the exit code."""
    from verl_precision.probe.comparison import compare, summarize
    from verl_precision.probe.log_probs import Task, compute_log_probs
    from verl_precision.probe.numerics import exact_dtype
    from verl_precision.probe.rebatching import rebatchings
    from verl_precision.probe.report import ProbeResult, show, write
    from verl_precision.probe.variants import check_gpus, check_vllm, variants
    from verl_precision.probe.work_folder import fingerprint, open_work_folder

    check_gpus(options)
    check_vllm(options)
    messages = prompts(options.data, options.rows)
    masters, tokenizer = load(options.model)
    token_prompts = [token_ids(tokenizer, each) for each in messages]
    length = answer_length(options, masters, max(map(len, token_prompts)))
    settings = options.settings() | {"LENGTH": length, "weights": fingerprint(masters)}
    work = open_work_folder(options.out, settings)
    if options.device == "cpu":
        sys.path.append(str(REPO))
        from recipes.cpu import host

        host.autocast_as_cuda()
    every, changes = variants(options), rebatchings(options)
    # Plain regimes first, which matter most if the probe is interrupted.
    ordered = sorted(every, key=lambda variant: (variant.head != options.head[0], variant.wire != options.wire[0]))
    interrupted = False
    try:
        compute_log_probs(Task(options, masters, tokenizer, token_prompts, length, work), [*ordered, *changes])
    except KeyboardInterrupt:
        interrupted = True
    comparisons = compare(every, work)
    if comparisons:
        positions = masters.config.max_position_embeddings
        rebatched = compare(changes, work)
        attention = masters.config._attn_implementation
        findings = summarize(options, comparisons, positions, attention, exact_dtype(masters))
        result = ProbeResult(options, settings, comparisons, rebatched, findings, positions)
        write(result)
        show(result)
    if interrupted:
        print(
            f"probe: interrupted; {len(comparisons)} of {len(every)} variants have results; "
            "repeat the command to resume",
            file=sys.stderr,
        )
    return 130 if interrupted else 0


def main(words: list[str]) -> int:
    options = parse(words)
    if options.is_sanity and not prepare_sanity():
        return 1
    return measure(options)
