"""Read the recorded configuration of a run as flat keys, without seeds, names and folders, and hash it."""

import hashlib
import json
import re
from pathlib import Path

from verl_precision.errors import Refused

# Seeds, which differ within a label, and names and folders of the run.
OF_ONE_RUN = re.compile(
    r"(.*[._])?seed|trainer\.(project_name|experiment_name|default_local_dir|(validation|rollout)_data_dir)"
    r"|save_path|wb_\w+|master_(addr|port)"  # OAT's
)


def read_json(file: Path) -> dict:
    """Return the content of a JSON file.

    Raises:
        Refused: it is not JSON.
    """
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise Refused(f"{file}: is not JSON: {error}") from error


def read_composed_config(folder: Path) -> dict:
    """Return ``config`` and ``config_hash`` of what Hydra wrote into a run's folder; {} and None where it is missing.

    Raises:
        Refused: the file is not YAML.
    """
    import yaml

    file = folder / "hydra" / "config.yaml"
    if not file.exists():
        return {"config": {}, "config_hash": None}
    try:
        tree = yaml.load(file.read_text(), Loader=yaml.CSafeLoader)
    except yaml.YAMLError as error:
        raise Refused(f"{file}: is not YAML: {' '.join(str(error).split())}") from error
    return with_hash(flatten(tree or {}))


def with_hash(flat: dict) -> dict:
    """Return ``config``, a flat configuration without seeds, names and folders, and ``config_hash``, 12 hex digits."""
    config = {key: value for key, value in flat.items() if not OF_ONE_RUN.fullmatch(key)}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    return {"config": config, "config_hash": digest[:12]}


def flatten(tree: dict, prefix: str = "") -> dict:
    """Return nested dicts as one with keys ``a.b.c``; an empty dict stays a value."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
