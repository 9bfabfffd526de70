"""Find and read the config.json of a model; nothing is downloaded."""

import json
import os
from pathlib import Path

from verl_precision.errors import Refused

GEMMA4 = ("gemma4", "gemma4_text")  # transformers' names of E2B, E4B, 26B-A4B and 31B, and of their language models
ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"


def config_file(model: str) -> Path | None:
    """Return the config.json of a model's folder, or of the Hub's model in the local cache."""
    local = Path(model).expanduser() / "config.json"
    if local.exists():
        return local
    caches = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", caches)) / "hub"
    cached = Path(hub).expanduser() / f"models--{model.replace('/', '--')}"
    main = cached / "refs/main"
    config = cached / "snapshots" / main.read_text().strip() / "config.json" if main.exists() else None
    return config if config and config.exists() else None


def read_config(file: Path) -> dict:
    try:
        return json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise Refused(f"{file} is not JSON: {error}") from error


def read_text_config(file: Path) -> dict:
    """Return the language model's part of a config.json: its ``text_config``, or all where it has none."""
    outer = read_config(file)
    return outer.get("text_config") or outer


def attention_width(file: Path) -> tuple[int, int]:
    """Return the largest attention head and the rank of latent attention that a config.json states, or 0."""
    config = read_text_config(file)
    return max(config.get("head_dim") or 0, config.get("global_head_dim") or 0), config.get("kv_lora_rank") or 0


def lost_softcap(model: str, attention: str | None) -> str | None:
    """Return what a trainer with this attention leaves out of ``model``, a folder or a name on the Hugging Face Hub.

    transformers' sdpa ignores the cap of the attention logits; verl's default, flash attention 2 (None), applies it.
    """
    if attention != "sdpa" or (file := config_file(model)) is None:
        return None
    if (cap := read_config(file).get("attn_logit_softcapping")) is None:
        return None
    return (
        f"leaves out the cap of the attention logits of {model} (attn_logit_softcapping={cap:g}) without an error, "
        "and the rollout applies it"
    )


def float16_report(model: str) -> str | None:
    """Return what was reported of a model in float16 that vLLM does not refuse; None without a report.

    Of Gemma 4 the measurements of another trainer differ. Not included: images, for which vLLM's vision tower overflows
    (vllm-project/vllm #40290).
    """
    file = config_file(model)
    kind = read_config(file).get("model_type") if file else None
    if kind not in GEMMA4:
        return None
    return (
        f"is a {kind} model. In float16 another trainer's GRPO ended at step 2, by an overflow in "
        "layers.0.mlp.down_proj (unslothai/unsloth-zoo #600), and gradients overflowed (#866); supervised training fit "
        "(unslothai/unsloth #4875)"
    )
