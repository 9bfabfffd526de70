"""Record the experts that a mixture chooses for each token, as one number per token.

In transformers 5 a layer's experts are a module ``experts``, called with the hidden states, the numbers of the chosen
experts ``(tokens, chosen)`` and their weights.
"""

import inspect
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ExpertRecorder:
    """Record the chosen experts of a model's forward passes inside a ``with`` block.

    Modules with another signature, as Llama 4's, are not recorded: such a model counts as dense.
    """

    def __init__(self, model: "PreTrainedModel"):
        named = (module for name, module in model.named_modules() if name.rpartition(".")[2] == "experts")
        self.layers = [module for module in named if len(inspect.signature(module.forward).parameters) == 3]
        self.chosen: list[torch.Tensor] = []

    def __enter__(self) -> "ExpertRecorder":
        record = lambda module, args: self.chosen.append(args[1])
        self.hooks = [layer.register_forward_pre_hook(record) for layer in self.layers]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def fingerprints(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a number per token of the pass since the last call, int64, in the shape of its token ids.

        The same experts in all layers have the same number, on every device; others differ except with a probability
        of 2**-50.
        """
        numbers, generator = torch.zeros_like(ids, dtype=torch.int64).flatten(), torch.Generator().manual_seed(0)
        for chosen in self.chosen:
            factors = torch.randint(2**63 - 1, chosen.shape[-1:], generator=generator)
            numbers += (chosen.sort(-1).values * factors.to(chosen.device)).sum(-1).flatten()  # modulo 2**64
        self.chosen.clear()
        return numbers.view_as(ids)
