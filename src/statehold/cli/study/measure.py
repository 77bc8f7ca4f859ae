"""Times one strategy: makes its files, overwrites them, reads them cold and warm, deletes them.

Invariants: no file of a case ever stays. A write ends when the bytes are durable. Before a cold
read the kernel is asked to drop these files from its cache. It is asked file by file, and not for
the whole machine, which needs no privilege and leaves other jobs their cache.
Not here: what is timed and how often (sweep, study).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

from statehold.cli.study.memory import Memory, kept
from statehold.cli.study.sessions import Session, open_session
from statehold.cli.study.strategies import Case, Operation, State, Strategy, spans_of
from statehold.errors import StateholdError

_READ_BYTES = 1 << 22
GB = 1e9


@dataclass(frozen=True, slots=True)
class Timing:
    """GB/s of each operation of a case, or why there are none (`refused`); `took_s` in all."""

    case: Case
    rates: dict[Operation, float]
    took_s: float
    refused: str = ""


class Bench:
    """Where cases are run: memory with the states, and a directory."""

    def __init__(self, directory: str, states: Iterable[State]) -> None:
        self._directory = directory
        self._states = {state.name: state for state in states}
        padded = Strategy(aligned=True)
        most = max(spans_of(padded, state)[-1][1] for state in self._states.values())
        self._memory: Memory = kept(most)

    def time(self, case: Case) -> Timing:
        begin = time.monotonic()
        rates: dict[Operation, float] = {}
        refused = ""
        try:
            self._run(case, rates)
        except (OSError, StateholdError) as error:
            rates, refused = {}, str(error).splitlines()[0]
        return Timing(case, rates, time.monotonic() - begin, refused)

    def _run(self, case: Case, rates: dict[Operation, float]) -> None:
        state = self._states[case.strategy.state]
        with contextlib.ExitStack() as closing:
            closing.callback(self._clear)
            session = open_session(case.strategy, state, self._memory, self._directory)
            closing.callback(session.close)
            for operation in case.operations:
                _prepare(session, operation)
                rates[operation] = state.total_bytes / session.seconds(operation) / GB

    def _clear(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self._directory):
                os.unlink(entry.path)


def _prepare(session: Session, operation: Operation) -> None:
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
