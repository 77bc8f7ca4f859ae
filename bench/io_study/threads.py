"""Transfers by pread and pwrite on Python threads, as statehold never moves bytes.

All alternatives are measured on equal terms: buffered and direct transfers, a file for each tensor
or rank, shared files, and transfers that are not coalesced.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

from bench.io_study.alternatives import Alternative, FilePlan, files_of
from statehold.cli.study.strategies import MappedMemory, Operation, State, new


class PythonSession:
    """One strategy on one directory."""

    def __init__(
        self, strategy: Alternative, state: State, memory: MappedMemory, directory: str
    ) -> None:
        self._strategy = strategy
        self._plans = files_of(strategy, state)
        self._memory = memory
        self._directory = directory
        self._flags = os.O_CLOEXEC | (os.O_DIRECT if strategy.direct else 0)

    @property
    def paths(self) -> list[str]:
        return [f"{self._directory}/{plan.name}" for plan in self._plans]

    def seconds(self, operation: Operation) -> float:
        if operation.is_write:
            return self._write(operation is Operation.OVERWRITE)
        return self._read(new(self._memory.nbytes) if operation.into_new_memory else self._memory)

    def _write(self, overwrite: bool) -> float:
        flags = self._flags | os.O_WRONLY | (0 if overwrite else os.O_CREAT | os.O_EXCL)
        begin = time.perf_counter()
        with ExitStack() as closing:
            opened = self._open(flags, closing)
            for descriptor, plan in opened:
                if not overwrite:
                    os.posix_fallocate(descriptor, 0, max(1, plan.nbytes))
            in_turns(_moves(opened, self._memory.view, _write_all), self._strategy.depth)
            in_turns(
                [partial(os.fdatasync, descriptor) for descriptor, _ in opened],
                self._strategy.depth,
            )
            return time.perf_counter() - begin

    def _read(self, memory: MappedMemory) -> float:
        begin = time.perf_counter()
        with ExitStack() as closing:
            opened = self._open(self._flags | os.O_RDONLY, closing)
            in_turns(_moves(opened, memory.view, _read_all), self._strategy.depth)
            return time.perf_counter() - begin

    def _open(self, flags: int, closing: ExitStack) -> list[tuple[int, FilePlan]]:
        opened = []
        for path, plan in zip(self.paths, self._plans, strict=True):
            descriptor = os.open(path, flags, 0o666)
            closing.callback(os.close, descriptor)
            opened.append((descriptor, plan))
        return opened

    def close(self) -> None:
        """Nothing: files are closed when they have been moved."""


Move = Callable[[], object]


def _moves(
    opened: Sequence[tuple[int, FilePlan]],
    view: memoryview,
    act: Callable[[int, memoryview, int], None],
) -> Iterator[Move]:
    for descriptor, plan in opened:
        for each in plan.transfers:
            part = view[each.memory : each.memory + each.nbytes]
            yield partial(act, descriptor, part, each.offset)


def _write_all(descriptor: int, part: memoryview, offset: int) -> None:
    while len(part):
        count = os.pwrite(descriptor, part, offset)
        part, offset = part[count:], offset + count


def _read_all(descriptor: int, part: memoryview, offset: int) -> None:
    while len(part):
        count = os.preadv(descriptor, [part], offset)
        if not count:
            raise OSError(f"a file ends at byte {offset}, before what is to be read")
        part, offset = part[count:], offset + count


def in_turns(moves: Sequence[Move] | Iterator[Move], depth: int) -> None:
    """Do all of them, `depth` at a time. Raises the first error after all threads have stopped."""
    waiting, guard = iter(moves), threading.Lock()
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            while not errors:
                with guard:
                    move = next(waiting, None)
                if move is None:
                    return
                move()
        except BaseException as error:
            errors.append(error)

    helpers = [threading.Thread(target=serve, daemon=True) for _ in range(depth - 1)]
    for helper in helpers:
        helper.start()
    serve()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
