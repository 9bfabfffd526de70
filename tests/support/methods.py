"""Functions of verl whose modules cannot be imported here, since they import Megatron's or CUDA's packages."""

import __future__

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any


def function(file: Path, path: str, **names: Any) -> Callable:
    """Return a function of ``file``, or by ``CLASS.NAME`` a method, run with ``names`` as its globals."""
    *owners, name = path.split(".")
    node: ast.AST = ast.parse(file.read_text())
    for part in (*owners, name):
        (node,) = (each for each in node.body if getattr(each, "name", None) == part)
    node.decorator_list = []
    unevaluated = __future__.annotations.compiler_flag  # the annotations name what the module imports
    exec(compile(ast.Module([node], []), str(file), "exec", flags=unevaluated, dont_inherit=True), names)
    return names[name]
