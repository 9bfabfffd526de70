"""Format numbers and durations for the terminal and for reports."""


def number(value: float | None, form: str = ".3g") -> str:
    """Format ``value`` with the format specification ``form``; ``-`` for None."""
    return "-" if value is None else format(value, form)


def duration(seconds: float) -> str:
    """Format ``seconds`` as ``m:ss``."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"


def first_three(paths: list[str]) -> str:
    """Join the first three paths and the number of the others."""
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
