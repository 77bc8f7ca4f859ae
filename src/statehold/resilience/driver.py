"""Driver: executes the actions of the protocol with torch, step after step (R1 to R19).

    for work in driver.step(until): ...      the microbatches of this replica; returns the number
                                             of the committed step, or None when the run is over

    driver.part()                            the loop was left by an exception or by `break`

Invariants: the gradients of a step are in p.grad when `step` returns, on every member alike. A seat
that was fenced is given up with everything that it has computed; a new one begins as a joiner. A
state in parts is never the state of a new seat if a saved one can be restored.
Not here: the order of actions (protocol/actions), groups and links (seat), the user's loop (step).
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import NoReturn

from statehold import _core
from statehold.errors import ReplicaLostError, StateholdError, UsageError, WaitTimeout
from statehold.resilience.checkpoints import Checkpoints
from statehold.resilience.likeness import Likeness, refusal
from statehold.resilience.position import Position
from statehold.resilience.protocol import actions
from statehold.resilience.protocol.actions import GroupLostError
from statehold.resilience.protocol.comeback import Comeback
from statehold.resilience.protocol.messages import TORN, View
from statehold.resilience.seat import Seat, SeatLost
from statehold.resilience.sums.interface import Start, Sum
from statehold.resilience.sums.report import UnlikeError
from statehold.resilience.transfer import StateTransfer

logger = logging.getLogger(__name__)

_AGAIN = "start all ranks of this replica again: they join"
_OUT = "statehold: replica %s is out of the job: %s. It joins again in %g s."


class Driver:
    """take_seat: a new seat for a rank whose state is that of a view. first: the one to begin with.

    view: describes the live state after a restore.
    learn: called with the checksums that lost replicas have left. transfer: of the state.
    checkpoints: take the state before this rank gives up, and give one if too much is lost.
    position: learns that an update is due. comeback: of this process.
    likeness: of the state to that of other members.
    computed: what this replica has computed of the work of its member in the step in progress.
    """

    def __init__(
        self,
        take_seat: Callable[[View], Seat],
        first: View,
        view: Callable[[], View],
        sums: Sum,
        transfer: StateTransfer,
        learn: Callable[[Mapping[str, int]], None],
        checkpoints: Checkpoints,
        position: Position,
        comeback: Comeback,
        likeness: Likeness,
    ) -> None:
        self._take_seat = take_seat
        self._view = view
        self._sums = sums
        self._transfer = transfer
        self._learn = learn
        self._checkpoints = checkpoints
        self._position = position
        self._comeback = comeback
        self._likeness = likeness
        self._unlike: UnlikeError | None = None  # why nothing was summed
        self._parts: dict[str, dict[str, str]] = {}  # of members that differ
        self.has_left = False  # another driver may take its place
        self.has_parted = False
        self._began = TORN  # the step in which the loop was last
        self.computed: set[tuple[int, int]] = set()
        self._adopted = {0}
        self._has_lost_sums = False
        self._served = 0
        self._heard = 0
        self.seat = take_seat(first)

    @property
    def number(self) -> int:
        """The step in progress."""
        return self.seat.member.step

    @property
    def share(self) -> list[int]:
        """What this replica contributes to the step: what it has computed, less copies."""
        return sorted(index for index, copy in self.computed if copy in self._adopted)

    @property
    def is_torn(self) -> bool:
        """Whether the live state has parts of two steps."""
        return self._position.is_torn or self.seat.member.own_view.step == TORN

    def admit(self) -> None:
        """Wait until this rank belongs to the job, so that the number of the step is known."""
        while self.seat.member.epoch == 0:
            try:
                self.seat.wait(0)
            except SeatLost as fenced:
                self._come_back(fenced)
            except WaitTimeout as late:
                self._give_up(late)
                raise

    def step(self, until: int) -> Generator[actions.Compute, None, int | None]:
        self.check()
        self._began = self._position.step
        while True:
            try:
                played = yield from self._play(until)
            except SeatLost as fenced:
                self._come_back(fenced)
                self.admit()
                continue
            except WaitTimeout as late:
                self._give_up(late)
                raise
            if played is None:
                return None
            self._transfer.stop_serving()
            self._sums.finish()
            self._position.committed(played)
            self.seat.end_epoch()
            return played

    def start(self, work: actions.Compute) -> Start | None:
        """If this microbatch is the last: what starts reductions during its backward pass.

        A copy of another member's share is not reduced.
        """
        now = work.index, work.copy
        is_last = not work.copy and set(self.seat.member.work) <= self.computed | {now}
        return self.seat.start if is_last and self.seat.has_groups else None

    def failed(self) -> None:
        """The backward pass of the microbatch has failed. A second try takes its place (R14)."""
        if not self._sums.abandon():
            self._has_lost_sums = True
            self.computed = set()
            self._adopted = {0}

    def leave(self) -> None:
        """The run is over."""
        self.has_left = True
        self.seat.leave()
        self._transfer.close()

    def check(self) -> None:
        """Raise UsageError if the loop was left: its steps are not those of the job any more."""
        if self.has_left:
            raise UsageError(
                "this loop over the steps was left",
                facts={"step": self.number},
                hint="go on with the loop over the newest call of steps()",
            )

    def part(self) -> None:
        """The program has left the loop (R16). The others go on at once; the state stays."""
        if self.has_left or sys.is_finalizing():
            return
        self.has_parted = True
        self.close()
        if self.seat.width == 1:
            self._checkpoints.give_way()

    def rest(self) -> None:
        """Before another driver takes the place of one that has parted.

        A program that leaves every step costs the others an epoch each time, so it waits longer and
        longer (R10). The ranks of a larger replica cannot meet: some may not have left the loop.
        """
        if not self.has_parted:
            return
        if self.seat.width > 1:
            raise self._lost("its loop over the steps was left", _AGAIN)
        if self._position.step == self._began:
            self._pause("its loop was left in a step")

    def _pause(self, why: object) -> None:
        pause_s = self._comeback.pause(time.monotonic())
        name = self.seat.member.name
        logger.warning(_OUT, name, why, pause_s)
        time.sleep(pause_s)

    def close(self) -> None:
        self.has_left = True
        self.seat.close()
        self._transfer.close()

    def _play(self, until: int) -> Generator[actions.Compute, None, int | None]:
        self._forget()
        member = self.seat.member
        playing = actions.play(member, self.seat.link.lock, until)
        result: object = None
        error: GroupLostError | None = None
        while True:
            try:
                action = playing.throw(error) if error else playing.send(result)
            except StopIteration as stop:
                played: int | None = stop.value
                return played
            result = error = None
            self.check()
            if isinstance(action, actions.Depart):
                self._part()  # also if the seat is lost by now: another rank may have left before
            self.seat.check()
            self._hear()
            try:
                if isinstance(action, actions.Compute):
                    self._serve()
                    self._has_lost_sums = False
                    self._likeness.note()
                    yield action
                    self._likeness.check()
                    self.computed.add((action.index, action.copy))
                    result = not self._has_lost_sums
                elif isinstance(action, actions.Forget):
                    self._forget()
                else:
                    result = self.execute(action)
            except GroupLostError as lost:
                self.seat.complain(str(lost))
                error = GroupLostError(str(lost))  # without the frames, which hold the groups

    def execute(self, action: actions.Action) -> object:
        """Do what the protocol asks for. Raises GroupLostError when the groups have failed."""
        if isinstance(action, actions.Await):
            self.seat.wait(action.after)
        elif isinstance(action, actions.Gather):
            self._serve()
            self.seat.gather(action.epoch)
        elif isinstance(action, actions.Fetch):
            self._fetch(action)
        elif isinstance(action, actions.Adopt):
            self._sums.adopt(action.copy)
            self._adopted.add(action.copy)
        elif isinstance(action, actions.Reduce):
            self._reduce()
        elif isinstance(action, actions.Vote):
            return self._vote(action)
        return None

    def _reduce(self) -> None:
        """Members that cannot sum vote nevertheless: the ballots tell who differs (R19)."""
        self._unlike = None
        try:
            self._sums.reduce(self.seat.start)
        except UnlikeError as unlike:
            self._unlike = unlike

    def _part(self) -> NoReturn:
        """Leave the job, so that the others go on, and raise what differs (R19)."""
        self.close()
        member = self.seat.member
        raise refusal(member.name, self._parts, member.step, self._likeness.turns())

    def _forget(self) -> None:
        """Nothing is computed in this step."""
        self._sums.begin()
        self.computed = set()
        self._adopted = {0}

    def _vote(self, action: actions.Vote) -> list[actions.Ballot]:
        """The ballots of the column. A wish of any rank of a replica is the wish of the replica."""
        digest = self._likeness.digest(None if action.of_all else action.ballot.step)
        rows = self.seat.exchange(replace(action.ballot, digest=digest).values())
        found = [[actions.Ballot(*values) for values in row] for row in rows]
        ballots = [
            replace(
                row[self.seat.place],
                joiners_wait=max(each.joiners_wait for each in row),
                digest=_core.xxh3_64(repr([each.digest for each in row]).encode()),
            )
            for row in found
        ]
        if len({each.digest for each in ballots}) > 1:
            self._parts = dict(zip(action.members, self._told(), strict=True))
        elif self._unlike is not None:
            raise self._unlike
        return ballots

    def _told(self) -> list[dict[str, str]]:
        """What each member has, by name: all ranks of all replicas come here, or none."""
        rows = self.seat.tell(json.dumps(self._likeness.parts()).encode())
        with contextlib.suppress(GroupLostError, SeatLost):  # a rank that has heard all may leave
            self.seat.exchange([0])
        return [
            {
                f"rank {place}: {name}" if self.seat.width > 1 else name: text
                for place, said in enumerate(row)
                for name, text in json.loads(said).items()
            }
            for row in rows
        ]

    def _hear(self) -> None:
        """Learn what lost replicas have drawn, once in an epoch: it may begin in any moment."""
        member = self.seat.member
        if member.epoch != self._heard:
            self._heard = member.epoch
            self._learn(member.drawn)

    def _serve(self) -> None:
        """Let joiners have the state of the step's beginning, once in an epoch (R11)."""
        member = self.seat.member
        if not member.joiners or self._served == member.epoch or member.must_fetch:
            return
        with contextlib.suppress(GroupLostError):  # it has ended, and they join in the next one
            where = self.seat.where(member.epoch)
            self._served = where.epoch
            self._transfer.serve(where)

    def _fetch(self, action: actions.Fetch) -> None:
        self._transfer.fetch(self.seat.where(action.epoch))

    def _give_up(self, late: WaitTimeout) -> None:
        """Leave the job, and save the state. All ranks of a replica come here, or none."""
        self.close()
        self._keep(late)
        if self.seat.width == 1:
            self._checkpoints.give_way()

    def _keep(self, error: StateholdError) -> None:
        """Save the state, and tell the error. The state of a new run is not worth it.

        A rank that is no member may hold a newer state than any saved one: an earlier attempt to
        save it has failed, or the job has ended after this rank was taken for dead.
        """
        step = self._position.step
        if self.is_torn or (self.seat.member.must_fetch and step == 0):
            return
        problem = self._checkpoints.keep(step)
        error.with_fact("saved", f"no: {problem}" if problem else f"as step {step}")
        if problem and isinstance(error, WaitTimeout):
            error.hint = (
                "the state is lost when this process ends. To keep it, catch this error, mend what "
                "is wrong, and enter steps() again"
            )

    def _come_back(self, fenced: SeatLost) -> None:
        """Take another seat, under another name.

        The state is that of the step's beginning, as it was. If it is in parts, or if the others
        have saved a newer one, the newest saved one takes its place: the others may be gone. The
        ranks of a larger replica cannot come back: one of them may be dead.
        """
        member = self.seat.member
        if self.seat.width > 1:
            raise self._lost(fenced, _AGAIN) from fenced
        self._transfer.stop_serving()
        self.seat.close()
        self._checkpoints.give_way()
        self._pause(fenced)
        view = member.own_view
        if self._checkpoints.restore(than=view.step):
            view = self._view()
        elif view.step == TORN and not member.epoch:  # nobody else has a state, either
            raise self._lost(fenced, "start it again, with a checkpointer if a step is saved")
        self._served = 0
        self.seat = self._take_seat(view)

    def _lost(self, why: object, hint: str) -> ReplicaLostError:
        """The error. If no other replica is known that has the state, it is saved (R18)."""
        member = self.seat.member
        error = ReplicaLostError(
            f"this replica is out of the job: {why}",
            facts={"replica": member.name, "step": self._position.step},
            hint=hint,
        )
        others = sum(name != member.name for name in member.members)
        if self.is_torn:
            error.with_fact("state", "parts of two steps")
        elif others:
            error.with_fact("state", f"{others} other replicas had it when this one was lost")
        else:
            error.with_fact("state", "no other replica is known to have it")
            self._keep(error)
        return error
