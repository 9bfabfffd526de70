"""``support.fork_server``: ranks get their environment and tree, end together, and never wait for one that is gone."""

import os

import pytest
from support.fork_server import ForkServer, JobError

pytestmark = pytest.mark.subprocess

MEET = """
import json, os, sys, torch, tree
rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])
met = torch.ones(1)
if rank < world_size:
    torch.distributed.init_process_group("gloo")
    torch.distributed.all_reduce(met)
with open(f"{sys.argv[1]}/{rank}.json", "w") as outcome:
    json.dump([tree.NAME, int(met), sys.argv[2:]], outcome)
"""
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


def test_ranks_import_their_own_tree_and_meet(server, tmp_path):
    (tmp_path / "meet.py").write_text(MEET)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tree.py").write_text(f"NAME = {name!r}")
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / name)}
        server.check([tmp_path / "meet.py", tmp_path, "word"], environment, tmp_path, ranks=2, others=1)
        outcomes = [(tmp_path / f"{rank}.json").read_text() for rank in range(3)]
        assert outcomes == [f'["{name}", {met}, ["word"]]' for met in (2, 2, 1)]


@pytest.mark.parametrize(("last", "message"), ENDS.items())
def test_rank_that_fails_ends_the_others_at_once(server, tmp_path, last, message):
    """The other rank sleeps for longer than any limit."""
    script = tmp_path / "fail.py"
    script.write_text(f"import os, time\nif os.environ['RANK'] == '1':\n    {last}\ntime.sleep(1e6)\n")
    limit = {"limit_s": 0.5} if "sleep" in last else {}
    with pytest.raises(JobError, match=f"(?s){message}"):
        server.check([script], dict(os.environ), tmp_path, **limit)
