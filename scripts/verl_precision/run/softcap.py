"""Report models that transformers' sdpa changes without an error: it leaves out the cap of their attention logits."""

from verl_precision.run.vllm_float16 import config_file, read_config

ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"


def lost_softcap(model: str, attention: str | None) -> str | None:
    """Return what a trainer with this attention leaves out of ``model``, a folder or a name on the Hugging Face Hub.

    Args:
        attention: transformers' name of the implementation; None for verl's default, flash attention 2, which caps.
    """
    if attention != "sdpa" or (file := config_file(model)) is None:
        return None
    if (cap := read_config(file).get("attn_logit_softcapping")) is None:
        return None
    return (
        f"leaves out the cap of the attention logits of {model} (attn_logit_softcapping={cap:g}) without an error, "
        "and the rollout applies it"
    )
