"""Recommend a regime for a model, from a preflight and a probe.

Prints the regime, the first loss scale, the modules to keep in fp32, and whether sequence weights hold at the response
length of your run, each with the numbers behind it; then what these do not decide and the command that measures
it; and last the overrides for ``python -m verl.trainer.main_ppo``. Writes recommendation.md to the folder OUT, beside
the reports of preflight and probe. Exit code 0: measured, whether or not a regime is recommended; 1: refused or failed;
130: interrupted, repeat the command to resume.
"""

import shlex
from dataclasses import replace
from pathlib import Path

from verl_precision.commands import preflight, probe
from verl_precision.errors import Refused
from verl_precision.files import check_room
from verl_precision.paths import OUTPUTS
from verl_precision.probe.model import VARIABLES as PROBE
from verl_precision.probe.model import ModelOptions, ProbeOptions, prepare_sanity, probe_options
from verl_precision.words import file_path, options, parse_words, whole_number

SHARED = ("MODEL", "DATA", "ROWS", "SAMPLES", "BACKEND", "DEVICE")  # variables of the probe
VARIABLES = {
    **{name: PROBE[name] for name in SHARED},
    "LENGTH": "tokens of a response in your run, default 8192",
    "TOKENS": "most tokens of an answer in the probe, default as many as the model's positions allow, up to 1024",
    "OUT": "the folder of the reports, default outputs/recommend/MODEL-BACKEND-DEVICE-ROWSxSAMPLES",
}
REGIMES = [name for name in options("precision") if name != "fp32"]
MEASURED = {"PRECISION": " ".join(REGIMES)}


def parse(words: list[str]) -> tuple[ProbeOptions, int, dict[str, str]]:
    """Return the probe's options, whose folder is that of all reports, the tokens of a response, and the variables."""
    values = parse_words(words, VARIABLES)
    length, tokens = whole_number(values, "LENGTH", 1, 8192), whole_number(values, "TOKENS", 1, None) or ""
    passed = {name: values[name] for name in SHARED if name in values} | MEASURED | {"LENGTH": tokens}
    measured = probe_options([f"{name}={value}" for name, value in passed.items()])
    size = f"{measured.rows}x{measured.samples}{f'-{tokens}' if tokens else ''}"
    name = f"{measured.name}-{measured.backend}-{measured.device}-{size}"
    out = Path(file_path(values, "OUT") or OUTPUTS / "recommend" / name)
    check_room(out)
    return replace(measured, out=out), length, {name: value for name, value in values.items() if name != "OUT"}


def runnable(options: ProbeOptions) -> ProbeOptions:
    """Return the options without the regimes that the probe refuses; refused if none is left."""
    from verl_precision.probe.log_probs import refused_regimes

    refused = refused_regimes(options)
    left = tuple(name for name in options.precision if name not in refused)
    if not left:
        reasons = "; ".join(dict.fromkeys(refused.values()))
        raise Refused(f"MODEL={options.model}: no 16-bit regime runs here: {reasons}")
    return replace(options, precision=left)


def main(request: tuple[ProbeOptions, int, dict[str, str]]) -> int:
    measured, length, given = request
    if not prepare_sanity(measured):
        return 1
    out = measured.out
    shared = measured.model, measured.data, measured.rows, None, measured.device
    examined = preflight.examine(ModelOptions(*shared, out / "preflight"))
    report = probe.measure(runnable(replace(measured, out=out / "probe")))

    from verl_precision.probe.recommendation import recommend

    found = recommend(examined, report, length, given)
    lines = [f"- {name}: {text}" for name, text in found.answers.items()]
    if found.unknown:
        lines += ["", "Not decided by these numbers:", "", *(f"- {text}" for text in found.unknown)]
    last = "No regime is recommended." if found.overrides is None else shlex.join(found.overrides)
    fenced = [last] if found.overrides is None else ["```", last, "```"]
    file = out / "recommendation.md"
    file.write_text("\n".join([*lines, "", *fenced, ""]))
    print("", *lines, "", f"  {file}", "", last, sep="\n")
    return 0
