"""Times one strategy: makes its files, overwrites them, reads them cold and warm, deletes them.

Invariants: no file of a case ever stays. A write ends when the bytes are durable. Before a cold
read the kernel is asked to drop these files from its cache. It is asked file by file, and not for
the whole machine, which needs no privilege and leaves other jobs their cache.
Not here: what is timed and how often (sweep, study).
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from statehold.cli.study.memory import MappedMemory, kept
from statehold.cli.study.sessions import TimedStrategy, open_session
from statehold.cli.study.strategies import Case, Operation, State, Strategy, spans_of
from statehold.errors import StateholdError

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
