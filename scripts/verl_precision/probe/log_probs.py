"""Compute the log-probabilities of a probe: a rollout samples answers, then trainers compute those of the same tokens.

The rollout is HuggingFace's generate in this process, or an offline vLLM in a process of its own.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from omegaconf import OmegaConf
from tqdm import tqdm

from verl_precision.errors import Refused
from verl_precision.files import read_jsonl
from verl_precision.paths import CONFIGS, IMPORTS, REPO
from verl_precision.probe.numerics import RolloutNumerics, TrainerNumerics, build, end_tokens, generate, token_log_probs
from verl_precision.probe.options import ProbeOptions
from verl_precision.probe.rebatching import Rebatching
from verl_precision.probe.variants import Variant
from verl_precision.probe.work_folder import (
    append_missing,
    drop_incomplete_line,
    is_complete,
    rollout_file,
    trainer_file,
)
from verl_precision.run.log import errors

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

POLL_S = 0.5


@dataclass(frozen=True)
class Task:
    """Model, prompts and settings that all rollouts and trainers of a probe share.

    Args:
        masters: the model in fp32.
        prompts: token ids.
        length: most tokens of an answer.
        work: the folder of the results.
    """

    options: ProbeOptions
    masters: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    prompts: list[list[int]]
    length: int
    work: Path


def compute_log_probs(task: Task, pairs: Iterable[Variant | Rebatching]) -> None:
    """Compute the log-probabilities of all pairs, as far as they are not in the work folder yet."""
    pairs = list(pairs)
    for rollout in dict.fromkeys(pair.rollout for pair in pairs):
        if not is_complete(rollout_file(task.work, rollout), len(task.prompts)):
            (generate_by_vllm if task.options.backend == "vllm" else generate_by_hf)(task, rollout)
        trainers = (trainer for pair in pairs if pair.rollout == rollout for trainer in pair.trainers)
        for trainer in dict.fromkeys(trainers):
            score_by_trainer(task, trainer, rollout)


def generate_by_hf(task: Task, rollout: RolloutNumerics) -> None:
    """Answer every prompt with HuggingFace's model."""
    options = task.options
    model, ends = build(task.masters, rollout, options.device), end_tokens(task.masters, task.tokenizer)

    def answers(index: int) -> dict:
        seed = options.seed * 1_000_003 + index
        prompt = task.prompts[index]
        return generate(model, rollout, prompt, options.samples, task.length, ends, seed, options.temperature)

    append_missing(rollout_file(task.work, rollout), len(task.prompts), answers, rollout.name)


def generate_by_vllm(task: Task, rollout: RolloutNumerics) -> None:
    """Answer every prompt with an offline vLLM in a process of its own, which loads one model in one dtype.

    Raises:
        Refused: vLLM failed.
    """
    options, file = task.options, rollout_file(task.work, rollout)
    done = len(drop_incomplete_line(file))
    checkpoint = task.work / rollout.name
    model = options.model
    if rollout.wire != "fp32":  # the weights after the wire, in fp32: vLLM rounds them to the rollout's dtype
        sent = build(task.masters, RolloutNumerics("fp32", rollout.wire, False), "cpu")
        sent.save_pretrained(checkpoint)
        task.tokenizer.save_pretrained(checkpoint)
        model = str(checkpoint)
    request = file.with_suffix(".request")
    content = {
        "model": model,
        "dtype": rollout.dtype,
        "head": rollout.head,
        "prompts": task.prompts[done:],
        "samples": options.samples,
        "length": task.length,
        "seed": options.seed,
        "temperature": options.temperature,
        "device": options.device,
        "file": str(file),
    }
    request.write_text(json.dumps(content))
    run_vllm(request, file, options.device, f"{rollout.name}, vLLM", len(task.prompts), done)
    if rollout.wire != "fp32":
        shutil.rmtree(checkpoint)


def run_vllm(request: Path, file: Path, device: str, label: str, number: int, done: int) -> None:
    """Run ``verl_precision.probe.vllm_generate`` on a request, with a progress bar over the lines of ``file``.

    Raises:
        Refused: the process failed.
    """
    path = filter(None, [*IMPORTS, str(REPO), os.environ.get("PYTHONPATH")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    if device == "cpu":
        cpu = OmegaConf.load(CONFIGS / "device" / "cpu.yaml")
        environment |= dict(cpu.ray_kwargs.ray_init.runtime_env.env_vars)
    log = file.with_suffix(".log")
    with log.open("w") as output:
        command = [sys.executable, "-m", "verl_precision.probe.vllm_generate", str(request)]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            with tqdm(total=number, initial=done, desc=label, unit="prompt") as bar:
                running = True
                while running:
                    time.sleep(POLL_S)
                    running = process.poll() is None
                    bar.update(file.read_bytes().count(b"\n") - bar.n)
        finally:
            process.terminate()
            process.wait()
    if process.returncode:
        reason = "; ".join(errors(log.read_text().splitlines(), 1)) or f"exit code {process.returncode}"
        raise Refused(f"BACKEND=vllm: {file.stem} failed: {reason} ({log})")


def score_by_trainer(task: Task, trainer: TrainerNumerics, rollout: RolloutNumerics) -> None:
    """Compute the log-probabilities of a rollout's answers by a trainer."""
    file, rolled_out = trainer_file(task.work, trainer, rollout), read_jsonl(rollout_file(task.work, rollout))
    if is_complete(file, len(task.prompts)) or "overflow" in rolled_out[-1]:
        return
    model = build(task.masters, trainer, task.options.device)

    def answers(index: int) -> list[tuple[list[int], list[int]]]:
        return [(task.prompts[index], answer) for answer in rolled_out[index]["answers"]]

    def log_probs(index: int) -> dict:
        others = answers((index + 1) % len(rolled_out))
        return token_log_probs(model, trainer, answers(index), others, task.options.temperature)

    append_missing(file, len(task.prompts), log_probs, file.stem)
    if task.options.device == "cuda":
        del model
        torch.cuda.empty_cache()  # or vLLM's next process would lack the memory
