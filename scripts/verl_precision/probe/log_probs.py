"""List the trainers and rollouts that a probe compares, and compute their log-probabilities.

A rollout samples answers, then trainers compute the log-probabilities of the same tokens. The rollout is Hugging Face's
model in this process, or an offline vLLM in another. ``OUT/work`` has a file for each, once it is complete, so that an
interrupted probe can resume: ``ROLLOUT.jsonl`` contains the ``answers`` (token ids) to a prompt in each line and their
``log_probs``; ``TRAINER-on-ROLLOUT.jsonl`` the ``log_probs`` of the same tokens. A line with ``overflow`` is the last
one of its file.
"""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from omegaconf import OmegaConf
from tqdm import tqdm

from verl_precision.errors import Refused
from verl_precision.facts.dtypes import short_name
from verl_precision.facts.gpus import find_gpus
from verl_precision.facts.vllm_float16 import float16_support
from verl_precision.files import read_jsonl, write_json
from verl_precision.paths import CONFIGS, IMPORTS, REPO
from verl_precision.probe.model import HEADS, ProbeOptions, end_tokens
from verl_precision.probe.numerics import Overflow, RolloutNumerics, TrainerNumerics, build, generate, token_log_probs
from verl_precision.run.log import errors

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Variant:
    """A row of the report: a regime, its wire, and which heads compute in fp32."""

    regime: str
    wire: str
    head: str
    trainer: TrainerNumerics
    rollout: RolloutNumerics

    def files(self, work: Path) -> tuple[Path, Path]:
        """Return the files of the trainer's log-probabilities and of the rollout's."""
        return work / f"{self.trainer.name}-on-{self.rollout.name}.jsonl", work / f"{self.rollout.name}.jsonl"

    def columns(self) -> dict[str, str]:
        """Return what identifies the row in the JSON report."""
        dtypes = {"train": self.trainer.dtype, "infer": self.rollout.dtype}
        return {"regime": self.regime, "wire": self.wire, "fp32_head": self.head} | dtypes


def variants(options: ProbeOptions) -> list[Variant]:
    """Return every regime over every wire, and every head over the first wire; numerically equal ones only once."""
    distinct: dict[tuple, Variant] = {}
    for regime in options.precision:
        config = OmegaConf.load(CONFIGS / "precision" / f"{regime}.yaml").actor_rollout_ref
        train, infer = short_name(config.actor.dtype), short_name(config.rollout.dtype)
        wires = [(wire, options.head[0]) for wire in options.wire]
        for wire, head in wires + [(options.wire[0], head) for head in options.head[1:]]:
            # A head of an fp32 trainer or rollout is in fp32 anyway, and a wire in the rollout's dtype rounds alike.
            trainer_head, rollout_head = HEADS[head]
            rounded = "fp32" if wire == infer else wire
            trainer = TrainerNumerics(train, trainer_head and train != "fp32")
            rollout = RolloutNumerics(infer, rounded, rollout_head and infer != "fp32")
            distinct.setdefault((regime, trainer, rollout), Variant(regime, wire, head, trainer, rollout))
    return list(distinct.values())


def refused_regimes(options: ProbeOptions) -> dict[str, str]:
    """Return the regimes that a GPU of this machine emulates or that vLLM as the backend refuses, and why."""
    emulating = [gpu for gpu in find_gpus() if not gpu.bf16] if options.device == "cuda" else []
    support = float16_support(options.model)
    refused = {}
    for each in variants(options):
        if emulating and "bf16" in (each.trainer.dtype, each.rollout.dtype):
            refused[each.regime] = f"{emulating[0]} emulates bfloat16"
        if each.rollout.dtype == "fp16" and options.backend == "vllm" and support.supported is False:
            refused[each.regime] = f"{support.reason} (BACKEND=hf runs it)"
    return refused


def check_regimes(options: ProbeOptions) -> None:
    """Refuse regimes that cannot be measured here."""
    if refused := refused_regimes(options):
        others = " ".join(name for name in options.precision if name not in refused) or "fp32"
        raise Refused(
            f"PRECISION={' '.join(options.precision)}: {'; '.join(dict.fromkeys(refused.values()))}; leave out "
            f"{' and '.join(refused)}: PRECISION={shlex.quote(others)}"
        )


@dataclass(frozen=True)
class ProbeTask:
    """What all rollouts and trainers of a probe share."""

    options: ProbeOptions
    masters: "PreTrainedModel"  # in fp32
    tokenizer: "PreTrainedTokenizerBase"
    prompts: list[list[int]]  # token ids
    length: int  # most tokens of an answer
    work: Path


