"""Format numbers and durations for the terminal and for reports."""

import math
import re
from collections.abc import Iterable


def number(value: float | None, form: str = ".3g") -> str:
    """Format ``value`` with the format specification ``form``; ``-`` for None."""
    return "-" if value is None else format(value, form)


def significant(value: float, digits: int = 3) -> str:
    """Format ``value`` by its first digits, whole numbers as such: ``0.00951``, ``26``, ``1958``, ``1.67e-07``."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    leading = math.floor(math.log10(abs(value)))
    if not -3 <= leading < 7:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{max(digits - 1 - leading, 0)}f}"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def markdown_table(header: Iterable[object], rows: Iterable[Iterable[object]]) -> list[str]:
    """Return the lines of a Markdown table; bars and line breaks in cells are escaped."""
    texts = [[str(cell).replace("|", r"\|").replace("\n", "<br>") for cell in row] for row in (header, *rows)]
    texts.insert(1, ["---"] * len(texts[0]))
    return [f"| {' | '.join(row)} |" for row in texts]


def first_three(paths: list[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
