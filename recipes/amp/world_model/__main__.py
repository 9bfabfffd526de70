"""Train a recurrent world model of an environment in 16 bits.

    python -m recipes.amp.world_model --env Pendulum-v1 --out /tmp/world                 fp16 on a GPU, fp32 on a CPU
    python -m recipes.amp.world_model --env Pendulum-v1 --out /tmp/world --device cpu    fp16 on a CPU too, slowly

``h[t+1] = GRU(h[t], [z[t], a[t]])`` with ``z[t]`` the encoded observation, and a learned vector in its place where
no observation is given. From ``h[t+1]`` three heads predict the next observation, the reward and the end of the
episode. The first ``context`` observations of a trajectory are given; all later ones are predicted from the actions
alone. OUT gets metrics.jsonl, predictions.png and checkpoint.pt, from which :meth:`WorldModel.load` makes a model that
predicts.
"""

import sys

from recipes.amp.options import parse
from recipes.amp.world_model.config import WorldModelConfig
from recipes.amp.world_model.train import run
from verl.utils.precision import LossScaleError

PROGRAM = "recipes.amp.world_model"


def main() -> None:
    """Run the command line; an error ends the process with one line and code 1."""
    config, _ = parse(WorldModelConfig, PROGRAM, __doc__.splitlines()[0])
    try:
        run(config)
    except (ValueError, LossScaleError, FloatingPointError) as error:
        sys.exit(f"{PROGRAM}: {error}")


if __name__ == "__main__":
    main()
