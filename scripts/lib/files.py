"""Write files whole; read JSON lines."""

import json
from pathlib import Path


def write(path: Path, content: bytes) -> None:
    """Write a file, creating its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def write_json(file: Path, content: dict) -> None:
    """Replace ``file`` atomically with ``content`` as JSON."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(file)


def read_jsonl(file: Path) -> list[dict]:
    """Return the objects of a JSON-lines file, such as verl's ``{"step": int, "data": {name: value}}``.

    Returns:
        An empty list if ``file`` does not exist. An incomplete last line, still being written, is left out.
    """
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
