"""Faults: what strikes the real replicas of a campaign, one by one.

A seed decides which fault comes next, whom it strikes and after which time. Each kind says whether
it has hit what it was meant for: a replica that was killed had not ended before, the one that was
to be fenced was. So a campaign can assert that each kind has fired.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from resilience.jobs import Job
from resilience.office import Office

# How often each kind is in the deck that the faults are drawn from.
DECK = {
    "kill": 6,
    "kill in recovery": 3,
    "kill of a joiner": 2,
    "kill without a coordinator": 2,
    "stop": 2,
    "stop until fenced": 4,
    "coordinator killed": 2,
    "coordinator stopped": 2,
    "growth": 2,
}
LEASE_S = 1.0


class Fault(NamedTuple):
    """What has happened, when, and to which replica; -1: to the coordinator or to none."""

    kind: str
    at: float
    victim: int = -1


class Faults:
    """size: as many replicas train when everybody is back. kinds: that are drawn."""

    def __init__(
        self, job: Job, office: Office, size: int, seed: int, kinds: Sequence[str] = tuple(DECK)
    ) -> None:
        self.job, self.office, self.size, self.kinds = job, office, size, kinds
        self.random = random.Random(seed)
        self.struck: list[Fault] = []
        self.fired: Counter[str] = Counter()
        self._deck: list[str] = []
        self._active: list[int] = []

    def strike(self, kind: str | None = None) -> None:
        """One fault, of this kind or of the next one in the deck."""
        kind = kind or self._drawn()
        all_needed = kind in ("kill in recovery", "growth")
        self._active = self.job.progress(self.size if all_needed else self.size - 1, steps=2)
        self._pause(0.2)
        getattr(self, "_" + kind.replace(" ", "_"))(kind)

    def settle(self) -> None:
        """Until all replicas take part again."""
        self._active = self.job.progress(self.size, steps=2)

    def _drawn(self) -> str:
        if not self._deck:
            self._deck = [kind for kind in self.kinds for _ in range(DECK[kind])]
            self.random.shuffle(self._deck)
        return self._deck.pop()

    # The kinds

    def _kill(self, kind: str) -> None:
        self._killed(kind, self._victim())
        self.job.start()

    def _kill_in_recovery(self, kind: str) -> None:
        """The second one, before the survivors of the first one have committed a step."""
        first, second = self.random.sample(self._active, 2)
        before = self.job.steps()
        self._killed("kill", first)
        self._pause(0.03)
        self._killed("kill", second)
        after = self.job.steps()
        survivors = set(self._active) - {first, second}
        self.fired[kind] += all(before[each] == after[each] for each in survivors)
        for _ in range(2):
            self.job.start()

    def _kill_of_a_joiner(self, kind: str) -> None:
        self._killed("kill", self._victim())
        self.job.start()
        joiner = len(self.job.processes) - 1
        self._pause(1.0)
        self.fired[kind] += not self.job.steps()[joiner]
        self._killed("kill", joiner)
        self.job.start()

    def _kill_without_a_coordinator(self, kind: str) -> None:
        self.office.kill()
        self.struck.append(Fault("coordinator killed", time.monotonic()))
        self._pause(0.2)
        self._killed(kind, self._victim())
        self._pause(0.5)
        self.office.start()
        self.job.start()

    def _stop(self, kind: str) -> None:
        """Shorter than the lease: mostly the others wait for it."""
        victim = self._stopped(kind)
        self._pause(0.7 * LEASE_S)
        os.kill(self._process(victim).pid, signal.SIGCONT)

    def _stop_until_fenced(self, kind: str) -> None:
        """It may hold sums and groups of a step that the others have finished without it."""
        victim, begun = self._stopped(kind), len(self.office.events)
        pid = self._process(victim).pid
        self.office.wait_for(" replica", without=f"-{pid}-", since=begun)
        self._pause(1.0)
        os.kill(pid, signal.SIGCONT)

    def _coordinator_killed(self, kind: str) -> None:
        self.office.kill()
        self._note(kind, -1)
        self._pause(1.0)
        self.office.start()

    def _coordinator_stopped(self, kind: str) -> None:
        self.office.stop()
        self._note(kind, -1)
        self._pause(2.0)
        self.office.go_on()

    def _growth(self, kind: str) -> None:
        """One more than at the start; then another one goes for good."""
        self.job.start()
        self.job.progress(self.size + 1, steps=2)
        self.struck.append(Fault(kind, time.monotonic()))
        self.fired[kind] += 1
        self._killed("kill", self._victim())

    # How they strike

    def _victim(self) -> int:
        """A replica that takes part."""
        living = [each for each in self._active if self._process(each).is_alive()]
        return self.random.choice(living)

    def _killed(self, kind: str, victim: int) -> None:
        process, at = self._process(victim), time.monotonic()
        active = [self._process(each) for each in self._active]
        is_known = all(self.office.knows(each.pid) for each in active if each.is_alive())
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, (victim, process.exitcode)
        self._note(kind if is_known else "kill without a coordinator", victim, at)

    def _stopped(self, kind: str) -> int:
        victim, at = self._victim(), time.monotonic()
        os.kill(self._process(victim).pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self._process(victim).pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)
        self._note(kind, victim, at)
        return victim

    def _note(self, kind: str, victim: int, at: float | None = None) -> None:
        self.struck.append(Fault(kind, time.monotonic() if at is None else at, victim))
        self.fired[kind] += 1

    def _process(self, number: int) -> Any:
        return self.job.processes[number]

    def _pause(self, longest_s: float) -> None:
        """So the seed decides at which moment of a step something happens."""
        time.sleep(self.random.uniform(0, longest_s))
