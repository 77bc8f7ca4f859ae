"""Transfer: the selection of tensors that go from the model of a step into another model. Pure.

Invariants: exactly the tensors of the pairs are taken, each by its whole name. All else in the
model is kept, and all else in the step is left out: neither is an error.
Not here: which tensors belong together (format/graphs), patterns (format/selection).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from statehold.format.selection import Names, Selection


class Transfer(Selection):
    """pairs: saved name -> live name of each tensor."""

    def __init__(self, pairs: Mapping[str, str]) -> None:
        super().__init__(rename={saved: live for saved, live in pairs.items() if saved != live})
        self.strict = False
        self._live = frozenset(pairs.values())
        self._above_live = _above(pairs.values())
        self._above_saved = _above(self.rename)

    @property
    def is_everything(self) -> bool:
        return False

    @property
    def has_patterns(self) -> bool:
        return False

    def takes(self, name: str) -> bool:
        return name in self._live

    def reaches(self, name: str) -> bool:
        return name in self._live or name in self._above_live

    def renamed(self, name: str) -> str:
        return self.rename.get(name, name)

    def renames_below(self, name: str) -> bool:
        return name in self._above_saved

    def answers(self, names: Names) -> dict[str, list[str] | None]:
        return {}


def _above(names: Iterable[str]) -> frozenset[str]:
    """Every name that one of these lies below, and the empty one."""
    found = {""}
    for name in names:
        parts = name.split(".")
        found.update(".".join(parts[:length]) for length in range(1, len(parts)))
    return frozenset(found)
