"""The stubs of the native modules name exactly what the modules have."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

from statehold import _core, _sim

UNLISTED = {"Region"}  # only ever behind a memoryview


def members(node: ast.ClassDef) -> set[str]:
    """Public methods and properties; the attributes of Mismatch are set on its instances."""
    return {n.name for n in node.body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"}


@pytest.mark.parametrize("module", [_core, _sim])
def test_stub_matches_module(module: ModuleType) -> None:
    assert module.__file__ is not None
    name = module.__name__.rpartition(".")[2]
    tree = ast.parse(Path(module.__file__).with_name(f"{name}.pyi").read_text())
    classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
    functions = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    constants = {
        n.target.id
        for n in tree.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    public = {name for name in vars(module) if name[0] != "_"}
    assert public - UNLISTED == functions | constants | set(classes)
    for name, node in classes.items():
        own = {n for n in vars(getattr(module, name)) if n[0] != "_"}
        assert own == members(node), name
