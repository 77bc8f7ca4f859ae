"""One simulated rank of a replica: its member, its training thread, and its connection.

The protocol is the product's. The world around it (replicated) delivers its messages, executes its
collectives, and strikes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sim.undisturbed import MODULUS, gradient, updated
from statehold.errors import InvariantError
from statehold.resilience.progress import STUCK_LEAST_S, StuckCheck
from statehold.resilience.protocol import actions
from statehold.resilience.protocol.actions import GroupLostError
from statehold.resilience.protocol.comeback import Comeback
from statehold.resilience.protocol.member import Member
from statehold.resilience.protocol.messages import (
    TORN,
    Beat,
    GivesUp,
    Hello,
    Leave,
    Promise,
    View,
    decode,
    encode,
)

if TYPE_CHECKING:
    from sim.replicated import World

LEASE_S, BEAT_S, RECONNECT_S = 1.0, 0.2, 0.1
MICROBATCH_S = 0.05
COMPILING_S = 1.5 * STUCK_LEAST_S
TURNS = 4  # in which all bytes are compared


@dataclass
class Collective:
    """One operation of a group: what the ranks brought, and who has got the result."""

    kind: str
    epoch: int
    needed: frozenset[str]
    brought: dict[str, Any] = field(default_factory=dict)
    waiting: dict[str, Rank] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Flaw:
    """What differs from the state of others, and changes no gradient: a bit of a moment, say.

    turn: of the bytes that differ; None: small, so that every digest has them.
    """

    mark: int
    since: int  # the state of the beginning of this step
    turn: int | None

    def shows_in(self, vote: actions.Vote) -> bool:
        return vote.of_all or self.turn in (None, vote.ballot.step % TURNS)


class Rank:
    """One process: a member, its training thread, and its connection to the coordinator.

    view: of its state.
    """

    def __init__(
        self, world: World, slot: int, life: int, place: int, view: View, state: int
    ) -> None:
        self.world = world
        self.slot, self.life, self.place = slot, life, place
        self.replica = f"r{slot}.{life}"
        self.name = f"{self.replica}/{place}"
        hello = Hello(
            replica=self.replica,
            place=place,
            width=world.width,
            job={"seed": str(world.seed)},
            view=replace(view, digest=f"{view.digest} {place}"),
            min_replicas=world.min_replicas,
            lease_s=LEASE_S,
            desk=self.name,
        )
        self.member = Member(hello, world.microbatches, world.redundancy)
        self.state, self.state_of = state, view.step  # after so many steps
        self.flaw: Flaw | None = None
        self.comeback = Comeback()
        self.progress = StuckCheck(None, lambda: world.clock.now)
        self._has_computed = False
        self.sums: dict[int, int] = {}
        self.copies: dict[int, dict[int, int]] = {}
        self.conn: int | None = None
        self.is_dead = False
        self.has_left = False
        self.stopped_until = 0.0
        self._playing: Generator[actions.Action, object, int | None] | None = None
        self._waits_for: int | None = None
        self._may_fail = False
        self._acts_in = 0  # the epoch of the action
        self._group = ""
        self._gathered = 0
        self._commits = 0
        self.busy_in = 0  # the operation that its collective answers
        self._busy = 0  # counts operations: an answer to an older one is dropped
        self._used: dict[str, int] = {}
        self._later: list[Callable[[], None]] = []
        self.later(0, self.connect)
        self.later(0, self.begin)
        self.later(BEAT_S, self.beat)

    # Time of this process

    def later(self, delay: float, event: Callable[[], None]) -> None:
        """Unless it is dead by then. A stopped process does it when it goes on, in order."""

        def fire() -> None:
            if self.is_dead:
                return
            if self.world.clock.now < self.stopped_until:
                self._later.append(event)
            else:
                event()

        self.world.clock.after(delay, fire)

    def stop(self, seconds: float) -> None:
        self.stopped_until = max(self.stopped_until, self.world.clock.now + seconds)
        if not self.is_hung:
            self.world.clock.after(seconds + 1e-6, self.go_on)

    @property
    def is_hung(self) -> bool:
        """It will never go on, and nobody ends it."""
        return math.isinf(self.stopped_until)

    def go_on(self) -> None:
        while self._later and not self.is_dead and self.world.clock.now >= self.stopped_until:
            self._later.pop(0)()

    def die(self) -> None:
        self.is_dead = True
        self.world.drop(self)
        self.world.hang_up(self.conn)

    # The connection

    def connect(self) -> None:
        if self.member.fenced is None and self.conn is None and not self.has_left:
            self.conn = self.world.dial(self)
            if self.conn is None:
                self.later(RECONNECT_S, self.connect)
            else:
                self.send(self.member.hello())

    def send(self, message: Any) -> None:
        if self.conn is not None:
            self.world.to_coordinator(self.conn, encode(message))

    def disconnected(self, conn: int) -> None:
        if conn == self.conn:
            self.conn = None
            self.later(RECONNECT_S, self.connect)

    def beat(self) -> None:
        if self.progress.is_stuck():
            self.world.report.wrong(f"{self.name} computes, and is taken for hung")
        self.send(Beat(self.member.step))
        self.later(BEAT_S, self.beat)

    def heard(self, line: bytes) -> None:
        promised = self.member.promised
        answer = self.member.receive(decode(line))
        if self.world.dies(self, "an answer"):
            return
        if answer is not None:
            self.send(answer)
        if self.member.fenced is not None:
            self.world.report.counts["fenced"] += 1
            self.world.rejoin(self)
            return
        self.world.installed(self.member)
        if self.member.promised != promised:
            self.revoked(self.member.promised)
        self.later(self.world.reaction(), self.wake)

    def wake(self) -> None:
        """The training thread looks whether the epoch that it waits for is there."""
        if self._waits_for is not None and self.member.epoch > self._waits_for:
            self._waits_for = None
            self.advance(None)

    def give_up(self, after: int) -> None:
        """The training thread has waited too long. The coordinator answers, or the epoch comes."""
        if self._waits_for == after:
            self.send(GivesUp(after))

    def revoked(self, promised: int) -> None:
        """The training thread gives up the running operation, if it does not end before that."""
        busy = self._busy

        def give_up() -> None:
            self.world.drop(self, promised)
            self.failed(busy)

        self.later(self.world.reaction(), give_up)

    # The training thread

    def begin(self) -> None:
        """The next step, or the end of the run."""
        self._playing = actions.play(self.member, contextlib.nullcontext(), self.world.steps)
        self.sums, self.copies = {}, {}
        self.advance(None)

    def advance(self, result: object, error: Exception | None = None) -> None:
        assert self._playing is not None
        was_behind = self.member.is_behind
        try:
            action = self._playing.throw(error) if error else self._playing.send(result)
        except StopIteration as stop:
            self._busy += 1
            self._may_fail = False
            if stop.value is None:
                self.leave()
            else:
                self.world.report.counts["caught up"] += was_behind
                self.committed(stop.value)
            return
        except InvariantError as broken:
            self.world.report.wrong(f"{self.name}: {broken}")
            self.is_dead = True
            return
        self._busy += 1
        self._may_fail = not isinstance(
            action,
            actions.Compute | actions.Adopt | actions.Forget | actions.Await | actions.Depart,
        )
        self._acts_in = getattr(action, "epoch", 0)
        if not self.world.dies(self, type(action).__name__):
            self.act(action)

    def leave(self) -> None:
        self.has_left = True
        self.send(Leave(self.member.view))
        self.world.drop(self)

    def failed(self, busy: int) -> None:
        if busy == self._busy and self._may_fail:
            self._busy += 1
            if not self.member.is_changing and self._acts_in == self.member.epoch:
                self.send(self.member.complain("failed"))
            self.advance(None, GroupLostError("failed"))

    def act(self, action: actions.Action) -> None:
        member, random = self.member, self.world.random
        if isinstance(action, actions.Compute):
            seconds = MICROBATCH_S * random.uniform(0.5, 1.5)
            if not self._has_computed and self.world.befalls("slow first microbatch", 0.02):
                seconds += COMPILING_S
            self._has_computed = True
            self.progress.begin()
            self.later(seconds, lambda: self.compute(action))
        elif isinstance(action, actions.Adopt):
            self.world.report.counts["adopted"] += 1
            self.sums |= self.copies.pop(action.copy)
            self.soon()
        elif isinstance(action, actions.Forget):
            self.world.report.counts["forgotten"] += 1
            self.sums, self.copies = {}, {}
            self.soon()
        elif isinstance(action, actions.Await):
            if member.epoch > action.after:
                self.soon()
            else:
                self._waits_for = action.after
                if self.world.faulty("gave up", 0.02):
                    self.later(random.uniform(0.0, 0.5), lambda: self.give_up(action.after))
        elif isinstance(action, actions.Gather):
            if self._gathered == action.epoch:
                self.soon()
            else:
                self.meet("gather", None)
        elif isinstance(action, actions.Fetch):
            busy = self._busy
            self.state = -1  # parts of different states, until all has come
            self.later(random.uniform(0.01, 0.3), lambda: self.fetched(busy, action))
        elif isinstance(action, actions.Reduce):
            self.meet("reduce", (member.step, dict(self.sums)))
        elif isinstance(action, actions.Vote):
            self.vote, self.newcomers = action, self.member.newcomers
            self.meet("vote", replace(action.ballot, digest=self.digest()))
        elif isinstance(action, actions.Depart):
            self.world.parted(self)

    def digest(self) -> int:
        """Of the state of the step's beginning (R19)."""
        is_shown = self.flaw is not None and self.flaw.shows_in(self.vote)
        return self.state ^ (self.flaw.mark if self.flaw is not None and is_shown else 0)

    def soon(self) -> None:
        """The action has nothing to wait for."""
        busy = self._busy
        self.later(0, lambda: self.advance(None) if busy == self._busy else None)

    def compute(self, action: actions.Compute) -> None:
        self.progress.end(is_computed=True)
        if self.world.befalls("left in a step", 0.004):
            self.part(self.state_of)
            return
        index, step = action.index, self.member.step
        kept = True
        if self.world.befalls("backward failed", 0.01) and self.world.is_fast:
            kept, self.sums, self.copies = False, {}, {}  # R14: and the second try follows
        sums = self.copies.setdefault(action.copy, {}) if action.copy else self.sums
        if index in sums:
            self.world.report.wrong(f"{self.name} computes {index} of {step} twice")
        sums[index] = gradient(self.state, step, index)
        self.advance(kept)

    def part(self, step: int) -> None:
        """R16: the program has left the loop. step: the one that the state belongs to (R15)."""
        self.die()
        self.world.enter_again(self, View(step, digest=self.name))

    def fetched(self, busy: int, action: actions.Fetch) -> None:
        if busy != self._busy:
            return
        holders = [
            rank
            for rank in self.world.living()
            if rank.replica in action.holders
            and rank.place == self.place
            and rank.state_of <= self.member.step  # it gives none of what it has changed
        ]
        if any(rank.state_of < self.member.step for rank in holders):
            self.later(0.01, lambda: self.fetched(busy, action))  # it has to catch up
            return
        if not holders or self.member.epoch != action.epoch or self.member.is_changing:
            self.failed(busy)
            return
        self.state, self.state_of = holders[0].state, holders[0].state_of
        self.flaw = self.world.flaws.choice(holders).flaw  # whoever has given the bytes
        self.world.report.counts["fetched"] += 1
        self.advance(None)

    def meet(self, kind: str, value: object) -> None:
        """A collective of the column; a vote goes over the row, too."""
        epoch, busy = self._acts_in, self._busy
        spurious = self.world.faulty("spurious failure", 0.002)
        if self.member.is_changing or self.member.epoch != epoch or spurious:
            self.later(0.001, lambda: self.failed(busy))
            if spurious:
                self.world.drop(self)
            return
        self._group = f"{self.member.desk}:{epoch}:{self.member.members}"
        members = frozenset(f"{each}/{self.place}" for each in self.member.members)
        self.join(f"{self._group}:{self.place}", members, kind, value, busy)

    def join(
        self, group: str, members: frozenset[str], kind: str, value: object, busy: int
    ) -> None:
        number = self._used[group] = self._used.get(group, 0) + 1
        epoch = self._acts_in
        self.world.collective(f"{group}:{number}", epoch, members, kind, self, value, busy)

    def met(self, busy: int, collective: Collective) -> None:
        """A collective has finished for this rank."""
        if busy != self._busy:
            return
        if collective.kind == "vote":
            row = f"{self._group}:row:{self.replica}"
            members = frozenset(f"{self.replica}/{i}" for i in range(self.world.width))
            self.votes = [collective.brought[f"{each}/{self.place}"] for each in self.vote.members]
            self.join(row, members, "row", self.votes, busy)
        elif collective.kind == "row":
            rows = [collective.brought[name] for name in sorted(collective.brought)]
            self.advance(
                [
                    replace(
                        mine,
                        digest=hash(tuple(each.digest for each in row)),
                        joiners_wait=max(each.joiners_wait for each in row),
                    )
                    for mine, *row in zip(self.votes, *rows, strict=True)
                ]
            )
        elif collective.kind == "reduce":
            self.reduced(collective)
        else:
            self._gathered = self._acts_in
            self.advance(None)

    def reduced(self, collective: Collective) -> None:
        found = list(collective.brought.values())
        indices = sorted(index for _, sums in found for index in sums)
        if {step for step, _ in found} != {self.member.step}:
            self.world.report.wrong(f"{self.name} reduces steps {[r for r, _ in found]}")
        if indices != list(range(self.world.microbatches)):
            self.world.report.wrong(f"{self.name}: {self.member.step} sums up {indices}")
        self.total = sum(sum(sums.values()) for _, sums in found) % MODULUS
        self.world.report.counts["reductions"] += 1
        self.advance(None)

    def committed(self, step: int) -> None:
        if self.world.befalls("left before its update", 0.01):
            self.part(step)
            return
        if self.world.befalls("left in its update", 0.005):
            self.part(TORN)
            return
        self.state = updated(self.state, step, self.total)
        self.state_of = step + 1
        if self.flaw is None:
            self.flaw = self.world.flaw(self)
        self.world.report.counts["rejoined"] += self.life > 1 and not self._commits
        self._commits += 1
        self.world.committed(self, step)
        if self.world.befalls("left after its update", 0.01):
            self.part(step + 1)
            return
        if self.member.is_changing:
            self.send(Promise(self.member.promised, self.member.view))
            self.world.drop(self, self.member.promised)
        self.later(0.001, self.begin)
