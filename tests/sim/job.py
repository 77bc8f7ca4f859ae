"""A job of ranks on a simulated disk, as threads that can die, stall and come back.

A rank passes a turnstile before every operation on the disk and every call to the board. There it
may die (from then on nothing that it does has an effect), or stall until somebody lets it go on.
What others wait for ends when only ranks that are gone could end it: a deadline that costs no time.
Deadlines of the real kind are for hangs, and a hang is a violation.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from sim.oracle import RUN
from statehold import Checkpointer
from statehold.errors import StateholdError
from statehold.ranks.board import StoreBoard, lost_leader
from statehold.ranks.membership import Membership
from statehold.ranks.peers import Peers
from statehold.testing import SimFs, checkpointer_on
from statehold.testing.memory_board import MemoryStore
from support.faults import Spy

T = TypeVar("T")
HANG_S = 60.0
QUIET_S = 2.0
SMALL = {"staging_bytes": "2MiB", "buffer_bytes": "1MiB", "copy_threads": 1}


class Died(StateholdError):
    """This rank is dead, and its threads do not know yet."""


class Life:
    """Whether a rank lives, and how many operations it has left.

    stalls: (at which operation, for how many of all ranks'); None: until go_on().
    """

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self.rank = rank
        self.operations = 0
        self.dies_at: int | None = None
        self.dies_with_all = False
        self.stalls: tuple[int, int | None] | None = None
        self.is_dead = self.is_stalled = self.has_stalled = False
        self._go_on = threading.Event()
        self._guard = threading.Lock()

    def before(self, operation: str, args: tuple[Any, ...] = ()) -> None:
        """The turnstile."""
        self._hub.tick()
        with self._guard:
            self.operations += 1
            dies = self.operations == self.dies_at
            stalls = self.stalls is not None and self.operations == self.stalls[0]
        if dies:
            self._hub.kill(self)
        elif stalls:
            self._stall()
        elif self.is_stalled:
            self._wait()
        if self.is_dead:
            raise Died(f"rank {self.rank} is dead before {operation}")

    def go_on(self) -> None:
        self._go_on.set()

    def _stall(self) -> None:
        assert self.stalls is not None
        self.is_stalled = self.has_stalled = True
        self._hub.leave(self.rank)
        if self.stalls[1] is not None:
            self._hub.wake(self, self.stalls[1])
        self._wait()
        self.is_stalled = False
        self._hub.come_back(self.rank)

    def _wait(self) -> None:
        if not self._go_on.wait(HANG_S):
            raise AssertionError("nobody let a stalled rank go on")


class Hub(MemoryStore):
    """The store of a job, which knows the ranks that nobody need wait for."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.lives = [Life(self, rank) for rank in range(size)]
        self._gone: set[int] = set()
        self._finished: set[int] = set()
        self._waiting: Counter[int] = Counter()
        self._ticks = 0
        self._alarms: list[tuple[int, Life]] = []

    def tick(self) -> None:
        """An operation of some rank: those who stalled until now go on."""
        with self._changed:
            self._ticks += 1
            for at, life in self._alarms:
                if at == self._ticks:
                    life.go_on()

    def wake(self, life: Life, after: int) -> None:
        with self._changed:
            self._alarms.append((self._ticks + after, life))

    def leave(self, rank: int) -> None:
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()

    def come_back(self, rank: int) -> None:
        with self._changed:
            self._gone.discard(rank)

    def kill(self, life: Life) -> None:
        for each in self.lives if life.dies_with_all else [life]:
            each.is_dead = True
            each.go_on()
            self.leave(each.rank)

    def finish(self, rank: int) -> None:
        with self._changed:
            self._finished.add(rank)
        self.leave(rank)

    def wait_until_settled(self) -> None:
        """Until every rank has ended or stalls."""
        with self._changed:
            settled = self._changed.wait_for(
                lambda: all(life.is_stalled or life.rank in self._finished for life in self.lives),
                2 * HANG_S,
            )
        if not settled:
            raise AssertionError("a rank hangs")

    def wait_or_give_up(self, rank: int, keys: Sequence[str]) -> bool:
        """Wait for keys until they are there, or nobody who is left could post them."""

        def hopeless() -> bool:
            group, _, last = keys[0].rpartition("/")
            if last != "bell":
                return 0 in self._gone
            return all(
                life.rank in self._gone or f"{group}/{life.rank}" in self._values
                for life in self.lives
            )

        with self._changed:
            self._waiting[rank] += 1
            try:
                for _ in range(int(HANG_S / QUIET_S)):
                    ticks = self._ticks
                    ended = self._changed.wait_for(lambda: self.check(keys) or hopeless(), QUIET_S)
                    if ended or (ticks == self._ticks and self._all_wait()):
                        return self.check(keys)
            finally:
                self._waiting[rank] -= 1
        raise AssertionError(f"a rank hangs, waiting for {keys}")

    def _all_wait(self) -> bool:
        """Whether ranks wait for each other, so that only a deadline can end it."""
        return all(life.rank in self._gone or self._waiting[life.rank] for life in self.lives)


class RankBoard(StoreBoard):
    """A rank's connection to the hub."""

    def __init__(self, hub: Hub, life: Life, token: str) -> None:
        super().__init__(hub, "sim")
        self._hub = hub
        self._life = life
        self._token = token

    def open(self, rank: int, size: int, until: float) -> str:
        if rank == 0:
            self.post("token", self._token.encode())
        elif self.wait(["token"], until):
            raise lost_leader("call the ranks to open the run")
        return self._token

    def _call(self, action: Callable[[Any], T]) -> T:
        self._life.before("board")
        return super()._call(action)

    def _block(self, keys: list[str], until: float) -> bool:
        self._life.before("wait")
        return self._hub.wait_or_give_up(self._life.rank, keys)


class Job:
    """`size` ranks on `fs`. Each runs one program in a thread of its own, and closes."""

    def __init__(self, fs: SimFs, size: int, token: str, **options: Any) -> None:
        self.size = size
        self.hub = Hub(size)
        self.lives = self.hub.lives
        self.ckpts = [self._rank(fs, life, token, options) for life in self.lives]
        self._pool = ThreadPoolExecutor(size)
        self._told: list[Future[Any]] = []

    def _rank(self, fs: SimFs, life: Life, token: str, options: dict[str, Any]) -> Checkpointer:
        board = RankBoard(self.hub, life, token)
        peers = Peers(board, Membership(life.rank, self.size), HANG_S) if self.size > 1 else None
        ckpt = checkpointer_on(fs, RUN, peers, **{**SMALL, **options})
        opened: Any = ckpt._opened()
        spy = Spy(fs, life.before)
        for place in opened.levels.places:
            place.store._fs = spy
        for promoter in opened.levels.promotions._promoters.values():
            promoter._fs = spy
        return ckpt

    def start(self, program: Callable[[int], Any]) -> None:
        self._told = [self._pool.submit(self._act, program, rank) for rank in range(self.size)]

    def end(self, *, leave_stalled: bool = False) -> list[Any]:
        """What the program has returned or raised on each rank; None for those still stalled."""
        self.hub.wait_until_settled()
        stalled = {life.rank for life in self.lives if life.is_stalled}
        if not leave_stalled:
            for life in self.lives:
                life.go_on()
        return [
            None if leave_stalled and rank in stalled else told.result(2 * HANG_S)
            for rank, told in enumerate(self._told)
        ]

    def close(self) -> None:
        """After the last end()."""
        self._pool.shutdown()

    def _act(self, program: Callable[[int], Any], rank: int) -> Any:
        outcome: Any
        try:
            outcome = program(rank)
        except Exception as error:
            outcome = error
        try:
            self.ckpts[rank]._close()
        except Exception as error:
            outcome = error
        self.hub.finish(rank)
        return outcome
