"""``support.fork_server``: ranks end together, and never wait for one that is gone."""

import os

import pytest
from support.fork_server import ForkServer, JobError

pytestmark = pytest.mark.subprocess

ENDS = {
    "raise ValueError('in one rank')": "rank 1 failed; exit codes .*ValueError: in one rank",
    "os.kill(os.getpid(), 9)": "rank 1 failed; exit codes .-9, -9.",
    "raise RuntimeError('Timed out waiting 90000ms for recv')": "stuck: one rank waited",
    "time.sleep(1e6)": "stuck: one rank waited",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with ForkServer(["torch"], tmp_path_factory.mktemp("server") / "server.log") as made:
        yield made


@pytest.mark.parametrize(("last", "message"), ENDS.items())
def test_rank_that_fails_ends_the_others_at_once(server, tmp_path, last, message):
    """The other rank sleeps for longer than any limit."""
    script = tmp_path / "fail.py"
    script.write_text(f"import os, time\nif os.environ['RANK'] == '1':\n    {last}\ntime.sleep(1e6)\n")
    limit = {"limit_s": 0.5} if "sleep" in last else {}
    with pytest.raises(JobError, match=f"(?s){message}"):
        server.check([script], dict(os.environ), tmp_path, **limit)
