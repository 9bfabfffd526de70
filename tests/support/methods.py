"""Methods and functions of verl whose modules cannot be imported here, since they import Megatron's or CUDA's packages,
or are those of another tree."""

import __future__

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any


def method(file: Path, class_name: str, name: str, **names: Any) -> Callable:
    """Return a method of a class in ``file``, run by itself with ``names`` as its module's globals."""
    (owner,) = (n for n in ast.parse(file.read_text()).body if isinstance(n, ast.ClassDef) and n.name == class_name)
    return defined_in(file, owner, name, names)


def function(file: Path, *wanted: str, **names: Any) -> Callable:
    """Return a function of ``file``, run with the others in ``wanted`` and with ``names`` as its module's globals."""
    for name in reversed(wanted):
        defined_in(file, ast.parse(file.read_text()), name, names)
    return names[wanted[0]]


def defined_in(file: Path, owner: ast.ClassDef | ast.Module, name: str, names: dict[str, Any]) -> Callable:
    functions = (n for n in owner.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    (found,) = (n for n in functions if n.name == name)
    found.decorator_list = []
    unevaluated = __future__.annotations.compiler_flag  # the annotations name what the module imports
    exec(compile(ast.Module([found], []), str(file), "exec", flags=unevaluated, dont_inherit=True), names)
    return names[name]
