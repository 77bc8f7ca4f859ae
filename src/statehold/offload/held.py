"""The files of a state as it was at one moment: what a save takes into a step.

Invariants: from the moment on until release(), none of these files is written or removed. What was
only in memory is being written since then; files() waits for that. release() is called once.
Not here: who writes it (pipeline), what the files are for a step (file_form).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from statehold.layout.stored import StoredFile
from statehold.offload.store import Store, Stored

__all__ = ["Held"]


@dataclass(frozen=True)
class Held:
    """Of each of `subgroups` the generation in `writes`, which the store holds once it is there."""

    store: Store
    subgroups: Sequence[int]
    writes: Sequence[Future[Stored]]

    def files(self) -> list[StoredFile]:
        """All files. Raises the error of a write that has failed."""
        return [
            self.store.forms[index].stored(stored.file, stored.sums)
            for index, stored in zip(
                self.subgroups, [write.result() for write in self.writes], strict=True
            )
        ]

    def release(self) -> None:
        """Let the files go."""
        for write in self.writes:
            if write.exception() is None:
                self.store.release(write.result())
