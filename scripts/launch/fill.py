"""Print a YAML file with ``${NAME}`` replaced by the environment's values: ``fill.py FILE``.

``'${NAME}'`` becomes a quoted string, whatever the value contains, and so does ``'${NAME}/more'``; a bare ``${NAME}``
must be a whole number.
"""

import json
import os
import re
import sys
from pathlib import Path

NAME = re.compile(r"\$\{(\w+)\}")
PLACE = re.compile(rf"'([^'\n]*{NAME.pattern}[^'\n]*)'|{NAME.pattern}")


def fill(place: re.Match) -> str:
    """Return what replaces a quoted or bare name; what a value itself contains stays as it is."""
    if place[1] is None:
        return str(int(os.environ[place[3]]))
    text = NAME.sub(lambda name: os.environ[name[1]], place[1])
    return json.dumps(text, ensure_ascii=False)  # YAML joins no surrogates


if __name__ == "__main__":
    print(PLACE.sub(fill, Path(sys.argv[1]).read_text()), end="")
