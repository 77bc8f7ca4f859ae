"""The files of a store in memory that this process has mapped, by step.

A mapping is worth keeping, because setting one up costs as much as filling it. It moves with its
file: from a step in the making to a committed one, to a retired one, and to the save that
    overwrites it.
Invariants: if a file is deleted, its mapping is closed, too, or its memory would not come back. Not
synchronised: the caller holds the store's guard. Empty if the store is not in memory, or if several
ranks write, because then no rank knows which file another rank has retired.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from statehold._core import File

Files = dict[str, "File"]


class Mappings:
    """name -> mapped file, of each step."""

    def __init__(self) -> None:
        self._making: dict[int, Files] = {}
        self._committed: dict[int, Files] = {}
        self._spare: Files = {}

    def making(self, step: int, name: str, file: File) -> None:
        """A file of a step in the making was opened."""
        self._making.setdefault(step, {})[name] = file

    def abandoned(self, step: int) -> None:
        _close(self._making.pop(step, {}).values())

    def committed(self, step: int) -> None:
        """The step in the making is `step`; a step that it replaces is then the abandoned one."""
        before = self._committed.pop(step, {})
        self._committed[step] = self._making.pop(step, {})
        if before:
            self._making[step] = before

    def retired(self, step: int) -> None:
        """A committed step is retired: its files are those of a step in the making again."""
        self._making[step] = self._committed.pop(step, {})

    def spared(self, step: int) -> None:
        """The files of a retired step are held back to be overwritten."""
        self._spare = self._making.pop(step, {})

    def spare(self, name: str) -> File | None:
        """The mapping of a file that is held back."""
        return self._spare.get(name)

    def taken(self, name: str) -> None:
        """A file that was held back is in use again."""
        self._spare.pop(name, None)

    def dropped(self) -> None:
        """The files that were held back are deleted."""
        _close(self._spare.values())
        self._spare = {}

    def close(self) -> None:
        """The store is not used any more; its files stay."""
        self.dropped()
        for files in (*self._making.values(), *self._committed.values()):
            _close(files.values())
        self._making, self._committed = {}, {}


def _close(files: Iterable[File]) -> None:
    for file in files:
        file.close()
