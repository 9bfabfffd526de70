"""Make a tiny model of another family for the task: ``python -m recipes.arithmetic.families --family llama --out DIR``.

The model has random weights and the task's tokenizer, so that ``make run MODEL=DIR`` runs a family's code paths through
FSDP, the weight sync and vLLM. It learns nothing in a few steps; it shows that a family runs, and its mismatch.
``python -m recipes.arithmetic.prepare --family llama`` makes one that solves a part of the task.
"""

import argparse
import sys
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from recipes.arithmetic import model

TIED = {"tie_word_embeddings": True}  # vLLM asserts it of Gemma
WINDOWS = {"query_pre_attn_scalar": 64, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}
# transformers' ``model_type``, and the entries of its config besides ``model.SHAPE``.
FAMILIES = {
    "qwen2": {},
    "llama": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    # A router with sigmoid scores and a bias; vLLM asserts both norms of q and k are off by default.
    "glm4_moe": {
        **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_shared_experts": 1},
        **{"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    },
    "gemma": TIED,
    "gemma2": TIED | WINDOWS,
    "gemma3_text": TIED | WINDOWS,
    "phi3": {},  # q, k and v are one layer, as are gate and up
    "mistral": {},
    "olmo2": {},
    # Granite 3's constants, for this head's width; warm-started, it stays below the task's lowest accuracy.
    "granite": {
        **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0},
        "attention_multiplier": 1 / 64,
    },
    "gpt2": TIED | {"n_inner": 384},  # learned positions, transposed layers; verl does not find vLLM's layers
    # Latent attention of DeepSeek's rank, 512: vLLM's CPU build drops a weight that verl sends again.
    "deepseek_v2": {
        **{"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32},
        **{"head_dim": 64, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
        **{"n_shared_experts": 1, "first_k_dense_replace": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    },
}
# Special tokens by which verl 0.9 finds the end of a turn.
TURN_TOKENS = {"qwen3": ["<|im_end|>"], "qwen3_moe": ["<|im_end|>"], "glm4_moe": ["<|user|>", "<|observation|>"]}


def build_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Return the task's tokenizer with the special tokens that verl requires of ``family``."""
    tokenizer = model.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": TURN_TOKENS.get(family, [])})
    return tokenizer


def build_model(family: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """Return the task's model (``model.build_model``) of ``family``.

    Raises:
        KeyError: ``family`` is not one of ``FAMILIES``.
    """
    return model.build_model(tokenizer, seed, family, **FAMILIES[family])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=FAMILIES, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the folder to make; must not exist")
    parser.add_argument("--seed", type=int, default=1, help="of the weights")
    arguments = parser.parse_args()
    if arguments.out.exists():
        sys.exit(f"--out {arguments.out}: exists; give a new folder")
    tokenizer = build_tokenizer(arguments.family)
    build_model(arguments.family, tokenizer, arguments.seed).save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
