"""Run kernels of a verl job on the CPU, in Triton's interpreter, and compare them with float64.

    python -m verl_precision.kernels.arithmetic [DTYPE ...]

prints a JSON object for each kernel, situation and dtype, by default all of DTYPES. bfloat16 is refused: the
interpreter computes it wrongly (https://github.com/triton-lang/triton/issues/5424).
"""

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported

import torch
import torch.nn.functional as F

from verl_precision.errors import Refused
from verl_precision.kernels import vllm_cases
from verl_precision.kernels.cases import Missing, load, load_file
from verl_precision.kernels.generations import GENERATIONS
from verl_precision.process import stdout_of_json

TOKENS, HIDDEN, VOCABULARY = 6, 128, 300  # the vocabulary is not a multiple of a block
SCALE = 65536.0  # torch's first loss scale
DTYPES = ("float16", "float32")
COMPARISONS = 31  # of a dtype

# What is added to the logits of all tokens, by the first of the hidden dimensions.
SHIFTS = {
    "usual logits": 0.0,
    "all logits near -56": -56.0,
    "all logits near -100": -100.0,
    "all logits near -116": -116.0,
    "all logits near 60000": 60000.0,
}


def checked(dtype: str) -> torch.dtype:
    """Return the dtype, or refuse one that the interpreter computes wrongly."""
    if dtype not in DTYPES:
        raise Refused(f"{dtype}: Triton's interpreter is used for {' and '.join(DTYPES)} only (triton#5424)")
    return getattr(torch, dtype)


