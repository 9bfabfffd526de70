"""Recommend a regime for a model, from a preflight and a probe.

Prints the regime, the first loss scale, the modules to keep in fp32, and whether sequence weights hold at the response
length of your run, each with the numbers it follows from; then what these do not decide and the command that measures
it; and last the overrides for ``python -m verl.trainer.main_ppo``. Writes recommendation.md to the folder OUT, beside
the reports of preflight and probe. Exit code 0: measured, whether or not a regime is recommended; 1: refused or failed;
130: interrupted, repeat the command to resume.
"""

import json
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from verl_precision.commands import preflight, probe
from verl_precision.errors import Refused
from verl_precision.facts.vllm_float16 import float16_support
from verl_precision.files import sha256, write_json
from verl_precision.paths import OUTPUTS
from verl_precision.probe.model import prepare_sanity
from verl_precision.probe.options import VARIABLES as PROBE
from verl_precision.probe.options import ProbeOptions
from verl_precision.probe.options import parse as parse_probe
from verl_precision.words import file_path, parse_words, whole_number

VARIABLES = {
    "MODEL": PROBE["MODEL"],
    "DATA": PROBE["DATA"],
    "LENGTH": "tokens of a response in your run, default 8192",
    "TOKENS": "most tokens of an answer in the probe, default as many as the model's positions allow, up to 1024",
    **{name: PROBE[name] for name in ("ROWS", "SAMPLES", "BACKEND", "DEVICE")},
    "OUT": "the folder of the reports, default outputs/recommend/MODEL-BACKEND-DEVICE-ROWSxSAMPLES",
}


@dataclass(frozen=True)
class RecommendOptions:
    """The options of both measurements; ``length``, tokens of a response; ``words``, the variables without OUT."""

    preflight: preflight.PreflightOptions
    probe: ProbeOptions
    length: int
    words: dict[str, str]
    out: Path


def parse(words: list[str]) -> RecommendOptions:
    """Parse ``NAME=VALUE`` words.

    Raises:
        Refused: a name or a value is not allowed, or DATA is missing.
    """
    values = parse_words(words, VARIABLES)
    shared = {name: values[name] for name in ("MODEL", "DATA", "DEVICE") if name in values}
    length, tokens = whole_number(values, "LENGTH", 1, 8192), whole_number(values, "TOKENS", 1, None)
    sizes = {name: values[name] for name in ("ROWS", "SAMPLES", "BACKEND") if name in values}
    measured = {"PRECISION": "bf16 bf16_train_fp16_infer fp16", "WIRE": "fp32", "HEAD": "none", "BATCH": "none"}
    as_words = lambda *parts: [f"{name}={value}" for part in parts for name, value in part.items()]
    limit = {"LENGTH": tokens} if tokens else {}
    first = parse_probe(as_words(shared, sizes, measured, limit))
    size = f"{first.rows}x{first.samples}{f'-{tokens}' if tokens else ''}"
    name = f"{first.name}-{first.backend}-{first.device}-{size}"
    out = Path(file_path(values, "OUT") or OUTPUTS / "recommend" / name)
    return RecommendOptions(
        preflight.parse(as_words(shared, {"ROWS": first.rows, "OUT": out / "preflight"})),
        replace(first, out=out / "probe"),
        length,
        {name: value for name, value in values.items() if name != "OUT"},
        out,
    )


def runnable(options: ProbeOptions) -> ProbeOptions:
    """Return the options without the regimes that the probe refuses to run on these GPUs or with vLLM.

    Raises:
        Refused: no regime is left.
    """
    from verl_precision.probe.variants import refused_by_gpus, refused_by_vllm

    refused = refused_by_gpus(options) | (refused_by_vllm(options) if options.backend == "vllm" else {})
    left = tuple(name for name in options.precision if name not in refused)
    if not left:
        reasons = "; ".join(dict.fromkeys(refused.values()))
        raise Refused(f"MODEL={options.model}: no 16-bit regime runs here: {reasons}")
    return replace(options, precision=left)


def preflight_numbers(options: preflight.PreflightOptions) -> dict:
    """Return the numbers of the preflight, from its file if these options and files were measured already."""
    file = options.out / "numbers.json"
    settings = {name: str(getattr(options, name)) for name in ("model", "data", "rows", "length", "device")}
    files = [Path(options.data), *sorted(Path(options.model).glob("*.*"))]  # of a model on the hub, none
    settings["files"] = {path.name: sha256(path) for path in files if path.is_file()}
    if file.exists() and (recorded := json.loads(file.read_text()))["settings"] == settings:
        return recorded["numbers"]
    numbers = preflight.examine(options)
    write_json(file, {"settings": settings, "numbers": numbers})
    return numbers


def last_line(overrides: list[str] | None, fenced: bool = False) -> str:
    """Return the overrides to paste, in a block of code if ``fenced``, or that there are none."""
    if overrides is None:
        return "No regime is recommended."
    return f"```\n{shlex.join(overrides)}\n```" if fenced else shlex.join(overrides)


def main(words: list[str]) -> int:
    options = parse(words)
    if options.probe.is_sanity and not prepare_sanity():
        return 1
    numbers = preflight_numbers(options.preflight)
    # From here on the model is on this machine, so that vLLM's table can be asked for its type.
    numbers["rollout"] = asdict(float16_support(options.probe.model))
    if code := probe.measure(runnable(options.probe)):
        return code

    from verl_precision.probe.recommendation import recommend

    report = json.loads(options.probe.report(".json").read_text())
    found = recommend(numbers, report, options.length, options.words)
    lines = [f"- {name}: {text}" for name, text in found.answers.items()]
    if found.unknown:
        lines += ["", "Not decided by these numbers:", "", *(f"- {text}" for text in found.unknown)]
    (options.out / "recommendation.md").write_text("\n".join([*lines, "", last_line(found.overrides, fenced=True), ""]))
    print("\n".join(["", *lines, "", f"  {options.out / 'recommendation.md'}", "", last_line(found.overrides)]))
    return 0
