"""The stub of the native module names exactly what the module has."""

from __future__ import annotations

import ast
from pathlib import Path

from statehold import _core

STUB = Path(_core.__file__).with_name("_core.pyi")
UNLISTED = {"Region"}  # only ever behind a memoryview


def members(node: ast.ClassDef) -> set[str]:
    """Public methods and properties; the attributes of Mismatch are set on its instances."""
    return {n.name for n in node.body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"}


def test_stub_matches_module() -> None:
    tree = ast.parse(STUB.read_text())
    classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
    functions = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    constants = {
        n.target.id
        for n in tree.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    public = {name for name in vars(_core) if name[0] != "_"}
    assert public - UNLISTED == functions | constants | set(classes)
    for name, node in classes.items():
        own = {n for n in vars(getattr(_core, name)) if n[0] != "_"}
        assert own == members(node), name