def situations(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield hidden states (TOKENS, HIDDEN), the head's weights (VOCABULARY, HIDDEN) and labels (TOKENS,), by name."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator) * HIDDEN**-0.5
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    hidden[:, 0] = 1
    for name, shift in SHIFTS.items():
        shifted = weight.clone()
        shifted[:, 0] = shift
        yield name, hidden.to(dtype), shifted.to(dtype), labels
    huge = weight.clone()
    huge[labels[0], 0] = 60000
    yield "one logit of 60000", hidden.to(dtype), huge.to(dtype), labels
    yield "subnormal weights", hidden.to(dtype), (weight * 1e-6).to(dtype), labels


def exact(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, gradient: torch.Tensor) -> list:
    """Return log-probabilities, entropies, and the gradients of hidden states and weights, in float64."""
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_probs = (hidden @ weight.T).log_softmax(-1)
    chosen = log_probs.gather(1, labels[:, None])[:, 0]
    chosen.backward(gradient.double())
    return [chosen.detach(), -(log_probs.exp() * log_probs).sum(-1).detach(), hidden.grad, weight.grad]


def eager(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, gradient: torch.Tensor) -> list:
    """Return the same as verl computes it without a fused head: logits in the dtype, their softmax in float32."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    log_probs = (hidden @ weight.T).float().log_softmax(-1)
    chosen = log_probs.gather(1, labels[:, None])[:, 0]
    chosen.backward(gradient)
    return [chosen.detach(), -(log_probs.exp() * log_probs).sum(-1).detach(), hidden.grad, weight.grad]


def fused_head(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, gradient: torch.Tensor) -> list:
    """Return the same from verl's Triton kernels."""
    kernels = load("verl.utils.kernel.kernels")
    kernels.set_backward_method(kernels.BackwardEnum._Split_Dlogits_N)  # verl's default
    with patch.object(torch.Tensor, "is_cuda", True, create=True):
        log_probs, entropy, *rest = kernels.efficient_entropy_forward(hidden, weight, labels, 0, 1.0)
        gradients = gradient, torch.zeros_like(entropy)
        result = kernels.efficient_entropy_backward(*gradients, hidden, weight, labels, *rest, 0, False, 1.0)
    return [log_probs, entropy, *result]


def error(found: torch.Tensor, expected: torch.Tensor, relative: bool = False) -> float:
    """Return the largest error, as a share of the largest expected value if ``relative``; inf if a value is nan."""
    largest = (found.double() - expected).abs().max().item()
    largest /= (expected.abs().max().item() or 1.0) if relative else 1.0
    return math.inf if math.isnan(largest) else largest


def heads(dtype: torch.dtype) -> Iterator[dict]:
    """Compare verl's fused head, and verl's way without it, under a loss scale over the number of tokens."""
    gradient = torch.full((TOKENS,), SCALE / TOKENS)
    for situation, hidden, weight, labels in situations(dtype):
        expected = exact(hidden, weight, labels, gradient)
        for kernel, compute in (("verl: fused head", fused_head), ("without it", eager)):
            found = compute(hidden, weight, labels, gradient)
            errors = [error(*pair, relative=index > 1) for index, pair in enumerate(zip(found, expected, strict=True))]
            named = dict(zip(("log_prob", "entropy", "hidden", "weight"), errors, strict=True))
            yield {"kernel": kernel, "situation": situation, **named}


def cross_entropy(dtype: torch.dtype) -> Iterator[dict]:
    """Compare flash-attn's cross entropy with in-place gradients, one of whose rows is masked."""
    module = load_file("flash_attn", "ops/triton/cross_entropy.py")
    for situation, hidden, weight, labels in situations(dtype):
        logits, labels = (hidden @ weight.T).clamp(-65504, 65504), labels.clone()
        labels[-1] = -100
        wanted = logits.double().requires_grad_()
        expected = F.cross_entropy(wanted, labels, reduction="none")
        (expected * SCALE / TOKENS).sum().backward()
        logits = logits.requires_grad_()
        with patch.object(torch.cuda, "device", lambda *_: nullcontext()):
            loss, _ = module.cross_entropy_loss(logits * 1, labels, inplace_backward=True)
            (loss * SCALE / TOKENS).sum().backward()
        errors = {"log_prob": error(loss, expected.detach()), "logits": error(logits.grad, wanted.grad, True)}
        yield {"kernel": "flash-attn: cross entropy", "situation": situation, **errors}


def sampled(dtype: torch.dtype) -> Iterator[dict]:
    """Compare the log-probabilities that vLLM computes for sampled tokens, from logits that it has cast to float32."""
    compute = load("vllm.v1.worker.gpu.sample.logprob", "compute_token_logprobs")
    for situation, hidden, weight, labels in situations(dtype):
        logits = (hidden @ weight.T).float()
        expected = logits.double().log_softmax(-1).gather(1, labels[:, None])
        yield {
            "kernel": "vLLM: log-probabilities",
            "situation": situation,
            "log_prob": error(compute(logits, labels[:, None]), expected),
        }


def attention(dtype: torch.dtype) -> Iterator[dict]:
    """Compare vLLM's unified attention of one causal sequence."""
    unified = load("vllm.v1.attention.ops.triton_unified_attention", "unified_attention")
    heads, kv_heads, size, length, block = 4, 2, 64, 24, 16
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(length, each, size, generator=generator) for each in (heads, kv_heads, kv_heads))
    for situation, factor in (("usual values", 1.0), ("products above 65504", 120.0), ("subnormal keys", 1e-6)):
        q, k, v = (query * max(factor, 1.0)).to(dtype), (key * factor).to(dtype), value.to(dtype)
        cache = torch.zeros(2, 2, block, kv_heads, size, dtype=dtype)
        for source, target in ((k, cache[0]), (v, cache[1])):
            target.view(-1, kv_heads, size)[:length] = source
        table, lengths = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
        starts, out = torch.tensor([0, length], dtype=torch.int32), torch.empty_like(q)
        settings = size**-0.5, True, (-1, -1), table, 0.0, None, None, None
        unified(q, cache[0], cache[1], out, starts, length, lengths, length, *settings)
        wide = [each.double().transpose(0, 1)[None] for each in (q, k, v)]
        expected = F.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        yield {"kernel": "vLLM: unified attention", "situation": situation, "output": error(out, expected, True)}


def main(*dtypes: str) -> None:
    chosen = [checked(name) for name in dtypes or DTYPES]
    lines = stdout_of_json()
    vllm_cases.become(GENERATIONS["sm80"])
    print(json.dumps({"kernels": len(chosen) * COMPARISONS}), file=lines)
    for dtype in chosen:
        for compare in (heads, cross_entropy, sampled, attention):
            try:
                for row in compare(dtype):
                    print(json.dumps({"dtype": str(dtype).removeprefix("torch."), **row}), file=lines)
            except Missing as missing:
                print(json.dumps({"missing": str(missing)}), file=lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
