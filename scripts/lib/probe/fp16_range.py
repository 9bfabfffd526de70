"""What fp16 would do to a model: how large the values and gradients of its modules are, and what follows from it.

Everything is computed in fp32, outside autocast: a value that fp16 would turn into inf is seen as large as it is, and
so are those that come after it.
"""

import math
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

LARGEST = torch.finfo(torch.float16).max  # 65504
FLUSHED = -25  # a power of two: what is smaller is nearer to 0 than to 2**-24, fp16's smallest subnormal
ROOM = 16  # a suggested loss scale leaves the largest gradient seen so far below 65504: other batches have larger ones
LOWEST, BINS = -149, 279  # exponents of fp32 as frexp gives them, -148 to 128, and a bin more


@dataclass
class Range:
    """What was seen of one module. Magnitudes are the largest ones; a gradient is one of a pass at loss scale 1."""

    block: bool  # a transformer block: its input and output are the residual stream
    head: bool  # a child of the model itself that holds no block, such as lm_head
    leaf: bool  # holds no other module: its outputs are counted once among all gradients
    shared: bool  # shares a weight with another module, so that it cannot have a dtype of its own
    weight: float  # of the module's own weights, as all that is said of weights
    input: float = 0.0
    output: float = 0.0
    output_gradient: float = 0.0
    weight_gradient: float = 0.0
    output_bins: torch.Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.int64))
    weight_bins: torch.Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.int64))

    @property
    def activation(self) -> float:
        return max(self.input, self.output)

    @property
    def fits(self) -> bool:
        return max(self.activation, self.weight) <= LARGEST

    @property
    def fits_outside(self) -> bool:
        """Whether it fits once kept in fp32: what goes in and comes out still passes through fp16, but for a head's."""
        return (self.input if self.head else self.activation) <= LARGEST and not self.shared


def bins(gradient: torch.Tensor) -> torch.Tensor:
    """How many elements have each exponent e, 2**(e-1) <= |g| < 2**e, zeros left out; int64, ``(BINS,)``.

    Raises:
        ValueError: an element is inf or NaN.
    """
    if not gradient.isfinite().all():
        raise ValueError("a gradient is not finite in fp32")
    exponents = torch.frexp(gradient[gradient != 0]).exponent
    return torch.bincount(exponents.long() - LOWEST, minlength=BINS).cpu()


def flushed(counts: torch.Tensor, log2_scale: int) -> float:
    """The share of non-zero gradients that fp16 rounds to zero at loss scale ``2**log2_scale``; NaN without any."""
    below = counts[: max(FLUSHED - log2_scale - LOWEST + 1, 0)].sum().item()
    return below / counts.sum().item() if counts.any() else math.nan


def values(tree: object) -> list[torch.Tensor]:
    """The activations among a module's inputs or outputs: what a gradient flows through. Masks are not."""
    return [leaf for leaf in tree_leaves(tree) if torch.is_tensor(leaf) and leaf.requires_grad]


def largest(tensors: Iterable[torch.Tensor]) -> float:
    return max((tensor.detach().abs().max().item() for tensor in tensors), default=0.0)


def modules_of(model: torch.nn.Module) -> dict[str, Range]:
    """A record for each module, in the model's order, with nothing seen yet."""
    blocks = set(model._no_split_modules or ())
    owners: dict[torch.nn.Parameter, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[parameter] = owners.get(parameter, 0) + 1
    found = {}
    for name, module in model.named_modules():
        holds_block = any(type(part).__name__ in blocks for part in module.modules())
        found[name] = Range(
            block=type(module).__name__ in blocks,
            head="." not in name and not holds_block,
            leaf=not any(module.children()),
            weight=largest(module.parameters(recurse=False)),
            shared=any(owners[parameter] > 1 for parameter in module.parameters(recurse=False)),
        )
    del found[""]
    return found


def measure(
    model: torch.nn.Module, rows: list[tuple[torch.Tensor, int]], show: Callable[[int, dict[str, Range]], None]
) -> dict[str, Range]:
    """Forward and backward passes, a row each, of the loss that verl's actor has where every advantage is 1.

    The loss is the negative log-likelihood of the answers' tokens over the number of them in all rows (verl's
    token-mean over a mini-batch). A row a pass: nothing is padded, and padding would be seen too.

    Args:
        model: in fp32, all weights trained.
        rows: token ids ``(1, prompt + answer)`` and the prompt's length.
        show: called after each row with the rows done and what was seen so far.

    Returns:
        by module name, in the model's order.

    Raises:
        ValueError: the loss or a gradient is not finite in fp32 either.
    """
    seen = modules_of(model)
    tokens = sum(ids.shape[1] - prompt for ids, prompt in rows)

    def watch(name: str, module: torch.nn.Module):
        record = seen[name]

        def forward(module, args, kwargs, output):
            outputs = values(output)
            record.input = max(record.input, largest(values((args, kwargs))))
            record.output = max(record.output, largest(outputs))
            for tensor in outputs:
                tensor.register_hook(backward)

        def backward(gradient):
            record.output_gradient = max(record.output_gradient, largest([gradient]))
            record.output_bins += bins(gradient)

        return module.register_forward_hook(forward, with_kwargs=True)

    def watch_weight(name: str, parameter: torch.nn.Parameter):
        record = seen[name.rpartition(".")[0]]

        def backward(parameter):
            record.weight_gradient = max(record.weight_gradient, largest([parameter.grad]))
            record.weight_bins += bins(parameter.grad)
            parameter.grad = None  # fp16 holds the gradients of a pass; their sum is in fp32

        return parameter.register_post_accumulate_grad_hook(backward)

    hooks = [watch(name, module) for name, module in model.named_modules() if name]
    hooks += [watch_weight(name, parameter) for name, parameter in model.named_parameters()]
    for done, (ids, prompt) in enumerate(rows, 1):
        logits = model(input_ids=ids, use_cache=False).logits[0, prompt - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, prompt:], reduction="sum") / tokens
        if not loss.isfinite():
            raise ValueError(f"the loss of row {done} is {loss.item()} in fp32")
        loss.backward()
        show(done, seen)
    for hook in hooks:
        hook.remove()
    return seen


