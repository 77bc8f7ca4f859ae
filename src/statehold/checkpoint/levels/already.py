"""Shared files that a level has already: a copy of a step gets them by a second name.

The newest step of the level holds most files that the step before it at the source shared with this
one. Two files with the same spans, and the same checksums of all of them, are one and the same.

Invariants: only files that steps share are looked for, so a run without such files reads nothing
more. If the newest step cannot be read, or goes away meanwhile, the files are copied.
Not here: which files are shared (checkpoint/save/sharing), the bytes of a copy (copying).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from statehold.checkpoint.levels.copying import DataFile, FileSpan, part_of
from statehold.errors import StateholdError, StorageError
from statehold.layout.plan import file_of

if TYPE_CHECKING:
    from statehold.checkpoint.levels.copying import Source
    from statehold.checkpoint.store.store import Store

# The size of a file, of its blocks, and its spans with their checksums.
Content = tuple[int, int, tuple[FileSpan, ...]]


class Already:
    """The shared files in the newest step of a store, while a copy of another step is made."""

    def __init__(self, store: Store, step: int, files: Sequence[DataFile]) -> None:
        self._store = store
        self._step = step
        self._writers = {_writer(file) for file in files if is_shared(file.name)}
        self._paths: dict[Content, str] = {}

    @contextlib.contextmanager
    def known(self, source: Callable[[int], Source]) -> Iterator[None]:
        """Look the files up, and keep their step while the context lasts.

        source: the source of the files of a step of the store.
        """
        newest = self._newest() if self._writers else None
        if newest is None:
            yield
            return
        with self._store.protect(newest):
            with contextlib.suppress(StateholdError):  # then nothing is known
                self._look(self._store.path(newest), source(newest))
            yield

    def _newest(self) -> int | None:
        """The newest step but for the one that is made: that may be there from an earlier save."""
        with contextlib.suppress(StorageError):
            return max((step for step in self._store.steps() if step != self._step), default=None)
        return None

    def _look(self, where: str, source: Source) -> None:
        for file in part_of(source, where, self._share).files:
            if is_shared(file.name):
                self._paths[content_of(file)] = f"{where}/{file.name}"

    def link(self, file: DataFile, attempt: str) -> bool:
        """Give the file to the step that is made, if it is there. False if it has to be copied."""
        path = self._paths.get(content_of(file))
        if path is None:
            return False
        with contextlib.suppress(StorageError):  # a copy of the file is as good
            return self._store.link(self._step, file.name, path, attempt)
        return False

    def _share(self, saved: int, _: bytes) -> list[int]:
        return [writer for writer in sorted(self._writers) if writer < saved]


def content_of(file: DataFile) -> Content:
    """Equal for files with equal bytes, and for no others."""
    return file.bytes, file.block_bytes, file.spans


def is_shared(name: str) -> bool:
    """Whether other steps may have the file, too: a rank writes its first one for each step."""
    found = file_of(name)
    return found is not None and found[2] > 0


def _writer(file: DataFile) -> int:
    found = file_of(file.name)
    return found[0] if found else 0
