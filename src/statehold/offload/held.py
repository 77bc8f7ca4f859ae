"""The files of a state as it was at one moment: what a save takes into a step.

Invariants: from the moment on until release(), none of these files is removed, and nothing in them
is written but headers. What was only in memory is being written since then; files() waits for that,
and then writes the headers that are missing. release() is called once.
Not here: who writes the subgroups (pipeline), what the headers say (head).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from statehold.layout.stored import StoredFile
from statehold.offload.head import Head
from statehold.offload.store import Stored, SubgroupStore


@dataclass(frozen=True)
class Held:
    """Of each subgroup the generation in `writes`, which the store holds once it is there."""

    store: SubgroupStore
    writes: Mapping[int, Future[Stored]]

    def files(self, heads: Mapping[int, Head]) -> list[StoredFile]:
        """All files, with these headers. Raises the error of a write that has failed."""
        found = {index: write.result() for index, write in self.writes.items()}
        for index, stored in found.items():
            self.store.write_head(stored, heads[index])
        return [heads[index].stored(stored.file, stored.sums) for index, stored in found.items()]

    def release(self) -> None:
        """Let the files go."""
        for write in self.writes.values():
            if write.exception() is None:
                self.store.release(write.result())
