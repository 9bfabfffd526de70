"""Measure the activations and gradients of a model's modules, and report whether they fit into fp16's range.

Everything is computed in fp32, outside autocast: fp16 would turn a large value into inf and hide its size and that of
all values after it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from verl_precision.facts.vllm_float16 import ROLLOUT_DTYPE, Float16Support
from verl_precision.format import significant

LARGEST = torch.finfo(torch.float16).max  # 65504
FLUSH_EXPONENT = -25  # magnitudes below 2**-25 round to 0, those above to 2**-24, fp16's smallest subnormal
HEADROOM = 16  # factor between the largest scaled gradient and 65504, since other batches have larger gradients
LOWEST_EXPONENT, BINS = -149, 279  # frexp's exponents of fp32, -148 to 128, and one bin more


def exponent_counts(gradient: torch.Tensor) -> torch.Tensor:
    """Count the non-zero elements of each exponent e, 2**(e-1) <= |g| < 2**e; int64, ``(BINS,)``."""
    if not gradient.isfinite().all():
        raise ValueError("a gradient is not finite in fp32")
    exponents = torch.frexp(gradient[gradient != 0]).exponent
    return torch.bincount(exponents.long() - LOWEST_EXPONENT, minlength=BINS).cpu()


def flushed_share(counts: torch.Tensor, log2_scale: int) -> float:
    """Return the share of gradients in ``exponent_counts`` that fp16 rounds to zero at a loss scale; NaN if none."""
    below = counts[: max(FLUSH_EXPONENT - log2_scale - LOWEST_EXPONENT + 1, 0)].sum().item()
    return below / counts.sum().item() if counts.any() else math.nan


def largest(tensors: Iterable[torch.Tensor]) -> float:
    return max((tensor.detach().abs().max().item() for tensor in tensors), default=0.0)


@dataclass
class GradientRange:
    """The largest magnitude of gradients, and their ``exponent_counts``."""

    most: float = 0.0
    counts: torch.Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.int64))

    def add(self, gradient: torch.Tensor) -> None:
        self.most = max(self.most, largest([gradient]))
        self.counts += exponent_counts(gradient)


@dataclass
class ModuleRange:
    """The largest magnitudes of one module; gradients are those of one pass at loss scale 1."""

    block: bool  # a transformer block: its input and output are the residual stream
    head: bool  # a direct child of the model without blocks, such as lm_head
    lm_head: bool  # the language model's head: kept in fp32, it multiplies a weight rounded to fp16, its gradient too
    leaf: bool  # without submodules: its outputs count once among all gradients
    shared: bool  # shares a weight with another module, so it cannot be kept; false for lm_head, which may share it
    weight: float  # of the module's own weights, without those of submodules
    input: float = 0.0
    output: float = 0.0
    output_gradients: GradientRange = field(default_factory=GradientRange)
    weight_gradients: GradientRange = field(default_factory=GradientRange)

    @property
    def activation(self) -> float:
        return max(self.input, self.output)

    @property
    def fits(self) -> bool:
        return max(self.activation, self.weight) <= LARGEST

    @property
    def fits_if_kept(self) -> bool:
        """True if it fits when kept in fp32: input and output still pass through fp16, except the output of a head."""
        passed = self.input if self.head else self.activation
        return max(passed, self.weight if self.lm_head else 0) <= LARGEST and not self.shared


def activations_of(tree: object) -> list[torch.Tensor]:
    """Return the tensors with gradient among a module's inputs or outputs; masks have none."""
    return [leaf for leaf in tree_leaves(tree) if torch.is_tensor(leaf) and leaf.requires_grad]


def module_ranges(model: torch.nn.Module) -> dict[str, ModuleRange]:
    blocks = set(model._no_split_modules or ())
    own = {module: list(module.parameters(recurse=False)) for module in model.modules()}
    owners = Counter(parameter for parameters in own.values() for parameter in parameters)
    lm_head, ranges = model.get_output_embeddings(), {}
    for name, module in model.named_modules():
        contains_block = any(type(part).__name__ in blocks for part in module.modules())
        ranges[name] = ModuleRange(
            block=type(module).__name__ in blocks,
            head="." not in name and not contains_block,
            lm_head=module is lm_head,
            leaf=not any(module.children()),
            shared=module is not lm_head and any(owners[parameter] > 1 for parameter in own[module]),
            weight=largest(own[module]),
        )
    del ranges[""]
    return ranges


