"""Figures of the source: how large the package is, and how many ideas its reader has to know.

A figure is a Counter of places: its total is the figure, and its keys say where to look.
Invariants: only the text of the files counts, so every machine has the same figures.
Not here: the lines that the figures may not cross (tests/api/test_house.py), what a save enters
(support/entered.py).
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path

Figures = dict[str, Counter[str]]

_PRIVATE = re.compile(r"_[a-z]")
_MAY_REACH = re.compile(r"(?<!\bself)(?<!\bcls)\.(_[a-z]\w*)")
_OPEN = ("self", "cls", "torch", "os", "sys")  # a `._name` of these is no reach into our objects
_OF_TUPLES = ("_asdict", "_fields", "_make", "_replace")  # public: a NamedTuple documents them
_NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# Where a statement has statements in it.
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
# What came after the house was measured has lines of its own.
_LATER = {
    "kv": ("statehold/kv/",),
    "lowrank": (
        "statehold/lowrank/",
        "statehold/planners/lowrank.py",
        "statehold/cli/plan_lowrank.py",
    ),
}


class Facts:
    """What the tests ask of a Python file. Its tree is not kept, because that takes much memory."""

    def __init__(self, text: str) -> None:
        tree = ast.parse(text)
        below = list(_statements(tree))
        named = [node for node in below if isinstance(node, _NAMED)]
        self.head = ast.get_docstring(tree)
        self.functions = [
            (node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1)
            for node in named
            if not isinstance(node, ast.ClassDef)
        ]
        self.classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        self.code_lines = _code_lines(text, [tree, *named])
        self.reaches = list(_reached(text, tree, {node.name for node in named}))
        self.imported = {types: list(statements(tree, types=types)) for types in (False, True)}
        targets = (node.targets for node in tree.body if isinstance(node, ast.Assign))
        # Whether the module says in `__all__` which names are for others.
        self.has_list = any(getattr(t, "id", "") == "__all__" for each in targets for t in each)


# Several tests ask all files of the project. A text that has changed is another one.
facts = cache(Facts)


class Source:
    """A Python file."""

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self.text = path.read_text("utf-8")
        self.facts = facts(self.text)


def _code_lines(text: str, documented: Iterable[_Documented]) -> int:
    """Lines that are neither empty, nor a comment, nor of a docstring."""
    docs: set[int] = set()
    for node in documented:
        if ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            docs.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(line[:1] not in ("", "#") and number not in docs for number, line in lines)


def _reached(text: str, tree: ast.Module, own: set[str]) -> Iterator[str]:
    """The private names of other objects: those that no class or function of this file has."""
    own.update(_OF_TUPLES)
    if own.issuperset(_MAY_REACH.findall(text)):
        return
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    own |= {node.attr for node in attributes if _root(node) in ("self", "cls")}
    for node in attributes:
        if _PRIVATE.match(node.attr) and node.attr not in own and _root(node) not in _OPEN:
            yield node.attr


def figures(root: Path) -> Figures:
    """The figures of the project in a directory."""
    package = list(sources(root / "src"))
    later = {
        f"code lines of {name}": [each for each in package if each.name.startswith(places)]
        for name, places in _LATER.items()
    }
    first = [each for each in package if not each.name.startswith(sum(_LATER.values(), ()))]
    return {
        "code lines": Counter({each.name: each.facts.code_lines for each in first}),
        **{
            line: Counter({each.name: each.facts.code_lines for each in files})
            for line, files in later.items()
        },
        "files": Counter(each.name for each in first),
        "class names with several meanings": _several(package),
        "modules with one importer": _one_importer(package),
        "internal modules with __all__": Counter(
            each.name for each in package if _is_internal(each.name) and each.facts.has_list
        ),
        "private reaches in src": _reaches(package),
        "private reaches in tests": _reaches(sources(root / "tests")),
    }


def sources(folder: Path) -> Iterator[Source]:
    for path in sorted(folder.rglob("*.py")):
        yield Source(path, path.relative_to(folder).as_posix())


def _is_internal(name: str) -> bool:
    """No package, and no module at the top level: those are what users import."""
    return name.count("/") > 1 and not name.endswith("/__init__.py")


def _reaches(files: Iterator[Source] | list[Source]) -> Counter[str]:
    return Counter(f"{each.name}: {name}" for each in files for name in each.facts.reaches)


def _several(package: list[Source]) -> Counter[str]:
    found = defaultdict(list)
    for each in package:
        for name in each.facts.classes:
            found[name].append(each.name)
    return Counter(f"{name}: {', '.join(w)}" for name, w in found.items() if len(w) > 1)


def _root(node: ast.Attribute) -> str | None:
    return node.value.id if isinstance(node.value, ast.Name) else None


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """What is below a node, without the expressions: most of it, and no statement is in one."""
    for child in chain.from_iterable(getattr(node, block, ()) for block in _BLOCKS):
        yield child
        yield from _statements(child)


# -- imports ---------------------------------------------------------------------------------------


def module_name(name: str) -> str:
    """`a.b` of the file a/b.py, or a/b/__init__.py."""
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(module: str, text: str, *, types: bool = False) -> set[str]:
    """Dotted names that a module imports; with `types`, also for type checkers only."""
    found: set[str] = set()
    for statement in facts(text).imported[types]:
        found.update(_resolved(statement, module.split(".")))
    return found


def statements(node: ast.AST, *, types: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports below `node`; with `types`, also those that only type checkers follow."""
    for child in chain.from_iterable(getattr(node, block, ()) for block in _BLOCKS):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and _is_type_checking(child.test) and not types:
            for other in child.orelse:
                yield from statements(ast.Module([other], []), types=types)
        else:
            yield from statements(child, types=types)


def _resolved(statement: ast.Import | ast.ImportFrom, module: list[str]) -> Iterator[str]:
    """Dotted names that a statement in `module` imports; `from a import b` gives a and a.b."""
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
        return
    base = module[: -statement.level] if statement.level else []
    origin = ".".join([*base, *filter(None, [statement.module])])
    yield origin
    yield from (f"{origin}.{alias.name}" for alias in statement.names)


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return name == "TYPE_CHECKING"


def _one_importer(package: list[Source]) -> Counter[str]:
    """Packages do not count: an import of what is in them names them too."""
    users = defaultdict(list)
    for each in package:
        for target in imports(module_name(each.name), each.text, types=True):
            users[target].append(each.name)
    importers = {each.name: users[module_name(each.name)] for each in package}
    return Counter(
        f"{name} (for {users[0]})"
        for name, users in importers.items()
        if len(users) == 1 and not name.endswith("/__init__.py")
    )
