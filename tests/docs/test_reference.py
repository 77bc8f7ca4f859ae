"""The reference documents each parameter in the usual form: Args and Attributes.

Methods with one parameter may say in their first sentence what it is.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NAMES = [
    name
    for name in re.findall(
        r"^::: (statehold\.[\w.]+)$", (ROOT / "docs/reference.md").read_text(), re.M
    )
    if name != "statehold.errors"
]
# What another library fixes, and documents.
OTHERS = {"StorageWriter", "StorageReader"}
# What calls of statehold return: nobody else makes it.
RETURNED = {
    "Endpoint", "Interval", "LevelStatus", "Microbatch", "RestoreReport", "Run", "Save", "Step",
    "Subscription", "TensorInfo", "Update",
}  # fmt: skip
INHERITED = re.compile(r"(?:The|All|The other) arguments (?:before `(\w+)` )?are those of")


# Modules, a version, and what "Errors" on the page shows.
NOT_SHOWN = {
    "__version__",
    "StateholdError",
    "errors",
    "lineage",
    "metrics",
    "offload",
    "resilience",
}


def test_the_page_has_the_public_names_and_no_others() -> None:
    """By the paths from which users import them."""
    shown: dict[str, set[str]] = {}
    for name in NAMES:
        module, _, attribute = name.rpartition(".")
        shown.setdefault(module, set()).add(attribute)
    others = {name for name in shown if name.startswith("statehold.integrations.")}
    assert set(shown) - others == {
        "statehold", "statehold.dcp", "statehold.lineage", "statehold.metrics",
        "statehold.offload", "statehold.resilience", "statehold.testing",
    }  # fmt: skip
    for module in set(shown) - others:
        found = importlib.import_module(module)
        assert shown[module] == set(found.__all__) - NOT_SHOWN, module


def named(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")


def documented(text: str) -> set[str]:
    """The names below Args: and Attributes:."""
    return {
        name
        for section in re.findall(r"^ *(?:Args|Attributes):\n((?: +.*\n|\n)+)", text + "\n", re.M)
        for name in re.findall(r"^ +\**(\w+):", section, re.M)
    }


def expected(thing: Any) -> list[str]:
    names = [name for name in inspect.signature(thing).parameters if name not in {"self", "cls"}]
    found = INHERITED.search(thing.__doc__ or "")
    if found is None:
        return names
    return names[names.index(found[1]) :] if found[1] else []


def public(thing: Any) -> Iterator[Any]:
    """The callable itself, and the methods that a class adds."""
    if not inspect.isclass(thing):
        yield thing
        return
    if "__init__" in vars(thing) and thing.__name__ not in RETURNED:
        yield thing
    if thing.__name__ in OTHERS:
        return
    for name, each in vars(thing).items():
        if not name.startswith("_") and inspect.isfunction(each):
            yield each


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_documented(name: str) -> None:
    for thing in public(named(name)):
        wanted = expected(thing)
        if inspect.isfunction(thing) and len(wanted) < 2:
            continue
        assert set(wanted) <= documented(inspect.getdoc(thing) or ""), (name, thing.__name__)
