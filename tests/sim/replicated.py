"""One seed of replicas that train together while they die, hang, lose their coordinator and come.

The protocol is the product's (resilience/protocol): the members, their rounds and the coordinator.
Simulated are the clock, the network to the coordinator, the collectives of the groups, and what a
step computes. Collectives fail as Gloo's do: a ring may finish on some ranks and fail on others,
and a rank whose neighbours live may wait for ever.

The oracle knows the state of an undisturbed run after each step. It compares it with the state of
every rank after every commit, and looks at every sum for microbatches that are missing or counted
twice. When the faults have ended, the run must reach its last step.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from sim.clock import Clock
from sim.seeds import Report
from sim.undisturbed import MODULUS, gradient, overflows, updated
from statehold.errors import InvariantError
from statehold.resilience.protocol import rounds
from statehold.resilience.protocol.coordinator import Coordinator
from statehold.resilience.protocol.member import Member
from statehold.resilience.protocol.messages import (
    Beat,
    Hello,
    Leave,
    Promise,
    Round,
    View,
    decode,
    encode,
)
from statehold.resilience.protocol.rounds import GroupLost

FAULTS = (
    "kill", "stop", "cut off", "coordinator dies", "spurious failure", "overflow", "growth",
    "fenced", "half a collective", "caught up", "two deaths at once", "all lost", "rejoined",
)  # fmt: skip
LEASE_S, BEAT_S, TICK_S, RECONNECT_S = 1.0, 0.2, 0.05, 0.1
MICROBATCH_S = 0.05
END_S, LATE_S = 900.0, 600.0
SAVE_EVERY = 5


@dataclass
class Collective:
    """One operation of a group: what the ranks brought, and who has got the result."""

    kind: str
    needed: frozenset[str]
    brought: dict[str, Any] = field(default_factory=dict)
    waiting: dict[str, Rank] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)


class Rank:
    """One process: a member, its training thread, and its connection to the coordinator."""

    def __init__(self, world: World, slot: int, life: int, place: int) -> None:
        self.world = world
        self.slot, self.life, self.place = slot, life, place
        self.replica = f"r{slot}.{life}"
        self.name = f"{self.replica}/{place}"
        step, state = world.saved
        hello = Hello(
            replica=self.replica,
            place=place,
            width=world.width,
            job={"seed": str(world.seed)},
            view=View(Round(step), digest=f"{state} {place}"),
            min_replicas=world.min_replicas,
            lease_s=LEASE_S,
            desk=self.name,
        )
        self.member = Member(hello, world.microbatches)
        self.state, self.state_of = state, step  # after so many steps
        self.sums: dict[int, int] = {}
        self.conn: int | None = None
        self.is_dead = False
        self.has_left = False
        self.stopped_until = 0.0
        self._playing: Generator[rounds.Action, object, rounds.Played | None] | None = None
        self._waits_for: int | None = None
        self._may_fail = False
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
        self.stopped_until = self.world.clock.now + seconds
        self.world.clock.after(seconds + 1e-6, self.go_on)

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
        self.send(Beat(self.member.round))
        self.later(BEAT_S, self.beat)

    def heard(self, line: bytes) -> None:
        promised = self.member.promised
        answer = self.member.receive(decode(line))
        if answer is not None:
            self.send(answer)
        if self.member.fenced is not None:
            self.world.report.counts["fenced"] += 1
            self.world.rejoin(self)
            return
        self.world.installed(self.member)
        if self.member.promised != promised:
            self.revoked()
        if self._waits_for is not None and self.member.epoch > self._waits_for:
            self._waits_for = None
            self.advance(None)

    def revoked(self) -> None:
        """The training thread gives up the running operation, a little later."""
        busy = self._busy
        self.world.drop(self)
        self.later(0.001, lambda: self.failed(busy))

    # The training thread

    def begin(self) -> None:
        """The next round, or the end of the run."""
        self._playing = rounds.play(self.member, contextlib.nullcontext(), self.world.steps)
        self.sums = {}
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
        self._may_fail = not isinstance(action, rounds.Compute | rounds.Await)
        self.act(action)

    def leave(self) -> None:
        self.has_left = True
        self.send(Leave(self.member.view))
        self.world.drop(self)

    def failed(self, busy: int) -> None:
        if busy == self._busy and self._may_fail:
            self._busy += 1
            if not self.member.is_changing:
                self.send(self.member.complain("failed"))
            self.advance(None, GroupLost("failed"))

    def act(self, action: rounds.Action) -> None:
        member, random = self.member, self.world.random
        if isinstance(action, rounds.Compute):
            self.later(MICROBATCH_S * random.uniform(0.5, 1.5), lambda: self.compute(action.index))
        elif isinstance(action, rounds.Await):
            if member.epoch > action.after:
                self.later(0, lambda: self.advance(None))
            else:
                self._waits_for = action.after
        elif isinstance(action, rounds.Gather):
            if self._gathered == action.epoch:
                self.later(0, lambda: self.advance(None))
            else:
                self.meet("gather", None)
        elif isinstance(action, rounds.Fetch):
            busy = self._busy
            self.state = -1  # parts of different states, until all has come
            self.later(random.uniform(0.01, 0.3), lambda: self.fetched(busy, action))
        elif isinstance(action, rounds.Reduce):
            self.meet("reduce", (member.round, dict(self.sums)))
        elif isinstance(action, rounds.Vote):
            self.meet("vote", action.ballot)

    def compute(self, index: int) -> None:
        if index in self.sums:
            self.world.report.wrong(f"{self.name} computes {index} of {self.member.round} twice")
        self.sums[index] = gradient(self.state, self.member.round.step, index)
        self.advance(None)

    def fetched(self, busy: int, action: rounds.Fetch) -> None:
        if busy != self._busy:
            return
        holders = [
            rank
            for rank in self.world.living()
            if rank.replica in action.holders and rank.place == self.place
        ]
        if any(rank.state_of < self.member.round.step for rank in holders):
            self.later(0.01, lambda: self.fetched(busy, action))  # it has to catch up
            return
        if not holders or self.member.epoch != action.epoch or self.member.is_changing:
            self.failed(busy)
            return
        self.state, self.state_of = holders[0].state, holders[0].state_of
        self.world.report.counts["fetched"] += 1
        self.advance(None)

    def meet(self, kind: str, value: object) -> None:
        """A collective of the column; a vote goes over the row, too."""
        epoch, busy = self.member.epoch, self._busy
        spurious = self.world.faulty("spurious failure", 0.002)
        if self.member.is_changing or spurious:
            self.later(0.001, lambda: self.failed(busy))
            if spurious:
                self.world.drop(self)
            return
        group = f"{self.member.desk}:{epoch}:{self.member.members}:{self.place}"
        members = frozenset(f"{each}/{self.place}" for each in self.member.members)
        self.join(group, members, kind, value, busy)

    def join(
        self, group: str, members: frozenset[str], kind: str, value: object, busy: int
    ) -> None:
        number = self._used[group] = self._used.get(group, 0) + 1
        self.world.collective(f"{group}:{number}", members, kind, self, value, busy)

    def met(self, busy: int, collective: Collective) -> None:
        """A collective has finished for this rank."""
        if busy != self._busy:
            return
        if collective.kind == "vote":
            row = f"{self.member.desk}:{self.member.epoch}:row:{self.replica}:{self.member.members}"
            members = frozenset(f"{self.replica}/{i}" for i in range(self.world.width))
            ballots = list(collective.brought.values())
            self.join(row, members, "row", (any(b.joiners_wait for b in ballots), ballots), busy)
        elif collective.kind == "row":
            self.advance(next(v[1] for n, v in collective.brought.items() if n == self.name))
        elif collective.kind == "reduce":
            self.reduced(collective)
        else:
            self._gathered = self.member.epoch
            self.advance(None)

    def reduced(self, collective: Collective) -> None:
        found = list(collective.brought.values())
        indices = sorted(index for _, sums in found for index in sums)
        if {round for round, _ in found} != {self.member.round}:
            self.world.report.wrong(f"{self.name} reduces rounds {[r for r, _ in found]}")
        if indices != list(range(self.world.microbatches)):
            self.world.report.wrong(f"{self.name}: {self.member.round} sums up {indices}")
        self.total = sum(sum(sums.values()) for _, sums in found) % MODULUS
        self.world.report.counts["reductions"] += 1
        self.advance(overflows(self.world.seed, self.member.round))

    def committed(self, played: rounds.Played) -> None:
        if played.again:
            self.world.report.counts["overflow"] += 1
        else:
            self.state = updated(self.state, played.round.step, self.total)
            self.state_of = played.round.step + 1
            self.world.report.counts["rejoined"] += self.life > 1 and not self._commits
            self._commits += 1
            self.world.committed(self, played.round.step)
        if self.member.is_changing:
            self.send(Promise(self.member.promised, self.member.view))
            self.world.drop(self)
        self.later(0.001, self.begin)


class World:
    """The replicas, their coordinator, the network between them, and the oracle."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(f"replicas {seed}")
        self.report = Report(seed, " --replicas")
        self.clock = Clock(END_S)
        draw = self.random
        self.width = draw.choice((1, 1, 2))
        self.replicas = draw.choice((1, 2, 3, 4, 4, 6))
        self.microbatches = draw.choice((4, 7, 16))
        self.steps = draw.choice((12, 30))
        self.min_replicas = draw.choice((1, 1, 2)) if self.replicas > 1 else 1
        self.weather = {
            each: draw.choice((0.0, 1.0, 3.0))
            for each in ("kill", "stop", "cut off", "coordinator dies", "spurious failure")
        }
        self.growth = draw.random() < 0.4
        self.fault_end = draw.uniform(2.0, 25.0)
        self.saved = (0, 1)
        self.reference = [1]
        self.ranks: list[Rank] = []
        self.lives: dict[int, int] = {}
        self.collectives: dict[str, Collective] = {}
        self.epochs: dict[tuple[str, int], tuple[str, ...]] = {}
        self.conns: dict[int, Rank] = {}
        self.cut_until: dict[int, float] = {}
        self.last: dict[tuple[int, bool], float] = {}
        self.numbers = itertools.count(1)
        self.coordinator: Coordinator | None = None
        self.start_coordinator()
        for slot in range(self.replicas):
            self.start(slot, draw.uniform(0, 0.5))
        self.clock.after(TICK_S, self.tick)
        for fault in ("kill", "stop", "cut off", "coordinator dies"):
            self.clock.after(draw.uniform(0.3, 3.0), lambda fault=fault: self.strike(fault))
        if self.growth:
            self.clock.after(draw.uniform(1, 10), self.grow)

    def run(self) -> Report:
        done = self.clock.run(self.is_over)
        if not done:
            ranks = [(r.name, r.member.round, r.member.epoch) for r in self.living()]
            epoch = self.coordinator.epoch if self.coordinator else None
            self.report.wrong(f"the run stands still: {ranks}, coordinator {epoch}")
        self.report.counts["steps"] += self.steps if done else 0
        return self.report

    def is_over(self) -> bool:
        if not any(r.has_left for r in self.ranks):
            return False
        left = {r.replica for r in self.living() if not r.has_left and r.member.epoch}
        return len(left) < self.min_replicas if self.clock.now > LATE_S else not left

    def living(self) -> list[Rank]:
        return [rank for rank in self.ranks if not rank.is_dead and rank.member.fenced is None]

    def trace(self, what: str) -> None:
        self.report.trace.append(f"{self.clock.now:8.3f} {what}")

    # Replicas

    def start(self, slot: int, delay: float) -> None:
        def begin() -> None:
            if any(rank.has_left for rank in self.ranks):
                return
            life = self.lives.setdefault(slot, 1)
            self.trace(f"replica r{slot}.{life} starts")
            self.ranks += [Rank(self, slot, life, place) for place in range(self.width)]

        self.clock.after(delay, begin)

    def rejoin(self, rank: Rank) -> None:
        """A fenced process ends; its replica is started again."""
        self.trace(f"{rank.name} is fenced: {rank.member.fenced}")
        rank.die()
        self.start_again(rank, self.random.uniform(0.1, 1.0))

    def start_again(self, rank: Rank, delay: float) -> None:
        """The launcher starts the replica once, whichever of its ranks dies first."""
        if self.lives[rank.slot] == rank.life:
            self.lives[rank.slot] += 1
            self.start(rank.slot, delay)

    def committed(self, rank: Rank, step: int) -> None:
        self.report.counts["committed"] += 1
        while len(self.reference) <= step + 1:
            number = len(self.reference) - 1
            state = self.reference[-1]
            total = sum(gradient(state, number, i) for i in range(self.microbatches)) % MODULUS
            self.reference.append(updated(state, number, total))
        if rank.state != self.reference[step + 1]:
            self.report.wrong(f"{rank.name} has another state after step {step}")
        if step % SAVE_EVERY == 0 and step + 1 > self.saved[0]:
            self.saved = (step + 1, rank.state)

    def installed(self, member: Member) -> None:
        if member.epoch:
            key = (member.desk, member.epoch)
            if self.epochs.setdefault(key, member.members) != member.members:
                self.report.wrong(f"epoch {member.epoch} has two memberships")

    # Collectives

    def collective(
        self, key: str, needed: frozenset[str], kind: str, rank: Rank, value: object, busy: int
    ) -> None:
        found = self.collectives.setdefault(key, Collective(kind, needed))
        if found.kind != kind:
            self.report.wrong(f"{rank.name} is in {kind}, others are in {found.kind}: {key}")
        found.brought[rank.name] = value
        found.waiting[rank.name] = rank
        rank.busy_in = busy
        if found.brought.keys() == needed and found.waiting.keys() == needed:
            for each in list(found.waiting.values()):
                delay = self.random.uniform(0.001, 0.02)
                each.later(delay, lambda each=each: self.finish(found, each))
        else:
            gone = needed - {r.name for r in self.living()} - found.waiting.keys()
            if gone:
                self.break_for(found, rank)

    def finish(self, found: Collective, rank: Rank) -> None:
        if rank.name in found.waiting:
            del found.waiting[rank.name]
            found.finished.add(rank.name)
            rank.met(rank.busy_in, found)

    def drop(self, rank: Rank) -> None:
        """The rank gives up its groups: the operations of others break, finish or hang."""
        for found in self.collectives.values():
            if rank.name in found.needed and rank.name not in found.finished:
                found.waiting.pop(rank.name, None)
                if found.finished:
                    self.report.counts["half a collective"] += 1
                for other in list(found.waiting.values()):
                    self.break_for(found, other)

    def break_for(self, found: Collective, rank: Rank) -> None:
        complete = found.brought.keys() == found.needed
        if complete and self.random.random() < 0.5:
            return  # it had all it needed: the event that finishes it is on its way
        found.waiting.pop(rank.name, None)
        if self.random.random() < 0.6:
            busy = rank.busy_in
            rank.later(self.random.uniform(0.001, 0.3), lambda: rank.failed(busy))

    # The network to the coordinator

    def start_coordinator(self) -> None:
        self.coordinator = Coordinator(self.replicas, settle_s=1.0)

    def dial(self, rank: Rank) -> int | None:
        if self.coordinator is None or self.is_cut(rank):
            return None
        conn = next(self.numbers)
        self.conns[conn] = rank
        return conn

    def is_cut(self, rank: Rank) -> bool:
        return self.clock.now < self.cut_until.get(rank.slot, 0.0)

    def deliver(self, conn: int, up: bool, event: Callable[[], None]) -> None:
        """In order, with a delay; after the end of a partition if there is one."""
        rank = self.conns[conn]
        at = self.clock.now + self.random.uniform(0.0002, 0.005)
        at = max(at, self.cut_until.get(rank.slot, 0.0), self.last.get((conn, up), 0.0))
        self.last[conn, up] = at
        if up:
            self.clock.after(at - self.clock.now, event)
        else:
            rank.later(at - self.clock.now, event)

    def to_coordinator(self, conn: int, line: bytes) -> None:
        if conn not in self.conns:
            return
        target = self.coordinator

        def arrive() -> None:
            if target is not None and target is self.coordinator and conn in self.conns:
                message = decode(line)
                if isinstance(message, Hello):
                    self.to_ranks(target.hello(conn, message, self.clock.now))
                else:
                    self.to_ranks(target.receive(conn, message, self.clock.now))

        self.deliver(conn, True, arrive)

    def to_ranks(self, sent: list[tuple[int, Any]]) -> None:
        for conn, message in sent:
            rank = self.conns.get(conn)
            if rank is not None:
                line = encode(message)
                self.deliver(
                    conn,
                    False,
                    lambda rank=rank, line=line, conn=conn: (
                        rank.heard(line) if rank.conn == conn else None
                    ),
                )

    def hang_up(self, conn: int | None) -> None:
        """The process at the other end is gone; its kernel says so."""
        target = self.coordinator

        def gone() -> None:
            if conn is not None and target is not None and target is self.coordinator:
                self.to_ranks(target.lost(conn, self.clock.now))
            self.conns.pop(conn or 0, None)

        if conn is not None and conn in self.conns:
            self.deliver(conn, True, gone)

    def tick(self) -> None:
        if self.coordinator is not None:
            self.to_ranks(self.coordinator.tick(self.clock.now))
        self.clock.after(TICK_S, self.tick)

    # Faults

    def faulty(self, fault: str, share: float) -> bool:
        happens = (
            self.clock.now < self.fault_end
            and self.random.random() < share * self.weather.get(fault, 1.0)
        )
        if happens:
            self.report.counts[fault] += 1
        return happens

    def strike(self, fault: str) -> None:
        if self.clock.now >= self.fault_end:
            return
        rate = self.weather[fault]
        self.clock.after(self.random.expovariate(max(rate, 0.1) / 3), lambda: self.strike(fault))
        if not rate or not self.living() or self.coordinator is None:
            return
        self.report.counts[fault] += 1
        if fault == "coordinator dies":
            self.kill_coordinator()
            return
        victims = self.random.sample(self.living(), min(len(self.living()), self.strength()))
        self.report.counts["two deaths at once"] += fault == "kill" and len(victims) == 2
        for rank in victims:
            self.trace(f"{fault} {rank.name} in {rank.member.round}")
            if fault == "kill":
                rank.die()
                self.start_again(rank, self.random.uniform(0.2, 4.0))
            elif fault == "stop":
                rank.stop(self.random.choice((0.1, 0.9, 1.1, 3.0)))
            else:
                self.cut_until[rank.slot] = self.clock.now + self.random.choice((0.3, 0.9, 2.5))
        if not self.living():
            self.report.counts["all lost"] += 1

    def strength(self) -> int:
        return self.random.choice((1, 1, 1, 2, 2, 100 if self.random.random() < 0.1 else 1))

    def kill_coordinator(self) -> None:
        self.trace("the coordinator dies")
        self.coordinator = None
        for conn, rank in list(self.conns.items()):
            rank.later(self.random.uniform(0.001, 0.05), lambda r=rank, c=conn: r.disconnected(c))
        self.conns.clear()
        self.clock.after(self.random.choice((0.05, 0.5, 3.0)), self.start_coordinator)

    def grow(self) -> None:
        self.report.counts["growth"] += 1
        self.start(self.replicas, 0.0)


def run_replicated(seed: int) -> Report:
    return World(seed).run()
