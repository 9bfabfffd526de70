"""Model the memory of training one model on one rank: the resident parts, and those of each moment of a step.

Follows the engine of verl 0.9 (``workers/engine/fsdp``) and torch's FSDP1 and FSDP2. All sizes are in bytes and of one
rank. docs/how-to/plan-memory.md lists what is exact, what is assumed and what is unknown.
"""

from dataclasses import dataclass

from verl_precision.bench.model_shape import ModelShape
from verl_precision.facts.dtypes import BYTES

# Bytes per logit when the backward pass of the loss begins, beside the logits themselves, of c bytes each.
# cpu: log_softmax, the zeros of gather's backward, and the gradient added to them, all in fp32. cuda: flash-attn's
# cross entropy writes its gradient over the logits. npu: log-probabilities and a gradient in the logits' dtype.
LOSS = {"cpu": lambda c: 12, "cuda": lambda c: 0, "npu": lambda c: 2 * c}
ENTROPY = 10  # bytes per logit of the entropy in its eager form, in fp32; compiled it takes none


@dataclass(frozen=True)
class TrainedModel:
    """A model in training, on one rank.

    Args:
        critic: whether the head has a single output.
        strategy: ``fsdp`` or ``fsdp2``.
        shards: ranks that share the parameters.
        tokens: of a micro-batch on this rank, after sequence parallelism.
        micro_batches: per optimizer step.
        compute, reduce, base: names of dtypes; ``base`` is the weights', of which LoRA trains none.
        lora_rank: of adapters on all projections, which are fp32 and alone trained; 0 without LoRA.
        device: ``cpu``, ``cuda`` or ``npu``.
        offload_params, offload_adam: whether they move to the host while another model, or the rollout, is at work.
        deferred: gradients are reduced after the last micro-batch only (``use_no_sync_for_gradient_accumulation``).
        fused_head: the logits are never materialized (``use_fused_kernels``).
        logits_twice: two copies of the logits exist: before and after a temperature other than 1, or with and without
            padding.
    """

    shape: ModelShape
    critic: bool
    strategy: str
    shards: int
    tokens: int
    micro_batches: int
    compute: str
    device: str
    checkpointing: bool
    reduce: str = "float32"
    base: str = "float32"
    lora_rank: int = 0
    offload_params: bool = False
    offload_adam: bool = False
    deferred: bool = False
    fused_head: bool = False
    logits_twice: bool = False

    @property
    def head(self) -> int:
        """Parameters of the head, 0 if it is tied to the embedding."""
        return self.shape.hidden + 1 if self.critic else 0 if self.shape.tied else self.shape.embedding

    @property
    def parameters(self) -> int:
        return self.shape.layers * self.shape.block + self.shape.embedding + self.shape.hidden + self.head

    @property
    def adapters(self) -> int:
        """Parameters of a layer's LoRA adapters."""
        return self.shape.adapters(self.lora_rank)

    @property
    def trained(self) -> int:
        return self.shape.layers * self.adapters if self.lora_rank else self.parameters

    @property
    def weights(self) -> int:
        """Bytes of this rank's shard of the weights, and of its fp32 adapters."""
        return (BYTES[self.base] * self.parameters + 4 * self.shape.layers * self.adapters) // self.shards

    @property
    def adam(self) -> int:
        """Bytes of this rank's shard of Adam's two moments."""
        return 2 * (4 if self.lora_rank else BYTES[self.base]) * self.trained // self.shards

    @property
    def idle(self) -> dict[str, int]:
        """Return the parts that stay on the device while another model, or the rollout, is at work."""
        return {
            "weights": 0 if self.offload_params else self.weights,
            "Adam": 0 if self.offload_adam else self.adam,
        }

    @property
    def logit_elements(self) -> int:
        """Elements in the logits of one micro-batch."""
        return 0 if self.critic or self.fused_head else self.tokens * self.shape.vocab

    @property
    def logits(self) -> int:
        return (1 + self.logits_twice) * self.logit_elements * BYTES[self.compute]

    def activations(self) -> tuple[int, int]:
        """Return the bytes saved at the end of the forward pass, and those of one layer that backward recomputes."""
        c, upcast = BYTES[self.compute], self.device == "cpu" and self.compute == "float16"
        layer = self.shape.saved_bytes(c, upcast)
        copies = 4 * (self.shape.layers * self.shape.block + self.head) if upcast and not self.checkpointing else 0
        each = c * self.shape.hidden if self.checkpointing else layer
        end = (4 + (c + 4 if upcast else 2 * c)) * self.shape.hidden
        return self.tokens * (self.shape.layers * each + end) + copies, self.checkpointing * self.tokens * layer

    def update_moments(self) -> dict[str, dict[str, int]]:
        """Return the moments of an update at which memory may peak, and the bytes of each part.

        ``loss``: its backward begins. ``head``: its gradient is computed and reduced. ``layer``: backward of the last
        layer. ``embedding``: the gradient of the embedding, under FSDP1 of all parameters outside the layers, is
        reduced, and all other gradients exist. ``step``: the optimizer's.
        """
        s, c, r, n = self.shape, BYTES[self.compute], BYTES[self.reduce], self.shards
        one, several = self.strategy == "fsdp", self.micro_batches > 1
        saved, again = self.activations()
        # Parameters that are gathered, and those that have gradients.
        block, outside = s.block + self.adapters, s.embedding + s.hidden + self.head
        if self.lora_rank:
            block_trained, embedding, head, outside_trained = self.adapters, 0, 0, 0
            largest = self.lora_rank * max(s.hidden, s.query_width, s.intermediate)
        else:
            block_trained, embedding, head, outside_trained = block, s.embedding, self.head, outside
            largest = max(embedding, head)
        gradients = r * self.trained // n
        earlier = gradients if several else 0
        if self.deferred and several:  # unsharded: FSDP1 accumulates in the compute dtype, FSDP2 in the reduce dtype
            earlier = (c if one else r) * self.trained
        # FSDP1 keeps its outermost unit gathered until its gradient is computed
        root, layer = c * outside * one * self.copied, c * block * self.copied
        final = r * (outside_trained if one else embedding)
        renewed = final // n if several and not self.deferred else 0  # the new gradient beside the accumulated one
        in_loss = {
            "gradients": earlier,
            "gathered": root,
            "activations": saved,
            "logits": self.logits + self.logit_elements * LOSS[self.device](c),
        }
        in_head = {  # its gradient is computed from the gradient of the logits while the last layer is gathered
            "gradients": earlier + c * head,
            "gathered": (root if one else c * self.head) + layer,
            "activations": saved,
            "logits": self.logits,
        }
        in_reduction = {
            "gradients": earlier + c * head + (0 if one else r * head // n),
            "gathered": root + layer,
            "reduced": 0 if one else r * head,
            "activations": saved,
        }
        in_layer = {
            "gradients": earlier + (c * head if one else r * head // n) + c * block_trained,
            "gathered": root + 2 * layer,
            "reduced": r * block_trained if one else r * max(head, block_trained),
            "activations": saved + again,
        }
        gathered = root if one and not self.lora_rank else c * embedding
        in_embedding = {"gradients": gradients + renewed + gathered, "reduced": final}
        foreach = one and self.device != "cpu"
        in_step = {"gradients": gradients, "reduced": gradients if foreach else r * largest // n}
        moments = {"loss": in_loss, "head": in_head, "head, reduced": in_reduction, "layer": in_layer}
        moments |= {"embedding": in_embedding, "step": in_step}
        return {name: {"weights": self.weights, "Adam": self.adam} | parts for name, parts in moments.items()}

    @property
    def copied(self) -> bool:
        """Return whether FSDP gathers copies; FSDP1 on one rank computes with a base of the compute dtype itself."""
        return self.shards > 1 or self.strategy != "fsdp" or self.base != self.compute

    def scoring_moments(self, entropy: bool) -> dict[str, dict[str, int]]:
        """Return the moments of a forward pass without backward, and the bytes of each part.

        ``layers``: in the layers. ``words``: where log-probabilities, and the entropy, are computed from the logits.
        """
        s, c = self.shape, BYTES[self.compute]
        root = c * (s.embedding + s.hidden + self.head) * self.copied if self.strategy == "fsdp" else 0
        layer = self.tokens * s.saved_bytes(c, self.device == "cpu" and self.compute == "float16")
        per_logit = max(ENTROPY if entropy else 0, {"cpu": 4, "cuda": 0, "npu": c}[self.device])
        return {
            "layers": {
                "gathered": root + 2 * c * self.copied * max(s.block + self.adapters, 0 if root else self.head),
                "activations": layer // 2,
            },
            "words": {"gathered": root, "logits": self.logits + self.logit_elements * per_logit},
        }
