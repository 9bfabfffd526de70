"""Check that prompts fit ``data.max_prompt_length``: verl's agent loop cuts them, whatever ``data.truncation`` is."""

from typing import TYPE_CHECKING

from verl_precision.errors import Refused
from verl_precision.facts.models import config_file, read_config

if TYPE_CHECKING:
    from omegaconf import DictConfig

TRUNCATION = "data.truncation"
IGNORED = "is ignored: verl's agent loop cuts the left end off a prompt above data.max_prompt_length"
PROCESSOR = ("preprocessor_config.json", "processor_config.json", "chat_template.json")
NO_TEMPLATE = ("deepseek_v4",)  # verl formats its prompts itself


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
