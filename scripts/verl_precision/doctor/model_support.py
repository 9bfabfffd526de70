"""Predict which models verl or vLLM cannot run, from their config.json; sources are read, nothing is imported."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_precision.doctor.finding import Finding
from verl_precision.doctor.resolver import MODEL, ROLLOUT, DtypeResolver, server_dtype
from verl_precision.facts.models import config_file, read_config
from verl_precision.facts.packages import package_folder
from verl_precision.facts.vllm_float16 import Float16Support, float16_support, version, ways_out

KV_HEADS = "num_key_value_heads"
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}  # for which vLLM's CPU build has a kernel
ALL_SLIDING = ("mistral", "starcoder2")  # without layer_types; other types then alternate by a rule of their class
OTHER = "another model: docs/reference/limits.md#upstreams-own-limits"


def float16_servers(job: DtypeResolver) -> Iterator[tuple[str, str, Float16Support]]:
    """Yield the keys of dtype and model of each vLLM that the job starts in float16, and whether it runs that model."""
    keys = []
    if job.server == "vllm" and job.effective_dtype("rollout.logits") == "float16":
        keys.append((job.rollout_dtype_key, f"{MODEL}.path"))
    key = job.reward_server_key() if job.uses("reward_model") else None
    if key and job.get(key.replace(".dtype", ".name")) == "vllm" and server_dtype(job.get(key)) == "float16":
        model = "model.path" if key.startswith("reward_model.") else "model_path"
        keys.append((key, key.replace("rollout.dtype", model)))
    for dtype_key, model_key in keys:
        yield dtype_key, model_key, float16_support(str(job.get(model_key)), job.tree.root)


def float16_refusals(job: DtypeResolver) -> Iterator[Finding]:
    """Yield the dtypes of vLLM servers that refuse their model in float16."""
    for key, _, support in float16_servers(job):
        if support.supported is False:
            effect = f"ends the job at its start: {support.reason}"
            yield Finding(key, job.get(key), effect, ways_out(key=key))


def float16_doubts(job: DtypeResolver) -> Iterator[Finding]:
    """Yield the models that the user set for a vLLM server in float16, where it is not known whether that runs them."""
    for _, key, support in float16_servers(job):
        if support.supported is None and key in job.config.user_keys:
            effect = f"may be a model that vLLM refuses in float16; it is not known: {support.reason}"
            fix = "make doctor VERL=SITE-PACKAGES of an environment with the job's vLLM, and the model's folder"
            yield Finding(key, job.get(key), effect, fix)


def unsupported_models(job: DtypeResolver) -> Iterator[Finding]:
    """Yield the model where the actor's worker or the rollout server would end on it.

    Yields nothing where its config.json is not on this machine.
    """
    model, site, on_fsdp = str(job.get(f"{MODEL}.path")), job.tree.root, job.on_fsdp("actor")
    if (file := config_file(model)) is None:
        return
    outer = read_config(file)
    config = outer.get("text_config") or outer
    reasons = [missing_kv_heads(config, site)] if on_fsdp else []
    if job.server == "vllm" and (vllm := package_folder("vllm", site)):
        if on_fsdp:  # Megatron's weights are sent by vLLM's names
            reasons.append(mixtral_weights(config, vllm, site))
        if job.get("trainer.device") == "cpu":
            reasons.append(latent_attention(config, vllm))
            if reason := sliding_window_blocks(config, job.get(ENGINE, {}), vllm):
                yield Finding(f"{MODEL}.path", model, reason, f"+{ENGINE}.block_size=16")
    for reason in filter(None, reasons):
        yield Finding(f"{MODEL}.path", model, reason, OTHER)


def missing_kv_heads(config: Mapping[str, Any], site: Path) -> str | None:
    """Return why verl's ``apply_monkey_patch`` ends on a model: neither its config nor its class has KV_HEADS."""
    kind = str(config.get("model_type"))
    package = package_folder("transformers", site)
    source = package / f"models/{kind}/configuration_{kind}.py" if package else None
    if KV_HEADS in config or source is None or not source.exists() or KV_HEADS in source.read_text():
        return None
    return f"is a {kind} model, whose config has no {KV_HEADS}: verl's apply_monkey_patch ends with an AttributeError"


def mixtral_weights(config: Mapping[str, Any], vllm: Path, site: Path) -> str | None:
    """Return why vLLM cannot load a Mixtral's weights: its loader knows no ``mlp.experts``, transformers 5's name."""
    source, package = vllm / "model_executor/models/mixtral.py", package_folder("transformers", site)
    if config.get("model_type") != "mixtral" or package is None or not source.exists():
        return None
    release = re.search(r'^__version__ = "(\d+)([^"]*)"', (package / "__init__.py").read_text(), re.M)
    if release is None or int(release[1]) < 5 or "gate_up_proj" in source.read_text():
        return None
    return (
        f"is a mixtral model, whose experts transformers {release[1]}{release[2]} names mlp.experts: "
        f"vLLM {version(vllm)} cannot load the weights that verl sends"
    )


def latent_attention(config: Mapping[str, Any], vllm: Path) -> str | None:
    """Return why vLLM's CPU build has no kernel for the latent attention (MLA) of a model."""
    sizes = {key: config.get(key) for key in LATENT}
    if sizes["kv_lora_rank"] is None or sizes == LATENT or not str(config.get("model_type")).startswith("deepseek"):
        return None
    given, needed = (", ".join(f"{key}={value}" for key, value in each.items()) for each in (sizes, LATENT))
    return f"has latent attention (MLA) with {given}: vLLM {version(vllm)}'s CPU build has a kernel for {needed} only"


def sliding_window_blocks(config: Mapping[str, Any], given: Mapping[str, Any], vllm: Path) -> str | None:
    """Return why vLLM's CPU build, with the options ``given``, ends if all layers of a model have a sliding window."""
    source = vllm / "model_executor/layers/attention/attention.py"
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    layers = config.get("layer_types")
    mixed = set(layers) - {"sliding_attention"} if layers else config.get("model_type") not in ALL_SLIDING
    if window is None or mixed or given.get("block_size") == 16 or given.get("disable_sliding_window"):
        return None
    if not source.exists() or "_largest_kernel_block_within" not in source.read_text():
        return None
    return (
        f"has a sliding window of {window} tokens in all layers, whose KV cache gets blocks of 16 tokens: vLLM "
        f"{version(vllm)}'s CPU build ends at the first generation, because its kernel expects blocks of 128"
    )
