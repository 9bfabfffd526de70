"""``verl.utils.precision`` as a package: imports, exports, and objects sent to other processes."""

import ast
import graphlib
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import precision
import torch

FILES = {path.stem: ast.parse(path.read_text()) for path in Path(precision.__file__).parent.glob("*.py")}


def imports(file: str) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(FILES[file]) if isinstance(node, ast.Import | ast.ImportFrom)]


def test_package_imports_only_torch_and_the_standard_library():
    imported = set()
    for node in (node for file in FILES for node in imports(file)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif not node.level:
            imported.add(node.module.partition(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"torch"}


def test_package_has_no_import_cycle():
    needs = {file: {node.module for node in imports(file) if getattr(node, "level", 0)} for file in FILES}
    assert needs["__init__"] == FILES.keys() - {"__init__"}
    assert all(needed <= needs["__init__"] for needed in needs.values()), "files must import files, not the package"
    assert list(graphlib.TopologicalSorter(needs).static_order())[-1] == "__init__"


def test_package_exports_exactly_its_public_names():
    exported = {alias.name for node in imports("__init__") for alias in node.names}
    assert sorted(precision.__all__) == sorted(exported)
    for file in FILES.keys() - {"__init__"}:
        assert not hasattr(precision, file) or not callable(getattr(precision, file)), f"{file} is hidden by a function"


def test_settings_precision_and_storm_are_pickled():
    """Ray sends them between processes."""
    settings = precision.GradScalerConfig(init_scale=8.0)
    resolved = precision.Precision.of_worker({"dtype": "fp16"}, trained=True)
    assert pickle.loads(pickle.dumps([settings, resolved])) == [settings, resolved]
    assert resolved.compute == torch.float16
    storm = pickle.loads(pickle.dumps(precision.LossScaleError("the storm")))
    assert type(storm) is precision.LossScaleError and str(storm) == "the storm"


def test_a_report_is_one_line_of_json_in_one_write(monkeypatch):
    writes = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=writes.append, flush=lambda: None))
    precision.report("actor", 0, compute="float16")
    stamp = Path(precision.__file__).parents[1] / "precision_stamp.json"  # written by apply; exists in a --verl-tree
    written = stamp.read_text().strip() if stamp.exists() else "null"
    line = f'[verl-precision] {{"role": "actor", "rank": 0, "compute": "float16", "stamp": {written}}}\n'
    assert [text for text in writes if text] == [line]
