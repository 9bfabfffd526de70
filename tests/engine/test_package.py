"""``verl.utils.precision`` as a package: imports, exports, and the line that a worker reports."""

import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import manifest
import precision
import torch

FOLDER = Path(precision.__file__).parent


def imported(file: Path) -> set[str]:
    """Return the packages that a file imports, its own excepted."""
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name.partition(".")[0] for name in names}


def test_package_imports_only_torch_and_the_standard_library():
    assert set.union(*map(imported, FOLDER.glob("*.py"))) - set(sys.stdlib_module_names) == {"torch"}
    assert imported(Path(manifest.__file__)) <= set(sys.stdlib_module_names)


def test_a_report_is_one_line_of_json_in_one_write(monkeypatch):
    writes = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=writes.append, flush=lambda: None))
    precision.report("actor", 0, compute="float16")
    stamp = Path(precision.__file__).parents[1] / "precision_stamp.json"  # written by apply; exists in a --verl-tree
    written = stamp.read_text().strip() if stamp.exists() else "null"
    line = f'[verl-precision] {{"role": "actor", "rank": 0, "compute": "float16", "stamp": {written}}}\n'
    assert [text for text in writes if text] == [line]


def test_a_worker_reports_what_it_resolved_unless_that_is_turned_off(capsys):
    model = torch.nn.Sequential(torch.nn.Linear(1, 1, dtype=torch.float16), torch.nn.Linear(1, 1))
    model[0].requires_grad_(False)
    for dtype, fsdp_config in ((None, {}), ("float16", {"report_dtypes": False})):
        resolved = precision.Precision.of_worker(dtype, fsdp_config, trained=True)
        precision.report_worker("actor", 0, "fsdp", resolved, model)
        assert capsys.readouterr().out == ""
    for dtype in ("float16", "bfloat16"):
        resolved = precision.Precision.of_worker(dtype, {}, trained=True)
        precision.report_worker("actor", 1, "fsdp", resolved, model, {"keep_fp32": ["lm_head"]})
        report = json.loads(capsys.readouterr().out.removeprefix("[verl-precision] "))
        facts = {"role": "actor", "rank": 1, "strategy": "fsdp", "compute": dtype, "loss_scaling": dtype == "float16"}
        assert report.items() >= (facts | {"base": "float16", "master": "float32", "keep_fp32": ["lm_head"]}).items()
        assert "requested" not in report and "reported" not in report
