"""Imports point down only, the native core has few users, and torch stays where it belongs.

What counts is what runs: an import under `if TYPE_CHECKING:` is free to look upwards, one inside
a function is not. A new module must be placed here before it can be imported.
"""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
PACKAGE = "statehold"

# From the bottom up. A group may import the groups of lower layers and its own members.
LAYERS: list[list[set[str]]] = [
    [{"_version"}, {"errors"}],
    [{"units"}, {"forks", "ending"}, {"memory"}, {"tracebacks", "holders", "garbage"}],
    # seeing: what can be seen, whatever is looked at; metrics is its public name.
    [{"options"}, {"encoding"}, {"seeing"}],
    [{"planning"}, {"ranks"}, {"selection"}, {"metrics"}],
    [{"steps"}, {"study"}],
    [{"state"}, {"storage"}],
    [{"devices"}],
    [{"agreeing", "leaving"}],
    [{"levels"}],
    [{"agent"}],
    [
        {
            "aftermath",
            "checkpointer",
            "opened",
            "staging",
            "save",
            "gate",
            "updates",
            "keeper",
            "pipeline",
            "landing",
            "stalls",
            "team",
            "flushing",
        }
        | {"across"}
        | {"restoring", "reads", "segments", "writes"},
    ],
    # Beside the Checkpointer stands what torch.distributed.checkpoint calls: it plans, so dcp only
    # stores, with the same engine and the same commit.
    [{"testing"}, {"dcp"}],
    [{"cli", "__main__"}],
]
# cli reads and verifies whole steps through an engine of its own: no state, no torch.
CORE_USERS = {
    "storage",
    "levels",
    "agent",
    "checkpointer",
    "opened",
    "staging",
    "save",
    "testing",
    "segments",
    "dcp",
    "cli",
}
CORE_USERS |= {"study"}
TORCH_USERS = {"state", "devices", "testing", "dcp"}
# Modules that may not even name torch in annotations: they make sense without it.
PURE = {"errors", "units", "options", "encoding", "planning", "selection", "steps"}


def is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return name == "TYPE_CHECKING"


def statements(node: ast.AST, *, types: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports below `node`; with `types`, also those that only type checkers follow."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and is_type_checking(child.test) and not types:
            for other in child.orelse:
                yield from statements(ast.Module([other], []), types=types)
        else:
            yield from statements(child, types=types)


def resolved(statement: ast.Import | ast.ImportFrom, module: list[str]) -> Iterator[str]:
    """Dotted names that a statement in `module` imports; `from a import b` gives a and a.b."""
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
        return
    base = module[: -statement.level] if statement.level else []
    origin = ".".join([*base, *filter(None, [statement.module])])
    yield origin
    yield from (f"{origin}.{alias.name}" for alias in statement.names)


def modules() -> dict[str, Path]:
    """Dotted name -> file, for every module of the package."""
    found = {}
    for path in sorted((SOURCE / PACKAGE).rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts)] = path
    return found


def imports(name: str, path: Path, *, types: bool = False) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    found: set[str] = set()
    for statement in statements(tree, types=types):
        found.update(resolved(statement, name.split(".")))
    return found


def part(dotted: str) -> str | None:
    """The module or folder directly below the package that a dotted name lies in."""
    names = dotted.split(".")
    return names[1] if names[0] == PACKAGE and len(names) > 1 else None


def place(name: str) -> tuple[int, int] | None:
    for level, groups in enumerate(LAYERS):
        for index, group in enumerate(groups):
            if name in group:
                return level, index
    return None


def inner(name: str, path: Path) -> set[str]:
    """The parts of the package that a module imports when it runs."""
    known = {part(module) for module in modules()} | {"_core"}
    return {p for p in map(part, imports(name, path)) if p in known and p is not None}


MODULES = modules()


@pytest.mark.parametrize("name", sorted(set(MODULES) - {f"{PACKAGE}.__init__"}))
def test_imports_point_down(name: str) -> None:
    own = part(name)
    assert own is not None
    here = place(own)
    assert here is not None, f"{own} has no layer: place it in this test"
    for target in inner(name, MODULES[name]) - {own, "_core", "__init__"}:
        there = place(target)
        assert there is not None, f"{target} has no layer: place it in this test"
        assert there[0] < here[0] or there == here, f"{name} imports {target}, which is above it"


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_there_are_no_cycles() -> None:
    assert cycle_in({"a": {"b"}, "b": {"a"}}) == ["a", "b", "a"]
    graph = {name: imports(name, path) & MODULES.keys() for name, path in MODULES.items()}
    assert cycle_in(graph) == []


def test_few_modules_touch_the_core() -> None:
    users = {part(name) for name, path in MODULES.items() if "_core" in inner(name, path)}
    assert users <= CORE_USERS


def roots(name: str, path: Path, *, types: bool) -> set[str]:
    return {dotted.split(".")[0] for dotted in imports(name, path, types=types)}


def test_torch_stays_in_its_layer() -> None:
    for name, path in MODULES.items():
        if part(name) not in TORCH_USERS:
            heavy = {"torch"} if name == "statehold.cli.numbers" else {"torch", "numpy"}
            assert not roots(name, path, types=False) & heavy, name
        if part(name) in PURE:
            assert not roots(name, path, types=True) & {"torch", "numpy"}, name


def test_pure_modules_do_no_input_or_output() -> None:
    for name, path in MODULES.items():
        if part(name) in PURE - {"errors", "options"}:  # these ask os for error texts, CPU counts
            effects = {"os", "pathlib", "shutil", "tempfile", "subprocess", "socket", "threading"}
            assert not roots(name, path, types=True) & effects, name
            calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
            assert not any(getattr(call.func, "id", None) == "open" for call in calls), name


def test_nothing_can_unpickle_or_evaluate() -> None:
    for name, path in MODULES.items():
        if name == "statehold.dcp.unpickle":
            continue  # reads the metadata of stock checkpoints, and admits a list of classes only
        assert not roots(name, path, types=True) & {"pickle", "marshal", "shelve", "dill"}, name
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                called = getattr(node.func, "id", None)
                assert called not in {"eval", "exec"}, f"{name}:{node.lineno}"


def test_importing_the_package_is_light() -> None:
    """CPU time: a busy machine does not matter. The interpreter's own start is not in it."""
    code = (
        "import sys, time; begin = time.process_time(); import statehold; "
        "taken = time.process_time() - begin; "
        "heavy = {'torch', 'numpy', 'statehold._core'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else f'{taken} s' if taken > 0.1 else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def sample(text: str, *, types: bool) -> set[str]:
    found: set[str] = set()
    for statement in statements(ast.parse(text), types=types):
        found.update(resolved(statement, ["statehold", "a", "b"]))
    return found


def test_this_test_sees_what_it_should() -> None:
    text = (
        "import typing as t\n"
        "from .c import d\n"
        "from .. import e\n"
        "if t.TYPE_CHECKING:\n    import torch\n"
        "else:\n    import numpy\n"
        "def f():\n    from statehold.storage import store\n"
        "try:\n    import g\nexcept ImportError:\n    pass\n"
    )
    running = sample(text, types=False)
    assert {"statehold.a.c", "statehold.a.c.d", "statehold.e", "statehold.storage.store"} <= running
    assert {"numpy", "g", "typing"} <= running
    assert "torch" not in running
    assert sample(text, types=True) == running | {"torch"}
