"""Methods of verl whose modules cannot be imported here, since they import Megatron's or CUDA's packages."""

import __future__

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any


def method(file: Path, class_name: str, name: str, **names: Any) -> Callable:
    """Return a method of a class in ``file``, run by itself with ``names`` as its module's globals."""
    (owner,) = (n for n in ast.parse(file.read_text()).body if isinstance(n, ast.ClassDef) and n.name == class_name)
    functions = (n for n in owner.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    (found,) = (n for n in functions if n.name == name)
    found.decorator_list = []
    unevaluated = __future__.annotations.compiler_flag  # the annotations name what the module imports
    exec(compile(ast.Module([found], []), str(file), "exec", flags=unevaluated, dont_inherit=True), names)
    return names[name]
