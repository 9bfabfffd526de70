"""``configs/launch/Dockerfile``: the files that it copies, and its steps, run here on a release's wheel."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch_machine import Machine

from lib.patches.status import status
from lib.patches.wheels import unpacked_wheel
from lib.paths import REPO

FILE = REPO / "configs/launch/Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions as (name, rest), without comments and with continued lines joined."""
    lines = [line for line in FILE.read_text().splitlines() if line and not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines()]


class Image(Machine):
    """Folders that stand for /opt/verl-precision and for the image's site-packages.

    ``python3`` is this environment's, whose verl is the wheel's; pip is a stub that records its arguments.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.project, self.site, self.installed = folder / "project", folder / "site", folder / "installed"
        self.project.mkdir()
        unpacked_wheel("0.9.1", self.site)
        python = f'PYTHONPATH={self.site}${{PYTHONPATH:+:$PYTHONPATH}} exec {sys.executable} "$@"'
        self.program("python3", f'if [[ "$1 $2" == "-m pip" ]]; then echo "$@" >> {self.installed}; else {python}; fi')
        self.program("ray")

    def build(self) -> subprocess.CompletedProcess:
        """Run all instructions; stop at the first step that fails, as docker does."""
        environment = {"PATH": f"{self.bin}:/usr/bin:/bin"}
        for name, rest in instructions():
            if name == "ARG" and "=" in rest:
                environment |= [rest.split("=", 1)]
            elif name == "COPY":
                source, target = rest.split()
                source = REPO / source
                if source.is_dir():
                    shutil.copytree(source, self.project / target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(source, self.project / target)
            elif name == "RUN":
                command = ["sh", "-c", rest]
                done = subprocess.run(command, cwd=self.project, env=environment, capture_output=True, text=True)
                if done.returncode:
                    return done
        return done


@pytest.fixture
def image(tmp_path) -> Image:
    return Image(tmp_path)


def test_image_contains_patched_verl_and_this_project(image):
    done = image.build()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--no-deps verl==0.9.1 TransferQueue==0.1.11" in image.installed.read_text()
    assert status(image.site).state == "patched"
    knobs = {"RAY_ADDRESS": "head:6379", "NNODES": "2", "GPUS_PER_NODE": "8"}
    environment = knobs | {"PATH": f"{image.project}/bin:/usr/bin:/bin"}
    for command, output in (
        ([image.project / "scripts/launch/train.sh", "--dry-run"], f"{image.project}/scripts/run.py"),
        (["python3", image.project / "scripts/run.py", "--help"], "flowrl_7b"),
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and output in done.stdout, done.stderr


def test_build_fails_if_verl_is_not_a_release(image):
    changed = image.site / "verl/utils/config.py"
    changed.write_text(changed.read_text() + "\n# edited\n")
    done = image.build()
    assert done.returncode and "patchset: " in done.stderr


def test_copied_folders_are_in_dockers_context():
    copied = {rest.split()[0] for name, rest in instructions() if name == "COPY"}
    ignore = FILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    assert ignore[0] == "*" and {line[1:] for line in ignore if line.startswith("!")} == copied
    assert ("ARG", "BASE=verlai/verl:vllm024.dev2") in instructions(), "verl's own image"