@dataclass(frozen=True)
class Outlook:
    """What follows for fp16.

    Args:
        keep: modules to keep in fp32, outermost ones.
        misfit: the value that no such module helps against: the name of its module, or ``None``.
        gradient: the largest gradient that fp16 holds, and of which module, at loss scale 1.
        log2_scale: of the suggested first loss scale: the largest power of two that leaves ``ROOM`` above ``gradient``.
        weights, activations: all gradients of weights and of leaf modules' outputs that fp16 holds, as ``bins`` gives.
    """

    keep: tuple[str, ...]
    misfit: str | None
    gradient: tuple[float, str]
    log2_scale: int
    weights: torch.Tensor
    activations: torch.Tensor

    @property
    def scale(self) -> float:
        return 2.0**self.log2_scale


def parents(name: str) -> list[str]:
    """``a.b.c`` -> ``["a.b", "a"]``."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def keeper(seen: dict[str, Range], name: str) -> str | None:
    """The smallest module that, kept in fp32, holds what is too large for fp16 in or about ``name``; or ``None``."""
    for outer in (name, *parents(name)):
        if seen[outer].block:
            return None  # around it there is the residual stream alone
        if seen[outer].fits_outside:
            return outer if seen[outer].head or any(seen[above].block for above in parents(outer)) else None
    return None


def judge(seen: dict[str, Range]) -> Outlook:
    """What the ranges of a model's modules mean for training it in fp16.

    Raises:
        ValueError: no gradient is other than zero.
    """
    too_large = {name: keeper(seen, name) for name, record in seen.items() if not record.fits}
    stream = [name for name in too_large if seen[name].block]
    misfits = stream or [name for name, outer in too_large.items() if outer is None]
    misfit = max(misfits, key=lambda name: seen[name].activation, default=None)
    wanted = {outer for outer in too_large.values() if outer is not None}
    keep = tuple(name for name in seen if name in wanted and wanted.isdisjoint(parents(name)))

    largest_gradient, weights, activations = (0.0, ""), torch.zeros(BINS).long(), torch.zeros(BINS).long()
    for name, record in seen.items():
        if not {name, *parents(name)}.isdisjoint(keep):
            if name in keep and not record.head:
                largest_gradient = max(largest_gradient, (record.output_gradient, name))
            continue  # in fp32
        largest_gradient = max(largest_gradient, (max(record.output_gradient, record.weight_gradient), name))
        weights += record.weight_bins
        activations += record.output_bins if record.leaf else 0
    if not largest_gradient[0]:
        raise ValueError("every gradient is zero")
    log2_scale = math.floor(math.log2(LARGEST / ROOM / largest_gradient[0]))
    return Outlook(keep, misfit, largest_gradient, log2_scale, weights, activations)


def overrides(outlook: Outlook, bf16_rollout: bool = False) -> list[str]:
    """Return the outlook as Hydra overrides of verl; with ``bf16_rollout`` the rollout is in bfloat16 anyway."""
    if outlook.misfit is not None:
        return ["+precision=bf16"]
    actor = "actor_rollout_ref.actor.fsdp_config"
    words = [f"{actor}.keep_fp32_modules=[{','.join(outlook.keep)}]"] if outlook.keep else []
    words += [f"{actor}.grad_scaler.init_scale={outlook.scale:g}"]
    words += [f"{actor}.grad_scaler.min_scale={outlook.scale:g}"] if outlook.scale < 1 else []  # its default is 1
    # A rollout server has no such list: what overflows here would overflow there.
    return words + (["actor_rollout_ref.rollout.dtype=bfloat16"] if outlook.keep or bf16_rollout else [])


def verdict(seen: dict[str, Range], outlook: Outlook) -> str:
    """One sentence."""
    if outlook.misfit is None and not outlook.keep:
        return "fp16 fits"
    if outlook.misfit is None:
        return "fits with these modules in fp32: " + ", ".join(outlook.keep)
    record = seen[outlook.misfit]
    reaches = f"reaches {max(record.activation, record.weight):.3g} at {outlook.misfit}"
    if record.block:
        return f"does not fit: the residual stream {reaches}; no module kept in fp32 helps, use bf16"
    if record.shared:
        return f"does not fit: a value {reaches}, which shares its weight and cannot be kept in fp32; use bf16"
    return f"does not fit: a value that passes between the modules of a block {reaches}; use bf16"


def columns(outlook: Outlook) -> list[str]:
    gradients = ["output gradient", "weight gradient"]
    return ["module", "activation", "of 65504", *gradients, "flushed at 1", f"flushed at 2^{outlook.log2_scale}"]


def lines(seen: dict[str, Range], outlook: Outlook) -> list[list]:
    """A line of the table for each module, those with the largest activations first; shares are of both gradients."""
    ordered = sorted(seen.items(), key=lambda item: item[1].activation, reverse=True)
    return [
        [
            name,
            record.activation,
            record.activation / LARGEST,
            record.output_gradient,
            record.weight_gradient,
            *(flushed(record.output_bins + record.weight_bins, log2) for log2 in (0, outlook.log2_scale)),
        ]
        for name, record in ordered
    ]


def cells(line: list, outlook: Outlook) -> list[str]:
    """A line of ``lines`` as text; a kept module is marked."""
    name, activation, of_largest, *gradients, at_1, at_scale = line
    mark = " (keep)" if name in outlook.keep else ""
    return [name + mark, f"{activation:.3g}", f"{of_largest:.2g}", *(f"{g:.2g}" for g in gradients)] + [
        "-" if math.isnan(share) else f"{share:.2%}" for share in (at_1, at_scale)
    ]


def summary(seen: dict[str, Range], outlook: Outlook) -> dict[str, str]:
    name, record = max(seen.items(), key=lambda item: item[1].activation)
    gradient, where = outlook.gradient
    scales = (0, outlook.log2_scale)
    shares = {kind: [flushed(counts, log2) for log2 in scales] for kind, counts in kinds(outlook).items()}
    return {
        "verdict": verdict(seen, outlook),
        "largest activation": f"{record.activation:.4g} at {name}; fp16 holds {LARGEST:g}",
        "largest gradient": f"{gradient:.3g} at {where}, at loss scale 1",
        "first loss scale": f"2^{outlook.log2_scale} = {outlook.scale:g}: the largest power of two that leaves that "
        f"gradient a factor {ROOM} below {LARGEST:g}",
        **{
            f"flushed, {kind}": f"{at_1:.2%} of non-zero gradients at scale 1, {at_scale:.2%} at {outlook.scale:g}"
            for kind, (at_1, at_scale) in shares.items()
        },
    }


def kinds(outlook: Outlook) -> dict[str, torch.Tensor]:
    return {"weights": outlook.weights, "activations": outlook.activations}


def plot(seen: dict[str, Range], outlook: Outlook, title: str, file: Path) -> None:
    """The largest activation of each module in the model's order, and the gradients' distribution over fp16's range."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    place = {name: index for index, name in enumerate(seen)}
    parts = {
        "residual stream (blocks)": [name for name in seen if seen[name].block],
        "leaf modules": [name for name in seen if seen[name].leaf],
    }
    for label, names in parts.items():
        names = [name for name in names if seen[name].activation]
        left.plot([place[n] for n in names], [seen[n].activation for n in names], "o", markersize=4, label=label)
    left.axhline(LARGEST, color="tab:red", label="65504")
    worst, activation, *_ = lines(seen, outlook)[0]
    left.set(title=f"largest |activation|: {activation:.3g} at {worst}")
    left.set(yscale="log", xlabel="module, in the model's order")
    left.legend(fontsize=8)

    edges = torch.arange(BINS + 1) + LOWEST - 1
    for kind, counts in kinds(outlook).items():
        right.stairs(counts / counts.sum(), edges, label=f"gradients of {kind}")
    for log2_scale, color in ((0, "tab:red"), (outlook.log2_scale, "tab:green")):
        label = f"fp16's range at loss scale 2^{log2_scale}"
        right.axvspan(FLUSHED - log2_scale, math.log2(LARGEST) - log2_scale, color=color, alpha=0.12, label=label)
    smallest = edges[:-1][(outlook.weights + outlook.activations) > 0].min().item()
    right.set_xlim(max(min(smallest, FLUSHED - outlook.log2_scale), -60) - 2, 18 - min(outlook.log2_scale, 0))
    right.set(xlabel="log2 |gradient|", title="share of the non-zero gradients, a power of two a bin")
    right.legend(fontsize=8)
    figure.suptitle(textwrap.fill(f"{title}: {verdict(seen, outlook)}", 160), fontsize=10)
    figure.savefig(file, dpi=120)
    plt.close(figure)
