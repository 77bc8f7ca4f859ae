"""Seat: the place of this rank in the job under one name, from its first Hello until it is fenced.

It holds the member, the link to the coordinator and the groups of the epoch. The control thread
revokes the groups as soon as the member has promised another epoch. The training thread does the
rest.

Invariants: groups are built for the newest epoch only. After the rank has promised another epoch,
every operation on them raises GroupLostError.
Not here: the order of actions (protocol/actions), what is done with them (driver).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from statehold.errors import ReplicaRefusedError, WaitTimeout
from statehold.net import addresses
from statehold.process.worker import Flag
from statehold.resilience.control import Link
from statehold.resilience.groups import Groups
from statehold.resilience.meeting import Desk, MeetingPlace
from statehold.resilience.progress import StuckCheck
from statehold.resilience.protocol.actions import GroupLostError
from statehold.resilience.protocol.member import Member
from statehold.resilience.protocol.messages import TORN, GivesUp, Hello, Promise, Refused
from statehold.resilience.sums.interface import Pending, Start

# For the coordinator, to answer a rank that gives up.
_ANSWER_S = 5.0


class SeatLost(Exception):
    """The job goes on without this seat."""


@dataclass(frozen=True)
class Surroundings:
    """What all seats of a rank have in common.

    address: of the coordinator. microbatches: of a step. redundancy: how many replicas compute
    each of them. wait_s: the longest wait for an epoch. device: of the gradients. host: the address
    of this machine that others can reach. desk: where the ranks of an epoch meet if this rank is
    the first. progress: of the training thread.
    """

    address: tuple[str, int]
    microbatches: int
    redundancy: int
    wait_s: float
    desk: Desk
    host: str
    device: torch.device
    progress: StuckCheck
    drawn: Callable[[], Mapping[str, int]]


class Seat:
    """See the module. The Hello names the seat."""

    def __init__(self, hello: Hello, around: Surroundings) -> None:
        self.place = hello.place
        self.member = Member(hello, around.microbatches, around.redundancy)
        self._around = around
        self.width = hello.width
        self._min_replicas = hello.min_replicas
        self._groups: Groups | None = None
        self._groups_epoch = 0
        self._epoch = 0  # of `_revoked`
        self._revoked = Flag()
        self.link = Link(
            around.address,
            self.member,
            lease_s=hello.lease_s,
            on_change=self._changed,
            is_stuck=around.progress.is_stuck,
            drawn=around.drawn,
        )

    def _changed(self) -> None:
        if self.member.epoch != self._epoch:
            self._revoked.set()
            self._epoch, self._revoked = self.member.epoch, Flag()
        if self.member.fenced is not None or self.member.promised > self._epoch:
            self._revoked.set()

    def check(self) -> None:
        """Raise SeatLost if the job goes on without it, ReplicaRefusedError if it may not join.

        Raises WaitTimeout if the replica has given up.
        """
        out = self.member.fenced
        if isinstance(out, Refused):
            hint = "start all replicas with the same program and arguments"
            raise ReplicaRefusedError(
                out.reason, facts=out.facts, hint=hint if "what" in out.facts else None
            )
        if out is not None:
            raise self._timeout() if out.gave_up else SeatLost(out.reason + self._excuse())

    def _excuse(self) -> str:
        """Why this rank has sent no beats (R13)."""
        limit = self._around.progress.passed_s
        if limit is None:
            return ""
        return f", because a microbatch took longer than {limit:g} s (stuck_s= sets this limit)"

    def wait(self, after: int) -> None:
        """Wait for an epoch later than `after` (R7).

        Raises WaitTimeout after `wait_s` seconds. Then the coordinator installs no epoch with this
        replica any more, and its other ranks get the same error: all save, or none.
        """
        self.drop()
        if not self._comes(after, self._around.wait_s):
            self.link.send(GivesUp(after))
            if not self._comes(after, 0 if self.link.problem else _ANSWER_S):
                raise self._timeout()
        self.check()

    def _comes(self, after: int, seconds: float) -> bool:
        """Whether the epoch is here after so many seconds, or this rank is out."""
        member, changed = self.member, self.link.changed
        with self.link.lock:
            return changed.wait_for(
                lambda: member.epoch > after or member.fenced is not None, seconds
            )

    def gather(self, epoch: int) -> None:
        """Have the groups of the epoch (R9). Raises GroupLostError."""
        if self._groups is not None and self._groups_epoch == epoch:
            return
        self.drop()
        self._groups_epoch = epoch
        self._groups = Groups(self.where(epoch), self._around.device)

    def where(self, epoch: int) -> MeetingPlace:
        """Where the ranks of an epoch find each other. Raises GroupLostError if it has ended."""
        with self.link.lock:
            member = self.member
            if member.is_changing or member.epoch != epoch or member.fenced is not None:
                raise GroupLostError(f"epoch {epoch} has ended")
            return MeetingPlace(
                member.desk,
                epoch,
                (member.members.index(member.name), self.place),
                (len(member.members), self.width),
                self._around.host,
                self._revoked,
            )

    @property
    def has_groups(self) -> bool:
        """Whether the groups of the epoch in force are here, and are not revoked."""
        return (
            self._groups is not None
            and self._groups_epoch == self._epoch
            and not self._revoked.is_set
        )

    @property
    def start(self) -> Start:
        """What begins sums over the column of the groups that are here (R2)."""
        return ColumnStart(self._groups)

    def exchange(self, values: Sequence[int]) -> list[list[list[int]]]:
        """The values of rank j of replica i at [i][j] (R3). Raises GroupLostError."""
        if self._groups is None:
            raise GroupLostError("the groups have been dropped")
        return self._groups.gather(values)

    def tell(self, said: bytes) -> list[list[bytes]]:
        """What rank j of replica i says at [i][j]; of any length."""
        lengths = self.exchange([len(said)])
        longest = max(length for row in lengths for (length,) in row)
        words = array("q", said.ljust(-(-longest // 8) * 8))
        rows = self.exchange(words.tolist())
        return [
            [array("q", words).tobytes()[:length] for words, (length,) in zip(*both, strict=True)]
            for both in zip(rows, lengths, strict=True)
        ]

    def complain(self, reason: str) -> None:
        """The groups of the newest epoch have failed here (R5). Of an older one it is no news."""
        self.drop()
        with self.link.lock:
            if self.member.is_changing or self.member.epoch != self._groups_epoch:
                return
            complaint = self.member.complain(reason)
        self.link.send(complaint)

    def end_epoch(self) -> None:
        """After a commit: send the promise that it implied, if it ended the epoch (R11)."""
        with self.link.lock:
            if not self.member.is_changing:
                return
            promise = Promise(self.member.promised, self.member.view)
        self.drop()
        self.link.send(promise)

    def drop(self) -> None:
        """Give up the groups, so that the operations of others end."""
        if self._groups is not None:
            groups, self._groups = self._groups, None
            groups.drop()

    def leave(self) -> None:
        """The run is over: tell it, and end."""
        self.link.leave()
        self.drop()

    def close(self) -> None:
        self.link.close()
        self._revoked.set()  # also of groups whose building was interrupted

    def _timeout(self) -> WaitTimeout:
        problem, (host, port) = self.link.problem, self._around.address
        return WaitTimeout(
            f"this replica has waited {self._around.wait_s:g} s (wait_s) for enough others",
            facts={
                "replica": self.member.name,
                "coordinator": addresses.joined(host, port),
                "connection": problem or "up",
                "replicas": f"at least {self._min_replicas}, with this one (min_replicas)",
                "state": self._state(),
            },
            hint=(
                f"start the coordinator at this address: statehold coordinate --port {port}"
                if problem
                else "start more replicas; a smaller min_replicas lets fewer go on"
            ),
        )

    def _state(self) -> str:
        """What the tensors of this rank hold, in words."""
        step = self.member.own_view.step
        if step == TORN:
            return "parts of two steps, because a transfer has broken off"
        return f"that of the beginning of step {step}, intact"


@dataclass(frozen=True)
class ColumnStart:
    """Begins sums over a column. Two of them are equal if they have the same groups.

    So the sums of gradients know what they have begun under an epoch that has ended.
    """

    groups: Groups | None

    def __call__(self, tensor: Tensor) -> Pending:
        """Nothing is raised before `wait()`."""
        try:
            if self.groups is None:
                raise GroupLostError("the groups have been dropped")
            return self.groups.start(tensor)
        except GroupLostError as lost:
            return _Lost(lost)


class _Lost:
    """An operation that could not be started."""

    def __init__(self, lost: GroupLostError) -> None:
        self._lost = lost

    def wait(self) -> None:
        raise self._lost
