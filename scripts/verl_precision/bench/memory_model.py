"""Model the memory of training one model on one rank: the resident parts, and those of each moment of a step.

Follows the engine of verl 0.9 (``workers/engine/fsdp``) and torch's FSDP1 and FSDP2. All sizes are in bytes and of one
rank. docs/results/plan-memory.md lists what is exact, what is assumed and what is unknown.
"""

from dataclasses import dataclass

from verl_precision.bench.model_shape import ModelShape
from verl_precision.facts.dtypes import BYTES

ENTROPY = 10  # bytes per logit of the entropy in its eager form, in fp32; compiled it takes none


@dataclass(frozen=True)
class TrainedModel:
    """A model in training, on one rank."""

    shape: ModelShape
    critic: bool  # the head has a single output
    strategy: str  # fsdp or fsdp2
    shards: int  # ranks that share the parameters
    tokens: int  # of a micro-batch on this rank, after sequence parallelism
    micro_batches: int  # per optimizer step
    compute: str
    checkpointing: bool
    reduce: str = "float32"
    base: str = "float32"  # dtype of the weights
    lora_rank: int = 0  # of adapters on all projections, in fp32, which are then all that is trained
    offload_params: bool = False  # to the host while another model, or the rollout, is at work
    offload_adam: bool = False
    deferred: bool = False  # gradients are reduced after the last micro-batch (use_no_sync_for_gradient_accumulation)
    fused_head: bool = False  # the logits are never materialized (use_fused_kernels)
    padded: bool = False  # sequences keep their padding (use_remove_padding is off)
    scaled: bool = False  # logits are divided by a temperature other than 1

    @property
    def head(self) -> int:
        """Parameters of the head, 0 if it is tied to the embedding."""
        return self.shape.hidden + 1 if self.critic else 0 if self.shape.tied else self.shape.embedding

    @property
    def parameters(self) -> int:
        return self.shape.layers * self.block + self.shape.embedding + self.shape.hidden + self.head

    @property
    def block(self) -> int:
        """Parameters of a layer as FSDP shards and gathers it.

        FSDP2 shards a tensor by its first dimension and pads it to a multiple of the ranks. In transformers 5 that
        dimension is the experts. The router's padding is left out.
        """
        experts = self.shape.experts
        sharded = self.shards * -(-experts // self.shards) if self.strategy == "fsdp2" else experts
        return self.shape.block + 3 * self.shape.hidden * self.shape.intermediate * (sharded - experts)

    @property
    def adapters(self) -> int:
        """Parameters of a layer's LoRA adapters, on all of its projections."""
        s = self.shape
        attention = 2 * (s.hidden + s.query_width) + 2 * (s.hidden + s.key_width)
        return self.lora_rank * (attention + 3 * (s.hidden + s.intermediate))

    @property
    def trained(self) -> int:
        return self.shape.layers * self.adapters if self.lora_rank else self.parameters

    @property
    def resident(self) -> dict[str, int]:
        """Bytes of this rank's shards: the weights with fp32 adapters, and Adam's two moments."""
        weights = BYTES[self.base] * self.parameters + 4 * self.shape.layers * self.adapters
        adam = 2 * (4 if self.lora_rank else BYTES[self.base]) * self.trained
        return {"weights": weights // self.shards, "Adam": adam // self.shards}

    @property
    def idle(self) -> dict[str, int]:
        """The resident parts that stay on the device while another model, or the rollout, is at work."""
        offloaded = {"weights": self.offload_params, "Adam": self.offload_adam}
        return {part: 0 if offloaded[part] else size for part, size in self.resident.items()}

    @property
    def copied(self) -> bool:
        """Whether FSDP gathers copies; FSDP1 on one rank computes with a base of the compute dtype itself."""
        return self.shards > 1 or self.strategy != "fsdp" or self.base != self.compute

    def logit_bytes(self, more: int = 0) -> int:
        """Return the bytes of one micro-batch's logits, and of ``more`` bytes per logit.

        The loss adds none: flash-attn's cross entropy writes its gradient over the logits.
        """
        elements = 0 if self.critic or self.fused_head else self.tokens * self.shape.vocab
        copies = 1 + (self.padded or self.scaled)  # with and without padding, or before and after the temperature
        return elements * (copies * BYTES[self.compute] + more)

    def activations(self) -> tuple[int, int]:
        """Return the bytes saved at the end of the forward pass, and those of one layer that backward recomputes."""
        c, hidden = BYTES[self.compute], self.shape.hidden
        layer = self.shape.saved_bytes(c)
        per_layer = c * hidden if self.checkpointing else layer
        end = (4 + 2 * c) * hidden  # the last norm's input in fp32, and its output
        return self.tokens * (self.shape.layers * per_layer + end), self.tokens * layer * self.checkpointing

    def update_moments(self) -> dict[str, dict[str, int]]:
        """Return the moments of an update at which memory may peak, and the bytes of each part.

        ``loss``: its backward begins. ``head``: its gradient is computed. ``layer``: backward of the last layer.
        ``embedding``: the gradient of the embedding, under FSDP1 of all parameters outside the layers, is reduced, and
        all other gradients exist. ``step``: the optimizer's.
        """
        s, c, r, n = self.shape, BYTES[self.compute], BYTES[self.reduce], self.shards
        fsdp1, several = self.strategy == "fsdp", self.micro_batches > 1
        saved, recomputed = self.activations()
        # Parameters that are gathered, and those that have gradients.
        block, outside = self.block + self.adapters, s.embedding + s.hidden + self.head
        if self.lora_rank:
            block_trained, gradient, embedding, head, outside_trained = self.adapters, self.adapters, 0, 0, 0
            largest = self.lora_rank * max(s.hidden, s.query_width, s.intermediate)
        else:
            # a layer's gradient before it is padded to be reduced
            block_trained, gradient, embedding, head, outside_trained = block, s.block, s.embedding, self.head, outside
            largest = max(embedding, head)
        gradients = r * self.trained // n
        earlier = gradients if several else 0
        if self.deferred and several:  # unsharded: FSDP1 accumulates in the compute dtype, FSDP2 in the reduce dtype
            earlier = (c if fsdp1 else r) * self.trained
        # FSDP1 keeps its outermost unit gathered until its gradient is computed
        root, layer = c * outside * fsdp1 * self.copied, c * block * self.copied
        final = r * (outside_trained if fsdp1 else embedding)
        renewed = final // n if several and not self.deferred else 0  # the new gradient beside the accumulated one
        moments = {
            "loss": {
                "gradients": earlier,
                "gathered": root,
                "activations": saved,
                "logits": self.logit_bytes(c * self.padded),  # their gradient with padding begins as zeros
            },
            "head": {  # its gradient is computed from the gradient of the logits while the last layer is gathered
                "gradients": earlier + c * head,
                "gathered": (root if fsdp1 else c * self.head) + layer,
                "activations": saved,
                "logits": self.logit_bytes(),
            },
            "layer": {  # the one before it is gathered, too
                "gradients": earlier + (c * head if fsdp1 else r * head // n) + c * gradient,
                "gathered": root + 2 * layer,
                "reduced": r * block_trained if fsdp1 else r * max(head, block_trained),
                "activations": saved + recomputed,
            },
            "embedding": {
                "gradients": gradients + renewed + (root if fsdp1 and not self.lora_rank else c * embedding),
                "reduced": final,
            },
            "step": {  # with foreach one intermediate of all parameters, otherwise of the largest
                "gradients": gradients,
                "reduced": gradients if fsdp1 else r * largest // n,
            },
        }
        return {name: self.resident | parts for name, parts in moments.items()}

    def scoring_moments(self, entropy: bool) -> dict[str, dict[str, int]]:
        """Return the moments of a forward pass without backward, and the bytes of each part.

        ``layers``: in the layers. ``head``: where log-probabilities, and the entropy, are computed from the logits.
        """
        s, c = self.shape, BYTES[self.compute]
        root = c * (s.embedding + s.hidden + self.head) * self.copied if self.strategy == "fsdp" else 0
        unit = max(self.block + self.adapters, 0 if root else self.head)
        return {
            "layers": {
                "gathered": root + 2 * c * unit * self.copied,  # a unit and the next
                "activations": self.tokens * s.saved_bytes(c) // 2,
            },
            "head": {"gathered": root, "logits": self.logit_bytes(ENTROPY if entropy else 0)},
        }
