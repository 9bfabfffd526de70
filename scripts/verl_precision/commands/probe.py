"""Measure the mismatch of a model before any training.

Samples answers to prompts as a rollout does, in the rollout's dtype and with a KV cache, and computes the
log-probabilities of the same tokens as verl's trainer does. Reports for each regime how far the two differ, and the
effective sample size of sequence weights at 512 to 32k tokens. Writes probe-MODEL.md and .json to the folder OUT.
Exit code 0: measured, whatever the verdict; 1: refused or failed; 130: interrupted.
"""

import sys
from functools import cache

from verl_precision.paths import REPO
from verl_precision.probe.model import VARIABLES as VARIABLES  # its options
from verl_precision.probe.model import ProbeOptions, load_with_prompts, prepare_sanity, probe_options

parse = probe_options
LONGEST = 1024  # the default LENGTH, if the model has the positions


def measure(options: ProbeOptions) -> dict:
    """Measure all regimes, write and print the report, and return it.

    Raises:
        Refused: the model or the data cannot be used, or a regime cannot be measured here.
    """
    from verl_precision.probe import log_probs
    from verl_precision.probe.report import compare, summarize, write

    log_probs.check_regimes(options)
    masters, tokenizer, prompts, length = load_with_prompts(options, LONGEST)
    settings = options.settings() | {"LENGTH": length, "weights": log_probs.fingerprint(masters)}
    work = log_probs.open_work_folder(options.out, settings)
    if options.device == "cpu":
        autocast_as_cuda()
    log_probs.compute_log_probs(log_probs.ProbeTask(options, masters, tokenizer, prompts, length, work))
    rows, positions = compare(options.precision, work), masters.config.max_position_embeddings
    report = {
        "settings": settings,
        "findings": summarize(options, rows, positions),
        "positions": positions,
        "rows": rows,
    }
    write(options, report)
    return report


@cache
def autocast_as_cuda() -> None:
    """Make the CPU's autocast round as CUDA's; torch 2.11 refuses to replace a kernel twice."""
    sys.path.append(str(REPO))
    from recipes.cpu import host

    host.autocast_as_cuda()


def main(options: ProbeOptions) -> int:
    if not prepare_sanity(options):
        return 1
    measure(options)
    return 0
