"""Compute in the dtypes of a rollout, which samples answers, and of a trainer, which scores the same tokens.

Both are Hugging Face models made from the same fp32 masters. On a CPU, autocast must round as on CUDA: the command
calls ``recipes.cpu.host.autocast_as_cuda`` once.
"""

import copy
import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from verl_precision.facts.dtypes import torch_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGITS = 2**28  # most logits of a trainer's micro-batch: 1 GiB in fp32
TOKENS = 2**13  # most tokens of it: packed rows need a square mask over all tokens


class Overflow(Exception):
    """Logits are not finite; the message names the trainer or the rollout."""


@dataclass(frozen=True)
class RolloutNumerics:
    """The dtypes of a rollout: weights are sent as ``wire`` and stored, like the KV cache, in ``dtype``."""

    dtype: str
    wire: str
    head: bool  # whether the head computes in fp32, from weights in dtype: vLLM's head_dtype

    @property
    def name(self) -> str:
        return f"rollout-{self.dtype}-wire-{self.wire}{'-head-fp32' if self.head else ''}"

    def cast(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(torch_dtype(self.wire)).to(torch_dtype(self.dtype))


@dataclass(frozen=True)
class TrainerNumerics:
    """The dtypes and micro-batches of verl's FSDP engine: fp32 masters, gathered in ``dtype``, in its autocast."""

    dtype: str
    head: bool  # whether the head computes in fp32 from the masters, as with keep_fp32_modules=[lm_head]
    packed: bool = False  # whether the rows of a micro-batch are packed, as with use_remove_padding; else padded
    doubled: bool = False  # whether a micro-batch has twice as many rows

    @property
    def name(self) -> str:
        parts = {"head-fp32": self.head, "packed": self.packed, "doubled": self.doubled}
        return "-".join(["trainer", self.dtype, *(part for part, chosen in parts.items() if chosen)])

    def cast(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(torch_dtype(self.dtype))


class HeadInFp32(torch.nn.Linear):
    """A head that computes fp32 logits from hidden states in 16 bits, (..., hidden) -> (..., vocabulary)."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return super().forward(hidden.float())


@torch.no_grad()
def build(masters: "PreTrainedModel", numerics: RolloutNumerics | TrainerNumerics, device: str) -> "PreTrainedModel":
    """Return a copy of the model with weights in the dtypes of ``numerics``.

    Buffers are not cast: trainer and rollout both keep rotary frequencies in fp32.
    """
    # deepcopy takes what its memo has under an object's id instead of copying the object.
    cast = {id(weight): torch.nn.Parameter(numerics.cast(weight), False) for weight in masters.parameters()}
    model = copy.deepcopy(masters, memo=cast)
    if numerics.head:
        head = masters.get_output_embeddings()
        stored = numerics.cast if isinstance(numerics, RolloutNumerics) else torch.Tensor.float
        in_fp32 = HeadInFp32(head.in_features, head.out_features, head.bias is not None)
        in_fp32.load_state_dict({name: stored(weight).float() for name, weight in head.state_dict().items()})
        model.set_output_embeddings(in_fp32)
    return model.to(device).eval()


class ExpertRecorder:
    """Record the experts that a mixture chooses in forward passes inside a ``with`` block.

    In transformers 5 a layer's experts are a module ``experts``, called with the hidden states, the numbers of the
    chosen experts ``(tokens, chosen)`` and their weights. A mixture with another signature, as Llama 4's, counts as
    dense.
    """

    def __init__(self, model: "PreTrainedModel"):
        named = (module for name, module in model.named_modules() if name.rpartition(".")[2] == "experts")
        self.layers = [module for module in named if len(inspect.signature(module.forward).parameters) == 3]
        self.chosen: list[torch.Tensor] = []

    def __enter__(self) -> "ExpertRecorder":
        record = lambda module, args: self.chosen.append(args[1])
        self.hooks = [layer.register_forward_pre_hook(record) for layer in self.layers]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def fingerprints(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a number per token of the pass since the last call, int64, in the shape of its token ids.

        The same experts in all layers have the same number, on every device; others differ except with a probability
        of 2**-50.
        """
        numbers, generator = torch.zeros_like(ids, dtype=torch.int64).flatten(), torch.Generator().manual_seed(0)
        for chosen in self.chosen:
            factors = torch.randint(2**63 - 1, chosen.shape[-1:], generator=generator)
            numbers += (chosen.sort(-1).values * factors.to(chosen.device)).sum(-1).flatten()  # modulo 2**64
        self.chosen.clear()
        return numbers.view_as(ids)


def autocast(device: str, dtype: str) -> AbstractContextManager:
    """Return the context of the engine's forward pass: autocast, except for fp32."""
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
        ``answers``, the tokens of each with the one that ended it, their ``log_probs``, and of a mixture ``experts``,
        the fingerprints of the experts at the positions that predict them.

    Raises:
        Overflow: the logits are not finite.
    """
    device = model.device
    step, cache = torch.tensor([prompt] * samples, device=device), None
    last_only = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}  # a long prompt's logits take GiB
    tokens, log_probs, experts, ended = [], [], [], torch.zeros(samples, dtype=torch.bool, device=device)
    last = torch.tensor(sorted(ends), device=device)
    with ExpertRecorder(model) as recorder, autocast("cpu", dtype) if device.type == "cpu" else nullcontext():
        while len(tokens) < length and not ended.all():
            output = model(input_ids=step, past_key_values=cache, use_cache=True, **last_only)
            cache = output.past_key_values
            experts.append(recorder.fingerprints(step)[:, -1])
            scores = (output.logits[:, -1].float() / temperature).log_softmax(-1)  # (samples, vocabulary)
            if not scores.isfinite().all():
                raise Overflow(f"the rollout's logits are not finite in {dtype}")
            step = torch.multinomial(scores.exp(), 1, generator=generator)  # (samples, 1)
            tokens.append(step[:, 0])
            log_probs.append(scores.gather(1, step)[:, 0])
            ended |= torch.isin(step[:, 0], last)
    tokens, log_probs, experts = (torch.stack(steps, 1).tolist() for steps in (tokens, log_probs, experts))
    sizes = [next((at for at, token in enumerate(row, 1) if token in ends), len(row)) for row in tokens]
    cut = lambda rows: [row[:size] for row, size in zip(rows, sizes, strict=True)]
    line = {"answers": cut(tokens), "log_probs": cut(log_probs)}
    return line | ({"experts": cut(experts)} if recorder.layers else {})


def model_inputs(rows: list[list[int]], packed: bool, device: torch.device) -> dict[str, torch.Tensor | None]:
    """Return the model's inputs for the rows of a micro-batch, as verl 0.9.1's ``FSDPEngineWithLMHead`` prepares them.

    Padded, they are ``(rows, longest)`` with a mask; the padding is on the right, where a causal model's attention does
    not reach. Packed, they are ``(1, tokens)`` without a mask, and positions begin anew at each row: from these,
    transformers masks other rows under sdpa, and flash attention bounds its sequences.
    """
    ids = [torch.tensor(row, device=device) for row in rows]
    positions = [torch.arange(len(row), device=device) for row in rows]
    if packed:
        return {"input_ids": torch.cat(ids)[None], "attention_mask": None, "position_ids": torch.cat(positions)[None]}
    parts = {"input_ids": ids, "attention_mask": map(torch.ones_like, ids), "position_ids": positions}
    return {name: pad_sequence(list(tensors), batch_first=True) for name, tensors in parts.items()}


@torch.no_grad()
def token_log_probs(
    model: "PreTrainedModel",
    trainer: TrainerNumerics,
    answers: list[tuple[list[int], list[int]]],
    others: list[tuple[list[int], list[int]]],
    temperature: float = 1.0,
) -> dict[str, list]:
    """Compute the log-probability of each token of the answers in full forward passes over prompts and answers.

    Like verl 0.9.1's ``FSDPEngineWithLMHead``: logits and their division by the temperature in the compute dtype, the
    log-softmax in fp32 by CUDA's autocast. A micro-batch has all answers, or fewer within ``LOGITS`` and ``TOKENS``;
    ``trainer.doubled`` doubles that.

    Args:
        answers: prompt and answer of each row.
        others: rows that fill the last micro-batch.

    Returns:
        ``log_probs`` and of a mixture ``experts``, as ``generate`` does.

    Raises:
        Overflow: a log-probability is not finite.
    """
    longest = max(len(prompt) + len(answer) for prompt, answer in answers)
    fit = min(LOGITS // (longest * model.config.vocab_size), TOKENS // longest, len(answers))
    size = max(1, fit) * (2 if trainer.doubled else 1)
    log_probs, experts = [], []
    with ExpertRecorder(model) as recorder, autocast(model.device.type, trainer.dtype):
        for first in range(0, len(answers), size):
            part = [*answers, *others][first : first + size]
            rows = [prompt + answer for prompt, answer in part]
            inputs = model_inputs(rows, trainer.packed, model.device)
            logits = model(**inputs, use_cache=False).logits
            wholes, sizes = (logits, recorder.fingerprints(inputs["input_ids"])), [len(row) for row in rows]
            by_row = (whole[0].split(sizes) if trainer.packed else whole for whole in wholes)
            for row, numbers, (prompt, answer) in zip(*by_row, part, strict=True):
                predicting = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)  # a position predicts the next one
                experts.append(numbers[predicting].tolist())
                scores = (row[predicting] / torch.tensor(temperature).to(row)).log_softmax(-1)
                log_probs.append(scores.gather(1, torch.tensor(answer, device=model.device)[:, None])[:, 0].float())
    log_probs = log_probs[: len(answers)]
    if not all(row.isfinite().all() for row in log_probs):
        raise Overflow(f"the trainer's log-probabilities are not finite in {trainer.dtype}")
    line = {"log_probs": [row.tolist() for row in log_probs]}
    return line | ({"experts": experts[: len(answers)]} if recorder.layers else {})


def exact_dtype(masters: "PreTrainedModel") -> str | None:
    """Return the 16-bit dtype that represents every weight exactly, if there is one."""
    exact = lambda name: all(torch.equal(each, each.to(torch_dtype(name)).float()) for each in masters.parameters())
    return next(filter(exact, ("bf16", "fp16")), None)
