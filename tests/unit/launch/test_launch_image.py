"""``configs/launch/Dockerfile``: the files that it copies, and its steps, run here on a release's wheel."""

import subprocess
import sys

import pytest
from support.launch_machine import Machine

from verl_precision.patch.status import status
from verl_precision.patch.wheels import unpacked_wheel
from verl_precision.paths import REPO

FILE = REPO / "configs/launch/Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions as (name, rest), without comments and with continued lines joined."""
    lines = [line for line in FILE.read_text().splitlines() if line and not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines()]


@pytest.fixture
def image(machine) -> Machine:
    """Folders that stand for /opt/verl-precision and for the image's site-packages, ``project`` and ``site``.

    ``python3`` is this environment's, whose verl is the wheel's; pip is a stub that records its arguments.
    """
    folder = machine.folder
    (folder / "project").mkdir()
    unpacked_wheel("0.9.1", folder / "site")
    python = f'PYTHONPATH={folder}/site${{PYTHONPATH:+:$PYTHONPATH}} exec {sys.executable} "$@"'
    machine.program("python3", f'if [[ "$1 $2" == "-m pip" ]]; then echo "$@" >> {folder}/installed; else {python}; fi')
    machine.program("ray")
    return machine


def build(image: Machine) -> subprocess.CompletedProcess:
    """Run all instructions; stop at the first step that fails, as docker does."""
    project, environment = image.folder / "project", {"PATH": f"{image.bin}:/usr/bin:/bin"}
    for name, rest in instructions():
        if name == "ARG" and "=" in rest:
            environment |= [rest.split("=", 1)]
        elif name == "COPY":
            source, target = rest.split()
            subprocess.run(["cp", "-r", REPO / source, project / target], check=True)
        elif name == "RUN":
            done = subprocess.run(["sh", "-c", rest], cwd=project, env=environment, capture_output=True, text=True)
            if done.returncode:
                return done
    return done


def test_image_contains_patched_verl_and_this_project(image):
    done, project = build(image), image.folder / "project"
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--no-deps verl==0.9.1 TransferQueue==0.1.11" in (image.folder / "installed").read_text()
    assert status(image.folder / "site").state == "patched"
    knobs = {"RAY_ADDRESS": "head:6379", "NNODES": "2", "GPUS_PER_NODE": "8", "PATH": f"{project}/bin:/usr/bin:/bin"}
    dry_run, help = (
        f"{project}/scripts/launch/train.sh --dry-run",
        f"python3 {project}/scripts/verl_precision run --help",
    )
    for command, output in ((dry_run, f"{project}/scripts/verl_precision run"), (help, "flowrl_7b")):
        done = subprocess.run(command.split(), env=knobs, capture_output=True, text=True)
        assert done.returncode == 0 and output in done.stdout, done.stderr


def test_build_fails_if_verl_is_not_a_release(image):
    with (image.folder / "site/verl/utils/config.py").open("a") as file:
        file.write("# edited\n")
    done = build(image)
    assert done.returncode and "verl-precision apply: " in done.stderr


def test_copied_folders_are_in_dockers_context():
    copied = {rest.split()[0] for name, rest in instructions() if name == "COPY"}
    ignore = FILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    assert ignore[0] == "*" and {line[1:] for line in ignore if line.startswith("!")} == copied
