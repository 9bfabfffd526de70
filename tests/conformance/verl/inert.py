"""Observe what a tree does without a precision key, bitwise: a case ends in one digest of all that it observed.

Each part is printed with a short hash into the log of its rank, so that a difference between two trees is found by

    diff <(grep -a ^inert A/rank_0.log) <(grep -a ^inert B/rank_0.log)
"""

import ast
import contextlib
import hashlib
import io
import json
import logging
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
import torch.distributed as dist
import transformers.utils.logging
from harness import MODEL, OUT, RANK, VERL
from observations import local
from omegaconf import DictConfig, ListConfig, OmegaConf
from safetensors.torch import load_file

# With the sign of a number: verl logs the memory that it freed, 0.00 GB in one run and -0.00 GB in the next.
VARYING = re.compile(r"0x[0-9a-f]+|(?<![\w.])-?\d+(\.\d+)?(e[+-]?\d+)?(?![\w])|tmp\w{8}")
MEASURED = re.compile("mfu|time|timing|memory|throughput")  # metrics that two runs of one tree disagree on
# Keys that the project adds, wherever they are, and beneath these nodes.
ADDED = ("grad_scaler", "keep_fp32_modules", "report_dtypes", "check_weight_sync", "check_rewards", "mismatch_freq")
WITH_DTYPE = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", "reward_model", "")
SHOWN = 200  # characters of a part that are printed beside its hash


def without_added(node: dict, path: str = "") -> dict:
    """Return a configuration without the keys that the project adds, in the order of the alphabet.

    A list of defaults, which an added key may need, changes the order.
    """
    own = [*ADDED, *["dtype"] * (path in WITH_DTYPE)]
    below = {key: node[key] for key in sorted(node) if key not in own}
    for key, value in below.items():
        if isinstance(value, dict):
            below[key] = without_added(value, f"{path}.{key}".removeprefix("."))
    return below


def normal(text: str) -> str:
    """Return a text without what differs between two runs: folders, addresses and numbers."""
    lines = [str(without_added(ast.literal_eval(line))) if line.startswith("{'") else line for line in text.split("\n")]
    text = "\n".join(lines)  # SFT's own trainer prints its configuration
    for folder, name in ((VERL, "VERL"), (OUT, "OUT"), (MODEL, "MODEL")):
        text = text.replace(str(folder), name)
    return VARYING.sub("N", text)


def plain(value: Any) -> Any:
    """Return a value as JSON takes it, a tensor or an array as its dtype, shape and the hash of its bytes."""
    if isinstance(value, torch.Tensor):
        tensor = local(value.detach()).cpu().contiguous()
        content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()}"
    if isinstance(value, np.ndarray):
        content = repr(value.tolist()) if value.dtype == object else value.tobytes()
        return f"{value.dtype} {value.shape} {hashlib.sha256(str(content).encode()).hexdigest()}"
    if hasattr(value, "local_shards"):  # FSDP1's own kind of tensor
        return [plain(shard.tensor) for shard in value.local_shards()]
    if isinstance(value, DictConfig | ListConfig):
        return plain(OmegaConf.to_container(value))
    if isinstance(value, Mapping):
        return [[str(key), plain(each)] for key, each in value.items()]
    if is_dataclass(value):
        return [type(value).__name__, plain(asdict(value))]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if hasattr(value, "aggregate"):  # a metric of the model engine
        return [type(value).__name__, plain(value.aggregate())]
    if value is None or isinstance(value, str | int | float | bytes | torch.dtype | Enum | np.generic):
        return repr(value)
    raise TypeError(f"no part of an observation: {type(value)}")


