"""Compute the log-probabilities of the trainers and rollouts that a probe compares.

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
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from omegaconf import OmegaConf
from tqdm import tqdm

from verl_precision.errors import Refused
from verl_precision.facts.dtypes import short_name
from verl_precision.facts.gpus import find_gpus
from verl_precision.facts.regime import named_dtypes
from verl_precision.facts.vllm_float16 import float16_support
from verl_precision.files import read_jsonl, write_json
from verl_precision.paths import CONFIGS, IMPORTS, REPO
from verl_precision.probe.model import ProbeOptions, end_tokens
from verl_precision.probe.numerics import Overflow, build, generate, token_log_probs
from verl_precision.run.log import errors

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def dtypes_of(regime: str) -> tuple[str, str]:
    """Return the dtypes in which the trainer and the rollout of a regime compute."""
    named = named_dtypes(regime)
    return short_name(named["actor"]), short_name(named["rollout"])


def files_of(regime: str, work: Path) -> tuple[Path, Path]:
    """Return the files of the trainer's log-probabilities and of the rollout's."""
    trainer, rollout = dtypes_of(regime)
    return work / f"trainer-{trainer}-on-rollout-{rollout}.jsonl", work / f"rollout-{rollout}.jsonl"


def refused_regimes(options: ProbeOptions) -> dict[str, str]:
    """Return the regimes that a GPU of this machine emulates or that vLLM as the backend refuses, and why."""
    emulating = [gpu for gpu in find_gpus() if not gpu.bf16] if options.device == "cuda" else []
    support = float16_support(options.model)
    refused = {}
    for regime in options.precision:
        if emulating and "bf16" in dtypes_of(regime):
            refused[regime] = f"{emulating[0]} emulates bfloat16"
        if dtypes_of(regime)[1] == "fp16" and options.backend == "vllm" and support.supported is False:
            refused[regime] = f"{support.reason} (BACKEND=hf runs it)"
    return refused


def check_regimes(options: ProbeOptions) -> None:
    """Refuse regimes that cannot be measured here, and print a model that vLLM would refuse in fp16."""
    if refused := refused_regimes(options):
        others = " ".join(name for name in options.precision if name not in refused) or "fp32"
        raise Refused(
            f"PRECISION={' '.join(options.precision)}: {'; '.join(dict.fromkeys(refused.values()))}; leave out "
            f"{' and '.join(refused)}: PRECISION={shlex.quote(others)}"
        )
    if (support := float16_support(options.model)).supported is False:
        print(f"{support.reason}: it can be measured in fp16 here, and not run in it", flush=True)


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


def compute_log_probs(task: ProbeTask) -> None:
    """Compute the log-probabilities of all regimes that are not in the work folder yet."""
    for regime in task.options.precision:
        (trainer, rollout), (scored, file) = dtypes_of(regime), files_of(regime, task.work)
        if not file.exists():
            (generate_by_vllm if task.options.backend == "vllm" else generate_by_hf)(task, rollout, file)
        rolled_out = read_jsonl(file)
        if not scored.exists() and "overflow" not in rolled_out[-1]:
            score_by_trainer(task, trainer, rolled_out, scored)


def generate_by_hf(task: ProbeTask, dtype: str, file: Path) -> None:
    options = task.options
    model, ends = build(task.masters, dtype, options.device), end_tokens(task.masters, task.tokenizer)

    def answers(index: int) -> dict:
        generator = torch.Generator(options.device).manual_seed(options.seed * 1_000_003 + index)
        sizes = options.samples, task.length
        return generate(model, dtype, task.prompts[index], *sizes, ends, generator, options.temperature)

    write_lines(file, len(task.prompts), answers)


def generate_by_vllm(task: ProbeTask, dtype: str, file: Path) -> None:
    """Answer every prompt with an offline vLLM in another process, which loads one model in one dtype."""
    options, part, log = task.options, file.with_suffix(".part"), file.with_suffix(".log")
    request = {name: getattr(options, name) for name in ("model", "samples", "seed", "temperature", "device")}
    request |= {"prompts": task.prompts, "length": task.length, "dtype": dtype, "file": str(part)}
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


def score_by_trainer(task: ProbeTask, dtype: str, rolled_out: list[dict], file: Path) -> None:
    model = build(task.masters, dtype, task.options.device)

    def log_probs(index: int) -> dict:
        answers = [(task.prompts[index], answer) for answer in rolled_out[index]["answers"]]
        return token_log_probs(model, dtype, answers, task.options.temperature)

    write_lines(file, len(task.prompts), log_probs)
    if task.options.device == "cuda":
        del model
        torch.cuda.empty_cache()  # or vLLM's next process would lack the memory
