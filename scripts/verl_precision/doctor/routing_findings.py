"""Findings on the routers of a mixture of experts: replayed routes, and routers in fp32 on one side alone."""

from collections.abc import Iterator
from fnmatch import fnmatchcase

from verl_precision.doctor.finding import Finding
from verl_precision.doctor.resolver import ROLES, ROLLOUT, DtypeResolver

ACTOR = ROLES["actor"]
RECORD = f"{ROLLOUT}.enable_rollout_routing_replay"
ROUTERS = ("model.layers.0.mlp.gate", "model.layers.0.mlp.router", "model.layers.0.block_sparse_moe.gate")
ENGINES = ("megatron", "veomni")  # that replay routes, where their config has the key


def routing_findings(resolver: DtypeResolver) -> Iterator[Finding]:
    yield from router_replay(resolver)
    yield from routers_of_one_side(resolver)


def router_replay(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield what replays the routes of the rollout (R3) or of the old log-probabilities (R2), and what cannot."""
    config, strategy = resolver.config, resolver.config.get(f"{ACTOR}.strategy", "fsdp")
    # Up to 0.7.0 Megatron's worker reads the actor's key; later releases have one for each engine, and 0.7.1 both.
    of_engine = [engine for engine in ENGINES if config.has(f"{ACTOR}.{engine}.router_replay")]
    keys = {f"{ACTOR}.{engine}.router_replay.mode": engine for engine in of_engine}
    keys[f"{ACTOR}.router_replay.mode"] = "megatron" if resolver.legacy else "no engine"
    modes = {key: mode for key in keys if (mode := config.get(key)) not in (None, "disabled")}
    instead = f"{resolver.engine_node('actor')}.keep_fp32_modules=[model.layers.*.gate] routes both sides in fp32"
    mend = instead if resolver.tree.precision and not resolver.legacy else f"{ACTOR}.strategy=megatron"
    for key, mode in modes.items():
        if keys[key] != strategy:
            effect = f"is read by {keys[key]} alone: strategy={strategy} recomputes the routes and replays none"
            yield Finding(key, mode, effect, mend, applies=False)
        elif mode == "R3" and not config.get(RECORD):
            yield Finding(key, mode, "replays the routes of the rollout, which does not return them", f"{RECORD}=true")
        else:
            source = "the rollout" if mode == "R3" else "the old log-probabilities"
            effect = f"replays the routes of {source}: their dtype decides the experts of the trainer, too"
            yield Finding(key, mode, effect, "nothing to do")
    if config.get(RECORD) and not any(keys[key] == strategy for key in modes):
        effect = f"returns the routes of the rollout to strategy={strategy}, which replays none"
        yield Finding(RECORD, True, effect, f"{RECORD}=false", applies=False)


def routers_of_one_side(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield routers that the trainer keeps in fp32 and the rollout server does not."""
    config = resolver.config
    server = resolver.server
    key = f"{resolver.engine_node('actor')}.keep_fp32_modules"
    routers = [pattern for pattern in config.get(key, []) if any(fnmatchcase(name, pattern) for name in ROUTERS)]
    if routers and resolver.tree.precision and server != "vllm":
        effect = f"is not followed by {server}, whose routers choose other experts in 16 bits"
        yield Finding(key, routers, effect, f"{ROLLOUT}.name=vllm")
