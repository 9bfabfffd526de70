"""Report a generation: its row of metrics.jsonl, its line on the terminal, and the figure of all generations."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from recipes.amp.evolution.config import EvolutionConfig
from recipes.amp.evolution.trajectory import ORIGINS, Trajectory


def generation_row(generation: int, members: Sequence[dict[str, Any]], pool: Sequence[Trajectory]) -> dict[str, Any]:
    """Return a generation's row, from its members' rows and the pool after it."""
    returns = [row["return_mean"] for row in members]
    return {
        "kind": "generation",
        "generation": generation,
        "best": max(returns),
        "median": median(returns),
        "worst": min(returns),
        "pool_worst": pool[-1].total,
        "pool": {origin: sum(each.origin == origin for each in pool) for origin in ORIGINS},
        **{
            origin: {key: sum(row[origin][key] for row in members) for key in ("tried", "kept", "gained")}
            for origin in ORIGINS[1:]
        },
        "overflow_steps": sum(row["overflow_steps"] for row in members),
        "effective_dtypes": sorted({row["effective_dtype"] for row in members if row["effective_dtype"]}),
        "fallback": next((row["fallback"] for row in members if row["fallback"] is not None), None),
        "workers": len({(row["host"], row["pid"]) for row in members}),
    }


def print_generation(row: dict[str, Any], config: EvolutionConfig, source: str) -> None:
    """Print a generation's line; before the first one that trains, print the reason of a fallback."""
    tried = ", ".join(
        f"{origin} {row[origin]['kept']}/{row[origin]['tried']} +{row[origin]['gained']:.0f}" for origin in ORIGINS[1:]
    )
    dtypes = "+".join(row["effective_dtypes"]) or "not trained yet"
    if row["fallback"] is not None and row["generation"] == 1:
        print(row["fallback"])
    print(
        f"generation {row['generation']}/{config.generations}: return best {row['best']:.1f} median "
        f"{row['median']:.1f} worst {row['worst']:.1f}, pool from {row['pool_worst']:.0f}, {tried}, overflows "
        f"{row['overflow_steps']}, fp16_training={config.fp16_training} by {source}, {dtypes}, {row['workers']} "
        f"workers, {row['seconds']:.1f} s",
        flush=True,
    )


def plot_generations(rows: list[dict[str, Any]], config: EvolutionConfig, path: Path) -> None:
    """Plot the returns of the population, and the gains of revision and recombination, a generation a point."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    generations = [row["generation"] for row in rows]
    figure, (returns, gains) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    dtypes = "+".join(sorted({dtype for row in rows for dtype in row["effective_dtypes"]}))
    figure.suptitle(f"{config.env}, {config.population} members, trained in {dtypes}, seed {config.seed}")
    returns.fill_between(generations, *([row[name] for row in rows] for name in ("worst", "best")), alpha=0.2)
    for name, style in (("best", "C2"), ("median", "C0"), ("worst", "C3")):
        returns.plot(generations, [row[name] for row in rows], style, label=name)
    returns.set(title="mean return of a member", xlabel="generation", ylabel="return")
    returns.legend()
    for place, origin in enumerate(ORIGINS[1:]):
        gained = [row[origin]["gained"] / max(row[origin]["tried"], 1) for row in rows]
        gains.bar([generation + 0.4 * place - 0.2 for generation in generations], gained, 0.4, label=origin)
    gains.set(title="return gained per try (0 where a try was not kept)", xlabel="generation", ylabel="return")
    gains.legend()
    for panel in (returns, gains):
        panel.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
