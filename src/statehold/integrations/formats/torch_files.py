"""Files of torch.save: one for a whole step, and shards of pytorch_model.bin for imports.

Invariants: what is written can be read with torch.load(weights_only=True). Values that this refuses
become the nearest ones that it takes, and are named: NumPy scalars become numbers, a deque becomes
a list, a frozenset a set.
Not here: archives (archives), which path has this format (recognition).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from typing import Any

from statehold.errors import CorruptionError, UsageError
from statehold.integrations.formats import archives
from statehold.integrations.formats.archives import indexed
from statehold.integrations.formats.partial import PartialExport

WHOLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def export(tree: Any, work: PartialExport) -> list[str]:
    """Write a tree as one file; returns the names of what became something else."""
    changed: list[str] = []
    archives.write(work, os.path.basename(work.path), plain(tree, "", changed))
    return changed


def plain(tree: Any, path: str, changed: list[str]) -> Any:
    """The same tree of values that torch.load(weights_only=True) takes."""
    kind: Any = type(tree)
    if kind in (deque, frozenset) or kind.__module__ == "numpy":
        changed.append(path)
        nearest: Any = {deque: list, frozenset: set}.get(kind, lambda scalar: scalar.item())
        return plain(nearest(tree), path, changed)
    if isinstance(tree, Mapping):
        return kind({key: plain(item, _below(path, key), changed) for key, item in tree.items()})
    if kind in (list, tuple):
        return kind(plain(item, _below(path, i), changed) for i, item in enumerate(tree))
    return tree


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def read(path: str) -> dict[str, Any]:
    """The tensors of pytorch_model.bin in a directory, or of its shards."""
    found: dict[str, Any] = {}
    has_index = os.path.exists(os.path.join(path, INDEX))
    files = indexed(path, INDEX, ".bin")[0] if has_index else [os.path.join(path, WHOLE)]
    for file in files:
        shard = archives.read(file)
        if not isinstance(shard, Mapping):
            facts = {"file": file, "expected": "a dict of names", "got": type(shard).__name__}
            raise UsageError("a file of torch.save holds no names", facts=facts)
        for name, value in shard.items():
            if name in found:
                raise CorruptionError("a checkpoint has a name twice", facts={"name": name})
            found[name] = value
    return found
