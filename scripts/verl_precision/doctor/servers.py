"""Find the vLLM servers that a job starts in float16, and report whether vLLM runs their models in it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl_precision.doctor.finding import Finding
from verl_precision.doctor.resolver import MODEL, DtypeResolver, server_dtype
from verl_precision.facts.vllm_float16 import Float16Support, float16_support, ways_out


@dataclass(frozen=True)
class Float16Server:
    """A vLLM that a job starts in float16: its dtype's key and value, its model's, and whether it runs that model."""

    dtype_key: str
    dtype: Any
    model_key: str
    model: str
    support: Float16Support

    @property
    def refusal(self) -> Finding:
        effect = f"ends the job at its start: {self.support.reason}"
        return Finding(self.dtype_key, self.dtype, effect, ways_out(key=self.dtype_key))

    @property
    def doubt(self) -> Finding:
        effect = f"may be a model that vLLM refuses in float16; it is not known: {self.support.reason}"
        mend = "make doctor VERL=SITE-PACKAGES of an environment with the job's vLLM, and the model's folder"
        return Finding(self.model_key, self.model, effect, mend)


def float16_servers(resolver: DtypeResolver) -> Iterator[Float16Server]:
    """Yield the rollout and the reward model's server where they are a vLLM in float16."""
    get = resolver.config.get
    keys = []
    if resolver.server == "vllm" and resolver.effective_dtype("rollout.logits") == "float16":
        keys.append((resolver.rollout_dtype_key, f"{MODEL}.path"))
    reward_key = resolver.reward_server_key() if resolver.uses("reward_model") else None
    if (
        reward_key
        and get(reward_key.replace(".dtype", ".name")) == "vllm"
        and server_dtype(get(reward_key)) == "float16"
    ):
        node = reward_key.removesuffix(".rollout.dtype")
        keys.append((reward_key, f"{node}.model.path" if node == "reward_model" else f"{node}.model_path"))
    for dtype_key, model_key in keys:
        model = str(get(model_key))
        support = float16_support(model, resolver.tree.root)
        yield Float16Server(dtype_key, get(dtype_key), model_key, model, support)
