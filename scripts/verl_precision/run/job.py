"""Turn the variables of ``make run`` into a ``Job``, and that into the overrides and the command of ``main_ppo``.

``python -m verl_precision.run.job [NAME=VALUE ...]`` refuses bad variables with only the standard library of Python
3.10: ``make`` and the launch scripts call it before they install or queue anything. ``--names`` prints the names of the
variables, ``--generated`` those of the experiments that need no TRAIN.
"""

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from verl_precision.cli import handled_errors
from verl_precision.errors import Refused
from verl_precision.facts.compose import Uncomposable, compose_config
from verl_precision.facts.packages import installed_verl
from verl_precision.files import check_room
from verl_precision.patch.precision_module import precision_file
from verl_precision.paths import CACHE, CONFIGS, REPO, WORK
from verl_precision.spelling import MADE
from verl_precision.words import (
    device,
    file_path,
    model_path,
    one_of,
    options,
    override_words,
    parquet_path,
    parse_words,
    whole_number,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

# The experiments whose model and data a recipe generates, and the task of each.
GENERATED = {"arithmetic": "addition", "sanity_cpu": "addition", "terms": "terms", "recall": "recall"}
MODULES = "VERL_USE_EXTERNAL_MODULES"  # what verl imports in every process, separated by commas
LOCAL_RAY = {  # of a Ray that the run starts itself, unless the caller sets them
    "RAY_worker_niceness": "0",  # Ray's own, 15, makes a run several times slower beside other programs
    "RAY_raylet_start_wait_time_s": "120",  # Ray's own, 30, is too short where two cores are busy
}
CPU_PLATFORM = {  # what makes verl run without a GPU
    MODULES: "recipes.cpu.platform",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # picks verl's FSDP engine
}

# The variables of `make run`. The launch scripts pass them on in this order.
VARIABLES = {
    "EXPERIMENT": "what to train, default arithmetic, or gsm8k_1gpu if TRAIN is given: {experiment}",
    "PRECISION": "the regime, default fp16: {precision}",
    "ALGO": "default grpo, dr_grpo without its divisions; ppo is GAE with a critic, pg_is REINFORCE with importance "
    "weights: {algo}",
    "RECIPE": "another objective than ALGO's, default none: {recipe}",
    "DEVICE": "cpu or cuda, default: cuda if there is a GPU",
    "STEPS": "training steps, default the experiment's (arithmetic: 26)",
    "SEED": "seed of the data order and of sampling, default 1; vLLM's samples still differ from run to run",
    "MODEL": "a folder or a name on the Hugging Face Hub, default the experiment's",
    "TRAIN": "a parquet file in verl's schema, default the experiment's",
    "VAL": "the same for validation, default TRAIN's",
    "OUT": "the run's folder, default outputs/EXPERIMENT/ALGO-PRECISION-seedSEED (RECIPE if there is one), then …-2",
    "RETRIES": "number of automatic resumes after a lost worker or node, default 2 on a cluster, else 0",
    "ARGS": "further Hydra overrides of verl in one string, e.g. 'trainer.n_gpus_per_node=2 trainer.save_freq=5'",
    "CARRY": "for make submit: yes (default) copies patched verl and this checkout to the nodes, no does not",
}


@dataclass(frozen=True)
class Job:
    """Settings of a run. ``None`` leaves a value to the experiment's file."""

    experiment: str
    precision: str
    algo: str
    device: str
    seed: int
    recipe: str | None = None
    steps: int | None = None
    model: str | None = None
    train: str | None = None
    val: str | None = None
    out: Path | None = None
    args: tuple[str, ...] = ()
    cluster: str | None = None  # RAY_ADDRESS: the running Ray cluster; without one verl starts Ray here
    retries: int = 0
    carry: bool = True
    gpu_overrides: tuple[str, ...] = ()  # what the GPUs of this machine require (machine.py)

    @property
    def generated(self) -> Path | None:
        """The folder of the generated model and data if the job uses one; on a cluster, one that all nodes share."""
        if self.experiment not in GENERATED or (self.model and self.train):
            return None
        return (self.out.parent / ".cache" if self.cluster and self.out else CACHE) / GENERATED[self.experiment]

    @property
    def objective(self) -> str:
        return self.recipe or self.algo

    @property
    def name(self) -> str:
        """The run's name among the runs of its experiment."""
        return f"{self.objective}-{self.precision}-seed{self.seed}"

    def settings(self) -> dict:
        """Return the settings that a resumed run must share: all but its length and its folder."""
        names = ("experiment", "precision", "algo", "recipe", "device", "seed", "model", "train", "val")
        values = {name.upper(): getattr(self, name) for name in names} | {"ARGS": shlex.join(self.args)}
        return {name: "" if value is None else value for name, value in values.items()}

    def overrides(self, out: Path) -> list[str]:
        """Return the Hydra overrides of ``main_ppo``, those of ARGS last, so that they win."""
        generated = self.generated
        train = self.train or (generated and str(generated / "train.parquet"))
        values = {
            "data.seed": self.seed,
            "actor_rollout_ref.rollout.seed": self.seed,
            "actor_rollout_ref.actor.data_loader_seed": self.seed,
            "critic.data_loader_seed": self.seed,
            "trainer.total_training_steps": self.steps,
            "trainer.total_epochs": 1_000_000,  # steps end a run, not epochs
            "actor_rollout_ref.model.path": self.model or (generated and str(generated / "model")),
            "data.train_files": train,
            "data.val_files": self.val or self.train or (generated and str(generated / "val.parquet")),
            "trainer.experiment_name": self.name,
            "trainer.logger": "[file]",
            "trainer.default_local_dir": str(out / "checkpoints"),
            "trainer.validation_data_dir": str(out / "validation"),
            "trainer.max_actor_ckpt_to_keep": 2,
            "trainer.max_critic_ckpt_to_keep": 2,
            "hydra.run.dir": str(out),
            "hydra.output_subdir": "hydra",
            "hydra/job_logging": "stdout",
        }
        return [
            f"hydra.searchpath=[{quoted(f'file://{CONFIGS}')}]",
            f"+experiment={self.experiment}",
            f"+algo={self.algo}",
            *(["+device=cpu"] if self.device == "cpu" else self.gpu_overrides),
            *([f"+recipe={self.recipe}"] if self.recipe else []),
            f"+precision={self.precision}",
            *(f"{key}={quoted(str(value))}" for key, value in values.items() if value is not None),
            *(self.cluster_overrides(out) if self.cluster else []),
            *self.args,
        ]

    def cluster_overrides(self, out: Path) -> list[str]:
        """Return the overrides by which ``main_ppo`` joins a running cluster; its processes inherit no environment."""
        prefix = "++ray_kwargs.ray_init.runtime_env.env_vars."  # what every process on every node gets
        return [
            "ray_kwargs.ray_init.num_cpus=null",  # Ray refuses counts for a running cluster, which has counted its own
            "++ray_kwargs.ray_init.num_gpus=null",
            # TransferQueue would pin its storage to every node, also to a head that has no CPU for it.
            "++transfer_queue.backend.SimpleStorage.required_node_resource=GPU",
            *(f"{prefix}{name}={quoted(value, string=True)}" for name, value in self.environment(out).items()),
        ]

    def environment(self, out: Path) -> dict[str, str]:
        """Return the variables that ``main_ppo`` and its workers need besides the caller's environment."""
        common = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
            "HYDRA_FULL_ERROR": "1",
            "RAY_DEDUP_LOGS": "0",  # or workers' lines that differ only in a rank would be dropped
            "RAY_USAGE_STATS_ENABLED": "0",
            "VERL_FILE_LOGGER_PATH": str(out / "verl.jsonl"),
        }
        if not self.cluster:
            common |= {name: os.environ.get(name, value) for name, value in LOCAL_RAY.items()}
        modules = [os.environ.get(MODULES)]
        if self.device == "cpu":
            common |= CPU_PLATFORM
            modules.append(CPU_PLATFORM[MODULES])
        if self.recipe:  # the presets NAME_….yaml are settings of recipes/NAME
            modules.append(f"recipes.{self.recipe.partition('_')[0]}.trainer")
        if len(modules) > 1:
            common[MODULES] = ",".join(filter(None, modules))
        return common

    def command(self, out: Path) -> list[str]:
        """Return the command that trains into ``out``."""
        return [sys.executable, "-m", "verl.trainer.main_ppo", *self.overrides(out)]

    def shell_line(self, out: Path) -> str:
        """Return the command with its environment as one line for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment(out).items()]
        return " ".join([f"cd {shlex.quote(str(WORK))} &&", *variables, shlex.join(self.command(out))])

    def generate_command(self) -> list[str]:
        """Return the command that writes the model and data into ``generated`` if they are missing."""
        task = GENERATED[self.experiment]
        prepare = ["recipes.recall.prepare"] if task == "recall" else ["recipes.arithmetic.prepare", "--task", task]
        return [sys.executable, "-m", *prepare, "--out", str(self.generated), "--seed", "1"]


def quoted(value: str, string: bool = False) -> str:
    """Quote ``value`` so that Hydra's override grammar reads it back unchanged.

    Numbers and ``[...]`` keep their meaning, unless a ``string`` is wanted.
    """
    plain = not string and re.fullmatch(r"[\w./:+-]*|\[\w*\]", value)
    return value if plain else "'" + value.replace("'", r"\'") + "'"


def parse_job(words: list[str]) -> Job:
    """Return the job that ``NAME=VALUE`` words and RAY_ADDRESS describe; refuse a name or value that is not allowed."""
    values = parse_words(words, VARIABLES)
    cluster = os.environ.get("RAY_ADDRESS") or None
    experiment = "gsm8k_1gpu" if "TRAIN" in values else "arithmetic"
    job = Job(
        experiment=one_of(values, "EXPERIMENT", options("experiment"), experiment),
        precision=one_of(values, "PRECISION", options("precision"), "fp16"),
        algo=one_of(values, "ALGO", options("algo"), "grpo"),
        device=device(values),
        seed=whole_number(values, "SEED", 0, 1),
        recipe=one_of(values, "RECIPE", options("recipe"), "") if "RECIPE" in values else None,
        steps=whole_number(values, "STEPS", 1, None),
        model=model_path(values["MODEL"]) if "MODEL" in values else None,
        train=parquet_path(values, "TRAIN"),
        val=parquet_path(values, "VAL"),
        out=Path(file_path(values, "OUT")) if "OUT" in values else None,
        args=tuple(override_words("ARGS", values.get("ARGS", ""), "; give it as one shell word")),
        cluster=cluster,
        retries=whole_number(values, "RETRIES", 0, 2 if cluster else 0),
        carry=one_of(values, "CARRY", ["yes", "no"], "yes") == "yes",
    )
    if job.recipe and job.algo != "grpo":  # the recipe would silently replace its advantages
        raise Refused(f"ALGO={job.algo}: RECIPE={job.recipe} requires grpo")
    if job.out:
        check_room(job.out)
    return job


def compose(job: Job, out: Path) -> "DictConfig":
    """Return the job's whole configuration, resolved as by ``main_ppo``. Refuse an unpatched verl, and a wrong key."""
    root = installed_verl().parent
    if not precision_file(root):
        raise Refused(f"the verl in {root} is not patched: make apply-patches VERL={shlex.quote(str(root))}")
    try:
        return compose_config(installed_verl() / "trainer/config", job.overrides(out))
    except Uncomposable as error:
        raise configuration_refusal(job, str(error)) from error


def configuration_refusal(job: Job, why: str) -> Refused:
    """Return the refusal of a job's configuration, whose reason names the key."""
    return Refused(f"{f'ARGS={shlex.join(job.args)}' if job.args else 'configuration'}: {why}")


if __name__ == "__main__":
    os.environ.setdefault(MADE, "run")  # launch scripts take knobs, NAME=VALUE
    printed = {"--names": VARIABLES, "--generated": GENERATED}.get(sys.argv[1] if len(sys.argv) == 2 else "")
    if printed:
        print(*printed)
    else:
        with handled_errors("run"):
            parse_job(sys.argv[1:])
