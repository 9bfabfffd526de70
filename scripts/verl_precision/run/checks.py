"""Check a job before it starts: its data, attention and rollout, the disk, and the folder and machine of the run."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from verl_precision.errors import Refused
from verl_precision.facts.dtypes import SERVER_SPELLINGS, cache_refusal
from verl_precision.facts.models import ATTENTION, config_file, lost_softcap, read_config
from verl_precision.facts.vllm_float16 import float16_support, ways_out
from verl_precision.files import check_room
from verl_precision.paths import WORK
from verl_precision.run.folder import start_record
from verl_precision.run.machine import check_gpus, check_machine

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl_precision.run.job import Job

SAMPLE = 1000  # rows of a data file whose types and lengths are checked
TRUNCATION = "data.truncation"
IGNORED = "is ignored: verl's agent loop cuts the left end off a prompt above data.max_prompt_length"
PROCESSOR = ("preprocessor_config.json", "processor_config.json", "chat_template.json")
NO_TEMPLATE = ("deepseek_v4",)  # verl formats its prompts itself


def check_start(job: "Job", config: "DictConfig", out: Path) -> dict:
    """Return the content of ``run.json`` with which the run starts or resumes; refuse one that can do neither.

    Checks the job, its data and folder and, without a cluster, this machine, by all but verl's own validation.

    Args:
        config: the job's whole configuration (``job.compose``).
    """
    if config.trainer.total_training_steps is None:
        raise Refused("STEPS: is not set, neither on the command line nor in the experiment's file")
    check_attention(config)
    check_rollout(job, config)
    check_data(job, config)
    check_reward_file(config)
    check_sampler(config)
    check_room(out)
    if not job.cluster:
        check_machine(config, job.device)
    if not job.cluster and job.device == "cuda":
        check_gpus(job, config)
    return start_record(job, out, config.trainer.total_training_steps)


def check_data(job: "Job", config: "DictConfig") -> None:
    """Refuse data files that cannot be used or have prompts that verl would cut; skip those that the run generates."""
    columns, prompts = [config.data.prompt_key, config.data.reward_fn_key, "reward_model"], []
    for name, key, least in (("TRAIN", "train_files", config.data.train_batch_size), ("VAL", "val_files", 1)):
        files = [config.data[key]] if isinstance(config.data[key], str) else config.data[key]
        if not files:
            raise Refused(f"{name}: is not set; {job.experiment} needs a parquet file in verl's schema")
        paths = [WORK / Path(file).expanduser() for file in files]
        if job.generated and any(path.is_relative_to(job.generated) and not path.exists() for path in paths):
            continue  # generated before the run starts
        samples = [read_sample(name, path, columns) for path in paths]
        rows = sum(count for count, _ in samples)
        if rows < least:
            raise Refused(
                f"{name}={files[0]}: has {rows} rows, but a batch needs {least}; give more or a smaller batch"
            )
        for path, (_, first) in zip(paths, samples, strict=True):
            prompts.append((f"{name}={path}", [row[columns[0]] for row in first]))
    check_prompts(config, prompts)


def check_reward_file(config: "DictConfig") -> None:
    """Refuse a file without the reward function, which verl loads only after the workers have started."""
    from omegaconf import OmegaConf

    for key in ("reward.custom_reward_function", "custom_reward_function"):  # the second is its older name
        path, name = (str(OmegaConf.select(config, f"{key}.{part}") or "") for part in ("path", "name"))
        if not path or path.startswith("pkg://"):
            continue
        file = WORK / Path(path.removeprefix("file://"))
        if not file.is_file():
            raise Refused(f"{key}.path={path}: no such file")
        if not re.search(rf"\b{re.escape(name)}\b", file.read_text()):
            raise Refused(f"{key}.name={name}: is not in {path}")


def check_sampler(config: "DictConfig") -> None:
    """Refuse DAPO's filter beside a custom sampler, such as that of DEVICE=cpu, to which verl does not pass it."""
    from omegaconf import OmegaConf

    sampler, filtering = "trainer.v1.sampler.custom_sampler.path", "algorithm.filter_groups.enable"
    path = OmegaConf.select(config, sampler)
    if path and OmegaConf.select(config, filtering):
        raise Refused(f"{filtering}=true: has no effect with {sampler}={path}; give ARGS={sampler}=null")


def check_attention(config: "DictConfig") -> None:
    """Refuse an attention that leaves out the cap of the logits that the model's config asks for."""
    from omegaconf import OmegaConf

    attention = OmegaConf.select(config, ATTENTION)
    if reason := lost_softcap(str(config.actor_rollout_ref.model.path), attention):
        raise Refused(f"{ATTENTION}={attention}: {reason}; give ARGS={ATTENTION}=eager")


