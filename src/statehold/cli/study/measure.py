"""Times one strategy: makes its files, overwrites them, reads them cold and warm, deletes them.

Owns: the cases on storage, and the two kinds of sessions that move their bytes.
Invariants: no file of a case ever stays. A write ends when the bytes are durable. Before a cold
read the kernel is asked to drop these files from its cache. It is asked file by file, and not for
the whole machine, which needs no privilege and leaves other jobs their cache.
Not here: what is timed and how often (strategies, bench).
"""

from __future__ import annotations

import contextlib
import os
import time
from array import array
from dataclasses import dataclass
from typing import Any, Protocol

from statehold import _core
from statehold._core import WriteJob
from statehold.cli.study.strategies import (
    Case,
    MappedMemory,
    Operation,
    State,
    Strategy,
    kept,
    new,
    spans_of,
)
from statehold.errors import StateholdError
from statehold.units import MiB

# -- all of them -----------------------------------------------------------------------------------


_READ_BYTES = 1 << 22
GB = 1e9


@dataclass(frozen=True, slots=True)
class Timing:
    """GB/s of each operation of a case, or why there are none (`refused`)."""

    rates: dict[Operation, float]
    refused: str = ""


class Bench:
    """Where cases are run: a directory, and memory with the state, and with `others`."""

    def __init__(self, directory: str, state: State, *others: State) -> None:
        self.directory = directory
        self.state = state
        states = (state, *others)
        self.memory: MappedMemory = kept(
            max(spans_of(each, aligned=True)[-1][1] for each in states)
        )

    def open(self, strategy: Strategy) -> tuple[TimedStrategy, int]:
        """A strategy, ready to be timed, and the bytes that it moves."""
        session = open_session(strategy, self.state, self.memory, self.directory)
        return session, self.state.total_bytes

    def time(self, case: Case) -> Timing:
        rates: dict[Operation, float] = {}
        try:
            self._run(case, rates)
        except (OSError, StateholdError) as error:
            return Timing({}, str(error).splitlines()[0])
        return Timing(rates)

    def _run(self, case: Case, rates: dict[Operation, float]) -> None:
        with contextlib.ExitStack() as closing:
            closing.callback(self._clear)
            session, nbytes = self.open(case.strategy)
            closing.callback(session.close)
            for operation in case.operations:
                _prepare(session, operation)
                rates[operation] = nbytes / session.seconds(operation) / GB

    def _clear(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self.directory):
                os.unlink(entry.path)


def _prepare(session: TimedStrategy, operation: Operation) -> None:
    """Bring the page cache into the state that the restore should find."""
    if operation.is_write:
        return
    for path in session.paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            if operation.is_warm:
                _fill_cache(descriptor)
        finally:
            os.close(descriptor)


def _fill_cache(descriptor: int) -> None:
    buffer = bytearray(_READ_BYTES)
    at = 0
    while count := os.preadv(descriptor, [buffer], at):
        at += count


# -- one strategy ----------------------------------------------------------------------------------
# The native core moves bytes only, or its engine saves and restores. An engine reads its saves back
# with the checksums that it took, so a timed restore has been verified, as statehold's own are.


STAGING_BYTES = 512 * MiB
_GRID_BYTES = MiB  # of the checksums, as in data files
_BUFFERS_MIN = 2


class TimedStrategy(Protocol):
    """One strategy, ready to be timed."""

    @property
    def paths(self) -> list[str]: ...
    def seconds(self, operation: Operation) -> float: ...
    def close(self) -> None: ...


def open_session(
    strategy: Strategy, state: State, memory: MappedMemory, directory: str
) -> TimedStrategy:
    if strategy.is_engine:
        return EngineSession(strategy, state, memory, directory)
    return RawSession(strategy, state, directory)


class RawSession:
    """One file, direct, in equal blocks, by the core: no copy, no checksum, memory of its own."""

    def __init__(self, strategy: Strategy, state: State, directory: str) -> None:
        self._strategy = strategy
        self._nbytes = spans_of(state, aligned=True)[-1][1]
        self.paths = [f"{directory}/bytes"]
        self._fs = _core.open_fs(strategy.mover.value, strategy.depth)

    def seconds(self, operation: Operation) -> float:
        path, how = self.paths[0], (self._strategy.block_bytes, self._strategy.depth)
        if operation.is_write:
            reuse = operation is Operation.OVERWRITE
            return _core.raw_write(self._fs, path, self._nbytes, *how, reuse)
        return _core.raw_read(self._fs, path, *how)

    def close(self) -> None:
        self._fs.close()


class EngineSession:
    """One file, as a Checkpointer saves and restores it, without plan and commit."""

    def __init__(
        self, strategy: Strategy, state: State, memory: MappedMemory, directory: str
    ) -> None:
        self._spans = spans_of(state, aligned=False)
        self._nbytes = self._spans[-1][1]
        self._memory = memory
        self.paths = [f"{directory}/saved"]
        self._sums = b""
        self._fs = _core.open_fs(strategy.mover.value, strategy.depth)
        buffer = strategy.block_bytes
        wanted = min(STAGING_BYTES // buffer, self._nbytes // buffer + 1)
        staging = max(_BUFFERS_MIN, wanted) * buffer
        self._engine = _core.Engine(self._fs, staging, buffer, strategy.copy_threads)
        self._warm_up(f"{directory}/first")

    def _warm_up(self, path: str) -> None:
        """The first job of an engine waits until its buffers are faulted in, which is not
        measured."""
        self._save(path, reuse=False)
        os.unlink(path)

    def seconds(self, operation: Operation) -> float:
        begin = time.perf_counter()
        if operation.is_write:
            self._save(self.paths[0], reuse=operation is Operation.OVERWRITE)
        else:
            size = self._memory.nbytes
            self._restore(new(size) if operation.into_new_memory else self._memory)
        return time.perf_counter() - begin

    def _save(self, path: str, *, reuse: bool) -> None:
        job: WriteJob = self._engine.write(
            file_bytes=self._nbytes, header=b"", **self._segments(self._memory)
        )
        job.attach(self._fs.open_write(path, self._nbytes, reuse))
        job.wait_written(None)
        job.finish()
        self._sums = job.checksums()

    def _restore(self, memory: MappedMemory) -> None:
        job = self._engine.read(
            files=self.paths,
            file_bytes=[self._nbytes],
            file_index=array("q", bytes(8 * len(self._spans))),
            sums=self._sums,
            **self._segments(memory),
        )
        job.wait(None)

    def _segments(self, memory: MappedMemory) -> dict[str, Any]:
        return {
            "block_bytes": _GRID_BYTES,
            "begins": array("q", [begin for begin, _ in self._spans]),
            "sizes": array("q", [end - begin for begin, end in self._spans]),
            "addresses": array("Q", [memory.address + begin for begin, _ in self._spans]),
            "flags": bytes(len(self._spans)),
            "strided": {},
            "owner": memory,
        }

    def close(self) -> None:
        self._engine.close()
        self._fs.close()
