"""Print a YAML file with ``${NAME}`` replaced by the environment's values: ``fill.py FILE``.

``'${NAME}'`` becomes a quoted string, whatever the value contains, and so does ``'${NAME}/more'``; a bare ``${NAME}``
must be a whole number.
"""

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

NAME = re.compile(r"\$\{(\w+)\}")
PLACE = re.compile(rf"'([^'\n]*{NAME.pattern}[^'\n]*)'|{NAME.pattern}")


def fill(text: str, values: Mapping[str, str]) -> str:
    """Return ``text`` with every ``${NAME}`` filled in; what a value itself contains stays as it is.

    Raises:
        KeyError: a name is not among ``values``.
        ValueError: a bare one is not a whole number.
    """

    def value(place: re.Match) -> str:
        if place[1] is None:
            return str(int(values[place[3]]))
        return json.dumps(
            NAME.sub(lambda name: values[name[1]], place[1]), ensure_ascii=False
        )  # YAML joins no surrogates

    return PLACE.sub(value, text)


if __name__ == "__main__":
    print(fill(Path(sys.argv[1]).read_text(), os.environ), end="")
