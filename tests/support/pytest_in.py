"""Run pytest in a folder, as a program of a fork server: without the variables of a process group.

pytest_in.py FOLDER ARGUMENT ...
"""

import os
import sys

import pytest

# What tests/support/forked_ranks.py sets.
GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

if __name__ == "__main__":
    for name in (*GROUP, "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        os.environ.pop(name, None)
    folder, *arguments = sys.argv[1:]
    os.chdir(folder)
    sys.path[0] = folder  # not this script's
    sys.exit(pytest.main(arguments))
