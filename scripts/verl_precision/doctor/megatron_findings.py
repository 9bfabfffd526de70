"""Findings on a role that Megatron trains: its loss scaler, and the dtypes of its gradients and optimizer."""

from collections.abc import Iterator

from verl_precision.doctor import dtype_rules
from verl_precision.doctor.dtype_rules import MEGATRON_ENGINE
from verl_precision.doctor.finding import Finding
from verl_precision.doctor.resolver import ROLES, DtypeResolver
from verl_precision.facts.dtypes import SPELLINGS

# Of megatron-core's OptimizerConfig. verl's own keys of the last three take effect in bf16 alone.
OPTIMIZER_DTYPES = ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
REDUCE_IN_FP32 = "override_ddp_config.grad_reduce_in_fp32"
# The line of 0.9.1 that sets grad_reduce_in_fp32 for Megatron-Bridge, whose default is false.
EXPLICIT_REDUCTION = 'override_ddp_config["grad_reduce_in_fp32"] = not use_low_precision_main_grads'


def megatron_findings(resolver: DtypeResolver, role: str) -> Iterator[Finding]:
    yield from overflow(resolver, role)
    yield from reduction(resolver, role)
    yield from optimizer_dtypes(resolver, role)


def overflow(resolver: DtypeResolver, role: str) -> Iterator[Finding]:
    """Yield Megatron's own loss scaler, at whose first overflow upstream ends the run."""
    mended = resolver.tree.precision and not resolver.legacy
    if mended or resolver.effective_dtype(f"{role}.compute") != "float16":
        return
    key = f"{resolver.engine_node(role)}.dtype"
    patch = f"{dtype_rules.SKIP}: {resolver.tree.apply_command}"
    mend = f"{ROLES[role]}.strategy=fsdp" if resolver.legacy else patch
    effect = "ends the run at the first overflow with a NotImplementedError"
    yield Finding(key, resolver.config.get(key), effect, mend)


def reduction(resolver: DtypeResolver, role: str) -> Iterator[Finding]:
    """Yield gradients that are summed over the ranks in 16 bits, and the key, or the missing key, that decides it."""
    get, node, compute = resolver.config.get, resolver.engine_node(role), resolver.effective_dtype(f"{role}.compute")
    key, grads = f"{node}.{REDUCE_IN_FP32}", f"{ROLES[role]}.optim.main_grads_dtype"
    effect = f"sums the {role}'s gradients over the ranks in {compute}"
    in_fp32 = get(key)
    if in_fp32 is None and lowers_gradients(resolver, role):
        yield Finding(grads, get(grads), effect, f"{grads}=fp32")
    elif in_fp32 is None and get(f"{node}.use_mbridge") and get(f"{node}.vanilla_mbridge") is False:
        engine = resolver.tree.root / "verl" / MEGATRON_ENGINE
        if EXPLICIT_REDUCTION not in engine.read_text():
            unset = f"is not set, and Megatron-Bridge's default {effect}"
            yield Finding(key, None, unset, f"+{key}=true")
    elif in_fp32 is False:
        yield Finding(key, False, effect, f"{key}=true")


def lowers_gradients(resolver: DtypeResolver, role: str) -> bool:
    """Return whether verl's optimizer keys request gradients in 16 bits, which its engine reads in any dtype."""
    optim = f"{ROLES[role]}.optim"
    dtype = resolver.config.get(f"{optim}.main_grads_dtype", "fp32")
    return bool(resolver.config.get(f"{optim}.use_precision_aware_optimizer")) and dtype not in SPELLINGS["float32"]


def refused_optimizer(resolver: DtypeResolver, role: str) -> str | None:
    """Return the line with which megatron-core refuses a dtype of its optimizer; None without one.

    verl hands it over as text, which equals no dtype of torch, ``fp32`` neither.
    """
    get, optim = resolver.config.get, f"{ROLES[role]}.optim"
    override = f"{optim}.override_optimizer_config"
    aware = (f"{optim}.use_precision_aware_optimizer", f"{override}.use_precision_aware_optimizer")
    if resolver.effective_dtype(f"{role}.compute") == "float16" or any(map(get, aware)):
        return None
    named = [name for name in OPTIMIZER_DTYPES if get(f"{override}.{name}")]
    refusal = "can only be fp32 when not using precision-aware optimizer"
    return f"AssertionError: {named[0]} {refusal}" if named else None


def optimizer_dtypes(resolver: DtypeResolver, role: str) -> Iterator[Finding]:
    """Yield dtypes of the optimizer that are refused, not read, or that store its state in 16 bits."""
    get, optim, compute = resolver.config.get, f"{ROLES[role]}.optim", resolver.effective_dtype(f"{role}.compute")
    for name in OPTIMIZER_DTYPES:
        own, override = f"{optim}.{name}", f"{optim}.override_optimizer_config.{name}"
        if value := get(override):
            effect = "reaches the optimizer as text, where it expects a dtype of torch"
            yield Finding(override, value, effect, f"remove it: the default of {name} is float32")
        if (value := get(own, "fp32")) in SPELLINGS["float32"]:
            continue
        if not get(f"{optim}.use_precision_aware_optimizer"):
            effect = f"is not read without {optim}.use_precision_aware_optimizer=true"
            yield Finding(own, value, effect, f"{own}=fp32", applies=False)
        elif compute == "float16":
            effect = "is not read by the optimizer of an fp16 trainer, which keeps float32"
            yield Finding(own, value, effect, f"{own}=fp32", applies=False)
        elif name.startswith("exp_avg"):
            yield Finding(own, value, f"stores AdamW's moments of the {role} in 16 bits", f"{own}=fp32")
