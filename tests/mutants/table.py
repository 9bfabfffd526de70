"""Read the mutants of ``tests/mutants/AREA.toml``: known defects, each a text of a file and its replacement."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.paths import REPO

FOLDER = REPO / "tests/mutants"


@dataclass(frozen=True)
class Mutant:
    """One defect: ``replace``, which occurs exactly once in ``file``, becomes ``by``."""

    area: str  # the file of tests/mutants that contains it
    name: str
    defect: str  # what goes wrong, and when
    seen_in: str  # who ships it, or how it happens
    file: str  # a path of this repository, or ``verl/…`` or ``oat/…`` in a patched release
    replace: str
    by: str
    tests: tuple[str, ...] = ()  # pytest ids, the cheapest first; empty: those whose imports reach ``file``
    release: str = ""  # of ``file``; empty: the newest
    equivalent: str = ""  # why no test can fail on it; empty: one must

    def source(self, file: Path) -> str:
        """Return the mutated content of ``file``, which is this mutant's in some tree."""
        text = file.read_text()
        if (count := text.count(self.replace)) != 1:
            raise Refused(f"{self.name}: its text occurs {count} times in {self.file}; correct {self.area}.toml")
        return text.replace(self.replace, self.by)


def load(folder: Path = FOLDER) -> list[Mutant]:
    """Read all areas, in the order of their names.

    Raises:
        Refused: two mutants have the same name, or one has a key that does not exist or lacks one.
    """
    mutants: dict[str, Mutant] = {}
    for file in sorted(folder.glob("*.toml")):
        for name, entry in tomllib.loads(file.read_text()).items():
            if name in mutants:
                raise Refused(f"{file.name}: {name} is in {mutants[name].area}.toml, too")
            entry["tests"] = tuple(entry.get("tests", ()))
            try:
                mutants[name] = Mutant(area=file.stem, name=name, **entry)
            except TypeError as error:
                raise Refused(f"{file.name}: {name}: {error}") from error
    return list(mutants.values())


def choose(mutants: list[Mutant], only: str) -> list[Mutant]:
    """Return the mutants that ``only`` names: names and areas, separated by commas or spaces; empty: all.

    Raises:
        Refused: a word is neither.
    """
    words = only.replace(",", " ").split()
    areas, names = dict.fromkeys(mutant.area for mutant in mutants), {mutant.name for mutant in mutants}
    for word in words:
        if word not in areas and word not in names:
            raise Refused(f"ONLY={word}: is neither a mutant nor an area; the areas are {', '.join(areas)}")
    return [mutant for mutant in mutants if not words or {mutant.area, mutant.name} & set(words)]
