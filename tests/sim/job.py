"""A job of ranks on a simulated disk, as tasks of a Scheduler that can die, stall and come back.

A rank passes a turnstile before every operation on the disk and every call to the board. There it
may lose its turn, die (from then on nothing that it does has an effect), or stall until somebody
lets it go on. Those who wait for a rank that is gone wait until their deadline, in virtual time.
Used inside simulated() alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any, TypeVar

from sim.oracle import RUN
from statehold import Checkpointer
from statehold.errors import StateholdError
from statehold.ranks.board import StoreBoard, lost_leader
from statehold.ranks.membership import Membership
from statehold.ranks.peers import Peers
from support.faults import Spy, small
from support.in_memory import SimFs, checkpointer_on
from support.in_memory.board import MemoryStore
from support.inside import end, inside
from support.turns import scheduler

T = TypeVar("T")
# Of virtual time: how long ranks wait for each other, and how long no save takes.
PEERS_S = 60.0
HANG_S = 100 * PEERS_S
SMALL = small(copy_threads=1)


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
        self._go_on = Event()

    def before(self, operation: str, args: Sequence[Any] = ()) -> None:
        """The turnstile."""
        what = " ".join([operation, *[each for each in args if isinstance(each, str)]])
        self._hub.turns.pause(f"rank {self.rank}: {what}")
        self._hub.tick()
        self.operations += 1
        if self.operations == self.dies_at:
            self._hub.kill(self)
        elif self.stalls is not None and self.operations == self.stalls[0]:
            self._stall(self.stalls[1])
        elif self.is_stalled:
            self._go_on.wait()
        if self.is_dead:
            raise Died(f"rank {self.rank} is dead before {operation}")
        self._hub.turns.say(f"rank {self.rank}: {what}")

    def go_on(self) -> None:
        self._go_on.set()

    def _stall(self, ticks: int | None) -> None:
        self.is_stalled = self.has_stalled = True
        if ticks is not None:
            self._hub.wake(self, ticks)
        self._hub.changed()
        self._go_on.wait()
        self.is_stalled = False


class Hub(MemoryStore):
    """The store of a job, and the clock of those that stall."""

    def __init__(self, size: int) -> None:
        super().__init__()
        turns = scheduler()
        assert turns is not None
        self.turns = turns
        self.lives = [Life(self, rank) for rank in range(size)]
        self._finished: set[int] = set()
        self._ticks = 0
        self._alarms: list[tuple[int, Life]] = []

    def tick(self) -> None:
        """An operation of some rank: those who stalled until now go on."""
        self._ticks += 1
        for at, life in self._alarms:
            if at == self._ticks:
                life.go_on()

    def wake(self, life: Life, after: int) -> None:
        self._alarms.append((self._ticks + after, life))

    def changed(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def kill(self, life: Life) -> None:
        for each in self.lives if life.dies_with_all else [life]:
            each.is_dead = True
            each.go_on()

    def finish(self, rank: int) -> None:
        self._finished.add(rank)
        self.changed()

    def wait_until_settled(self) -> None:
        """Until every rank has ended or stalls."""
        with self._changed:
            self._changed.wait_for(
                lambda: all(life.is_stalled or life.rank in self._finished for life in self.lives)
            )


class RankBoard(StoreBoard):
    """A rank's connection to the hub."""

    def __init__(self, hub: Hub, life: Life, token: str) -> None:
        super().__init__(hub, "sim")
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


class Job:
    """`size` ranks on `fs`. Each runs one program as a task of its own, and closes."""

    def __init__(self, fs: SimFs, size: int, token: str, **options: Any) -> None:
        self.size = size
        self.hub = Hub(size)
        self.lives = self.hub.lives
        self.ckpts = [self._rank(fs, life, token, options) for life in self.lives]
        self._pool = ThreadPoolExecutor(size)
        self._told: list[Future[Any]] = []

    def _rank(self, fs: SimFs, life: Life, token: str, options: dict[str, Any]) -> Checkpointer:
        board = RankBoard(self.hub, life, token)
        peers = Peers(board, Membership(life.rank, self.size), PEERS_S) if self.size > 1 else None
        ckpt = checkpointer_on(fs, RUN, peers, **{**SMALL, **options})
        opened: Any = inside(ckpt)
        spy = Spy(fs, life.before)
        for place in opened.levels.places:
            place.store.fs = spy
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
            None if leave_stalled and rank in stalled else told.result()
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
            end(self.ckpts[rank])
        except Exception as error:
            outcome = error
        self.hub.finish(rank)
        return outcome
