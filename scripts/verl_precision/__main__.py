"""Run the command line as a module or, from a checkout, by ``python3 scripts/verl_precision``."""

import os
import sys

if sys.version_info < (3, 10):  # noqa: UP036 - before anything is imported that an older Python cannot read
    sys.exit(f"verl-precision: Python 3.10 or later is needed; {sys.executable} is {sys.version.split()[0]}")

if not __package__:  # started by its path: import the package from the folder above, not its modules from here
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    if os.path.dirname(here) not in sys.path:  # as site-packages is, which must not come before PYTHONPATH
        sys.path.insert(0, os.path.dirname(here))

if sys.argv[1:2] == ["make"]:
    from verl_precision.make import main

    sys.exit(main(sys.argv[2:]))

from verl_precision.cli import main

sys.exit(main(sys.argv[1:]))
