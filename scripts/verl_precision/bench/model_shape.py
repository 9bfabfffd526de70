"""Read the dimensions of a decoder of Llama's kind from its ``config.json``, and count its parameters."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_precision.errors import Refused

KINDS = ("llama", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a decoder of Llama's kind."""

    vocab: int
    hidden: int
    intermediate: int  # width of the MLP, or of each expert
    layers: int
    query_width: int  # of all heads
    key_width: int
    head_dim: int
    tied: bool
    bias: bool  # of the query, key and value projections: Qwen2, and the others with attention_bias
    output_bias: bool  # of the attention's output projection: never in Qwen2
    qk_norm: bool  # queries and keys are normalized: Qwen3
    experts: int = 0  # per layer, 0 for a dense model
    active: int = 1  # of them, for each token

    @classmethod
    def of(cls, config: Mapping[str, Any], name: str) -> "ModelShape":
        """Return the shape that a ``config.json`` describes, or refuse it; ``name`` is the model's in messages."""
        kind = config.get("model_type")
        if kind not in KINDS:
            raise Refused(f"MODEL={name}: its model_type is {kind}; supported are {', '.join(KINDS)}")
        moe = kind.endswith("moe")
        width = "moe_intermediate_size" if moe else "intermediate_size"
        needed = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", width]
        needed += ["num_experts", "num_experts_per_tok"] if moe else []
        needed += [key for key in ("num_key_value_heads", "head_dim") if config.get(key) is not None]
        for key in needed:
            if not isinstance(config.get(key), int) or config[key] < 1:
                raise Refused(f"MODEL={name}: {key} is {config.get(key)}; must be a whole number of at least 1")
        if moe and (config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers")):
            raise Refused(f"MODEL={name}: some of its layers have no experts; all layers must have the same structure")
        heads, biased = config["num_attention_heads"], bool(config.get("attention_bias", False))
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        return cls(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            intermediate=config[width],
            layers=config["num_hidden_layers"],
            query_width=heads * head_dim,
            key_width=(config.get("num_key_value_heads") or heads) * head_dim,
            head_dim=head_dim,
            tied=bool(config.get("tie_word_embeddings", False)),
            bias=kind == "qwen2" or biased,
            output_bias=kind != "qwen2" and biased,
            qk_norm=kind.startswith("qwen3"),
            **({"experts": config["num_experts"], "active": config["num_experts_per_tok"]} if moe else {}),
        )

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the head unless the two are tied."""
        return self.vocab * self.hidden

    @property
    def largest_tensor(self) -> int:
        """Parameters of the largest tensor: the embedding, or the gate and up projections of a layer's experts."""
        return max(self.embedding, 2 * self.hidden * self.intermediate * self.experts)

    @property
    def block(self) -> int:
        """Parameters of one layer."""
        attention = 2 * self.hidden * (self.query_width + self.key_width)
        attention += (self.query_width + 2 * self.key_width) * self.bias + self.hidden * self.output_bias
        attention += 2 * self.head_dim * self.qk_norm
        mlp = 3 * self.hidden * self.intermediate * max(1, self.experts) + self.hidden * self.experts
        return attention + mlp + 2 * self.hidden

    @property
    def total(self) -> int:
        """Parameters of the whole model."""
        return self.layers * self.block + self.hidden + (1 if self.tied else 2) * self.embedding

    def saved_bytes(self, c: int) -> int:
        """Return the bytes per token that one layer saves for its backward pass; ``c``: bytes of the compute dtype.

        A norm saves its input in fp32 and in the compute dtype, and its output; attention saves query, key, value and
        output; an MLP saves gate, activated gate, up and their product. Each active expert saves its own copy.
        """
        h, q, k, i = self.hidden, self.query_width, self.key_width, self.intermediate * self.active
        norms = 2 * (4 + 2 * c) * h + (4 + 2 * c) * (q + k) * self.qk_norm
        experts = 2 * c * h * self.active * bool(self.experts)  # the input and output of each
        return norms + 2 * c * (q + k) + 4 * c * i + experts


def model_config(path: str) -> Mapping[str, Any]:
    """Return the ``config.json`` of ``path``: a model's folder, or a model whose dimensions are built in."""
    file = Path(path).expanduser() / "config.json"
    if file.exists():
        try:
            return json.loads(file.read_text())
        except ValueError as error:
            raise Refused(f"MODEL={path}: its config.json is not JSON ({error})") from error
    if path in MODELS:
        return MODELS[path]
    raise Refused(f"MODEL={path}: give a folder with its config.json, or one of {', '.join(MODELS)}")


def entries(kind: str, vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv: int, **more) -> dict:
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": intermediate}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv}
    return {"model_type": kind} | sizes | more


EXPERTS = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
# The config.json of each on the Hugging Face Hub, 2026-11.
MODELS = {
    "Qwen/Qwen2.5-0.5B-Instruct": entries("qwen2", 151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": entries("qwen2", 151936, 1536, 8960, 28, 12, 2),
    "Qwen/Qwen2.5-3B": entries("qwen2", 151936, 2048, 11008, 36, 16, 2, tie_word_embeddings=True),
    "Qwen/Qwen2.5-7B": entries("qwen2", 152064, 3584, 18944, 28, 28, 4),
    "Qwen/Qwen2.5-32B": entries("qwen2", 152064, 5120, 27648, 64, 40, 8),
    "Qwen/Qwen3-8B": entries("qwen3", 151936, 4096, 12288, 36, 32, 8, head_dim=128),
    "Qwen/Qwen3-30B-A3B": entries("qwen3_moe", 151936, 2048, 6144, 48, 32, 4, head_dim=128, **EXPERTS),
    "Qwen/Qwen3-235B-A22B": entries(
        "qwen3_moe", 151936, 4096, 12288, 94, 64, 4, head_dim=128, **EXPERTS | {"moe_intermediate_size": 1536}
    ),
}
