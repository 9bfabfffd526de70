"""Report which models vLLM refuses to run in float16, by its own table; its source is parsed, never imported."""

import ast
import re
from pathlib import Path
from typing import NamedTuple

from verl_precision.facts.models import config_file, read_config
from verl_precision.facts.packages import package_folder

TABLE = "_FLOAT16_NOT_SUPPORTED_MODELS"  # of vllm/config.py, later vllm/config/model.py: reasons by model type
POOLING_HEADS = "`head_dtype` currently only supports pooling models"  # its warning, up to 0.27
ROLLOUT_DTYPE = "actor_rollout_ref.rollout.dtype"
# Beside a trainer in float16, by rollout_corr/k3_kl of the sanity task: 1.1e-7, and 2.4e-7 with fp16 on both sides. A
# rollout in bfloat16 is not offered: 7.9e-6, as with bf16 on both sides (docs/results/recommend.md).
FP32_COST = "with a trainer in fp16 a mismatch as small as with fp16 on both sides, and twice the rollout's memory"


class Float16Support(NamedTuple):
    """Whether vLLM runs a model in float16; None where that is not known. ``reason`` is a clause."""

    supported: bool | None
    reason: str


def float16_support(model: str, site: Path | None = None) -> Float16Support:
    """Return whether vLLM runs ``model``, a folder or a name on the Hugging Face Hub, in float16.

    Args:
        site: the folder whose ``vllm`` counts; the installed one where it has none.
    """
    file = config_file(model)
    if file is None:
        return Float16Support(None, f"{model} has no config.json on this machine")
    model_type = read_config(file).get("model_type")  # the outer one of a multimodal model: vLLM looks that up
    if model_type is None:
        return Float16Support(None, f"{file} has no model_type")
    package = package_folder("vllm", site)
    if package is None:
        return Float16Support(None, "no vLLM is installed here")
    name, table = f"vLLM {version(package)}", refused_types(package)
    if table is None:
        return Float16Support(None, f"{name} has no {TABLE} in {package}/config")
    if model_type in table:
        return Float16Support(False, f"{name} refuses {model_type} models in float16: {table[model_type].rstrip('.')}")
    return Float16Support(True, f"{name} runs {model_type} models in float16")


def version(package: Path) -> str:
    file = package / "_version.py"
    match = re.search(r"""^__version__ = .*?['"]([^'"]+)['"]""", file.read_text(), re.M) if file.exists() else None
    return match[1] if match else "(no version)"


def ignores_head_dtype(site: Path | None = None) -> bool:
    """Return whether the vLLM of ``site``, or the installed one, ignores ``head_dtype`` for models that generate."""
    package = package_folder("vllm", site)
    source = package / "config/model.py" if package else None
    return source is not None and source.exists() and POOLING_HEADS in source.read_text()


def refused_types(package: Path) -> dict[str, str] | None:
    """Return the reasons by the model type that vLLM refuses in float16; None where it has no such literal table."""
    for file in [package / "config.py", *sorted((package / "config").glob("*.py"))]:
        if not file.exists() or TABLE not in (source := file.read_text()):
            continue
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and ast.unparse(node).startswith(TABLE):
                try:
                    return ast.literal_eval(node.value)
                except ValueError:
                    return None
    return None


def ways_out(override: str = "", regime: str = "+precision=", key: str = ROLLOUT_DTYPE) -> str:
    """Return the settings to choose from where vLLM refuses float16, the policy's with their costs.

    Args:
        override: prefix of an override of verl in the suggested command, ``ARGS=`` for make.
        regime: prefix of the name of a regime, which is suggested only for the rollout.
        key: the dtype key of the server; a reward model's has no mismatch.
    """
    if key.startswith("actor_rollout_ref.rollout"):
        return f"{override}{key}=float32 ({FP32_COST}), or {regime}bf16"
    return f"{override}{key}=bfloat16, or {override}{key}=float32"
