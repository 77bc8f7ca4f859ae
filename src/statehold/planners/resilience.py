"""Which redundancy, checkpoint interval and number of spares a job should have, for each policy.

Owns: the search for the best settings, and the simulation of a job under a trace of failures.
Invariants: times are in seconds. The same arguments give the same plan, and the same outcome. Pure.
SimPy is imported when a run begins.
Not here: the formulae (policies, intervals), what policies do (policies).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from statehold.errors import UsageError
from statehold.planners import policies
from statehold.planners.intervals import INTERVAL_S_MAX, best_s
from statehold.planners.policies import Drop, Job, Policy, Quota, Restart, StepLeft, stacked
from statehold.planners.traces import Trace

if TYPE_CHECKING:
    import simpy

POLICIES = ("restart", "drop", "quota", "stacked", "exact")
COVERED = 0.99  # of the time, by spares
_SPARES_MAX = 100_000
_SCALES = (0.5, 0.7, 1.4, 2.0)  # of the interval
_NEAR = (-3, -2, -1, 1, 2, 3)  # of the redundancy


# -- the choice ------------------------------------------------------------------------------------
# Closed forms begin: redundancy (the redundancy that minimizes J, T_c), intervals (Daly), and as
# many spares as are broken at most in 99 % of the time, if repairs come and go independently. That
# number of broken machines is Poisson, with the mean repair time over the mean time between
# failures (after the standby machines of ByteRobust, SOSP 2025). The simulation of the given trace
# refines them one after another: spares, redundancy, interval. The choice with the most useful work
# for each machine wins, spares included. So a spare has to earn its place.


@dataclass(frozen=True, slots=True)
class Rates:
    """mtbf_s: between losses of a replica, over the whole job. job_mtbf_s: between losses of the
    whole job. repair_s: the mean time until a machine is back; infinite until a restart."""

    mtbf_s: float
    job_mtbf_s: float = math.inf
    repair_s: float = math.inf

    @property
    def broken(self) -> float:
        """The mean number of machines under repair."""
        return self.repair_s / self.mtbf_s if math.isfinite(self.repair_s) else 0.0


@dataclass(frozen=True, slots=True)
class Settings:
    """interval_s: of training between two checkpoints. redundancy: replicas that hold a shard."""

    policy: str
    interval_s: float
    spares: int
    redundancy: int = 1


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """closed: what the closed forms say. chosen: after the simulation, with its outcome."""

    closed: Settings
    chosen: Settings
    outcome: Outcome


def plan(
    job: Job, rates: Rates, trace: Trace, policies: Iterable[str] = POLICIES
) -> list[PolicyChoice]:
    """The best settings of each policy on the same trace, the best policy first."""
    found = [refined(job, settings(job, rates, each), rates, trace) for each in policies]
    return sorted(found, key=lambda each: -each.outcome.goodput_allocated)


def best(choices: Iterable[PolicyChoice]) -> PolicyChoice:
    """The most useful work for each machine, among the policies that train every sample."""
    return max(
        (each for each in choices if not each.outcome.lost_batches),
        key=lambda each: each.outcome.goodput_allocated,
    )


def settings(job: Job, rates: Rates, policy: str) -> Settings:
    """What the closed forms say."""
    if policy not in POLICIES:
        facts = {"expected": ", ".join(POLICIES), "got": policy}
        raise UsageError("a policy is not known", facts=facts)
    if policy == "stacked":
        return _stacked(job, rates)
    lost = 1 / rates.job_mtbf_s
    if policy == "restart":
        lost += 1 / rates.mtbf_s
    elif policy == "quota" or not math.isfinite(rates.repair_s):  # nobody comes back
        lost += 1 / rates.mtbf_s / (job.replicas - job.min_replicas + 1)
    interval_s = min(best_s(job.save_s, lost), INTERVAL_S_MAX)
    spares = spares_for(rates.broken) if policy in ("restart", "drop", "exact") else 0
    return Settings(policy, max(interval_s, job.step_s), spares)


def spares_for(broken: float) -> int:
    """The least number that a Poisson variable with the mean `broken` exceeds rarely enough."""
    if broken > 0.5 * _SPARES_MAX:
        facts = {"broken": f"{broken:.3g} at a time", "limit": _SPARES_MAX // 2}
        raise UsageError("too many machines are under repair to plan for spares", facts=facts)
    spares, below = 0, 0.0
    while True:
        below += (
            math.exp(spares * math.log(broken) - broken - math.lgamma(spares + 1)) if broken else 1
        )
        if below >= COVERED:
            return spares
        spares += 1


def _stacked(job: Job, rates: Rates) -> Settings:
    costs = policies.Costs(rates.mtbf_s, job.save_s, job.restart_s, job.compute_s, job.reduce_s)
    depth = policies.best_redundancy(job.replicas, costs)
    mu = policies.endured(job.replicas, depth)
    uptime_s = 1 / (1 / rates.job_mtbf_s + 1 / (mu * rates.mtbf_s))
    interval_s = policies.period_s(job.save_s, uptime_s, job.restart_s) - job.save_s
    return Settings("stacked", max(min(interval_s, INTERVAL_S_MAX), job.step_s), 0, depth)


def refined(job: Job, closed: Settings, rates: Rates, trace: Trace) -> PolicyChoice:
    """Try other spares, then other redundancies, then other intervals, on the trace."""
    chosen, outcome = closed, _outcome(job, closed, trace)
    if not outcome.is_finished and not closed.redundancy > 1:
        return PolicyChoice(closed, chosen, outcome)
    for others in (_spares, _redundancies, _intervals):
        for tried in others(job, chosen, rates):
            found = _outcome(job, tried, trace)
            if found.goodput_allocated > outcome.goodput_allocated:
                chosen, outcome = tried, found
    return PolicyChoice(closed, chosen, outcome)


def _spares(job: Job, chosen: Settings, rates: Rates) -> list[Settings]:
    counts = {0, round(rates.broken / 2), round(rates.broken)} if chosen.spares else set()
    return [replace(chosen, spares=each) for each in sorted(counts - {chosen.spares})]


def _redundancies(job: Job, chosen: Settings, rates: Rates) -> list[Settings]:
    if chosen.redundancy == 1:
        return []
    near = (chosen.redundancy + each for each in _NEAR)
    return [replace(chosen, redundancy=each) for each in near if 2 <= each <= job.replicas]


def _intervals(job: Job, chosen: Settings, rates: Rates) -> list[Settings]:
    if not job.save_s:
        return []
    scaled = {max(job.step_s, chosen.interval_s * each) for each in _SCALES}
    return [replace(chosen, interval_s=each) for each in sorted(scaled - {chosen.interval_s})]


def _outcome(job: Job, chosen: Settings, trace: Trace) -> Outcome:
    return simulate(job, policy_of(job, chosen), trace, chosen.interval_s, chosen.spares)


def policy_of(job: Job, chosen: Settings) -> Policy:
    if chosen.policy == "stacked":
        return stacked(job.replicas, chosen.redundancy)
    return {"restart": Restart(), "drop": Drop(), "quota": Quota(), "exact": Policy()}[
        chosen.policy
    ]


# -- the simulation --------------------------------------------------------------------------------
# A failure hits the place of a replica. If nobody is there, it has no effect. The machine breaks,
# and is a spare after its repair; without a time of repair, after the next restart. A spare takes
# an empty place at a restart. If the policy lets replicas rejoin, it also does so at the end of a
# step, join_s after it could. Failures during a restart break machines, and do not prolong it. A
# loss of the whole job breaks none, and leads to a restart at once.
#
# Steps between two events are one event, so a run takes as long as its failures and saves are many.


# A job that takes longer than this many times its ideal time makes no progress.
HOPELESS = 10.0
_JOB = -1
_NEARLY = 1e-9  # of a step or a second: sums of floats may differ by less

Waiting = Generator["simpy.Event", Any, Any]


@dataclass(slots=True)
class Outcome:
    """What a run took: its time is the sum of these parts.

        ideal_s      what the steps would take without failures, saves and redundancy
        saving_s     checkpoints
        down_s       restarts, and waiting for machines
        lost_s       steps that count no more: rolled back, or dropped
        recovery_s   what failures add to steps that go on
        slower_s     fewer replicas, or redundant work; the rest

    alive_s is a sum over machines. is_finished: False if the run was given up as hopeless.
    failures: those that hit a replica or the job. lost_batches: samples that are never trained.
    again_batches: those computed more than once. A batch is the one of a step with all replicas.
    """

    policy: str
    replicas: int
    machines: int
    ideal_s: float
    total_s: float = 0.0
    saving_s: float = 0.0
    down_s: float = 0.0
    lost_s: float = 0.0
    recovery_s: float = 0.0
    alive_s: float = 0.0
    failures: int = 0
    restarts: int = 0
    lost_batches: float = 0.0
    again_batches: float = 0.0
    is_finished: bool = False

    @property
    def slower_s(self) -> float:
        known_s = self.ideal_s + self.saving_s + self.down_s + self.lost_s + self.recovery_s
        return max(0.0, self.total_s - known_s)

    @property
    def time_over_ideal(self) -> float:
        return self.total_s / self.ideal_s if self.is_finished else math.inf

    @property
    def availability(self) -> float:
        """The share of the time in which the job runs, whatever it does."""
        return 1 - self.down_s / self.total_s

    @property
    def goodput_allocated(self) -> float:
        """The useful share of the time of all machines, also of spares and broken ones."""
        return self.replicas / self.machines / self.time_over_ideal

    @property
    def goodput_alive(self) -> float:
        """The useful share of the time of the machines that are not broken."""
        return self.replicas * self.total_s / self.time_over_ideal / self.alive_s


def simulate(
    job: Job, policy: Policy, trace: Trace, interval_s: float = math.inf, spares: int = 0
) -> Outcome:
    """Run the job until its steps are trained, or it is hopeless.

    interval_s: of training between two checkpoints; infinite for none.
    """
    return _SimulatedRun(job, policy, trace, interval_s, spares).outcome()


def _simpy() -> Any:
    try:
        import simpy
    except ImportError as error:
        hint = "pip install 'statehold[plan]', or: pip install simpy"
        raise UsageError("the simulation needs SimPy, which is missing", hint=hint) from error
    return simpy


class _Machines:
    """Which places of replicas are empty, and which machines could fill them.

    Invariants: machines = replicas - empty + spare + joining + ready + broken.
    """

    def __init__(self, env: simpy.Environment, job: Job, policy: Policy, spares: int) -> None:
        self._env, self._job, self._policy = env, job, policy
        self._total = job.replicas + spares
        self.empty: set[int] = set()
        self._spare, self._joining, self._ready = spares, 0, 0
        self._broken = self._until_restart = 0
        self._alive_s = self._counted_at_s = 0.0
        self.changed = env.event()  # a repair, or a machine that is ready to join

    @property
    def replicas(self) -> int:
        """How many of them train."""
        return self._job.replicas - len(self.empty)

    @property
    def can_join(self) -> bool:
        return self._ready > 0 and bool(self.empty)

    def alive_s(self) -> float:
        """The time of all machines that are not broken, until now."""
        self._alive_s += (self._total - self._broken) * (self._env.now - self._counted_at_s)
        self._counted_at_s = self._env.now
        return self._alive_s

    def break_down(self, place: int, repair_s: float) -> None:
        self.alive_s()
        self.empty.add(place)
        self._broken += 1
        if math.isfinite(repair_s):
            self._env.process(self._repair(repair_s))
        else:
            self._until_restart += 1
        self._call_spares()

    def join(self) -> None:
        """At the end of a step: machines that are ready take empty places."""
        while self.can_join:
            self._ready -= 1
            self.empty.remove(min(self.empty))

    def restart(self) -> None:
        """All machines that work take empty places."""
        self.alive_s()
        self._broken -= self._until_restart
        self._spare += self._until_restart + self._ready
        self._until_restart = self._ready = 0
        for place in sorted(self.empty)[: self._spare]:
            self.empty.remove(place)
            self._spare -= 1

    def _repair(self, repair_s: float) -> Waiting:
        yield self._env.timeout(repair_s)
        self.alive_s()
        self._broken -= 1
        self._spare += 1
        self._call_spares()
        self._tell()

    def _call_spares(self) -> None:
        wanted = len(self.empty) - self._joining - self._ready
        for _ in range(min(wanted, self._spare) if self._policy.rejoins else 0):
            self._spare -= 1
            self._joining += 1
            self._env.process(self._join())

    def _join(self) -> Waiting:
        yield self._env.timeout(self._job.join_s)
        self._joining -= 1
        self._ready += 1
        self._tell()

    def _tell(self) -> None:
        told, self.changed = self.changed, self._env.event()
        told.succeed()


@dataclass(frozen=True, slots=True)
class _Loss:
    """place: of the replica that is lost; _JOB if the whole job is."""

    place: int


@dataclass(slots=True)
class _Position:
    """What a rollback restores."""

    batches: float = 0.0
    lost_batches: float = 0.0
    recovery_s: float = 0.0


class _SimulatedRun:
    """One run. The trainer is a process that failures interrupt while it trains or saves."""

    def __init__(
        self, job: Job, policy: Policy, trace: Trace, interval_s: float, spares: int
    ) -> None:
        self._simpy = _simpy()
        self._env: simpy.Environment = self._simpy.Environment()
        self._job, self._policy, self._trace = job, policy, trace
        self._interval_s = interval_s
        self._machines = _Machines(self._env, job, policy, spares)
        self._out = Outcome(policy.name, job.replicas, job.replicas + spares, job.ideal_s)
        self._at, self._saved = _Position(), _Position()
        self._unsaved_s = 0.0  # training since the newest checkpoint
        self._is_listening = False

    def outcome(self) -> Outcome:
        limit = self._env.timeout(HOPELESS * self._job.ideal_s)
        self._trainer = self._env.process(self._train())
        self._env.process(self._fail())
        self._env.run(until=self._trainer | limit)
        out = self._out
        out.is_finished = not self._trainer.is_alive
        out.total_s, out.alive_s = self._env.now, self._machines.alive_s()
        out.lost_batches, out.recovery_s = self._at.lost_batches, self._at.recovery_s
        return out

    # -- processes ---------------------------------------------------------------------------------

    def _fail(self) -> Waiting:
        for failure in self._trace:
            yield self._env.timeout(failure.at_s - self._env.now)
            place = _JOB if failure.replica is None else failure.replica % self._job.replicas
            if place in self._machines.empty:
                continue
            if place != _JOB:
                self._machines.break_down(place, failure.repair_s)
            if self._is_listening:
                self._out.failures += 1
                self._trainer.interrupt(_Loss(place))

    def _train(self) -> Waiting:
        while self._at.batches < self._job.steps - _NEARLY:
            self._machines.join()
            if self._unsaved_s >= self._interval_s - _NEARLY:
                yield from self._save()
            else:
                yield from self._steps()

    # -- the trainer -------------------------------------------------------------------------------

    def _steps(self) -> Waiting:
        """Steps that are alike, until the next save. A failure or a join ends that early."""
        step = self._new_step()
        length_s = step.left_s
        alive = self._machines.replicas
        each = self._policy.batches(self._job, alive)
        wanted = math.ceil((self._job.steps - self._at.batches) / each - _NEARLY)
        if math.isfinite(self._interval_s):
            until_save_s = self._interval_s - self._unsaved_s
            wanted = min(wanted, max(1, math.ceil(until_save_s / length_s - _NEARLY)))
        begin_s = self._env.now
        event = yield from self._wait(wanted * length_s, self._machines.changed)
        whole = min(int((self._env.now - begin_s) / length_s + _NEARLY), wanted)
        if event is not None:
            whole = min(whole, wanted - 1)  # it hits the last step, if only at its very end
        self._commit(whole, alive, whole * length_s)
        if whole < wanted:
            step.spend(max(0.0, self._env.now - begin_s - whole * length_s))
            yield from self._finish(step, event)

    def _finish(self, step: StepLeft, event: _Loss | None) -> Waiting:
        """The rest of a step in which something has happened."""
        normal_s = step.spent_s + step.left_s
        while True:
            if event is not None:
                if not self._survives(event):
                    return (yield from self._restart(event, step.spent_s))
                if self._policy.drops:
                    return (yield from self._drop(step))
                self._recover(step, event)
            begin_s = self._env.now
            event = yield from self._wait(step.left_s)
            step.spend(self._env.now - begin_s)
            if event is None:
                return self._commit(
                    1, self._machines.replicas, step.spent_s, step.spent_s - normal_s
                )

    def _recover(self, step: StepLeft, loss: _Loss) -> None:
        """The survivors go on. The work of the lost one, and a reduction, are done again."""
        empty = self._machines.empty
        self._out.again_batches += self._policy.recover(self._job, step, empty, loss.place)

    def _drop(self, step: StepLeft) -> Waiting:
        self._out.lost_s += step.spent_s + self._job.detect_s
        self._at.lost_batches += 1
        yield self._env.timeout(self._job.detect_s)
        if not self._policy.works(self._job, self._machines.empty):  # more losses meanwhile
            yield from self._restart(_Loss(_JOB))

    def _save(self) -> Waiting:
        """A save goes on after a loss that the job survives."""
        left_s = self._job.save_s
        while True:
            begin_s = self._env.now
            event = yield from self._wait(left_s)
            left_s -= self._env.now - begin_s
            self._out.saving_s += self._env.now - begin_s
            if event is None:
                break
            if not self._survives(event):
                return (yield from self._restart(event))
        self._saved, self._unsaved_s = replace(self._at), 0.0

    def _survives(self, loss: _Loss) -> bool:
        if loss.place == _JOB:
            return False
        return self._policy.works(self._job, self._machines.empty, loss.place)

    def _restart(self, loss: _Loss, spent_s: float = 0.0) -> Waiting:
        """Back to the newest checkpoint, when there are enough machines. spent_s: in a step."""
        out, begin_s = self._out, self._env.now
        out.restarts += 1
        out.lost_s += self._unsaved_s + spent_s
        out.again_batches += self._at.batches - self._saved.batches
        self._at, self._unsaved_s = replace(self._saved), 0.0
        yield self._env.timeout(self._job.restart_s)
        self._machines.restart()
        while not self._policy.works(self._job, self._machines.empty):
            yield self._machines.changed
            self._machines.restart()
        out.down_s += self._env.now - begin_s

    def _new_step(self) -> StepLeft:
        return StepLeft(
            self._policy.compute_s(self._job, self._machines.replicas), self._job.reduce_s
        )

    def _commit(self, steps: int, alive: int, taken_s: float, recovery_s: float = 0.0) -> None:
        """alive: the replicas in these steps, before a loss that ended them."""
        self._at.batches += steps * self._policy.batches(self._job, alive)
        self._at.lost_batches += steps * self._policy.unused(self._job, alive)
        self._at.recovery_s += recovery_s
        self._unsaved_s += taken_s

    def _wait(self, s: float, also: simpy.Event | None = None) -> Waiting:
        """Wait, and listen. Returns the failure that came first, or None."""
        over = self._env.timeout(s)
        self._is_listening = True
        try:
            yield over if also is None else over | also
            return None
        except self._simpy.Interrupt as interrupt:
            return interrupt.cause
        finally:
            self._is_listening = False
