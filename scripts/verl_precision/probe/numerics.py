"""Compute in the dtypes of a rollout, which samples answers, and of a trainer, which scores the same tokens.

Both are Hugging Face models made from the same fp32 masters. On a CPU, autocast must round as on CUDA: the command
calls ``recipes.cpu.host.autocast_as_cuda`` once.
"""

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from verl_precision.facts.dtypes import torch_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGITS = 2**28  # most logits of a trainer's micro-batch: 1 GiB in fp32
TOKENS = 2**13  # most tokens of it


class Overflow(Exception):
    """Logits are not finite; the message names the trainer or the rollout."""


@torch.no_grad()
def build(masters: "PreTrainedModel", dtype: str, device: str) -> "PreTrainedModel":
    """Return a copy of the model with weights in ``dtype``, as a server stores them and FSDP gathers them.

    Buffers are not cast: trainer and rollout both keep rotary frequencies in fp32.
    """
    # deepcopy takes what its memo has under an object's id instead of copying the object.
    kind = torch_dtype(dtype)
    cast = {id(weight): torch.nn.Parameter(weight.to(kind), False) for weight in masters.parameters()}
    return copy.deepcopy(masters, memo=cast).to(device).eval()


def autocast(device: str, dtype: str) -> AbstractContextManager:
    return nullcontext() if dtype == "fp32" else torch.autocast(device, torch_dtype(dtype))


@torch.no_grad()
def generate(
    model: "PreTrainedModel",
    dtype: str,
    prompt: list[int],
    samples: int,
    length: int,
    ends: set[int],
    generator: torch.Generator,
    temperature: float = 1.0,
) -> dict[str, list]:
    """Sample answers to one prompt as a batch, token by token with a KV cache.

    Log-probabilities are the log-softmax of the logits over the temperature, both in fp32, as in vLLM. On a CPU
    autocast is on for its fp16 products with fp32 sums; the weights are in ``dtype`` already.

    Args:
        length: most tokens of an answer.
        ends: tokens that end an answer.

    Returns:
        ``answers``, the tokens of each with the one that ended it, and their ``log_probs``.

    Raises:
        Overflow: the logits are not finite.
    """
    device = model.device
    step, cache = torch.tensor([prompt] * samples, device=device), None
    last_only = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}  # a long prompt's logits take GiB
    tokens, log_probs, ended = [], [], torch.zeros(samples, dtype=torch.bool, device=device)
    last = torch.tensor(sorted(ends), device=device)
    with autocast("cpu", dtype) if device.type == "cpu" else nullcontext():
        while len(tokens) < length and not ended.all():
            output = model(input_ids=step, past_key_values=cache, use_cache=True, **last_only)
            cache = output.past_key_values
            scores = (output.logits[:, -1].float() / temperature).log_softmax(-1)  # (samples, vocabulary)
            if not scores.isfinite().all():
                raise Overflow(f"the rollout's logits are not finite in {dtype}")
            step = torch.multinomial(scores.exp(), 1, generator=generator)  # (samples, 1)
            tokens.append(step[:, 0])
            log_probs.append(scores.gather(1, step)[:, 0])
            ended |= torch.isin(step[:, 0], last)
    tokens, log_probs = (torch.stack(steps, 1).tolist() for steps in (tokens, log_probs))
    sizes = [next((at for at, token in enumerate(row, 1) if token in ends), len(row)) for row in tokens]
    cut = lambda rows: [row[:size] for row, size in zip(rows, sizes, strict=True)]
    return {"answers": cut(tokens), "log_probs": cut(log_probs)}


@torch.no_grad()
def token_log_probs(
    model: "PreTrainedModel", dtype: str, answers: list[tuple[list[int], list[int]]], temperature: float = 1.0
) -> dict[str, list]:
    """Compute the log-probability of each token of the answers in full forward passes over prompts and answers.

    Like verl 0.9.1's ``FSDPEngineWithLMHead`` with padded rows: logits and their division by the temperature in the
    compute dtype, the log-softmax in fp32 by CUDA's autocast. A micro-batch has all answers, or fewer within ``LOGITS``
    and ``TOKENS``; padding is on the right, where a causal model's attention does not reach.

    Args:
        answers: prompt and answer of each row.

    Returns:
        ``log_probs``, as ``generate`` does.

    Raises:
        Overflow: a log-probability is not finite.
    """
    longest = max(len(prompt) + len(answer) for prompt, answer in answers)
    size = max(1, min(LOGITS // (longest * model.config.vocab_size), TOKENS // longest, len(answers)))
    log_probs = []
    with autocast(model.device.type, dtype):
        for first in range(0, len(answers), size):
            part = answers[first : first + size]
            rows = [torch.tensor(prompt + answer, device=model.device) for prompt, answer in part]
            ids, mask = (pad_sequence(each, batch_first=True) for each in (rows, list(map(torch.ones_like, rows))))
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            for row, (prompt, answer) in zip(logits, part, strict=True):
                predicting = row[len(prompt) - 1 : len(prompt) + len(answer) - 1]  # a position predicts the next one
                scores = (predicting / torch.tensor(temperature).to(row)).log_softmax(-1)
                log_probs.append(scores.gather(1, torch.tensor(answer, device=model.device)[:, None])[:, 0].float())
    if not all(row.isfinite().all() for row in log_probs):
        raise Overflow(f"the trainer's log-probabilities are not finite in {dtype}")
    return {"log_probs": [row.tolist() for row in log_probs]}
