"""One seed of replicas that train together while they die, hang, lose their coordinator and come.

The protocol is the product's (resilience/protocol): the members, their steps and the coordinator.
Simulated are the clock, the network to the coordinator, the collectives of the groups, and what a
step computes. Collectives fail as Gloo's do: a ring may finish on some ranks and fail on others,
and a rank whose neighbours live may wait for ever. Processes die at any time, and also in the very
moment in which they act or answer.

The oracle knows the state of an undisturbed run after each step. It compares it with the state of
every rank after every commit, and looks at every sum for microbatches that are missing or counted
twice. When the faults have ended, the run must reach its last step.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

from sim.clock import Clock
from sim.replica import TURNS, Collective, Flaw, Rank
from sim.seeds import Report
from sim.undisturbed import MODULUS, gradient, updated
from statehold.resilience.protocol.coordinator import Coordinator
from statehold.resilience.protocol.member import Member
from statehold.resilience.protocol.messages import TORN, Hello, View, decode, encode

FAULTS = (
    "kill", "stop", "hang", "cut off", "reset", "coordinator dies", "coordinator stops",
    "spurious failure", "severed", "growth", "fenced", "half a collective",
    "caught up", "two deaths at once", "all lost", "rejoined", "forgotten", "adopted",
    "joined with its own state", "gave up",
    "left in a step", "left before its update", "left in its update", "left after its update",
    "slow first microbatch", "backward failed", "save failed",
    "differs", "differs in a share", "parted", "all parted",
    "death in an answer",
    *(f"death in {each}" for each in ("Compute", "Await", "Gather", "Fetch", "Reduce", "Vote")),
)  # fmt: skip
TICK_S = 0.05
END_S, LATE_S = 400.0, 300.0
SAVE_EVERY = 5
STRIKES = ("kill", "stop", "hang", "cut off", "reset", "coordinator dies", "coordinator stops")


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
        self.redundancy = random.Random(f"redundancy {seed}").choice((1, 1, 2, 3))
        self.steps = draw.choice((12, 30))
        self.min_replicas = draw.choice((1, 1, 2)) if self.replicas > 1 else 1
        self.weather = {
            each: draw.choice((0.0, 1.0, 3.0)) for each in (*STRIKES, "spurious failure", "death")
        }
        self.growth = draw.random() < 0.4
        self.flaws = random.Random(f"flaws {seed}")
        self.weather["differs"] = self.flaws.choice((0.0, 0.0, 1.0, 3.0))
        self.slowness = draw.choice((0.001, 0.02, 0.2))  # of threads, from a wish to its effect
        self.network_s = draw.choice((0.005, 0.005, 0.3))
        self.severed = self.sever()
        self.life = random.Random(f"life {seed}")  # what befalls the loops of the programs
        self.is_fast = self.life.random() < 0.5
        self.troubles = self.life.choice((0.0, 1.0, 3.0))
        self.fault_end = draw.uniform(2.0, 25.0)
        self.saved = (0, 1)
        self.reference = [1]
        self.ranks: list[Rank] = []
        self.lives: dict[int, int] = {}
        self.collectives: dict[str, Collective] = {}
        self.epochs: dict[tuple[str, int], tuple[str, ...]] = {}
        self.conns: dict[int, Rank] = {}
        self.cut_until: dict[str, float] = {}
        self.last: dict[tuple[int, bool], float] = {}
        self.numbers = itertools.count(1)
        self.coordinator: Coordinator | None = None
        self.start_coordinator()
        for slot in range(self.replicas):
            self.start(slot, draw.uniform(0, 0.5))
        self.clock.after(TICK_S, self.tick)
        for fault in STRIKES:
            self.clock.after(draw.uniform(0.3, 3.0), lambda fault=fault: self.strike(fault))
        if self.growth:
            self.clock.after(draw.uniform(1, 10), self.grow)

    def run(self) -> Report:
        try:
            done = self.clock.run(lambda: bool(self.report.violations) or self.is_over())
        except Exception as error:  # of the coordinator, or of a member that hears
            self.report.wrong(f"{type(error).__name__}: {error}")
            return self.report
        if not done:
            ranks = [(r.name, r.member.step, r.member.epoch) for r in self.living()]
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
        return [each for each in self.ranks if self.is_there(each) and not each.is_hung]

    def is_there(self, rank: Rank) -> bool:
        """Whether its connections are open."""
        return not rank.is_dead and rank.member.fenced is None

    def trace(self, what: str) -> None:
        self.report.trace.append(f"{self.clock.now:8.3f} {what}")

    # Replicas

    def start(self, slot: int, delay: float) -> None:
        def begin() -> None:
            if any(rank.has_left for rank in self.ranks):
                return
            life = self.lives.setdefault(slot, 1)
            self.trace(f"replica r{slot}.{life} starts")
            view = View(self.saved[0], digest=f"{self.saved[1]}")
            self.ranks += [
                Rank(self, slot, life, place, view, self.saved[1]) for place in range(self.width)
            ]

        self.clock.after(delay, begin)

    def rejoin(self, rank: Rank) -> None:
        """A fenced process joins again with the state that it has.

        If that is in parts, or if it has other ranks, it ends: its replica is started again.
        """
        self.trace(f"{rank.name} is fenced: {rank.member.fenced}")
        view = rank.member.own_view
        rank.die()
        self.enter_again(rank, view)

    def enter_again(self, rank: Rank, view: View) -> None:
        """The process of a rank that is dead joins again, or its launcher starts it again."""
        if self.width > 1 or view.step == TORN:
            self.start_again(rank, self.random.uniform(0.1, 1.0))
            return
        self.lives[rank.slot] += 1
        life = self.lives[rank.slot]

        def join() -> None:
            if not any(other.has_left for other in self.ranks):
                self.report.counts["joined with its own state"] += 1
                again = Rank(self, rank.slot, life, 0, view, rank.state)
                again.comeback, again.flaw = rank.comeback, rank.flaw
                self.ranks.append(again)

        self.clock.after(rank.comeback.pause(self.clock.now), join)

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
        has_voted = rank.vote.ballot.epoch == rank.member.epoch  # or it follows others
        if rank.flaw is not None and has_voted and step >= rank.flaw.since + TURNS - 1:
            self.compared(rank, rank.flaw)
        is_due = rank.flaw is None and step % SAVE_EVERY == 0 and step + 1 > self.saved[0]
        if is_due and not self.befalls("save failed", 0.1):
            self.saved = (step + 1, rank.state)

    def compared(self, rank: Rank, flaw: Flaw) -> None:
        """All of the state has been compared since it has the flaw: so all others have it, too."""
        members = {f"{name}/{rank.place}" for name in rank.vote.members}
        unlike = [r.name for r in self.living() if r.name in members and r.flaw != flaw]
        if unlike:
            self.report.wrong(f"{rank.name} differs from {unlike} since {flaw.since}, unnoticed")

    def flaw(self, rank: Rank) -> Flaw | None:
        """What makes the state differ from now on that the rank has just committed."""
        share = 0.1 * self.weather["differs"]
        if self.clock.now > self.fault_end or self.flaws.random() >= share:
            return None
        turn = self.flaws.choice((None, *range(TURNS)))
        self.report.counts["differs" if turn is None else "differs in a share"] += 1
        self.trace(f"{rank.name} differs in {turn}")
        return Flaw(self.flaws.getrandbits(60), rank.state_of, turn)

    def parted(self, rank: Rank) -> None:
        """The rank has left because of its state. Then it differs, or as many others do."""
        flawed = {each.replica for each in self.ranks if each.flaw is not None}
        holders = [name for name in rank.vote.members if name not in rank.newcomers]
        odd = flawed & set(holders)
        if rank.replica not in flawed and 2 * len(odd) < len(holders):
            self.report.wrong(f"{rank.name} has left, though {odd} of {holders} differ")
        self.report.counts["parted"] += 1
        self.report.counts["all parted"] += 2 * len(odd) >= len(holders)
        self.trace(f"{rank.name} parts in {rank.member.step}")
        rank.die()
        self.start_again(rank, self.flaws.uniform(0.1, 1.0))

    def installed(self, member: Member) -> None:
        if member.epoch:
            key = (member.desk, member.epoch)
            if self.epochs.setdefault(key, member.members) != member.members:
                self.report.wrong(f"epoch {member.epoch} has two memberships")

    # Collectives

    def collective(
        self,
        key: str,
        epoch: int,
        needed: frozenset[str],
        kind: str,
        rank: Rank,
        value: object,
        busy: int,
    ) -> None:
        found = self.collectives.setdefault(key, Collective(kind, epoch, needed))
        if found.kind != kind:
            self.report.wrong(f"{rank.name} is in {kind}, others are in {found.kind}: {key}")
        found.brought[rank.name] = value
        found.waiting[rank.name] = rank
        rank.busy_in = busy
        if found.brought.keys() == needed and found.waiting.keys() == needed:
            if self.is_severed(found):
                return
            for each in list(found.waiting.values()):
                delay = self.random.uniform(0.001, 0.02)
                each.later(delay, lambda each=each: self.finish(found, each))
        else:
            there = {each.name for each in self.ranks if self.is_there(each)}
            gone = needed - there - found.waiting.keys()
            if gone:
                self.break_for(found, rank)

    def finish(self, found: Collective, rank: Rank) -> None:
        if rank.name in found.waiting:
            del found.waiting[rank.name]
            found.finished.add(rank.name)
            rank.met(rank.busy_in, found)

    def sever(self) -> frozenset[int]:
        """In some seeds there are two replicas that never reach each other."""
        if self.replicas <= self.min_replicas or self.random.random() > 0.1:
            return frozenset()
        return frozenset(self.random.sample(range(self.replicas), 2))

    def is_severed(self, found: Collective) -> bool:
        """Those two notice, and the others wait for ever."""
        two = [each for each in found.waiting.values() if each.slot in self.severed]
        if len({each.slot for each in two}) < 2:
            return False
        self.report.counts["severed"] += 1
        found.waiting.clear()
        for each in two:
            busy = each.busy_in
            each.later(self.random.uniform(0.001, 0.3), lambda e=each, b=busy: e.failed(b))
        return True

    def drop(self, rank: Rank, before: int | None = None) -> None:
        """The rank gives up its groups, all or those of the epochs before that one.

        The operations of others break, finish or hang.
        """
        for found in self.collectives.values():
            if before is not None and found.epoch >= before:
                continue
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
        self.coordinator_stopped_until = 0.0
        self.coordinator_later: list[Callable[[], None]] = []

    def stop_coordinator(self, seconds: float) -> None:
        """What arrives meanwhile waits in its sockets."""
        self.trace(f"the coordinator stops for {seconds} s")
        self.coordinator_stopped_until = self.clock.now + seconds

        def go_on() -> None:
            while self.coordinator_later and self.clock.now >= self.coordinator_stopped_until:
                self.coordinator_later.pop(0)()

        self.clock.after(seconds + 1e-6, go_on)

    def at_coordinator(self, event: Callable[[], None]) -> None:
        if self.clock.now < self.coordinator_stopped_until or self.coordinator_later:
            self.coordinator_later.append(event)
        else:
            event()

    def dial(self, rank: Rank) -> int | None:
        if self.coordinator is None or self.is_cut(rank):
            return None
        conn = next(self.numbers)
        self.conns[conn] = rank
        return conn

    def is_cut(self, rank: Rank) -> bool:
        return self.clock.now < self.cut_until.get(rank.name, 0.0)

    def deliver(self, conn: int, up: bool, event: Callable[[], None]) -> None:
        """In order, with a delay; after the end of a partition if there is one."""
        rank = self.conns[conn]
        at = self.clock.now + self.random.uniform(0.0002, self.network_s)
        at = max(at, self.cut_until.get(rank.name, 0.0), self.last.get((conn, up), 0.0))
        self.last[conn, up] = at
        if up:
            self.clock.after(at - self.clock.now, lambda: self.at_coordinator(event))
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

    def reset(self, rank: Rank) -> None:
        """The connection ends at both sides, with what is on its way; the process lives."""
        conn, target = rank.conn, self.coordinator
        if conn is None or self.conns.pop(conn, None) is None:
            return

        def gone() -> None:
            if target is not None and target is self.coordinator:
                self.to_ranks(target.lost(conn, self.clock.now))

        self.clock.after(self.random.uniform(0.001, 0.3), lambda: self.at_coordinator(gone))
        rank.later(self.random.uniform(0.001, 0.3), lambda: rank.disconnected(conn))

    def tick(self) -> None:
        if self.coordinator is not None and self.clock.now >= self.coordinator_stopped_until:
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

    def befalls(self, trouble: str, share: float) -> bool:
        happens = self.clock.now < self.fault_end and self.life.random() < share * self.troubles
        self.report.counts[trouble] += happens
        return happens

    def dies(self, rank: Rank, where: str) -> bool:
        """Whether the rank dies in this very moment."""
        if not self.faulty("death", 0.001):
            return False
        self.report.counts[f"death in {where}"] += 1
        self.trace(f"{rank.name} dies in {where}, {rank.member.step}")
        rank.die()
        self.start_again(rank, self.random.uniform(0.2, 4.0))
        return True

    def reaction(self) -> float:
        return self.random.uniform(0.0005, self.slowness)

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
        if fault == "coordinator stops":
            self.stop_coordinator(self.random.choice((0.1, 0.4, 1.5, 4.0)))
            return
        victims = self.random.sample(self.living(), min(len(self.living()), self.strength()))
        self.report.counts["two deaths at once"] += fault == "kill" and len(victims) == 2
        for rank in victims:
            self.trace(f"{fault} {rank.name} in {rank.member.step}")
            if fault == "kill":
                rank.die()
                self.start_again(rank, self.random.uniform(0.2, 4.0))
            elif fault == "stop":
                rank.stop(self.random.choice((0.1, 0.9, 1.1, 3.0)))
            elif fault == "hang":
                rank.stop(math.inf)
                self.start_again(rank, self.random.uniform(2.0, 6.0))
            elif fault == "reset":
                self.reset(rank)
            else:
                self.cut_until[rank.name] = self.clock.now + self.random.choice((0.3, 0.9, 2.5))
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
