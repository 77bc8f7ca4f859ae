"""Spare memory: pieces of a step are read and verified there, before a live tensor changes.

Owns: the memory of one update, which the next one uses again; the reading of pieces into it.
Invariants: read() returns only if every piece is there and has its checksum. The files are not
needed afterwards, so whatever happens to them changes nothing. A writer of this host does not
overwrite a file that is open here. The memory is pinned if a device is to read it.
Not here: which pieces (preparing), where they go from here (subscribe).
"""

from __future__ import annotations

import contextlib
import resource
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from statehold import _core
from statehold.errors import ChecksumError, CorruptionError
from statehold.format.entries import sums_to_bytes
from statehold.io.clients import Client, open_engine
from statehold.tensors.devices.devices import backend_for
from statehold.tensors.devices.pinning import Pinning, mapped
from statehold.units import MiB

if TYPE_CHECKING:
    from statehold._core import Engine, File
    from statehold.subscription.preparing import ChangedPiece, Move

# (name, bytes) of a file -> its path.
Locate = Callable[[str, int], str]

PAGE = 4096
BUFFER_BYTES = 4 * MiB
COPY_THREADS = 2
# Memory is given back if an update needs less than this part of it.
_LEAST_PART = 4


class Spare:
    """The memory of one update at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._pinning: Pinning | None = None
        self._fs = _core.open_fs()
        self._engine: Engine | None = None

    def read(self, moves: Sequence[Move], locate: Locate, device: torch.device | None) -> list[int]:
        """Read the pieces of the moves, and verify them; the place of each in `memory`.

        device: that will read the memory, if any. Raises ChecksumError, CorruptionError, or
        StorageError, with the file.
        """
        order = sorted(range(len(moves)), key=lambda index: moves[index].piece)
        places, nbytes = _placed([moves[index].piece for index in order])
        self._make_room(nbytes, device)
        self._fill([moves[index] for index in order], places, locate)
        return [at for _, at in sorted(zip(order, places, strict=True))]

    @property
    def memory(self) -> torch.Tensor:
        """The memory, which begins at a page."""
        return self._memory

    def drop(self) -> None:
        """Give the memory back; nothing copies from it."""
        if self._pinning is not None:
            self._pinning.close()
            self._pinning = None
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def close(self) -> None:
        """End."""
        self.drop()
        if self._engine is not None:
            self._engine.close()
        self._fs.close()

    def _make_room(self, nbytes: int, device: torch.device | None) -> None:
        if not nbytes <= self._memory.numel() <= max(_LEAST_PART * nbytes, BUFFER_BYTES):
            self.drop()
            self._memory = mapped(nbytes)
        if device is not None and nbytes:
            self._pinning = self._pinning or Pinning(backend_for(device), device)
            self._pinning.pin(self._memory)

    def _fill(self, moves: Sequence[Move], places: Sequence[int], locate: Locate) -> None:
        """From many files at once, because a step may be retired at any time. But a process cannot
        open those of thousands of ranks."""
        first = {move.piece.file: at for at, move in reversed([*enumerate(moves)])}
        most = max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)  # others have files, too
        for begin, end in pairwise([*sorted(first.values())[::most], len(moves)]):
            self._fill_from(moves[begin:end], places[begin:end], locate)

    def _fill_from(self, moves: Sequence[Move], places: Sequence[int], locate: Locate) -> None:
        with contextlib.ExitStack() as opened:
            sizes = {move.piece.file: move.piece.file_bytes for move in moves}
            files = [self._opened(locate(*each), each[1]) for each in sizes.items()]
            for file in files:
                opened.callback(file.close)
            number = {name: index for index, name in enumerate(sizes)}
            address = self._memory.data_ptr()
            job = self._open_engine().ranges(
                write=False,
                files=files,
                file_index=array("q", [number[move.piece.file] for move in moves]),
                offsets=array("q", [move.piece.begin for move in moves]),
                sizes=array("q", [move.piece.end - move.piece.begin for move in moves]),
                addresses=array("Q", [address + at for at in places]),
                sums=sums_to_bytes("".join([move.piece.sum for move in moves])),
                owner=self._memory,
                client=Client.RESTORE,
            )
            try:
                job.wait(None)
            except _core.Mismatch as found:
                raise _damaged(found, moves) from None
            finally:
                job.cancel()

    def _opened(self, path: str, nbytes: int) -> File:
        file = self._fs.open_read(path)
        if (got := file.size_bytes()) != nbytes:
            file.close()
            facts = {"file": path, "expected": f"{nbytes} bytes", "got": f"{got} bytes"}
            raise CorruptionError("a file of a step does not have its size", facts=facts)
        return file

    def _open_engine(self) -> Engine:
        if self._engine is None:
            self._engine = open_engine(self._fs, 2 * BUFFER_BYTES, BUFFER_BYTES, COPY_THREADS)
        return self._engine


def _placed(pieces: Sequence[ChangedPiece]) -> tuple[list[int], int]:
    """Where each piece goes, and the bytes of all.

    Each is as far from a page as in its file, so most need no copy on their way.
    """
    places, end = [], 0
    for piece in pieces:
        at = end + (piece.begin - end) % PAGE
        places.append(at)
        end = at + piece.end - piece.begin
    return places, end


def _damaged(found: _core.Mismatch, moves: Sequence[Move]) -> ChecksumError:
    name, begin = found.path.rpartition("/")[2], found.begin
    at = (move.name for move in moves if (move.piece.file, move.piece.begin) == (name, begin))
    return ChecksumError(
        "bytes of a step do not match their checksum",
        facts={
            "tensor": next(at, "unknown"),
            "file": found.path,
            "bytes": f"[{begin}, {found.end})",
            "xxh3-64": f"expected {found.expected:016x}, got {found.got:016x}",
        },
        hint="the tensors in place were not changed",
    )
