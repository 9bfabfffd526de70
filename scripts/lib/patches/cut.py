"""Cut a Python module down to what some files use of it, by its syntax tree; what is left keeps its text."""

import ast
import re
from collections.abc import Iterator, Mapping

WIDTH = 120


def cut(source: str, module: str, users: Mapping[str, str]) -> str:
    """Return ``source`` without what neither ``users`` need nor what they need of it.

    Kept are the top-level names that are imported or named as a Hydra target, and what these name in turn; of a class
    all whose bases are in the module, the methods and private attributes that are read somewhere in the users or in
    what is kept. ``__all__`` and the imports follow. A comment goes with the line below it.

    Args:
        source: the module's text; its top level is imports, definitions and assignments.
        module: its dotted name.
        users: texts by path, of Python files and yaml files.
    """
    tree = ast.parse(source)
    defined = {name: node for node in tree.body for name in names_of(node)}
    names, attributes = used_by(users, module)
    kept: set[ast.stmt] = set()
    while new := {node for node in reached(defined, names, attributes) if node not in kept}:
        kept |= new
        for part in (part for node in new for part in parts_of(node)):
            names |= {each.id for each in ast.walk(part) if isinstance(each, ast.Name)}
            names |= {each.value for each in ast.walk(part) if is_quoted_name(each)}
            attributes |= set(attributes_of(part, set()))
    return "".join(pieces(source.splitlines(keepends=True), tree, kept, names, defined))


def names_of(node: ast.stmt) -> list[str]:
    """What a statement defines, imports left out."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [target.id for target in targets if isinstance(target, ast.Name)]
    return []


def used_by(users: Mapping[str, str], module: str) -> tuple[set[str], set[str]]:
    """Return the names that are imported from the module, and all attributes of what is not itself a module."""
    names: set[str] = set()
    attributes: set[str] = set()
    tail = module.partition(".")[2]  # in which a relative import ends
    for path, text in users.items():
        if not path.endswith(".py"):
            names |= set(re.findall(rf"^\s*_target_: {re.escape(module)}\.(\w+)$", text, re.M))
            continue
        tree = ast.parse(text)
        imported = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
        modules = {alias.asname or alias.name.partition(".")[0] for node in imported for alias in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in ((tail,) if node.level else (module,)):
                names |= {alias.name for alias in node.names}
        attributes |= set(attributes_of(tree, modules))
    return names, attributes


def attributes_of(tree: ast.AST, modules: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in modules):
            yield node.attr


def reached(defined: Mapping[str, ast.stmt], names: set[str], attributes: set[str]) -> Iterator[ast.stmt]:
    """Yield the statements, members of classes too, that these names and attributes need."""
    for name in names & defined.keys():
        node = defined[name]
        yield node
        if isinstance(node, ast.ClassDef):
            yield from (member for member in node.body if is_needed(member, node, defined, attributes))


def is_needed(member: ast.stmt, owner: ast.ClassDef, defined: Mapping[str, ast.stmt], attributes: set[str]) -> bool:
    if not all(isinstance(base, ast.Name) and base.id in defined for base in owner.bases):
        return True  # it may override what a base elsewhere calls
    names = names_of(member)
    if isinstance(member, ast.FunctionDef):
        return member.name.startswith("__") or member.name in attributes
    return not names or any(not name.startswith("_") or name in attributes for name in names)


def parts_of(node: ast.stmt) -> list[ast.AST]:
    """What of a kept statement names others: of a class not its members, which are judged one by one."""
    return [*node.bases, *node.keywords, *node.decorator_list] if isinstance(node, ast.ClassDef) else [node]


def is_quoted_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier()


def pieces(
    lines: list[str], tree: ast.Module, kept: set[ast.stmt], names: set[str], defined: Mapping[str, ast.stmt]
) -> Iterator[str]:
    """Yield the text of what is kept, piece by piece."""
    gap = ""  # above a group of imports, whose first may go
    for node, text in with_text(tree.body, lines, 0):
        if isinstance(node, ast.Import | ast.ImportFrom):
            gap = "\n" if text.startswith("\n") else gap
            wanted = [alias for alias in node.names if (alias.asname or alias.name.partition(".")[0]) in names]
            if wanted:
                yield gap + (text.lstrip("\n") if len(wanted) == len(node.names) else import_of(node, wanted))
                gap = ""
        elif names_of(node) == ["__all__"]:
            exported = (name for name in ast.literal_eval(node.value) if defined[name] in kept)
            yield "\n__all__ = [\n" + "".join(f'    "{name}",\n' for name in exported) + "]\n"
        elif isinstance(node, ast.ClassDef) and node in kept:
            first = start_of(node.body[0])
            yield text.removesuffix("".join(lines[first - 1 : node.end_lineno]))
            yield from (piece for member, piece in with_text(node.body, lines, first - 1) if member in kept)
        elif node in kept or not names_of(node):
            yield text


def with_text(body: list[ast.stmt], lines: list[str], above: int) -> Iterator[tuple[ast.stmt, str]]:
    """Yield each statement with its text, from the end of the one above: the comments before it are its own."""
    for node in body:
        yield node, "".join(lines[above : node.end_lineno])
        above = node.end_lineno


def start_of(node: ast.stmt) -> int:
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])


def import_of(node: ast.ImportFrom, wanted: list[ast.alias]) -> str:
    line = ast.unparse(ast.ImportFrom(node.module, wanted, node.level))
    if len(line) <= WIDTH:
        return f"{line}\n"
    names = "".join(f"    {ast.unparse(alias)},\n" for alias in wanted)
    return f"{line.partition(' import ')[0]} import (\n{names})\n"
