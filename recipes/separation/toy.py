"""Train one linear layer with the mismatch per token of a large model, to show when precision affects the outcome.

    python -m recipes.separation.toy --out docs/results          all regimes, objectives and lengths, three seeds
    python -m recipes.separation.toy --out /tmp/toy --lengths 64 --seeds 1

An interrupted command resumes when repeated: rows in OUT/separation.csv are not run again.

A policy over answers of T tokens: the logits of position t of prompt p are ``W x[p, t]`` for fixed features x. 16
tokens of each answer decide: the reward is 1 if all of them are right. The others are free, like most tokens of a chain
of thought. Masters are fp32; trainer and rollout round weights, features, logits and gradients to their dtypes. They
differ as engines do: the rollout adds the partial sums of eight shards in its own dtype, like tensor parallelism; the
trainer sums in fp32. A constant is added to all logits. It changes no probability in exact arithmetic, but sets the
size of the numbers that are rounded, and so the mismatch per token.

This is not a language model. What carries over is the arithmetic of importance weights: the variance of their
logarithm is twice T times k3, whatever the source of the mismatch.
"""

import argparse
import csv
import sys
from pathlib import Path

import torch

REGIMES = {  # trainer, rollout
    "fp32": (torch.float32, torch.float32),
    "fp16": (torch.float16, torch.float16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16_train_fp16_infer": (torch.bfloat16, torch.float16),
}
OBJECTIVES = {  # the weight of an answer, from the ratio of its probabilities under trainer and rollout
    "pg_is": lambda weights: weights,
    "pg_tis": lambda weights: weights.clamp(max=2.0),  # truncated importance sampling, at verl's default
    "grpo": torch.ones_like,  # no weight; the advantage is divided by the group's standard deviation
}
PROMPTS, SAMPLES, KEYS, VOCABULARY, FEATURES, SHARDS = 4, 32, 16, 10, 256, 8
# Without a loss scale fp16 rounds most gradients to zero; a power of two changes nothing in bf16 and fp32.
LOSS_SCALE = 2.0**16
SETTINGS = ("objective", "length", "regime", "seed", "steps", "lr", "offset")
FIELDS = (*SETTINGS, "first", "last", "k3", "length_k3", "ess")


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round ``x``, and its gradient, to ``dtype``; stored in fp32."""
    return x.to(dtype).to(torch.float32)


def trainer_logits(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply rounded x (P, T, F) and weight (V, F), sum in fp32 and round once -> (P, T, V)."""
    return rounded(rounded(x, dtype) @ rounded(weight, dtype).T, dtype)


def rollout_logits(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute the same in ``SHARDS`` shards of the features, and round each partial sum and each addition."""
    total = torch.zeros(())
    for part, weights in zip(x.chunk(SHARDS, -1), weight.chunk(SHARDS, -1), strict=True):
        total = rounded(total + rounded(rounded(part, dtype) @ rounded(weights, dtype).T, dtype), dtype)
    return total


def problem(length: int, offset: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return features (P, T, F), the initial weight (V, F), the deciding positions (K) and their right tokens (P, K).

    With the initial weight about a third of the answers are right.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PROMPTS, length, FEATURES, generator=generator) / FEATURES**0.5
    x[..., :: FEATURES // SHARDS] = 1.0  # one constant feature a shard carries the offset
    keys = torch.linspace(0, length - 1, KEYS).long()
    right = torch.randint(0, VOCABULARY, (PROMPTS, KEYS), generator=generator)
    weight = torch.zeros(VOCABULARY, FEATURES, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.1)
    for _ in range(200):
        log_probs = torch.log_softmax(x[:, keys] @ weight.T, -1).gather(-1, right[..., None])
        if log_probs.mean().exp() > 0.93:  # 0.93 ** 16 = 0.31
            break
        optimizer.zero_grad()
        (-log_probs.mean()).backward()
        optimizer.step()
    weight = weight.detach()
    weight[:, :: FEATURES // SHARDS] += offset / SHARDS
    return x, weight, keys, right


def run(objective: str, length: int, regime: str, seed: int, *, steps: int, lr: float, offset: float) -> dict:
    """Train one policy and return its row of the table.

    ``first`` and ``last`` are accuracies of the first and the last ten steps; ``k3`` per token and ``ess``, the
    effective share of the samples, are means over the run.

    Raises:
        RuntimeError: a gradient overflows.
    """
    train, infer = REGIMES[regime]
    x, first, keys, right = problem(length, offset)
    weight = first.clone().requires_grad_()
    optimizer = torch.optim.AdamW([weight], lr=lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    rewards, k3s, sizes = [], [], []
    for _ in range(steps):
        with torch.no_grad():
            sampled = torch.log_softmax(rollout_logits(x, weight, infer), -1)
            tokens = torch.multinomial(sampled.exp().flatten(0, 1), SAMPLES, replacement=True, generator=generator)
            tokens = tokens.view(PROMPTS, length, SAMPLES)
            reward = (tokens[:, keys] == right[..., None]).all(1).float()  # (P, S)
            advantage = reward - reward.mean(1, keepdim=True)
            if objective == "grpo":
                advantage = advantage / (reward.std(1, keepdim=True) + 1e-6)
        trained = torch.log_softmax(trainer_logits(x, weight, train), -1).gather(-1, tokens)  # (P, T, S)
        difference = (trained - sampled.gather(-1, tokens)).detach()
        weights = difference.sum(1).exp()  # (P, S)
        k3s.append((difference.exp() - difference - 1).mean().item())
        sizes.append((weights.sum() ** 2 / weights.numel() / (weights**2).sum()).item())
        rewards.append(reward.mean().item())
        loss = -(OBJECTIVES[objective](weights) * advantage * trained.sum(1)).mean() / length
        optimizer.zero_grad()
        (loss * LOSS_SCALE).backward()
        weight.grad /= LOSS_SCALE
        torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)
        optimizer.step()
    k3 = sum(k3s) / steps
    return {
        "objective": objective,
        "length": length,
        "regime": regime,
        "seed": seed,
        "steps": steps,
        "lr": lr,
        "offset": offset,
        "first": round(sum(rewards[:10]) / 10, 3),
        "last": round(sum(rewards[-10:]) / 10, 3),
        "k3": float(f"{k3:.2e}"),
        "length_k3": float(f"{length * k3:.2e}"),
        "ess": round(sum(sizes) / steps, 3),
    }


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """Draw the final accuracy against length times k3: a panel per objective, a point per run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in OBJECTIVES if any(row["objective"] == name for row in rows)]
    figure, axes = plt.subplots(
        1, len(names), figsize=(4.2 * len(names), 3.6), layout="constrained", sharey=True, squeeze=False
    )
    for name, panel in zip(names, axes[0], strict=True):
        for regime, marker in zip(REGIMES, "ox^s", strict=True):
            points = [row for row in rows if (row["objective"], row["regime"]) == (name, regime)]
            across = [max(float(row["length_k3"]), 1e-6) for row in points]  # fp32's is 0 but for rounding
            panel.plot(across, [float(row["last"]) for row in points], marker, label=regime, fillstyle="none")
        panel.set(title=name, xscale="log", xlabel="length × k3 of the run", ylim=(0, 1))
    axes[0][0].set_ylabel("accuracy, last ten steps")
    axes[0][0].legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for separation.csv")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=OBJECTIVES)
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--offset", type=float, default=32.0, help="added to all logits")
    options = parser.parse_args()
    if min(options.lengths) < KEYS:
        sys.exit(f"--lengths: {min(options.lengths)} must be at least {KEYS}, the tokens that decide the reward")
    torch.set_num_threads(1)  # more threads are slower on tensors this small
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "separation.csv"
    rows = list(csv.DictReader(path.open())) if path.exists() else []
    done = {tuple(row[name] for name in SETTINGS) for row in rows}
    jobs = [
        job
        for length in options.lengths
        for objective in options.objectives
        for seed in options.seeds
        for regime in options.regimes
        if tuple(map(str, job := (objective, length, regime, seed, options.steps, options.lr, options.offset)))
        not in done
    ]
    with path.open("a", newline="") as file:
        table = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if not rows:
            table.writeheader()
        for number, (objective, length, regime, seed, steps, lr, offset) in enumerate(jobs, 1):
            row = run(objective, length, regime, seed, steps=steps, lr=lr, offset=offset)
            table.writerow(row)
            file.flush()
            print(f"{number}/{len(jobs)} " + " ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    draw(list(csv.DictReader(path.open())), options.out / "separation.png")


if __name__ == "__main__":
    main()
