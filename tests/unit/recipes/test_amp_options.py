"""A recipe's config: the precedence of its sources, and the refusal of malformed values."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import pytest
import torch

from recipes.amp import options


@dataclass(frozen=True)
class ExampleConfig:
    steps: int = options.option(10, "how many")
    lr: float = options.option(0.5, "how far")
    name: Optional[str] = options.option(None, "which")
    use_amp: bool = options.option(False, "16 bits", "TEST_USE_AMP")

    def __post_init__(self):
        options.within(
            self,
            {"steps": (self.steps >= 1, "at least 1"), "lr": (0 < self.lr < 1, "between 0 and 1")},
        )


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv("TEST_USE_AMP", raising=False)


def parse(*words: str) -> tuple[ExampleConfig, dict[str, str]]:
    return options.parse(ExampleConfig, "recipe", "A recipe.", words)


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("steps: 20\nlr: 1.0e-2\nname: null\n")
    return path


def test_default_is_used_without_other_sources():
    config, sources = parse()
    assert config == ExampleConfig() and set(sources.values()) == {"default"}


def test_file_overrides_defaults(file):
    config, sources = parse("--config", str(file))
    assert config == ExampleConfig(steps=20, lr=0.01)
    source = f"config ({file})"
    assert sources == {"steps": source, "lr": source, "name": source, "use_amp": "default"}


@pytest.mark.parametrize("value, expected", [("1", True), ("TRUE", True), ("0", False), ("false", False)])
def test_command_line_overrides_environment_overrides_file(file, monkeypatch, value, expected):
    file.write_text(f"use_amp: {str(not expected).lower()}\n")
    monkeypatch.setenv("TEST_USE_AMP", value)
    config, sources = parse("--config", str(file))
    assert config.use_amp is expected and sources["use_amp"] == "environment (TEST_USE_AMP)"
    word = "--no-use-amp" if expected else "--use-amp"
    config, sources = parse("--config", str(file), word, "--steps", "30", "--lr", "1e-3", "--name", "x")
    assert config == ExampleConfig(steps=30, lr=1e-3, name="x", use_amp=not expected)
    assert set(sources.values()) == {"command line"}


def refused(capsys, *words: str) -> str:
    """Return the one line that ends the process."""
    with pytest.raises(SystemExit) as ended:
        parse(*words)
    message = ended.value.code
    assert isinstance(message, str), "Python prints it to stderr and ends with exit code 1"
    assert message.startswith("recipe: ") and "\n" not in message
    assert capsys.readouterr().out == ""
    return message


@pytest.mark.parametrize(
    "words, message",
    [
        (["--lr", "fast"], "--lr: invalid float value: 'fast'"),
        (["--lr", "nan"], "lr=nan must be between 0 and 1"),
        (["--steps", "0"], "steps=0 must be at least 1"),
        (["--steps", "1.5"], "--steps: invalid int value: '1.5'"),
        (["--steps"], "--steps: expected one argument"),
        (["--ste", "5"], "--ste is not an option; did you mean --steps?"),
        (["--use-amp=1"], "ignored explicit argument '1'"),
        (["more"], "more is not an option; see --help"),
        (["--config", "none.yaml"], "--config none.yaml: No such file"),
    ],
)
def test_malformed_option_is_refused_in_one_line(words, message, capsys):
    assert message in refused(capsys, *words)


@pytest.mark.parametrize("value", ["", "2", "yes", "on", " 1"])
@pytest.mark.parametrize("words", [[], ["--use-amp"]])
def test_malformed_variable_is_refused_even_if_overridden(words, value, monkeypatch, capsys):
    monkeypatch.setenv("TEST_USE_AMP", value)
    assert f"TEST_USE_AMP={value!r} in the environment must be 1, 0, true or false" in refused(capsys, *words)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("step: 3\n", "step is not an option; choose from steps"),
        ("momentum: 3\n", "momentum is not an option; choose from steps, lr, name, use_amp"),
        ("steps: 1.5\n", "steps=1.5 must be int"),
        ("steps: true\n", "steps=True must be int"),
        ("steps: null\n", "steps=None must be int"),
        ("lr: 3e-4\n", "lr='3e-4' must be float (YAML needs the dot in 3.0e-4)"),
        ("lr: .nan\n", "lr=nan must be between 0 and 1"),
        ("lr: 1\n", "lr=1 must be between 0 and 1"),  # accepted as a number, and out of range
        ("name: 3\n", "name=3 must be str or null"),
        ("use_amp: 1\n", "use_amp=1 must be bool"),
        ("use_amp: [\n", "must be YAML: "),
        ("a: b: c\n", "must be YAML: "),
        ("a: 2024-13-45\n", "must be YAML: month"),
        ("[" * 1000, "must be YAML: "),
        (f"lr: 1{'0' * 400}\n", "must be float"),
        ("- steps\n", "must be a mapping of steps, lr, name, use_amp"),
        ("", "must be a mapping of steps"),
        (b"\xff\xfe\x00", "must be YAML: "),
    ],
)
def test_malformed_file_is_refused_in_one_line(text, expected, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    message = refused(capsys, "--config", str(path))
    assert expected in message and ("between" in message or str(path) in message)


def test_help_lists_every_option_and_default(capsys):
    with pytest.raises(SystemExit) as ended:
        parse("--help")
    assert not ended.value.code
    shown = capsys.readouterr().out
    for option in ("--config FILE", r"--steps int +how many \(10\)", "--no-use-amp", "--name str +which$"):
        assert re.search(option, shown, re.MULTILINE)


def test_16_bits_on_a_cpu_need_an_explicit_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert options.device("auto") == (torch.device("cpu"), False)
    assert options.device("cpu") == (torch.device("cpu"), True)
    with pytest.raises(ValueError, match="device=cuda must be .*no CUDA device"):
        options.device("cuda")
    with pytest.raises(ValueError, match="device=tpu must be auto, cpu or cuda"):
        options.device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert options.device("auto") == options.device("cuda") == (torch.device("cuda"), False)


def test_folder_with_results_is_refused(tmp_path):
    folder = options.new_folder(tmp_path / "a" / "b")
    assert folder.is_dir() and options.new_folder(folder) == folder
    (folder / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=f"out={folder} must be .*metrics.jsonl of another run"):
        options.new_folder(folder)
    # A file, a path below a file, an overlong name, a read-only folder.
    for path in (folder / "metrics.jsonl", folder / "metrics.jsonl" / "c", folder / ("c" * 300), Path("/proc/self")):
        with pytest.raises(ValueError, match=f"out={path} must be a writable folder: "):
            options.new_folder(path)
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl"]


def test_nonfinite_numbers_of_a_record_become_null():
    record = options.finite({"loss": float("nan"), "scale": float("inf"), "steps": 3, "dtype": "float16", "none": None})
    assert record == {"loss": None, "scale": None, "steps": 3, "dtype": "float16", "none": None}
