"""Train PPO on CartPole-v1 with three seeds in each dtype, on a CPU, with the default settings.

    python -m recipes.amp.ppo.experiment                                all nine runs, into docs/results
    python -m recipes.amp.ppo.experiment --dtypes float16 --seeds 3     one run, which replaces its older rows

Writes ``amp-ppo.csv`` (a row an update), ``amp-ppo.md`` and ``amp-ppo.png`` after every run. A run takes 10 s in
fp32 and 22 s in fp16 on two cores.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from recipes.amp.options import new_folder, option, parse, within
from recipes.amp.ppo.algorithm import PPO
from recipes.amp.ppo.config import KILL_SWITCH, PPOConfig
from recipes.amp.ppo.experiment_results import DTYPES, SEEDS, record_run
from recipes.amp.ppo.provenance import CHECKOUT
from recipes.amp.ppo.train import EVALUATION, METRICS, train
from verl.utils.precision import LossScaleError

PROGRAM = "recipes.amp.ppo.experiment"


@dataclass(frozen=True)
class ExperimentConfig:
    """Runs of the experiment, and the folder of their results.

    Raises:
        ValueError: naming the key, its value and what is allowed.
    """

    dtypes: str = option(",".join(DTYPES), "dtypes to train in, separated by commas")
    seeds: str = option(",".join(map(str, SEEDS)), "seeds to train each dtype with, separated by commas")
    out: Optional[str] = option(None, "folder for amp-ppo.csv, .md and .png; docs/results by default")

    def __post_init__(self):
        dtypes, seeds = set(self.dtypes.split(",")), set(self.seeds.split(","))
        known = set(map(str, SEEDS))
        within(
            self,
            {
                "dtypes": (dtypes <= set(DTYPES), f"of {','.join(DTYPES)}"),
                "seeds": (seeds <= known, f"of {','.join(sorted(known))}"),
            },
        )


def run_cartpole(dtype: str, seed: int, out: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train on CartPole-v1 with the default settings, on the CPU, into ``out``.

    Returns:
        the record of each update, with ``dtype``, ``seed`` and in the last one ``evaluation``, its mean return; and
        the content of ``evaluation.json``.

    Raises:
        ValueError: the run computed in another dtype.
    """
    amp = {} if dtype == "float32" else {"use_amp": True, "dtype": dtype}
    ppo = PPO(PPOConfig(env="CartPole-v1", device="cpu", seed=seed, out=str(out), **amp))
    train(ppo, out)
    ppo.envs.vector.close()
    records = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    effective = records[-1]["effective_dtype"]
    if effective != dtype:
        raise ValueError(f"dtypes={dtype}: the run computed in {effective} ({ppo.amp_source}); unset {KILL_SWITCH}")
    evaluation = json.loads((out / EVALUATION).read_text())
    rows = [{**record, "dtype": dtype, "seed": seed} for record in records]
    rows[-1]["evaluation"] = evaluation["mean"]
    return rows, evaluation


def main(words: Optional[Sequence[str]] = None) -> None:
    """Run the command line ``words`` (``sys.argv`` by default); an error ends the process with one line and code 1."""
    config, _ = parse(ExperimentConfig, PROGRAM, __doc__.splitlines()[0], words)
    files: list[Path] = []
    try:
        results = new_folder(config.out or CHECKOUT / "docs" / "results")
        for dtype in config.dtypes.split(","):
            for seed in map(int, config.seeds.split(",")):
                print(f"{dtype}, seed {seed}", flush=True)
                with tempfile.TemporaryDirectory() as folder:
                    rows, evaluation = run_cartpole(dtype, seed, Path(folder))
                files = record_run(results, rows, evaluation)
    except (ValueError, LossScaleError, FloatingPointError) as error:
        sys.exit(f"{PROGRAM}: {error}")
    print(*files, sep="\n")


if __name__ == "__main__":
    main()