def open_work_folder(out: Path, settings: dict) -> Path:
    """Return ``out``/work, created or with the work done so far; refused if that has other settings."""
    work = out / "work"
    file = work / "settings.json"
    recorded = json.loads(file.read_text()) if file.exists() else settings
    for name, value in settings.items():
        if (earlier := recorded.get(name, "not set")) != value:
            raise Refused(
                f"{name}={value}: {out} contains a probe with {name}={earlier}; "
                "repeat its settings, choose another OUT or remove that folder"
            )
    work.mkdir(parents=True, exist_ok=True)
    write_json(file, settings)
    return work


def fingerprint(masters: "PreTrainedModel") -> str:
    """Return 12 hex digits of the weights, the same on every device and with any number of threads."""
    digest = hashlib.sha256()
    for weight in masters.parameters():
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:12]


def write_lines(file: Path, number: int, make: Callable[[int], dict]) -> None:
    """Write what ``make`` returns by index, under another name until all lines are written; stop after an overflow."""
    part = file.with_suffix(".part")
    with part.open("w") as out:
        for index in tqdm(range(number), file.stem, unit="prompt"):
            try:
                line = make(index)
            except Overflow as error:
                line = {"overflow": str(error)}
            out.write(json.dumps(line) + "\n")
            if "overflow" in line:
                break
    part.rename(file)


def compute_log_probs(task: ProbeTask, variants: Iterable[Variant]) -> None:
    """Compute the log-probabilities of all variants that are not in the work folder yet."""
    for variant in variants:
        scored, file = variant.files(task.work)
        if not file.exists():
            (generate_by_vllm if task.options.backend == "vllm" else generate_by_hf)(task, variant.rollout, file)
        rolled_out = read_jsonl(file)
        if not scored.exists() and "overflow" not in rolled_out[-1]:
            score_by_trainer(task, variant.trainer, rolled_out, scored)


def generate_by_hf(task: ProbeTask, rollout: RolloutNumerics, file: Path) -> None:
    options = task.options
    model, ends = build(task.masters, rollout, options.device), end_tokens(task.masters, task.tokenizer)

    def answers(index: int) -> dict:
        generator = torch.Generator(options.device).manual_seed(options.seed * 1_000_003 + index)
        sizes = options.samples, task.length
        return generate(model, rollout.dtype, task.prompts[index], *sizes, ends, generator, options.temperature)

    write_lines(file, len(task.prompts), answers)


def generate_by_vllm(task: ProbeTask, rollout: RolloutNumerics, file: Path) -> None:
    """Answer every prompt with an offline vLLM in another process, which loads one model in one dtype."""
    options, part, log = task.options, file.with_suffix(".part"), file.with_suffix(".log")
    checkpoint = task.work / rollout.name
    if rollout.wire != "fp32":  # the weights after the wire, in fp32: vLLM rounds them to the rollout's dtype
        sent = build(task.masters, RolloutNumerics("fp32", rollout.wire, False), "cpu")
        sent.save_pretrained(checkpoint)
        task.tokenizer.save_pretrained(checkpoint)
    request = {name: getattr(options, name) for name in ("samples", "seed", "temperature", "device")}
    request |= {"prompts": task.prompts, "length": task.length, "dtype": rollout.dtype, "head": rollout.head}
    request |= {"model": options.model if rollout.wire == "fp32" else str(checkpoint), "file": str(part)}
    path = filter(None, [*IMPORTS, str(REPO), os.environ.get("PYTHONPATH")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    if options.device == "cpu":
        cpu = OmegaConf.load(CONFIGS / "device" / "cpu.yaml")
        environment |= dict(cpu.ray_kwargs.ray_init.runtime_env.env_vars)
    print(f"{file.stem}: vLLM answers {len(task.prompts)} prompts, log in {log}", flush=True)
    with log.open("w") as output:
        command = [sys.executable, "-m", "verl_precision.probe.vllm_generate"]
        given = {"input": json.dumps(request), "text": True, "env": environment}
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, **given)
    if done.returncode:
        reason = "; ".join(errors(log.read_text().splitlines(), 1)) or f"exit code {done.returncode}"
        raise Refused(f"BACKEND=vllm: {file.stem} failed: {reason} ({log})")
    part.rename(file)
    shutil.rmtree(checkpoint, ignore_errors=True)


def score_by_trainer(task: ProbeTask, trainer: TrainerNumerics, rolled_out: list[dict], file: Path) -> None:
    model = build(task.masters, trainer, task.options.device)

    def log_probs(index: int) -> dict:
        answers = [(task.prompts[index], answer) for answer in rolled_out[index]["answers"]]
        return token_log_probs(model, trainer.dtype, answers, task.options.temperature)

    write_lines(file, len(task.prompts), log_probs)
    if task.options.device == "cuda":
        del model
        torch.cuda.empty_cache()  # or vLLM's next process would lack the memory
