"""Write a report as Markdown, and print its beginning."""

from collections.abc import Mapping, Sequence
from pathlib import Path

FIRST_LINES = 40  # on the screen


def publish(file: Path, title: str, findings: Mapping[str, str], *blocks: Sequence[str]) -> None:
    """Write a page: a title, a list of findings, and blocks of lines; print its beginning and its path."""
    parts = [[f"# {title}"], [f"- {name}: {text}" for name, text in findings.items()], *blocks]
    text = "\n\n".join("\n".join(part) for part in parts) + "\n"
    file.write_text(text)
    print("", *text.splitlines()[:FIRST_LINES], "", f"  {file}", sep="\n")
