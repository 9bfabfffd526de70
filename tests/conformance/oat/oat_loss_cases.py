"""Cases of OAT: mismatch metrics, importance weights, and log-probabilities by the fused head."""

import math
from collections.abc import Callable

import torch
from oat_learner import learned, logged, made, name, near, same, state, transitions


def by_hand(learner, rows: list) -> list[dict[str, torch.Tensor]]:
    """Return each response's fp32 log-probabilities by actor and learner; the learner's are differentiable."""
    model = learner.model.model.module
    answers = []
    for row in rows:
        ids = torch.tensor([list(row.prompt_ids) + list(row.response_ids)])
        logits = model(ids).logits[0, :-1].float()
        taken = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        answers.append({"learner": taken[len(row.prompt_ids) - 1 :], "actor": torch.tensor(row.response_logprobs)})
    return answers


def mismatch() -> str:
    """Compare the reported mismatch with one computed by hand from the same weights and transitions."""
    learner = made("--no-bf16", "--no-use_fused_lm_head")
    with torch.no_grad():
        answers = by_hand(learner, transitions(0))
    ours, theirs = (torch.cat([answer[side] for answer in answers]) for side in ("learner", "actor"))
    ratio = ours - theirs
    reduce = learner.strategy.all_reduce

    def over_all_tokens(values: torch.Tensor) -> float:
        return (reduce(values.sum(), "sum") / reduce(torch.tensor(float(len(values))), "sum")).item()

    expected = {
        "rollout_probs_diff_mean": over_all_tokens((ours.exp() - theirs.exp()).abs()),
        "rollout_probs_diff_max": reduce((ours.exp() - theirs.exp()).abs().max(), "max").item(),
        "rollout_k3_kl": over_all_tokens(ratio.exp() - 1 - ratio),
        "kl_sample_train_v1": reduce(-ratio.mean()).item(),  # OAT's own: each rank's, then the mean of ranks
        "kl_sample_train_v2": reduce(0.5 * (ratio**2).mean()).item(),
    }
    metrics = logged(learner, 0)
    facts = []
    for key, value in expected.items():
        found = metrics.get(f"train/{key}")
        facts.append(
            f"{key} {'absent' if found is None else 'as by hand' if near(found, value) else f'{found} NOT {value}'}"
        )
    return ", ".join(facts)


def objective(weigh: Callable[[torch.Tensor], torch.Tensor], *options: str) -> str:
    """Compare loss and gradient of one update with those by hand, where ``weigh`` maps a response's log-ratios."""
    usual = ["--no-bf16", "--no-use_fused_lm_head", "--critic_type=drgrpo", "--train_batch_size_per_device=2"]
    learner = made(*usual, *options)
    rows = drifted(0)
    answers = by_hand(learner, rows)
    reinforce = learner.args.reinforce_update
    losses = []
    for row, answer in zip(rows, answers, strict=True):
        advantage = row.rewards[-1] - 0.5
        old = answer["learner"].detach()
        weights = weigh(old - answer["actor"])
        policy = answer["learner"] if reinforce else (answer["learner"] - old).exp()
        losses.append((-advantage * policy * weights).sum() / learner.args.generate_max_length)
    loss = torch.stack(losses).mean()
    gradients = torch.autograd.grad(loss, list(learner.model.model.module.parameters()))
    gradients = [learner.strategy.all_reduce(gradient) for gradient in gradients]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
    loss = learner.strategy.all_reduce(loss.detach()).item()
    learner.pi_buffer.clear()
    learner.process_feedback_data(rows)
    metrics = learner.learn(1)
    found = learner.strategy.all_reduce(metrics["train/pg_loss"])
    facts = ["loss as by hand" if near(found, loss) else f"loss {found:.4g} NOT {loss:.4g}"]
    found = metrics["train/policy_grad_norm"]
    facts.append("gradient as by hand" if near(found, norm) else f"gradient {found:.4g} NOT {norm:.4g}")
    return ", ".join(facts)


def drifted(seed: int) -> list:
    """Return transitions with a large mismatch, further up for the right answer than down for the wrong."""
    rows = transitions(seed)
    for row, shift in zip(rows, (-0.6, 0.4), strict=True):
        row.response_logprobs = [each + shift * (1 + index % 3) for index, each in enumerate(row.response_logprobs)]
    return rows


# Weights of a response's tokens by their log-ratios, learner to actor.


def token(log_ratio: torch.Tensor, most: float) -> torch.Tensor:
    return log_ratio.exp().clamp(max=most)


def sequence(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.sum().exp().expand_as(log_ratio)


def clamped_sequence(log_ratio: torch.Tensor, most: float) -> torch.Tensor:
    return sequence(log_ratio).clamp(max=most)


def masked(log_ratio: torch.Tensor, most: float) -> torch.Tensor:
    return sequence(log_ratio) * (sequence(log_ratio) <= most)


def head(*options: str) -> str:
    """Report whether the fused head, OAT's default, returns fp32 or 16-bit log-probabilities."""
    learner, facts = made(*options), []
    ids = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, entropy = learner.get_batch_logps(learner.model, ids, torch.ones_like(ids), compute_entropy=True)
    dtype = next(learner.model.parameters()).dtype
    for what, tensor in (("log-probs", found), ("entropy", entropy)):
        rounded = torch.equal(tensor, tensor.to(dtype).float())
        facts.append(f"{what} {f'ROUNDED to {name(dtype)}' if rounded else 'fp32'}")
    return ", ".join(facts)


def reference(*options: str) -> str:
    """Train two rounds with the fused head under each of OAT's two penalties on the distance to a reference model."""
    facts = []
    for key in ("beta", "kl_penalty_coef"):
        learner = made(f"--{key}=0.1", *options)
        before = state(learner.model.model)
        learned(learner, 0)
        metrics = learned(learner, 1)
        moved = not same(before, state(learner.model.model)) and math.isfinite(metrics["train/pg_loss"])
        facts.append(f"{key} {'trains' if moved else 'DOES NOT TRAIN'}")
    return ", ".join(facts)


def head_batch() -> str:
    """Report whether the fused head's hidden states get a gradient where a device has two rows."""
    norms = [
        learned(made("--no-bf16", "--train_batch_size_per_device=2", *options), 0)["train/policy_grad_norm"]
        for options in (["--no-use_fused_lm_head"], [])
    ]
    return "as without it" if near(norms[1], norms[0]) else f"gradient {norms[1]:.4g} NOT {norms[0]:.4g}"
