"""The two sides whose log-probabilities are held against each other: a rollout that generates, a trainer that reads.

Both are HuggingFace models made from the same fp32 masters. On a CPU autocast is made to round as on CUDA
(``recipes.cpu.host.autocast_as_cuda``); the command calls it once.
"""

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LOGITS = 2**28  # of one pass of the trainer's side at most: 1 GiB in fp32


class Overflow(Exception):
    """Logits that are not finite; the message says on which side."""


def name_of(dtype: str) -> str:
    """``float16`` -> ``fp16``."""
    return next(name for name, known in DTYPES.items() if str(known) == f"torch.{dtype}")


@dataclass(frozen=True)
class Rollout:
    """How the rollout holds the model: weights are sent as ``wire``, held and used in ``dtype``, with a KV cache of it.

    Args:
        head: whether the head computes in fp32, from weights in ``dtype``: vLLM's ``head_dtype``.
    """

    dtype: str
    wire: str
    head: bool

    @property
    def name(self) -> str:
        return f"rollout-{self.dtype}-wire-{self.wire}{'-head-fp32' if self.head else ''}"

    @property
    def effective(self) -> "Rollout":
        """The one with the same weights whose wire is fp32, or this one: fp16 from fp16 is fp16 from fp32."""
        return Rollout(self.dtype, "fp32", self.head) if self.wire == self.dtype else self

    def cast(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(DTYPES[self.wire]).to(DTYPES[self.dtype])


@dataclass(frozen=True)
class Trainer:
    """How verl's FSDP engine computes: fp32 masters, gathered in ``dtype``, under autocast of ``dtype``.

    Args:
        head: whether the head computes in fp32 from the masters, as ``keep_fp32_modules=[lm_head]`` has it.
    """

    dtype: str
    head: bool

    @property
    def name(self) -> str:
        return f"trainer-{self.dtype}{'-head-fp32' if self.head else ''}"

    def cast(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(DTYPES[self.dtype])


class HeadInFp32(torch.nn.Module):
    """Logits in fp32 of hidden states in 16 bits, (..., hidden) -> (..., vocabulary)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.bias = None if bias is None else torch.nn.Parameter(bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.nn.functional.linear(hidden.float(), self.weight, self.bias)


def build(masters: "PreTrainedModel", side: Rollout | Trainer, device: str) -> "PreTrainedModel":
    """A copy of the model as ``side`` holds it. Buffers stay as they are: rotary frequencies are fp32 on both sides."""
    with torch.no_grad():
        cast = {id(weight): torch.nn.Parameter(side.cast(weight), False) for weight in masters.parameters()}
        model = copy.deepcopy(masters, memo=cast)
        if side.head:
            head = masters.get_output_embeddings()
            held = side.cast if isinstance(side, Rollout) else torch.Tensor.float
            head = HeadInFp32(*(None if part is None else held(part).float() for part in (head.weight, head.bias)))
            model.set_output_embeddings(head)
    return model.to(device).eval()


def autocast(device: str, dtype: str) -> AbstractContextManager:
    """What the engine has around a forward pass: autocast, but for fp32."""
    return nullcontext() if dtype == "fp32" else torch.autocast(device, DTYPES[dtype])


@torch.no_grad()
def generate(
    model: "PreTrainedModel", side: Rollout, prompt: list[int], samples: int, length: int, ends: set[int], seed: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Answers to one prompt, token by token with a KV cache, at temperature 1, as a batch.

    Log-probabilities are the fp32 log-softmax of the logits, as vLLM gives them. On a CPU autocast is on, for its fp16
    products with fp32 sums: the weights are in ``side.dtype`` already.

    Returns:
        of each of ``samples`` answers its tokens, the one that ended it included, and their log-probabilities.

    Raises:
        Overflow: the logits are not finite.
    """
    device = model.device
    generator = torch.Generator(device).manual_seed(seed)
    step, cache = torch.tensor([prompt] * samples, device=device), None
    last_alone = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}  # of a long prompt they take GiB
    tokens, log_probs, ended = [], [], torch.zeros(samples, dtype=torch.bool, device=device)
    last = torch.tensor(sorted(ends), device=device)
    with autocast(device.type, side.dtype) if device.type == "cpu" else nullcontext():
        while len(tokens) < length and not ended.all():
            output = model(input_ids=step, past_key_values=cache, use_cache=True, **last_alone)
            cache = output.past_key_values
            scores = output.logits[:, -1].float().log_softmax(-1)
            if not scores.isfinite().all():
                raise Overflow(f"the rollout's logits are not finite in {side.dtype}")
            step = torch.multinomial(scores.exp(), 1, generator=generator)
            tokens.append(step[:, 0])
            log_probs.append(scores.gather(1, step)[:, 0])
            ended |= torch.isin(step[:, 0], last)
    tokens, log_probs = torch.stack(tokens, 1).tolist(), torch.stack(log_probs, 1).tolist()
    sizes = [next((at for at, token in enumerate(row, 1) if token in ends), len(row)) for row in tokens]
    cut = lambda rows: [row[:size] for row, size in zip(rows, sizes, strict=True)]
    return cut(tokens), cut(log_probs)


@torch.no_grad()
def read(model: "PreTrainedModel", side: Trainer, prompt: list[int], answers: list[list[int]]) -> list[list[float]]:
    """The log-probability of each token of the answers by one full forward pass over prompt and answer.

    As verl 0.9.1's ``FSDPEngineWithLMHead`` at temperature 1: logits in the compute dtype, their log-softmax in fp32,
    which CUDA's autocast sees to. Answers are padded on the right, which a causal model's earlier tokens do not see.

    Raises:
        Overflow: a log-probability is not finite.
    """
    longest = max(map(len, answers))
    ids = torch.tensor([prompt + answer + [prompt[0]] * (longest - len(answer)) for answer in answers])
    found = []
    with autocast(model.device.type, side.dtype):
        for part in ids.to(model.device).split(max(1, LOGITS // (ids.shape[1] * model.config.vocab_size))):
            logits = model(input_ids=part, use_cache=False).logits
            for row, row_ids in zip(logits, part, strict=True):
                scores = row[len(prompt) - 1 : -1].log_softmax(-1)
                found.append(scores.gather(1, row_ids[len(prompt) :, None])[:, 0].float())
    rows = [row[: len(answer)] for row, answer in zip(found, answers, strict=True)]
    if not all(row.isfinite().all() for row in rows):
        raise Overflow(f"the trainer's log-probabilities are not finite in {side.dtype}")
    return [row.tolist() for row in rows]


def ends_of(model: "PreTrainedModel", tokenizer) -> set[int]:
    """The tokens that end an answer."""
    configured = model.generation_config.eos_token_id
    several = configured if isinstance(configured, list) else [configured, tokenizer.eos_token_id]
    return {token for token in several if token is not None}
