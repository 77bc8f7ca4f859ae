"""Subgroups on paths: one call writes or reads a subgroup, and returns when it is done.

Invariants: every byte that is written is hashed, and every byte that is read is verified before the
call returns. Transfers go straight between a file and the caller's memory. A limit of a path holds
for its reads and writes together. A transfer has the turn of its path and direction. Its seconds
include the wait for that, so other optimizers on a path make it slower for the placement, too.
Not here: when which subgroup moves (pipeline), which path it goes to (planners/placement).
"""

from __future__ import annotations

import contextlib
import errno
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from statehold import _core
from statehold.errors import ChecksumError, StorageError
from statehold.io.clients import Client, open_engine
from statehold.offload.files import StateFiles
from statehold.offload.stats import Kind, Meter, Timeline
from statehold.offload.tiers import Path
from statehold.offload.turns import Turns
from statehold.planners.placement import Moved
from statehold.units import MiB

if TYPE_CHECKING:
    import torch

    from statehold._core import File, Fs
    from statehold.offload.subgroups import Subgroup

__all__ = ["Store", "Stored"]

QUEUE_DEPTH = 32
# A transfer, and what a checksum covers.
PIECE_BYTES = 8 * MiB
COPY_THREADS_MAX = 4
PARTS_NAMED = 4


@dataclass(frozen=True, slots=True)
class Stored:
    """The newest generation of a subgroup: the path's number, the file, the checksums."""

    path: int
    file: str
    sums: bytes


class PathMeters:
    """What one path has moved."""

    def __init__(self) -> None:
        self.read, self.written, self.both = Meter(), Meter(), Meter()


class Store:
    """All paths of an optimizer. `fs`: a file system from the caller, which stays open."""

    def __init__(self, paths: Sequence[Path], names: Sequence[str], fs: Fs | None = None) -> None:
        self._names = names  # of the parameters
        self._owned = contextlib.ExitStack()
        with contextlib.ExitStack() as owned:
            if fs is None:
                fs = _core.open_fs("auto", QUEUE_DEPTH)
                owned.callback(fs.close)
            self._fs = fs
            self._engine = open_engine(
                fs, 2 * PIECE_BYTES, PIECE_BYTES, min(COPY_THREADS_MAX, os.cpu_count() or 1)
            )
            owned.callback(self._engine.close)
            self.files: list[StateFiles] = []
            self._turns: list[Turns] = []
            for number, path in enumerate(paths):
                self.files.append(StateFiles(fs, path.directory))
                owned.callback(self.files[-1].close)
                takes_turns = path.exclusive and fs.backend != "sim"
                self._turns.append(Turns(path.directory if takes_turns else None))
                owned.callback(self._turns[-1].close)
                self._engine.set_limit(number, None, path.rate or 0)
            self._owned = owned.pop_all()
        self.meters = [PathMeters() for _ in paths]
        self.all_transfers = Meter()
        self.timeline = Timeline()

    def write(self, subgroup: Subgroup, memory: torch.Tensor, path: int) -> Stored:
        """Write the next generation of a subgroup to a path."""
        name, file = self.files[path].take(subgroup.nbytes)
        try:
            sums = self._move(file, subgroup, memory, path, None)
        except BaseException:
            self.files[path].give_back(name)
            raise
        return Stored(path, name, sums)

    def read(self, subgroup: Subgroup, stored: Stored, memory: torch.Tensor) -> None:
        """Read a subgroup. Raises ChecksumError, with its parameters, for a damaged one."""
        self.files[stored.path].check()
        file = self._open_read(stored.file)
        try:
            self._move(file, subgroup, memory, stored.path, stored.sums)
        except _core.Mismatch as found:
            raise self._damaged(subgroup, found) from None

    def moved(self, path: int) -> Moved:
        """What a path has moved so far."""
        meters = self.meters[path]
        return Moved(meters.read.nbytes, meters.written.nbytes, meters.both.busy_s)

    def drop(self, stored: Stored) -> None:
        """Nobody needs this generation any more."""
        self.files[stored.path].give_back(stored.file)

    def close(self) -> None:
        """Remove all state files, and release everything. No transfer is under way."""
        self._owned.close()

    def _move(
        self, file: File, subgroup: Subgroup, memory: torch.Tensor, path: int, sums: bytes | None
    ) -> bytes:
        begins = range(0, subgroup.nbytes, PIECE_BYTES)
        sizes = [min(PIECE_BYTES, subgroup.nbytes - begin) for begin in begins]
        meters, is_write = self.meters[path], sums is None
        own = meters.written if is_write else meters.read
        turn = self._turns[path].write if is_write else self._turns[path].read
        with contextlib.ExitStack() as measured:
            measured.callback(file.close)
            for meter in (own, meters.both, self.all_transfers):
                measured.enter_context(meter.moving(subgroup.nbytes))
            measured.enter_context(turn.taken())
            kind: Kind = "write" if is_write else "read"
            directory = self.files[path].directory
            measured.enter_context(self.timeline.during(kind, subgroup.index, directory))
            job = self._engine.ranges(
                write=is_write,
                files=[file],
                file_index=array("Q", [0] * len(sizes)),
                offsets=array("Q", begins),
                sizes=array("Q", sizes),
                addresses=array("Q", [memory.data_ptr() + begin for begin in begins]),
                sums=sums or b"",
                owner=memory,
                client=Client.OFFLOAD_WRITE if is_write else Client.OFFLOAD_READ,
                paths=[path],
            )
            job.wait(None)
        return job.checksums() if is_write else b""

    def _open_read(self, path: str) -> File:
        try:
            return self._fs.open_read(path, direct=True)
        except StorageError as error:
            if error.errno != errno.EINVAL:  # a file system without O_DIRECT
                raise
            return self._fs.open_read(path)

    def _damaged(self, subgroup: Subgroup, found: _core.Mismatch) -> ChecksumError:
        parts = subgroup.parts_in(found.begin, found.end)
        shown = [
            f"{part.field} of {self._names[part.span.parameter]} "
            f"[{part.span.begin}, {part.span.end})"
            for part in parts[:PARTS_NAMED]
        ]
        more = f", and {len(parts) - PARTS_NAMED} more" if len(parts) > PARTS_NAMED else ""
        return ChecksumError(
            "optimizer state on storage differs from its checksum",
            facts={
                "parameters": ", ".join(shown) + more,
                "file": found.path,
                "bytes": f"[{found.begin}, {found.end})",
                "xxh3-64": f"expected {found.expected:016x}, got {found.got:016x}",
            },
            hint="these bytes have trained nothing. This update is incomplete: restore the newest "
            "committed step",
        )
