"""The spelling of messages in these tests: ``NAME=VALUE``, as make has it."""

import os

from verl_precision.spelling import MADE

os.environ[MADE] = "tests"