def measure(model: torch.nn.Module, rows: list[tuple[torch.Tensor, int]]) -> dict[str, ModuleRange]:
    """Run forward and backward passes with the loss of verl's actor at advantages of 1, and record each module.

    The loss is the negative log-likelihood of the answers' tokens, divided by their number in all rows (verl's
    token-mean over a mini-batch). Each pass takes one row, so that no padding is recorded.

    Args:
        model: in fp32, all weights trainable.
        rows: token ids ``(1, prompt + answer)`` and the prompt's length.

    Raises:
        ValueError: the loss or a gradient is not finite in fp32 either.
    """
    ranges = module_ranges(model)
    tokens = sum(ids.shape[1] - prompt for ids, prompt in rows)

    def watch(module, args, kwargs, output, record: ModuleRange):
        outputs = activations_of(output)
        record.input = max(record.input, largest(activations_of((args, kwargs))))
        record.output = max(record.output, largest(outputs))
        for tensor in outputs:
            tensor.register_hook(record.output_gradients.add)

    def watch_weight(parameter, record: ModuleRange):
        record.weight_gradients.add(parameter.grad)
        parameter.grad = None  # only the gradients of one pass are in fp16; their sum is in fp32

    hooks = []
    for name, record in ranges.items():
        module = model.get_submodule(name)
        hooks.append(module.register_forward_hook(partial(watch, record=record), with_kwargs=True))
    for name, parameter in model.named_parameters():
        record = ranges[name.rpartition(".")[0]]
        hooks.append(parameter.register_post_accumulate_grad_hook(partial(watch_weight, record=record)))
    for done, (ids, prompt) in enumerate(tqdm(rows, "passes", unit="answer"), 1):
        logits = model(input_ids=ids, use_cache=False).logits[0, prompt - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, prompt:], reduction="sum") / tokens
        if not loss.isfinite():
            raise ValueError(f"the loss of row {done} is {loss.item()} in fp32")
        loss.backward()
    for hook in hooks:
        hook.remove()
    return ranges


@dataclass(frozen=True)
class Fp16Assessment:
    """Whether and how a model can train in fp16."""

    ranges: dict[str, ModuleRange]
    keep: tuple[str, ...]  # outermost modules to keep in fp32
    misfit: str | None  # the module whose value exceeds fp16 and that no kept module helps
    gradient: tuple[float, str]  # the largest gradient in fp16 at loss scale 1, and the name of its module
    counts: dict[str, torch.Tensor]  # of all gradients in fp16, of weights and of leaf modules' activations

    @property
    def log2_scale(self) -> int:
        """Of the suggested first loss scale, the largest power of two with ``HEADROOM`` above ``gradient``."""
        return math.floor(math.log2(LARGEST / HEADROOM / self.gradient[0]))

    @property
    def scale(self) -> float:
        return 2.0**self.log2_scale

    @property
    def largest_activation(self) -> tuple[float, str]:
        """The largest activation, and the name of its module."""
        return max((record.activation, name) for name, record in self.ranges.items())

    def verdict(self) -> str:
        if self.misfit is None:
            return "fits with these modules in fp32: " + ", ".join(self.keep) if self.keep else "fp16 fits"
        record = self.ranges[self.misfit]
        what, why = "a value that passes between the modules of a block", ""
        most = max(record.activation, record.weight)
        if record.block:
            what, why = "the residual stream", "; no module kept in fp32 helps"
        elif record.lm_head and record.weight > LARGEST:
            what, most, why = "a weight", record.weight, ", which rounds its weight to fp16 even if kept in fp32"
        elif record.shared:
            what, why = "a value", ", which shares its weight and cannot be kept in fp32"
        return f"does not fit: {what} reaches {most:.3g} at {self.misfit}{why}; use bf16"

    def overrides(self, rollout: Float16Support | None = None) -> list[str]:
        """Return Hydra overrides of verl, with a rollout in float32 where one in float16 overflows or is refused.

        One in bfloat16 would mismatch like bf16 on both sides.
        """
        if self.misfit is not None:
            return ["+precision=bf16"]
        actor = "actor_rollout_ref.actor.fsdp_config"
        words = [f"{actor}.keep_fp32_modules=[{','.join(self.keep)}]"] if self.keep else []
        words += [f"{actor}.grad_scaler.init_scale={self.scale:.17g}"]
        words += [f"{actor}.grad_scaler.min_scale={self.scale:.17g}"] if self.scale < 1 else []  # default 1
        refused = rollout is not None and rollout.supported is False
        # A rollout all in fp32 needs no list: it would follow the trainer's, and vLLM before 0.28 refuses a head in it.
        words += ["actor_rollout_ref.rollout.keep_fp32_modules=[]"] if self.keep else []
        # vLLM keeps only routers and the head in fp32: it would overflow in other modules.
        return words + ([f"{ROLLOUT_DTYPE}=float32"] if self.keep or refused else [])


