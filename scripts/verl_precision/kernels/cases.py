"""The models whose dimensions the kernels are compiled with, and what runs each kernel: its Python function.

A case calls the function of verl, vLLM or flash-attn that launches kernels, with tensors that have no data.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

DEVICE = "meta"


class Missing(Exception):
    """The installed version has no such kernel."""


@dataclass(frozen=True)
class Model:
    """Dimensions from a model's config.json."""

    name: str
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    vocabulary: int
    softcap: float = 0.0
    window: int = 0


@dataclass(frozen=True)
class Case:
    """A call that launches kernels."""

    group: str  # what the kernels are for
    model: str
    call: Callable[[], object]


MODELS = (
    Model("Qwen2.5-0.5B", 14, 2, 64, 896, 151936),
    Model("Qwen2.5-7B", 28, 4, 128, 3584, 152064),
    Model("Llama-2-7B", 32, 32, 128, 4096, 32000),
    Model("Phi-3-mini", 32, 32, 96, 3072, 32064),
    Model("Gemma-2-9B", 16, 8, 256, 3584, 256000, 50.0, 4096),
    Model("Gemma-4, global layers", 8, 4, 512, 2304, 262144),  # the defaults of transformers' Gemma4TextConfig
)
# Experts, experts of a token, their intermediate size, hidden size.
EXPERTS = {"Qwen3-30B-A3B": (128, 8, 768, 2048), "Mixtral-8x7B": (8, 2, 14336, 4096)}


def load(module: str, name: str = "") -> object:
    """Import a module, or one of its names.

    Raises:
        Missing: the installed version has none.
    """
    try:
        found = importlib.import_module(module)
        return getattr(found, name) if name else found
    except (ImportError, AttributeError) as error:
        raise Missing(f"{module}{'.' * bool(name)}{name}: {error}") from error


def load_file(package: str, path: str) -> ModuleType:
    """Import a file of a package whose own import needs a GPU build."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise Missing(f"{package} is not installed")
    name = f"{package}_{path.replace('/', '_')}".removesuffix(".py")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, f"{spec.submodule_search_locations[0]}/{path}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def integers(*shape: int) -> torch.Tensor:
    return tensor(*shape, dtype=torch.int32)
