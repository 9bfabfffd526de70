"""Machines of stubs, and data, for the launch scripts."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from support.launch_machine import ALL_BUT_THE_JOB, Machine


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture(scope="session")
def parquet(tmp_path_factory) -> Path:
    """A folder with 1,000 rows of verl's schema for training and validation."""
    folder = tmp_path_factory.mktemp("parquet")
    row = {"data_source": "math_dapo", "prompt": [{"role": "user", "content": "1+1?"}]}
    rows = pyarrow.Table.from_pylist([row | {"reward_model": {"style": "rule"}}] * 1000)
    for split in ("train", "test"):
        pyarrow.parquet.write_table(rows, folder / f"{split}.parquet")
    return folder


@pytest.fixture
def slurm(machine) -> Machine:
    """Stubs of Slurm with one node; ``ray symmetric-run`` runs its command, and python3 stands for the command run: it
    writes the run's summary.json."""
    machine.program("hostname", "echo 10.0.0.7 192.168.0.7")
    machine.program("scontrol", """case "$1" in show) printf 'node1\\nnode2\\nnode3\\n' ;; esac""")
    machine.program("srun", """while [[ $1 == -* ]]; do shift; done; exec "$@" """)
    machine.program("ray", """until [[ $1 == -- ]]; do shift; done; shift; exec "$@" """)
    job = "SLURM_JOB_ID=7 SLURM_JOB_NODELIST='node[1-2]'"
    machine.program("sbatch", f"""wrap=${{!#}}; {job} exec sh -c "${{wrap#--wrap=}}" """)
    machine.program(
        "python3",
        f"""{ALL_BUT_THE_JOB}
for word in "$@"; do
  case "$word" in --out=*) mkdir -p "${{word#--out=}}"; echo {{}} > "${{word#--out=}}/summary.json" ;; esac
done""",
    )
    return machine