class Seen:
    """What a case observes, part after part.

    Args:
        name: of the case, for the log.
    """

    def __init__(self, name: str):
        self.name, self.whole = name, hashlib.sha256()
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)

    def note(self, label: str, value: Any) -> None:
        """Add a part; of a text each line is one."""
        if isinstance(value, str) and "\n" in value:
            for line in value.splitlines():
                self.note(label, line)
            return
        text = value if isinstance(value, str) else json.dumps(plain(value))
        digest = hashlib.sha256(text.encode()).hexdigest()
        self.whole.update(f"{label} {digest}\n".encode())
        print(
            f"inert {harness.STRATEGY} {self.name}: {label} {digest[:8]} {text[:SHOWN]}",
            file=sys.__stdout__,
            flush=True,
        )

    def run(self, label: str, call: Callable[[], Any]) -> Any:
        """Add what ``call`` prints, and return what it returns."""
        with self.printed(label):
            return call()

    def attempt(self, label: str, call: Callable[[], Any]) -> Any:
        """Add what ``call`` prints and what it raises, which may be what upstream does; return what it returns."""
        with self.printed(label):
            try:
                return call()
            except Exception as error:
                while error.__cause__ is not None:  # Hydra's instantiate wraps it
                    error = error.__cause__
                self.note(f"{label} raises", normal(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"))
                return None

    @contextlib.contextmanager
    def printed(self, label: str) -> Iterator[None]:
        """Add what is printed, warned of and logged meanwhile; INFO only of verl."""
        records: list[str] = []
        with contextlib.redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", ResourceWarning)  # as the garbage collector likes
            try:
                with logged(records):
                    yield
            finally:
                print(printed.getvalue(), end="", file=sys.__stdout__, flush=True)
        warned = [normal(f"{each.category.__name__} {each.message}") for each in caught]
        for kind, lines in {"prints": [normal(printed.getvalue())], "warns": warned, "logs": records}.items():
            self.note(f"{label} {kind}", "\n".join(lines))

    def metrics(self, label: str, metrics: Mapping[str, Any] | None) -> None:
        """Add metrics by all their names, and the values of those that are no measurement."""
        for name in sorted(metrics or {}):
            self.note(f"{label} {name}", "measured" if MEASURED.search(name) else metrics[name])

    def state(self, label: str, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Add weights and buffers by name, Adam state and LR."""
        self.note(f"{label} parameters", dict(module.named_parameters()))
        self.note(f"{label} buffers", dict(module.named_buffers()))
        if optimizer is not None:
            self.note(f"{label} Adam", list(optimizer.state.values()))
            self.note(f"{label} LR", [group["lr"] for group in optimizer.param_groups])

    def files(self, label: str, folder: Path) -> None:
        """Add the files below a folder, by name and content; of another rank's shards the names."""
        dist.barrier()
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            foreign = re.search(rf"_rank_(?!{RANK}\b)", path.name)
            self.note(f"{label} {path.relative_to(folder)}", "of another rank" if foreign else content(path))

    def outcome(self) -> str:
        """Return the digests of all ranks."""
        digests = [""] * dist.get_world_size()
        dist.all_gather_object(digests, self.whole.hexdigest())
        return " ".join(digests)


def content(path: Path) -> Any:
    """Return the content of a file of a checkpoint, independent of how it is serialized."""
    if path.suffix == ".pt":
        return torch.load(path, weights_only=False)
    return load_file(path) if path.suffix == ".safetensors" else path.read_text().replace(str(OUT), "OUT")


@contextlib.contextmanager
def logged(records: list[str]) -> Iterator[None]:
    """Collect the records of all loggers, those of verl from INFO on, each once however often it was logged before."""

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING or str(VERL) in record.pathname:
                records.append(normal(f"{record.levelname} {record.getMessage()}"))

    transformers.utils.logging.warning_once.cache_clear()
    own = [each for name, each in logging.root.manager.loggerDict.items() if str(VERL) in name or "verl" in name]
    levels = {each: each.level for each in own if isinstance(each, logging.Logger)}
    collector, roots = Collector(), (logging.root, logging.getLogger("transformers"))
    for logger in levels:
        logger.setLevel(logging.INFO)
    for logger in roots:
        logger.addHandler(collector)
    try:
        yield
    finally:
        for logger in roots:
            logger.removeHandler(collector)
        for logger, level in levels.items():
            logger.setLevel(level)


def each_on(rank: int, act: Callable[[], None]) -> None:
    """Act on one rank while the others wait."""
    if RANK == rank:
        act()
    dist.barrier()