def ancestors(name: str) -> list[str]:
    """Return the enclosing modules, innermost first: ``a.b.c`` -> ``["a.b", "a"]``."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def module_to_keep(ranges: dict[str, ModuleRange], name: str) -> str | None:
    """Return the smallest module to keep in fp32 so that the values at ``name`` fit, or None if there is none."""
    for outer in (name, *ancestors(name)):
        if ranges[outer].block:
            return None  # only the residual stream is outside a block
        if ranges[outer].fits_if_kept:
            return outer if ranges[outer].head or any(ranges[above].block for above in ancestors(outer)) else None
    return None


def assess(ranges: dict[str, ModuleRange]) -> Fp16Assessment:
    """Assess training in fp16 from the ranges of a model's modules; a ValueError if every gradient is zero."""
    too_large = {name: module_to_keep(ranges, name) for name, record in ranges.items() if not record.fits}
    stream = [name for name in too_large if ranges[name].block]
    misfits = stream or [name for name, outer in too_large.items() if outer is None]
    misfit = max(misfits, key=lambda name: ranges[name].activation, default=None)
    kept = set(too_large.values())
    keep = tuple(name for name in ranges if name in kept and kept.isdisjoint(ancestors(name)))

    in_fp16 = {name: record for name, record in ranges.items() if {name, *ancestors(name)}.isdisjoint(keep)}
    rounded = in_fp16 | {name: ranges[name] for name in keep if ranges[name].lm_head}  # those with weights in fp16
    gradients = [(record.output_gradients.most, name) for name, record in in_fp16.items()]
    gradients += [(record.weight_gradients.most, name) for name, record in rounded.items()]
    # What leaves a module in fp32 is cast to fp16, except the loss after a head.
    gradients += [(ranges[name].output_gradients.most, name) for name in keep if not ranges[name].head]
    if not max(gradients)[0]:
        raise ValueError("every gradient is zero")
    none = torch.zeros(BINS, dtype=torch.int64)
    weights = sum((record.weight_gradients.counts for record in rounded.values()), none)
    outputs = sum((record.output_gradients.counts for record in in_fp16.values() if record.leaf), none)
    return Fp16Assessment(ranges, keep, misfit, max(gradients), {"weights": weights, "activations": outputs})


def findings(assessment: Fp16Assessment, rollout: Float16Support, listed: Mapping[str, object]) -> dict[str, str]:
    """Return the findings by name, the verdict first.

    Args:
        rollout: whether vLLM runs the model in float16.
        listed: ``KeptModules.names()`` of what the model's class lists for float16.
    """
    found = {"verdict": assessment.verdict()}
    if not rollout.supported:
        unknown = "not known whether vLLM runs it in float16: " if rollout.supported is None else ""
        found["rollout"] = unknown + rollout.reason
    (activation, name), (gradient, where) = assessment.largest_activation, assessment.gradient
    times = significant(LARGEST / activation)
    found["largest activation"] = f"{activation:.4g} at {name}; fp16's largest, 65504, is {times} times as large"
    found["largest gradient"] = f"{gradient:.3g} at {where}, at loss scale 1"
    found["first loss scale"] = (
        f"2^{assessment.log2_scale} = {assessment.scale:g}: the largest power of two that leaves the largest gradient, "
        f"{gradient:.3g} at {where}, a factor of {HEADROOM} below {LARGEST:g}"
    )
    for kind, counts in assessment.counts.items():
        at_1, at_scale = (flushed_share(counts, log2) for log2 in (0, assessment.log2_scale))
        found[f"flushed, {kind}"] = (
            f"{at_1:.2%} of non-zero gradients at scale 1, {at_scale:.2%} at {assessment.scale:g}"
        )
    if kept := listed.get("keep_fp32"):
        found["in fp32 by the model's class"] = (
            f"{', '.join(kept)}: the trainer follows the class (verl 0.8.0 on); vLLM has its own choice "
            "for each model, and follows keep_fp32_modules only for routers and the head"
        )
    if declined := listed.get("not_kept_fp32"):
        found["listed by the class, not in fp32"] = "; ".join(f"{name}: {why}" for name, why in declined.items())
    return found


def table(assessment: Fp16Assessment) -> list[list[str]]:
    """Return the headings and a row per module, largest activations first."""
    rows = [["module", "activation", "of 65504", "output gradient", "weight gradient"]]
    for name, record in sorted(assessment.ranges.items(), key=lambda item: item[1].activation, reverse=True):
        cells = [f"{name} (keep)" if name in assessment.keep else name]
        cells += [f"{record.activation:.3g}", f"{record.activation / LARGEST:.2g}"]
        rows.append([*cells, f"{record.output_gradients.most:.2g}", f"{record.weight_gradients.most:.2g}"])
    return rows
