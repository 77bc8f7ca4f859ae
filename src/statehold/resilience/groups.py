"""Groups: torch.distributed's process groups of one membership. They are built, used and given up.

    groups = Groups(where)               raises GroupLostError
    groups.start(tensor).wait()          the sum over the column, in place; raises GroupLostError
    groups.gather(values)                the values of every rank; raises GroupLostError
    groups.drop()                        from any thread; or revoked.set()

Rank (i, j) is place j of replica i. Its column is (., j), its row (i, .). Sums go over columns.

Invariants:
- When `revoked` is set, every wait here raises GroupLostError within milliseconds. The peers get it
  too, because the connections are broken.
- What runs keeps its tensor alive until it has ended. A tensor whose operation has raised may still
  be written into, so its owner must not use it again. It is kept until the groups are given up.
- Nobody but the thread of the groups waits for NCCL to connect.
- The default group of torch.distributed is neither used nor needed.
Not here: who belongs to an epoch (protocol), how gloo is made to give up (gloo).
"""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from statehold.process.worker import Flag, Thread
from statehold.resilience import gloo, nccl
from statehold.resilience.meeting import MeetingPlace
from statehold.resilience.protocol.actions import GroupLostError
from statehold.tensors.devices.devices import backend_for
from statehold.tensors.storable import empty_on

_ENDED = "the epoch has ended"
_POLL_S = 0.005
_POLL_LEAST_S = 0.0002
# After it is given up, an operation ends within milliseconds, or never.
_GIVE_UP_S = 0.5
_alive: set[Groups] = set()


class PendingOperation:
    """An operation. running: the work, and what it writes into until the end. None: it is over."""

    def __init__(self, groups: Groups, what: str, running: tuple[Any, object] | None) -> None:
        self._groups = groups
        self._what = what
        self._failure = ""
        self._running = running

    def wait(self) -> None:
        """Return when the result is there. GroupLostError: it never will be."""
        running = self._running
        if running is not None and not self._groups.ends(running[0]):
            raise self._groups.lost(self._what, _ENDED)  # the groups' thread settles it
        self.settle()
        if self._failure:
            raise self._groups.lost(self._what, self._failure)

    def settle(self) -> None:
        """Wait for the end, whatever it is. Keeps nothing of the operation, not even in frames."""
        running = self._running
        if running is None:
            return
        try:
            self._groups.finish(running[0])
        except RuntimeError as error:
            self._failure = _first_line(error)
            self._groups.keep(running)
        self._running = None
        self._groups.ended(self)


