"""A recipe's config: the precedence of its sources, and the refusal of malformed values."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from amp_commands import records

from recipes.amp import options


@dataclass(frozen=True)
class ExampleConfig:
    steps: int = options.option(10, "how many", "at least 1")
    lr: float = options.option(0.5, "how far")
    name: str = options.option("", "which")
    out: str = options.option("runs", "where")
    use_amp: bool = options.option(False, "16 bits", variable="TEST_USE_AMP")

    def __post_init__(self):
        options.check_values(self, {"lr": (0 < self.lr < 1, "between 0 and 1")})


def parse(*words: object) -> tuple[ExampleConfig, dict[str, str]]:
    return options.parse_config(ExampleConfig, "recipe", "A recipe.", [str(word) for word in words])


@pytest.mark.parametrize("value, expected", [("1", True), ("TRUE", True), ("0", False), ("false", False)])
def test_command_line_overrides_environment_overrides_file_overrides_default(tmp_path, monkeypatch, value, expected):
    path = tmp_path / "config.yaml"
    path.write_text(f"lr: 1.0e-2\nname: y\nuse_amp: {str(not expected).lower()}\n")
    monkeypatch.setenv("TEST_USE_AMP", value)
    config, sources = parse("--config", path)
    assert config == ExampleConfig(lr=0.01, name="y", use_amp=expected)
    others = dict.fromkeys(("lr", "name"), f"config ({path})") | {"use_amp": "environment (TEST_USE_AMP)"}
    assert sources == others | {"steps": "default", "out": "default"}
    word = "--no-use-amp" if expected else "--use-amp"
    config, sources = parse("--config", path, word, "--steps", "30", "--lr", "1e-3", "--name", "x", "--out", "here")
    assert config == ExampleConfig(steps=30, lr=1e-3, name="x", out="here", use_amp=not expected)
    assert set(sources.values()) == {"command line"}


def refused(*words: object) -> str:
    """Return the one line that ends the process."""
    with pytest.raises(SystemExit, match=r"^recipe: .*\Z") as ended:
        parse(*words)
    return ended.value.code


@pytest.mark.parametrize(
    "given, message",
    [
        ("--lr fast", "--lr: invalid float value: 'fast'"),
        ("--lr nan", "lr=nan must be between 0 and 1"),
        ("--ste 5", "unrecognized arguments: --ste 5"),
        ("--steps 0", "steps=0 must be at least 1"),
        ("--out=", "--out is missing: give a folder"),
        ("more", "unrecognized arguments: more"),
        ("--config none.yaml", "--config none.yaml: [Errno 2] No such file"),
        ("step: 3\n", "Key 'step' not in 'ExampleConfig'"),
        ("steps: true\n", "Value 'True' of type 'bool' could not be converted to Integer full_key: steps"),
        ("lr: fast\n", "Value 'fast' of type 'str' could not be converted to Float full_key: lr"),
        ("lr: 1\n", "lr=1.0 must be between 0 and 1"),  # accepted as a number, and out of range
        ("lr: ???\n", "Missing mandatory value: lr"),
        ("name: [3]\n", "full_key: name"),
        ("a: [\n", "expected the node content"),
        (f"lr: 1{'0' * 400}\n", "int too large to convert to float"),
        ("- 3\n", "Cannot merge DictConfig with ListConfig"),
    ],
)
def test_malformed_words_and_files_are_refused_in_one_line(given, message, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(given)
    is_file = given.endswith("\n")
    found = refused("--config", path) if is_file else refused(*given.split())
    assert message in found and (not is_file or "between" in found or str(path) in found)


@pytest.mark.parametrize("value", ["", "2", " 1"])
@pytest.mark.parametrize("words", [[], ["--use-amp"]])
def test_malformed_variable_is_refused_even_if_overridden(words, value, monkeypatch):
    monkeypatch.setenv("TEST_USE_AMP", value)
    assert f"TEST_USE_AMP={value!r} in the environment must be 1, 0, true or false" in refused(*words)


def test_16_bits_on_a_cpu_need_an_explicit_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert options.resolve_device("auto") == (torch.device("cpu"), False)
    assert options.resolve_device("cpu") == (torch.device("cpu"), True)
    with pytest.raises(ValueError, match="device=cuda must be .*no CUDA device"):
        options.resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert options.resolve_device("auto") == options.resolve_device("cuda") == (torch.device("cuda"), False)


def test_folder_that_cannot_be_written_is_refused(tmp_path):
    assert options.new_folder(tmp_path / "a" / "b").is_dir()
    file = tmp_path / "file"
    file.write_text("")
    # Results of another run, a file, a path below a file, an overlong name, a read-only folder.
    for path in (tmp_path / "a" / "b", file, file / "c", tmp_path / ("c" * 300), Path("/proc/self")):
        with pytest.raises(ValueError, match=f"out={path} must be a writable folder without results: "):
            options.new_folder(path)


def test_nonfinite_numbers_of_a_record_become_null(tmp_path):
    options.append_record(tmp_path, {"loss": float("nan"), "scale": float("inf"), "steps": 3, "dtype": "float16"})
    assert records(tmp_path) == [{"loss": None, "scale": None, "steps": 3, "dtype": "float16"}]
