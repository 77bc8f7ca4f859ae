"""Which parts of a state go to files that steps share: pure arithmetic on sizes and on history.

Owns: what has to be true of a part before it goes to such a file, how parts are put together into
files, and how long a part that changed after all stays out of them.
Invariants: no file is made smaller than FILE_BYTES_MIN, and a rank has few of them however large
its state is. A part that keeps changing is written to shared files ever more rarely.
Not here: whether a part has changed (checkpoint/save/sharing, and for certain
checkpoint/save/shared).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence, Set
from typing import Generic, TypeVar

from statehold.units import MiB

Key = TypeVar("Key", bound=Hashable)

# A smaller tensor is written with what changes: a checksum, a name and a place cost as much.
PART_BYTES_MIN = 64 << 10
FILE_BYTES_MIN = 8 * MiB
FILE_BYTES = 64 * MiB
# With more files, their names and syncs would take longer than what they save.
FILES_MAX = 64
_SAVES_MAX = 64


def grouped(sizes: Sequence[int]) -> list[range]:
    """Runs of neighbouring parts, each for one file; parts that make no file are in no run."""
    total = sum(sizes)
    if total < FILE_BYTES_MIN:
        return []
    wanted = max(FILE_BYTES, -(-total // FILES_MAX))
    groups, begin, nbytes = list[range](), 0, 0
    for index, size in enumerate(sizes):
        nbytes += size
        if nbytes >= wanted:
            groups.append(range(begin, index + 1))
            begin, nbytes = index + 1, 0
    if nbytes >= FILE_BYTES_MIN or not groups:
        groups.append(range(begin, len(sizes)))
    elif nbytes:
        groups[-1] = range(groups[-1].start, len(sizes))
    return groups


class History(Generic[Key]):
    """For how many saves each part has been the same, and for how many it has to be.

    That is one, at first. It doubles each time that a part changes which was in a shared file.
    """

    def __init__(self) -> None:
        self._same: dict[Key, int] = {}
        self._needed: dict[Key, int] = {}

    def saved(self, same: Iterable[Key], changed: Iterable[Key]) -> None:
        """A save has compared these with the save before."""
        for key in same:
            self._same[key] = self._same.get(key, 0) + 1
        for key in changed:
            self._same.pop(key, None)

    def predict(self, keys: Iterable[Key]) -> None:
        """Nothing is known of these yet, and nobody is expected to change them."""
        for key in keys:
            if key not in self._needed:
                self._same.setdefault(key, 1)

    def broke(self, keys: Iterable[Key]) -> None:
        """These were in a shared file, and have changed."""
        for key in keys:
            self._same.pop(key, None)
            self._needed[key] = min(_SAVES_MAX, 2 * self._needed.get(key, 1))

    def keep(self, keys: Collection[Key]) -> None:
        """The state has only these parts from now on."""
        self._same = {key: count for key, count in self._same.items() if key in keys}
        self._needed = {key: count for key, count in self._needed.items() if key in keys}

    @property
    def same(self) -> Set[Key]:
        """All that may be quiet. No other part is."""
        return self._same.keys()

    def is_quiet(self, key: Key) -> bool:
        """Whether the part may go to a shared file."""
        return self._same.get(key, 0) >= self._needed.get(key, 1)

    def __bool__(self) -> bool:
        """Whether any part may be quiet."""
        return bool(self._same)
