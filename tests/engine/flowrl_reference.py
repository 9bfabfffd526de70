"""FlowRL's worker, its batches, and the same update in plain torch; imported by flowrl_cases.py."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from fsdp_worker import MODEL, RANK, STRATEGY, settings
from transformers import AutoModelForCausalLM

from recipes.flowrl.config import FlowRLConfig, PartitionConfig
from recipes.flowrl.objective import group_log_z, mean_of_tokens, trajectory_balance
from recipes.flowrl.partition import PartitionHead
from recipes.flowrl.worker import FlowRLTrainingWorker, flowrl_loss
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig

PLAIN_MODEL = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="sdpa")


def make_worker(
    flowrl: FlowRLConfig | None = None,
    dtype: str = "float32",
    micro: int = 2,
    packed: bool = False,
    model: dict | None = None,
    checkpoint: CheckpointConfig | None = None,
    **engine,
) -> FlowRLTrainingWorker:
    """Return a worker with its engine built; by default the head starts at random, so that log Z reaches the trunk."""
    flowrl = flowrl or FlowRLConfig(partition=PartitionConfig(zero_init=False))
    torch.manual_seed(RANK)  # the ranks' heads start differently and must be synchronized
    worker = FlowRLTrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=MODEL,
                use_remove_padding=packed,
                override_config={"attn_implementation": "sdpa"},
                **(model or {}),
            ),
            engine_config=FSDPEngineConfig(
                strategy=STRATEGY,
                dtype=dtype,
                use_dynamic_bsz=engine.pop("use_dynamic_bsz", False),
                micro_batch_size_per_gpu=micro,
                infer_micro_batch_size_per_gpu=2,
                use_torch_compile=False,
                grad_scaler=settings(init_scale=16.0),
                **engine,
            ),
            optimizer_config=FSDPOptimizerConfig(lr=1e-2, lr_warmup_steps=4, total_training_steps=100, clip_grad=1.0),
            checkpoint_config=checkpoint or CheckpointConfig(),
        ),
        flowrl,
    )
    worker.reset()
    set_loss(worker, flowrl)
    return worker


def set_loss(worker: FlowRLTrainingWorker, flowrl: FlowRLConfig) -> None:
    worker.set_loss_fn(lambda **inputs: flowrl_loss(SimpleNamespace(flowrl=flowrl), **inputs))


def log_probs_of(model, prompt: torch.Tensor, answer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the answer's log-probabilities ``(tokens,)``, and the prompt's hidden states ``(tokens, hidden)``."""
    hidden = model.model(torch.cat([prompt, answer])[None])[0][0]
    at = slice(len(prompt) - 1, -1)
    logits = model.lm_head(hidden[at]).log_softmax(-1)
    return logits.gather(-1, answer[:, None])[:, 0], hidden[: len(prompt)]


def rollouts(seed: int, right: tuple[int, ...] = (1, 2), size: int = 4, noise: float = 0.1) -> list[dict]:
    """Return the rows of all ranks.

    Args:
        right: per prompt, how many of its answers have a reward of 1; the others have 0.
        size: answers per prompt.
        noise: standard deviation of the old and the reference log-probabilities around the model's own.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = lambda length: torch.randint(0, 64, (length,), generator=generator)  # noqa: E731
    rows = []
    for group in range(len(right)):
        prompt = tokens(3 + group % 4)
        for number in range(size):
            answer = tokens(2 + (group + number) % 5)
            with torch.no_grad():
                log_prob, _ = log_probs_of(PLAIN_MODEL, prompt, answer)
            mask = torch.ones(len(answer), dtype=torch.bool)
            mask[1:-2] = len(answer) < 6  # the longest answers contain a tool's output
            near = lambda: log_prob + noise * torch.randn(len(answer), generator=generator)  # noqa: B023, E731
            score = float(number < right[group])
            rows.append(
                {"prompt": prompt, "answer": answer, "group": group, "score": score, "real": True, "mask": mask}
                | {"old_log_probs": near(), "ref_log_prob": near()}
            )
    scores, uids = torch.tensor([[row["score"]] for row in rows]), [row["group"] for row in rows]
    advantages, _ = compute_grpo_outcome_advantage(scores, torch.ones_like(scores), uids)
    for row, advantage in zip(rows, advantages[:, 0].tolist(), strict=True):
        row["advantage"] = advantage
    return rows


def columns(rows: list[dict], flowrl: FlowRLConfig) -> dict[str, torch.Tensor]:
    """Return the objective's inputs, padded with values that must not matter."""
    pad = lambda name, by=1e4: torch.nn.utils.rnn.pad_sequence([r[name] for r in rows], True, by)  # noqa: E731
    return {
        "rollout_weights": pad("rollout_is_weights") if "rollout_is_weights" in rows[0] else None,
        "old_log_prob": pad("old_log_probs"),
        "ref_log_prob": pad("ref_log_prob"),
        "reward": torch.tensor([row["advantage" if flowrl.reward == "advantage" else "score"] for row in rows]),
        "mask": pad("mask", False) & torch.tensor([[row["real"]] for row in rows]),
    }


