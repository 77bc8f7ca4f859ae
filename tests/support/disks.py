"""What the conformance tests share: a file system with a directory, and states to move."""

from __future__ import annotations

import os
import resource
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from statehold import _core
from statehold.errors import StorageError
from support.faults import DEADLINE_S, must
from support.in_memory import SimFs

BLOCK = 64 << 10
BUFFER = 256 << 10
EAGER, EXTERNAL, SHARED = _core.SEGMENT_EAGER, _core.SEGMENT_EXTERNAL, _core.SEGMENT_SHARED


@dataclass(frozen=True)
class Disk:
    """A file system, and an empty directory on it."""

    fs: _core.Fs
    root: str

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"


def open_or_skip(backend: str) -> _core.Fs:
    try:
        return _core.open_fs(backend)
    except StorageError as error:
        pytest.skip(str(error))


@contextmanager
def no_file_larger_than(fs: _core.Fs, nbytes: int) -> Iterator[None]:
    """No room for larger files: of this process on a real disk, of all files on a simulated one."""
    if isinstance(fs, SimFs):
        fs.set_faults(capacity=nbytes)
        yield
        fs.set_faults()
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))  # Python ignores SIGXFSZ
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def piece_count(begin: int, size: int, block: int = BLOCK) -> int:
    return 0 if size == 0 else (begin + size - 1) // block - begin // block + 1


def random_arrays(seed: int, *sizes: int) -> list[np.ndarray[Any, Any]]:
    """Arrays of bytes that own their memory."""
    rng = np.random.default_rng(seed)
    return [np.frombuffer(rng.bytes(size), np.uint8).copy() for size in sizes]


@dataclass
class State:
    """Arrays in file order behind a header, and the arguments that move them."""

    arrays: list[np.ndarray[Any, Any]]
    header: bytes = b"h" * 4096
    flags: dict[int, int] = field(default_factory=dict)

    @property
    def image(self) -> bytes:
        return self.header + b"".join(a.tobytes() for a in self.arrays)

    @property
    def begins(self) -> list[int]:
        begins, at = [], len(self.header)
        for a in self.arrays:
            begins.append(at)
            at += a.nbytes
        return begins

    @property
    def file_bytes(self) -> int:
        return len(self.header) + sum(a.nbytes for a in self.arrays)

    def arguments(self) -> dict[str, Any]:
        return {
            "block_bytes": BLOCK,
            "begins": array("q", self.begins),
            "sizes": array("q", [a.nbytes for a in self.arrays]),
            "addresses": array("Q", [a.ctypes.data for a in self.arrays]),
            "flags": bytes(self.flags.get(i, 0) for i in range(len(self.arrays))),
            "strided": {
                i: (a.itemsize, a.shape, tuple(s // a.itemsize for s in a.strides))
                for i, a in enumerate(self.arrays)
                if not a.flags.c_contiguous
            },
            "owner": self.arrays,
        }

    def write(
        self, engine: _core.Engine, file: _core.File | None = None, **changes: Any
    ) -> _core.WriteJob:
        arguments = {**self.arguments(), **changes}
        return engine.write(file_bytes=self.file_bytes, header=self.header, file=file, **arguments)

    def read(self, engine: _core.Engine, path: str, sums: bytes, **changes: Any) -> _core.ReadJob:
        """Everything behind the header, whose sums are therefore left out."""
        arguments = {
            **self.arguments(),
            "files": [path],
            "file_bytes": [self.file_bytes],
            "file_index": array("q", [0] * len(self.arrays)),
            "sums": sums[8 * piece_count(0, len(self.header)) :],
            **changes,
        }
        return engine.read(**arguments)

    def cleared(self) -> State:
        """The same layout with other bytes in it, strides included."""
        copies = []
        for a in self.arrays:
            base = a if a.base is None else a.base
            copy = np.full_like(base, 0xAB)
            start = a.ctypes.data - base.ctypes.data
            copies.append(np.ndarray(a.shape, a.dtype, copy.data, start, a.strides))
        return State(copies, self.header, self.flags)


def save(engine: _core.Engine, disk: Disk, name: str, state: State, reuse: bool = False) -> bytes:
    """Write the whole file durably, through Python where it is flagged so; returns the sums."""
    job = state.write(engine)
    job.attach(disk.fs.open_write(disk.path(name), state.file_bytes, reuse))
    return finish(job, state)


def finish(job: _core.WriteJob, state: State) -> bytes:
    """Fill what Python has to fill, and wait for the rest; returns the sums."""
    while (fill := job.next_fill(DEADLINE_S)) is not None:
        for segment, offset, at, count in fill.pieces:
            source = state.arrays[segment - 1].tobytes()
            fill.view[at : at + count] = source[offset : offset + count]
        job.filled(fill)
    must(job.fills_left == 0)
    must(job.wait_written(DEADLINE_S))
    job.finish()
    return job.checksums()


def restore(engine: _core.Engine, disk: Disk, name: str, state: State, sums: bytes) -> None:
    """Read everything into place."""
    job = state.read(engine, disk.path(name), sums)
    while (ready := job.next_ready(DEADLINE_S)) is not None:
        for segment, offset, at, count in ready.pieces:
            target = memoryview(state.arrays[segment].data).cast("B")
            target[offset : offset + count] = ready.view[at : at + count]
        job.release(ready)
    must(job.ready_left == 0)
    must(job.wait(DEADLINE_S))


def corrupt(disk: Disk, name: str, offset: int, cold: bool) -> None:
    """Flip a bit; `cold` puts the file out of the page cache, otherwise it is in it."""
    if isinstance(disk.fs, SimFs):
        disk.fs.corrupt(disk.path(name), offset, 0x10)
        return
    with open(disk.path(name), "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        file.read()
        if cold:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
