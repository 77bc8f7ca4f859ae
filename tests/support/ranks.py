"""The ranks of a job as threads: saves, restores, and what each of them returned or raised."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from statehold import Checkpointer, Save
from statehold._core import Fs
from support.faults import DEADLINE_S, SMALL
from support.in_memory import ranks_on
from support.inside import end

T = TypeVar("T")
RUN = "/runs/x"
StateOf = Callable[[int], dict[str, Any]]


class Ranks:
    """A job on one file system; each rank acts in a thread of its own, all at once."""

    def __init__(self, fs: Fs, size: int, run: str = RUN, **options: Any) -> None:
        self.fs = fs
        self.run = run
        self.size = size
        self.ckpts = self._opened({**SMALL, "peer_timeout_s": DEADLINE_S, **options})
        self._pools = [ThreadPoolExecutor(1) for _ in range(size)]

    def _opened(self, options: dict[str, Any]) -> list[Checkpointer]:
        return ranks_on(self.fs, self.run, self.size, **options)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.outcomes(lambda rank: end(self.ckpts[rank]))
        for pool in self._pools:
            pool.shutdown()

    def outcomes(self, act: Callable[[int], T]) -> list[T | Exception]:
        """What `act` returns or raises on each rank."""

        def caught(rank: int) -> T | Exception:
            try:
                return act(rank)
            except Exception as error:
                return error

        told = [pool.submit(caught, rank) for rank, pool in enumerate(self._pools)]
        return [each.result(2 * DEADLINE_S) for each in told]

    def each(self, act: Callable[[int], T]) -> list[T]:
        """What `act` returns on each rank; no rank may raise."""
        found = []
        for outcome in self.outcomes(act):
            if isinstance(outcome, Exception):
                raise outcome
            found.append(outcome)
        return found

    def begin(self, step: int, state_of: StateOf) -> list[Save]:
        return self.each(lambda rank: self.ckpts[rank].save(step, state_of(rank)))

    def save(self, step: int, state_of: StateOf) -> list[Save]:
        """Save on all ranks; returns when all know that the step is committed."""
        return [save.wait("committed", DEADLINE_S) for save in self.begin(step, state_of)]

    def failures(self, step: int, state_of: StateOf) -> list[Exception]:
        """Save on all ranks; every rank must fail, in save() or in its handle."""

        def fail(rank: int) -> Save:
            return self.ckpts[rank].save(step, state_of(rank)).wait("committed", DEADLINE_S)

        found = []
        for outcome in self.outcomes(fail):
            if not isinstance(outcome, Exception):
                raise AssertionError(f"{outcome} did not fail")
            found.append(outcome)
        return found

    def data_bytes(self, step: int) -> list[int]:
        """How many bytes of tensors each rank has written for a committed step."""
        found = []
        for rank in range(self.size):
            name = f"rank-{rank:05d}-of-{self.size:05d}.safetensors"
            path = f"{self.run}/step-{step:012d}/{name}"
            total = self.fs.stat_bytes(path)
            if total is None:
                raise AssertionError(f"{path} is not there")
            length = int.from_bytes(self.fs.read_file(path, total)[:8], "little")
            found.append(total - 8 - length)
        return found

    def names(self) -> list[str]:
        """What lies in the run directory."""
        return sorted(name for name, _ in self.fs.listdir(self.run))
