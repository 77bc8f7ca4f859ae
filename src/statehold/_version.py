"""What every layer may read: the version, and how a package loads its modules late."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from statehold.errors import meant

__version__ = "0.1.0.dev0"

Lazy = tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]


def lazily(package: str, homes: Mapping[str, str]) -> Lazy:
    """__getattr__(), __dir__() and __all__ of a package whose modules load at their first use.

    homes: the names of each module; of one that is a name itself, "".
    """
    found = {
        name: home
        for home, names in homes.items()
        for name in names.split() or [home.rpartition(".")[2]]
    }
    public = sorted(found)

    def load(name: str) -> Any:
        if name not in found:
            question = f"; {close}" if (close := meant(name, public)) else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{question}")
        module = importlib.import_module(found[name])
        return getattr(module, name) if homes[found[name]] else module

    return load, public.copy, public
