"""Finished runs side by side: ``scripts/compare.py OUT LABEL=FOLDER [LABEL=FOLDER ...]``.

Writes ``OUT.png``, the runs' curves, and ``OUT.json``, by label what each run was asked and its summary. A label may
occur more than once, for other seeds of the same.
"""

import json
import sys
from pathlib import Path

from lib import runs
from lib.job import Refused


def read(word: str) -> tuple[str, dict, list[dict]]:
    """Of a ``LABEL=FOLDER``: the label, the content of ``OUT.json``, the rows of its metrics.

    Raises:
        Refused: there is no finished run.
    """
    label, _, folder = word.partition("=")
    out = Path(folder)
    if not folder or not runs.finished(out):
        raise Refused(f"{word}: must be LABEL=FOLDER with the folder of a finished run")
    asked = json.loads((out / "run.json").read_text())["settings"]
    summary = json.loads((out / "summary.json").read_text())
    return label, {"asked": {k: v for k, v in asked.items() if v}, **summary}, runs.rows(out / "metrics.jsonl")


def named(words: list[str]) -> tuple[Path, list[str]]:
    """``OUT`` and the ``LABEL=FOLDER`` words of a command line.

    Raises:
        Refused: it is of another form.
    """
    if len(words) < 2 or "=" in words[0]:
        raise Refused(f"{' '.join(words) or 'nothing given'}: must be OUT LABEL=FOLDER …")
    return Path(words[0]), words[1:]


def main(words: list[str]) -> None:
    out, given = named(words)
    several = [read(word) for word in given]
    by_label = {label: [told for of, told, _ in several if of == label] for label, _, _ in several}
    runs.write_json(out.with_suffix(".json"), by_label)
    runs.plot([(label, data) for label, _, data in several], out.name, out.with_suffix(".png"))
    for label, summaries in by_label.items():
        for summary in summaries:
            print(f"{label}\n{runs.table(summary)}\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refused as refusal:
        sys.exit(f"compare: {refusal}")