def check_rollout(job: "Job", config: "DictConfig") -> None:
    """Refuse a vLLM rollout that cannot run the model or cache keys in its dtype, or be deterministic as requested."""
    from omegaconf import OmegaConf

    rollout = config.actor_rollout_ref.rollout
    if OmegaConf.select(rollout, "name") != "vllm":
        return
    key = "ARGS=actor_rollout_ref.rollout"
    if job.device == "cpu" and OmegaConf.select(rollout, "full_determinism"):
        raise Refused(
            f"{key}.full_determinism=true: asks vLLM for batch-invariant kernels, and its CPU build would end at the "
            f"first generation; give {key}.full_determinism=false, or DEVICE=cuda"
        )
    given = OmegaConf.select(rollout, "engine_kwargs.vllm") or {}
    dtype, cache = SERVER_SPELLINGS.get(given.get("dtype") or rollout.dtype, "unknown"), given.get("kv_cache_dtype")
    if reason := cache_refusal(dtype, cache):
        key += ".engine_kwargs.vllm.kv_cache_dtype"
        raise Refused(f"{key}={cache}: {reason}; give {key}=auto")
    model = str(config.actor_rollout_ref.model.path)
    if dtype == "float16" and (support := float16_support(model)).supported is False:
        name = "MODEL" if job.model else "actor_rollout_ref.model.path"
        raise Refused(f"{name}={model}: {support.reason}; give {ways_out('ARGS=', 'PRECISION=')}")


def read_sample(name: str, file: Path, columns: list[str]) -> tuple[int, list[dict]]:
    """Return the number of rows of a parquet file, and its first ``SAMPLE`` rows; refuse what verl cannot read.

    Args:
        name: of the variable with which a refusal begins.
        columns: of the prompt, and optionally of the data source and the reward model.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(file)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise Refused(f"{name}={file}: is not a readable parquet file ({str(error).splitlines()[0]})") from error
    present = metadata.schema.to_arrow_schema().names
    if missing := [column for column in columns if column not in present]:
        raise Refused(f"{name}={file}: lacks the column {missing[0]!r} of verl's schema; it has {', '.join(present)}")
    with pyarrow.parquet.ParquetFile(file) as opened:
        rows = next(opened.iter_batches(SAMPLE, columns=columns)).to_pylist() if metadata.num_rows else []
    for number, row in enumerate(rows):
        for column, (allowed, fits) in zip(columns, KINDS, strict=False):
            if not fits(row[column]):
                value = str(row[column])[:60]
                raise Refused(f"{name}={file}: {column!r} of row {number} is {value!r}; it must be {allowed}")
    return metadata.num_rows, rows


def is_prompt(value: object) -> bool:
    """Return whether verl can read ``value`` as a prompt; it would read a plain string as an empty one."""
    if not (isinstance(value, list) and value and all(isinstance(each, dict) for each in value)):
        return False
    return all(each.get("role") and each.get("content") is not None for each in value)


# What the columns of a data file must contain, in the order of ``read_sample``'s argument.
KINDS = (
    ("a list of messages, each with role and content", is_prompt),
    ("a name", lambda value: value is not None),
    ("a struct, such as {ground_truth, style}", lambda value: isinstance(value, dict)),
)


def ways_to_fit(override: str = "", longest: int | None = None) -> str:
    """Return the settings to choose from if prompts are too long; ``override`` is the prefix of an override."""
    enough = f"{override}data.max_prompt_length={longest}" if longest else "a larger data.max_prompt_length"
    left_out = f"{override}data.filter_overlong_prompts=true (leaves them out)"
    return f"{enough}, {left_out} or {override}{TRUNCATION}=left (cuts them)"


def cuts_unasked(truncation: str, filters: bool) -> bool:
    """Return whether verl would cut a prompt that is too long although it was not asked for that."""
    return truncation != "left" and not filters


def no_chat_template(model: str) -> Refused:
    return Refused(f"MODEL={model}: its tokenizer has no chat template, which verl needs to format prompts")


def check_prompts(config: "DictConfig", prompts: "list[tuple[str, list[list[dict]]]]") -> None:
    """Tokenize prompts by the model's chat template as verl's agent loop does, and refuse those that are too long.

    Checks nothing if the model's tokenizer is not on this machine, if verl renders prompts otherwise (by a processor,
    or without a template), or if the user asks for cut prompts.

    Args:
        prompts: ``NAME=FILE`` of each data file, and its first prompts.
    """
    model, data = config.actor_rollout_ref.model, config.data
    file = config_file(str(model.get("tokenizer_path") or model.path))
    if not prompts or file is None or not cuts_unasked(data.truncation, data.filter_overlong_prompts):
        return
    files = {each.name for each in file.parent.iterdir()}
    if "tokenizer_config.json" not in files or files & {*PROCESSOR}:
        return
    if read_config(file).get("model_type") in NO_TEMPLATE:
        return
    from jinja2 import TemplateError
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, trust_remote_code=model.get("trust_remote_code", False))
    template = model.get("custom_chat_template")  # None is the tokenizer's own
    if not template and not tokenizer.chat_template:
        raise no_chat_template(model.path)
    options = {"chat_template": template, "add_generation_prompt": True, "return_dict": False}
    options |= data.get("apply_chat_template_kwargs", {})
    for name, of_file in prompts:
        lengths = []
        for row, messages in enumerate(of_file):
            try:
                lengths.append(len(tokenizer.apply_chat_template(messages, **options)))
            except TemplateError as error:
                why = f"the chat template of MODEL={model.path} refuses it: {error}"
                raise Refused(f"{name}: row {row}: {why}") from error
        if too_long := [row for row, length in enumerate(lengths) if length > data.max_prompt_length]:
            row = too_long[0]
            raise Refused(
                f"{name}: row {row} has {lengths[row]} tokens, and {len(too_long)} of the first {len(lengths)} rows "
                f"are too long for data.max_prompt_length={data.max_prompt_length}: {TRUNCATION}={data.truncation} "
                f"{IGNORED}; give {ways_to_fit('ARGS=', max(lengths))}"
            )
