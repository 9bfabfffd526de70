"""Write a report as Markdown, and print it."""

from collections.abc import Iterable, Mapping, Sequence

FIRST_ROWS = 24  # of a table on the screen


def markdown(title: str, findings: Mapping[str, str], *blocks: Sequence[str]) -> str:
    """Return a page: a title, a list of findings, and blocks of lines."""
    parts = [[f"# {title}"], [f"- {name}: {text}" for name, text in findings.items()], *blocks]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def show(table: Sequence[Sequence[str]], findings: Mapping[str, str], last: Iterable[object]) -> None:
    """Print the first rows of a table, headings first; findings; and the lines ``last``."""
    shown = table[: FIRST_ROWS + 1]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in ["", *shown]:
        print(" ", *(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)))
    width = max(map(len, findings))
    print("", *(f"  {name:<{width}} {text}" for name, text in findings.items()), "", sep="\n")
    print(*(f"  {line}" for line in last), sep="\n")