def log_z_of_groups(rows: list[dict], flowrl: FlowRLConfig) -> torch.Tensor:
    inputs = columns(rows, flowrl)
    groups = torch.tensor([row["group"] for row in rows])
    return group_log_z(
        inputs["old_log_prob"],
        inputs["ref_log_prob"],
        inputs["reward"],
        inputs["mask"],
        groups,
        beta=flowrl.beta,
        length_normalization=flowrl.length_normalization,
    )


def batch(rows: list[dict], flowrl: FlowRLConfig | None = None, size: int | None = None):
    """Return this rank's share of the rows as verl's trainer sends it; ``size``: rows of a mini-batch on all ranks."""
    mine = list(range(len(rows)))[RANK :: dist.get_world_size()]
    nested = lambda make: torch.nested.as_nested_tensor([make(rows[i]) for i in mine], layout=torch.jagged)  # noqa: E731
    length = lambda row: len(row["answer"])  # noqa: E731
    mask = nested(lambda r: r["mask"].long() * r["real"])
    tensors = {
        "prompts": nested(lambda r: r["prompt"]),
        "responses": nested(lambda r: r["answer"]),
        "input_ids": nested(lambda r: torch.cat([r["prompt"], r["answer"]])),
        "position_ids": nested(lambda r: torch.arange(len(r["prompt"]) + length(r))),
        "response_mask": mask,
        "loss_mask": mask,
        "old_log_probs": nested(lambda r: r["old_log_probs"]),
        "ref_log_prob": nested(lambda r: r["ref_log_prob"]),
        "advantages": nested(lambda r: torch.where(r["mask"] & r["real"], r["advantage"], 1e4)),
        "rm_scores": nested(lambda r: torch.tensor([0.0] * (length(r) - 1) + [r["score"]])),
    }
    if "rollout_is_weights" in rows[0]:
        tensors["rollout_is_weights"] = nested(lambda r: r["rollout_is_weights"])
    if flowrl is not None and flowrl.log_z == "group":
        tensors["group_log_z"] = log_z_of_groups(rows, flowrl)[mine]
    return tu.get_tensordict(
        tensors,
        non_tensor_dict={
            "temperature": 1.0,
            "update_lr_scheduler": True,
            "max_token_len_per_gpu": 24,
            "global_batch_size": size or len(rows),
        },
    )


def head_of(worker: FlowRLTrainingWorker) -> PartitionHead:
    return worker.engine.partition.head


def reference_update(
    worker: FlowRLTrainingWorker, rows: list[dict], flowrl: FlowRLConfig, detached: bool = False
) -> tuple[dict[str, float], dict[str, torch.Tensor], torch.Tensor]:
    """Compute the loss and means, and the gradients (trunk by name, head as one vector) without verl or FSDP.

    Args:
        rows: of all ranks.
        detached: without the gradient of log Z through the trunk.
    """
    PLAIN_MODEL.zero_grad()
    head = head_of(worker) if flowrl.log_z == "learned" else None
    outputs = [log_probs_of(PLAIN_MODEL, row["prompt"], row["answer"]) for row in rows]
    log_prob = torch.nn.utils.rnn.pad_sequence([o[0] for o in outputs], True)
    inputs, used = columns(rows, flowrl), slice(None, -1 if flowrl.partition.drop_last_prompt_token else None)
    hidden = torch.stack([o[1][used].mean(0) for o in outputs])
    log_z = {
        "learned": lambda: head(hidden.detach() if detached else hidden),
        "group": lambda: log_z_of_groups(rows, flowrl),
        "none": lambda: torch.zeros(len(rows)),
    }[flowrl.log_z]()
    losses, metrics = trajectory_balance(
        log_prob,
        inputs["old_log_prob"],
        inputs["ref_log_prob" if flowrl.anchor == "ref" else "old_log_prob"],
        inputs["reward"],
        log_z,
        inputs["mask"],
        beta=flowrl.beta,
        level=flowrl.importance_weight,
        clip=flowrl.importance_clip,
        length_normalization=flowrl.length_normalization,
        rollout_weights=inputs["rollout_weights"],
    )
    d = inputs["ref_log_prob"] - log_prob.detach()
    metrics["reference_kl"] = mean_of_tokens(d.exp() - d - 1, inputs["mask"])
    loss, parameters = losses.mean(), list(head.parameters()) if head else []
    trunk = dict(PLAIN_MODEL.named_parameters())
    grads = torch.autograd.grad(loss, [*trunk.values(), *parameters])
    of_head = torch.cat([grad.flatten() for grad in grads[len(trunk) :]]) if head else torch.zeros(0)
    means = {f"flowrl/{name}": values.mean().item() for name, values in metrics.items()}
    return {"pg_loss": loss.item()} | means, dict(zip(trunk, grads, strict=False)), of_head
