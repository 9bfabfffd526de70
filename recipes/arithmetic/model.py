"""A transformer and a byte-level tokenizer, made from scratch, small enough for two CPU cores."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

# No roles: the start token and the bare prompt.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "initializer_range": 0.05,  # learns in half the steps that the usual 0.02 takes at this width
    "tie_word_embeddings": False,
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 259 tokens: one per byte, so that any text round-trips, and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],  # the only inputs of the model
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, family: str = "qwen2", **entries: object
) -> PreTrainedModel:
    """Return a causal language model of about 0.5 M parameters with float32 weights drawn from ``seed``.

    Its vocabulary is exactly the tokenizer's: rollouts mask logits beyond the tokenizer's length and training does
    not, so a larger vocabulary would add to the mismatch.

    Args:
        family: transformers' ``model_type``.
        entries: of the model's config, besides ``SHAPE`` or instead of it.
    """
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **(SHAPE | tokens | entries))
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