class Groups:
    """See the module. Returns when the groups are built.

    where: its `revoked` ends these groups; it belongs to them.
    device: where the tensors of `start` are.
    """

    def __init__(self, where: MeetingPlace, device: torch.device | None = None) -> None:
        self._where = where
        self._revoked = where.revoked
        self._device = device or torch.device("cpu")
        self._built = Flag()
        self._failure = ""  # a text: an exception would keep the frames that hold the groups
        self._line: gloo.Line | None = None
        self._column: Any = None  # the groups; None where one rank is alone
        self._row: Any = None
        self._sums: Any = None
        self._lock = threading.Lock()
        self._running: set[PendingOperation] = set()
        self._kept: list[object] = []
        self._thread = Thread(self._live, "statehold-groups")
        _alive.add(self)
        self._thread.start()
        while not self._built.wait(_POLL_S):
            if self._revoked.is_set:
                self._hang_up()
                raise self.lost("the building of its groups", _ENDED)
        if self._failure:
            raise self.lost("the building of its groups", self._failure)

    def start(self, tensor: Tensor) -> PendingOperation:
        """Begin to sum `tensor` over the column, in place."""
        if self._where.size[0] == 1:
            return PendingOperation(self, "a sum", None)
        group = self._held(self._sums)
        return self._run("a sum", lambda: group.allreduce([tensor]), tensor)

    def gather(self, values: Sequence[int]) -> list[list[list[int]]]:
        """The values of all ranks: those of rank (i, j) are result[i][j].

        A rank that has them knows that every rank has called `gather`.
        """
        mine = torch.tensor(values, dtype=torch.int64, device="cpu")
        found = self._gather(self._column, mine, self._where.size[0])
        found = self._gather(self._row, found, self._where.size[1])
        result: list[list[list[int]]] = found.transpose(0, 1).tolist()
        return result

    def drop(self) -> None:
        """Give the groups up: what runs here and at the peers ends. Does not wait."""
        self._revoked.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until everything is released. False: not yet."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def ends(self, work: Any) -> bool:
        """Wait for the end of an operation. False: the groups are given up, and it does not end.

        gloo has operations that never notice that their connections are gone. (Its ring waits for a
        send that was queued before its process was stopped.)
        """
        pause, deadline = _POLL_LEAST_S, math.inf
        while not work.is_completed():
            if self._revoked.is_set:
                deadline = min(deadline, time.monotonic() + _GIVE_UP_S)
                if time.monotonic() > deadline:
                    return False
                time.sleep(pause)
            else:
                self._revoked.wait(pause)
            pause = min(2 * pause, _POLL_S)
        return True

    def finish(self, work: Any) -> None:
        """Wait for an operation. On a device: until it has run there."""
        if self._device.type != "cpu":
            nccl.poll(work)
        work.wait()

    def keep(self, running: object) -> None:
        """Of an operation that has failed. A kernel may still write into its tensors."""
        with self._lock:
            self._kept.append(running)

    def lost(self, what: str, reason: str) -> GroupLostError:
        return GroupLostError(
            f"{what} has failed",
            facts={
                "epoch": self._where.epoch,
                "rank": f"{self._where.place[1]} of replica {self._where.place[0]}",
                "reason": _ENDED if self._revoked.is_set else reason,
            },
        )

    def ended(self, pending: PendingOperation) -> None:
        with self._lock:
            self._running.discard(pending)

    def _gather(self, group: Any, values: Tensor, size: int) -> Tensor:
        if size == 1:
            self._check()
            return values.unsqueeze(0)
        group = self._held(group)
        found = [torch.empty_like(values) for _ in range(size)]
        self._run("a vote", lambda: group.allgather([found], [values]), found).wait()
        return torch.stack(found)

    def _run(self, what: str, begin: Callable[[], Any], tensors: object) -> PendingOperation:
        """The lock keeps the thread from releasing a group between the beginning and the set.

        Otherwise the caller would have the last reference to the group, and its destruction would
        wait for the operation, which may never end.
        """
        with self._lock:
            self._check()
            try:
                pending = PendingOperation(self, what, (begin(), tensors))
            except RuntimeError as error:
                raise self.lost(what, _first_line(error)) from error
            self._running.add(pending)
        return pending

    def _check(self) -> None:
        if self._revoked.is_set:
            raise self.lost("an operation", _ENDED)

    def _held(self, group: Any) -> Any:
        self._check()
        if group is None:
            raise self.lost("an operation", _ENDED)
        return group

    # ------------------------------------------------------------------ the thread of the groups

    def _live(self) -> None:
        try:
            self._build()
        except Exception as error:
            self._failure = _first_line(error)
        self._built.set()
        if not self._failure:
            self._revoked.wait()
        self._release()

    def _build(self) -> None:
        (i, j), (replicas, width) = self._where.place, self._where.size
        if replicas == width == 1:
            return
        line = self._line = gloo.Line(self._where.host)
        if replicas > 1:
            column = self._meeting(f"column{j}", i, replicas)
            self._sums = self._column = gloo.build(column, line, i, replicas)
        if width > 1:
            self._row = gloo.build(self._meeting(f"row{i}", j, width), line, j, width)
        if replicas > 1 and self._device.type != "cpu":
            meeting = self._meeting(f"device{j}", i, replicas)
            self._sums = nccl.build(meeting, i, replicas, self._where.host, self._device)
            self._connect()

    def _connect(self) -> None:
        """Make the first sum, in which NCCL connects: an abort waits for that, and so would the
        trainer. On a side stream, on which nothing of the trainer waits behind it."""
        backend = backend_for(self._device)
        with backend.using(self._device), backend.on(backend.fork(self._device, "replicas")):
            self.start(empty_on(self._device, (1,), torch.float32)).wait()

    def _meeting(self, group: str, rank: int, size: int) -> gloo.Meeting:
        return lambda says: self._where.meet(group, rank, size, says)

    def _release(self) -> None:
        """A group that is destroyed waits for what runs in it. So that has to end before."""
        self._hang_up()
        if self._sums is not self._column:
            nccl.abort(self._sums)
        with self._lock:
            running, self._running = self._running, set()
        for pending in running:
            pending.settle()
        self._kept.clear()
        self._sums = self._column = self._row = self._line = None
        _alive.discard(self)

    def _hang_up(self) -> None:
        line = self._line
        if line is not None:
            line.hang_up()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300] or type(error).__name__


def _at_exit() -> None:
    """A thread inside gloo that meets the end of the interpreter would crash the process."""
    for groups in list(_alive):
        groups.drop()
    for groups in list(_alive):
        groups.join(2 * gloo.CONNECT_S)


atexit.register(_at_exit)
