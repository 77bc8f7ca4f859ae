"""One seed of the simulation: jobs that save under faults, crashes, and what is left of them.

A seed draws which faults there are and how often (a swarm: every seed is another weather), the
number of ranks, the options, one level or two, what the ranks do, and when they die, stall or lose
power. With two levels the promises are those of all steps that there are, wherever they are, and a
step of the second level restores there by itself or is refused. After every
job the faults end, a new job restores every step on every rank, and the oracle compares; at the end
the run must go on without any error.

The seed also decides in which order the ranks and their threads go on (scheduler), so a seed does
the same each time that it is run.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sim.job import HANG_S, SMALL, Died, Job
from sim.oracle import FAR, RUN, Oracle, best_of, blank, content, metrics_of
from statehold import Directory, Keep, Save
from statehold.errors import CorruptionError, StateholdError, StepNotFoundError, WaitTimeout
from statehold.steps.store import Store
from statehold.steps.whole import whole_steps
from support.faults import small
from support.in_memory import SimFs, checkpointer_on
from support.inside import end, inside
from support.scheduler import Deadlock
from support.sharing import small_files
from support.stepped import simulated

# Of the seeds; drawn apart, so that the others are what they always were.
LEVELS_SHARE = 0.3
NO_EXCHANGE_SHARE = 0.25  # file systems that cannot exchange two names
RULES_SHARE = 0.3  # jobs that keep more than the newest steps
FOUR_SHARE = 0.1  # jobs of four ranks
REPLAY = ".venv/bin/python tests/sim/campaign.py --seeds 1"
SHARED = ("same", "step", "serial")
SHARES_SHARE = 0.4  # jobs with weights that change rarely
BESIDE_SHARE = 0.5  # rewinds that do not wait for the saves before them
LOST_SHARE = 0.15  # recoveries before which a step has lost a file
OPERATIONS = (
    "sync", "sync_dir", "rename", "exchange", "mkdir", "unlink", "rmdir", "write_file", "read_file",
    "open_write", "open_read", "truncate",
)  # fmt: skip
# What has to have happened in a campaign, or it has tested too little.
FAULTS = (
    "short", "reordered", "eio", "enospc", "torn", "lost name", "lost sector",
    "misdirected", "rot", "power", "half a file", "forgotten",
    *(f"injected {each}" for each in OPERATIONS),
    "death", "stall", "came back late", "kill of all", "power loss", "refused step", "no exchange",
    "linked", "rewind", "refused rewind", "rewind beside a save", "lost file", "no room",
)  # fmt: skip


@dataclass
class Report:
    """What became of a seed. options: of the command that replays it."""

    seed: int
    options: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    digest: str = ""  # of the schedule
    schedule: list[str] = field(default_factory=list)  # everything that happened, in order

    def wrong(self, what: str) -> None:
        self.violations.append(what)
        self.trace.append(f"VIOLATION {what}")

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, schedule {self.digest}", *self.trace]
        return "\n  ".join(lines) + f"\nreplay it: {REPLAY}{self.options} --first {self.seed}"


@dataclass(frozen=True)
class Action:
    """What every rank of a job does next."""

    kind: str  # "save", "rewind", "restore"
    step: int = 0
    serial: int = 0
    wait: bool = True


class Seed:
    """Runs one seed."""

    def __init__(self, report: Report, *, shares: bool = False) -> None:
        """shares: whether it has weights that change rarely, whatever the seed says."""
        self.report = report
        seed = report.seed
        self._random = random.Random(seed)
        self._fs = SimFs(seed)
        chance = self._random
        self._weather = {
            kind: chance.random() < 0.5
            for kind in (
                "short_io",
                "eio",
                "slow",  # nobody asks for it: how long a transfer takes, the scheduler decides
                "torn",
                "misdirected",
                "capacity",
                "injected",
                "rot",
            )
        }
        self._keep: int | Keep | None = chance.choice((None, 1, 1, 2, 2, 3))
        rules = random.Random(seed * 31 + 35)
        if rules.random() < RULES_SHARE:
            self._keep = best_of(rules, self._keep)
        io = small(copy_threads=1, reuse_files=chance.random() < 0.75)["io"]
        self._options: dict[str, Any] = {"keep": self._keep, "io": io}
        self._has_levels = random.Random(seed * 31 + 11).random() < LEVELS_SHARE
        if self._has_levels:
            self._options = {
                "io": io,
                "levels": _two_levels(random.Random(seed * 31 + 12), self._keep),
            }
        self._exchanges = random.Random(seed * 31 + 13).random() >= NO_EXCHANGE_SHARE
        self._shares = shares or random.Random(seed * 31 + 17).random() < SHARES_SHARE
        self._alike = (*SHARED, "base") if self._shares else SHARED
        self._oracle = Oracle(self._keep, self._has_levels)
        self._sizes = (chance.choice((1, 1, 2, 2, 3)), chance.choice((1, 2, 3)))
        if random.Random(seed * 31 + 15).random() < FOUR_SHARE:
            self._sizes = (4, self._sizes[1])
        self._serial = 0
        self._step = 0
        self._tokens = 0
        self._late: Job | None = None
        self._corrupt_found = 0
        self._apart = random.Random(seed * 31 + 41)

    def run(self) -> None:
        self._refuse_exchange()
        self._say(f"keep {self._keep} sizes {self._sizes} {self._options} {self._weather}")
        self._say(f"exchanges names: {self._exchanges}")
        try:
            for _ in range(self._random.randint(2, 4)):
                self._train()
                self._recover()
            self._end_late()
            self._recover()
            self._fill_up()
        finally:
            fired = dict(self._fs.fired)
            if not self._exchanges:
                self.report.counts["no exchange"] = fired.pop("injected exchange", 0)
            self.report.counts.update(fired)
            self.report.counts["committed"] = self._oracle.committed

    def _refuse_exchange(self) -> None:
        """Whenever other faults have been set: they forget this one."""
        if not self._exchanges:
            self._fs.fail_next("exchange", errno.EINVAL, 1 << 30, 0)

    def _say(self, line: str) -> None:
        self.report.trace.append(line)

    def _job(self, size: int) -> Job:
        self._tokens += 1
        return Job(self._fs, size, f"{self._tokens:08x}", **self._options)

    # -- a job under faults ----------------------------------------------------------------

    def _train(self) -> None:
        chance = self._random
        size = self._sizes[chance.random() < 0.2]
        actions = self._actions(chance.randint(2, 5))
        job = self._job(size)
        crash = chance.choice(("end", "power", "power", "power", "kill", "die", "stall", "late"))
        self._say(f"job of {size}: {crash}, {actions}")
        self._stir()
        self._doom(job, crash, len(actions))
        if self._late is not None:
            job.hub.wake(self._late.lives[-1], chance.randint(1, 60))
        done: set[int] = set()
        job.start(lambda rank: self._take_part(job, rank, actions, done))
        outcomes = job.end(leave_stalled=crash == "late")
        self._say(f"outcomes {[str(each)[:300] for each in outcomes]}")
        self._count_lives(job)
        self._end_late()
        if crash == "late" and any(life.is_stalled for life in job.lives):
            self._late = job
        else:
            job.close()
        if crash == "power":
            self._fs.crash()
            self.report.counts["power loss"] += 1

    def _actions(self, count: int) -> list[Action]:
        chance = self._random
        actions = [Action("restore")] if chance.random() < 0.7 else []
        for _ in range(count):
            self._serial += 1
            if chance.random() < 0.08 and self._step > 1:
                self._step = max(1, self._step - chance.randint(0, 2))
                waits = self._apart.random() >= BESIDE_SHARE
                actions.append(Action("rewind", self._step, self._serial, waits))
                continue
            self._step += chance.choice((0, 1, 1, 1, 2)) if self._step else 1
            actions.append(Action("save", self._step, self._serial, chance.random() < 0.7))
        return actions

    def _stir(self) -> None:
        """Begin the faults of a job."""
        chance, weather = self._random, self._weather
        free = chance.randint(0, 150_000)
        self._fs.set_faults(
            chance.getrandbits(60),
            short_io=0.3 * weather["short_io"],
            eio=chance.choice((0.005, 0.05)) * weather["eio"],
            torn=0.5 * weather["torn"],
            misdirected=0.05 * weather["misdirected"],
            capacity=used_bytes(self._fs, "") + free if weather["capacity"] else None,
        )
        self._refuse_exchange()
        if weather["injected"]:
            for operation in chance.sample(OPERATIONS, chance.randint(1, 3)):
                code = chance.choice((errno.EIO, errno.ENOSPC, errno.EROFS))
                self._fs.fail_next(operation, code, chance.randint(1, 2), chance.randint(0, 12))

    def _doom(self, job: Job, crash: str, saves: int) -> None:
        chance = self._random
        life = job.lives[chance.randrange(job.size)]
        at = chance.randint(1, 25 * saves)
        if crash == "power":
            self._fs.cut_power(chance.randint(0, 20 * saves * job.size))
        elif crash == "kill":
            life.dies_with_all = True
            life.dies_at = at
        elif crash == "die":
            life.dies_at = at
        elif crash == "stall":
            life.stalls = (at, chance.randint(1, 50))
        elif crash == "late" and job.size > 1 and self._late is None:
            job.lives[-1].stalls = (at, None)

    def _count_lives(self, job: Job) -> None:
        dead = sum(life.is_dead for life in job.lives)
        together = any(life.dies_with_all for life in job.lives)
        self.report.counts["kill of all" if together else "death"] += bool(dead)
        self.report.counts["stall"] += sum(life.has_stalled for life in job.lives)

    def _end_late(self) -> None:
        """A rank of an earlier job comes back, if it has not yet, and ends."""
        if self._late is not None:
            self._say(f"late outcomes {[str(each)[:300] for each in self._late.end()]}")
            self._late.close()
            self._late = None
            self.report.counts["came back late"] += 1

    def _take_part(self, job: Job, rank: int, actions: list[Action], done: set[int]) -> str:
        """What a rank does in a job under faults: all of it, whatever fails, unless it dies."""
        told: list[str] = []
        saves: list[tuple[Action, Save]] = []

        def settle() -> None:
            for action, save in saves:
                self._settle(action, save, told)
            saves.clear()

        for action in actions:
            try:
                if action.kind == "save":
                    self._oracle.begin(action.step, action.serial, job.size)
                    state = content(rank, action.step, action.serial, shares=self._shares)
                    saves.append(
                        (
                            action,
                            job.ckpts[rank].save(
                                action.step, state, metrics=metrics_of(action.step)
                            ),
                        )
                    )
                    if action.wait:
                        settle()
                elif action.kind == "rewind":
                    if action.wait:
                        settle()
                    self._rewind(job, rank, action, is_beside=bool(saves))
                else:
                    self._restore(job, rank)
            except Died:
                raise
            except StateholdError as error:
                told.append(f"{action.kind} {action.step}: {type(error).__name__}")
                if action.kind == "restore":  # as in a script: nothing is saved over what is there
                    raise
        settle()
        return "; ".join(told) or "well"

    def _rewind(self, job: Job, rank: int, action: Action, *, is_beside: bool) -> None:
        self._oracle.doubt(action.step, action.serial)
        try:
            job.ckpts[rank].rewind(action.step)
        except StepNotFoundError:
            self.report.counts["refused rewind"] += 1
            raise
        self._oracle.forget(action.step, action.serial)
        self.report.counts["rewind beside a save" if is_beside else "rewind"] += 1

    def _settle(self, action: Action, save: Save, told: list[str]) -> None:
        try:
            save.wait("committed", HANG_S)
        except WaitTimeout as error:
            self.report.wrong(f"hang: {error}")
        except StateholdError as error:
            told.append(
                f"save {action.step}.{action.serial}: {type(error).__name__} {error.summary}"
            )
        else:
            self._oracle.promise(action.step, action.serial)
            self.report.counts["linked"] += save.stats.linked_bytes > 0
            told.append(f"save {action.step}.{action.serial} committed")

    def _restore(self, job: Job, rank: int) -> None:
        state = blank(shares=self._shares)
        step = job.ckpts[rank].restore(state, only=self._alike)
        if step is not None:
            for wrong in self._oracle.judge_content(step, rank, state, self._alike):
                self.report.wrong(f"a restore under faults: {wrong}")

    # -- without faults --------------------------------------------------------------------

    def _recover(self) -> None:
        """Restore all there is and save once more, while nothing else goes wrong."""
        chance, fs = self._random, self._fs
        fs.set_faults()
        self._refuse_exchange()
        if self._weather["rot"] and chance.random() < 0.5:
            self._rot()
        self._oracle.look(fs)
        if self._apart.random() < LOST_SHARE:
            self._lose_a_file()
            self._prune()
        size = self._sizes[chance.random() < 0.3]
        job = self._job(size)
        visible = job.ckpts[0].steps()
        near = inside(job.ckpts[0]).levels.store.steps()
        self._oracle.far = {step for step in visible if step not in near}
        self.report.counts["only far"] += len(self._oracle.far)
        self._look_at_second_level()
        for wrong in self._oracle.judge(visible):
            self.report.wrong(wrong)
        self._say(f"steps {visible}, suspect {sorted(self._oracle.suspect)}")
        self._serial += 2
        self._step = max([self._step, *visible, *near])  # a damaged one counts for the order
        job.start(lambda rank: self._look_and_go_on(job, rank, visible, self._step, self._serial))
        outcomes = job.end()
        job.close()
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, Exception):
                self.report.wrong(
                    f"without faults, rank {rank}: {type(outcome).__name__}: {outcome}"
                )
        self._step += 2
        self.report.counts["recoveries"] += 1

    def _fill_up(self) -> None:
        """Save where there is little room: a save that finds none takes none.

        A job of one rank. Of several, one may come late with its part: the next job clears that.
        """
        chance, fs = random.Random(self.report.seed * 31 + 37), self._fs
        size = 1
        for _ in range(3):
            self._save_once(size)  # it clears what earlier jobs have left
            before = used_bytes(fs, "")
            fs.set_faults(capacity=before + chance.randrange(40_000))
            self._refuse_exchange()
            outcomes = self._save_once(size, before)
            if "committed" not in outcomes:
                self.report.counts["no room"] += 1
                self._check_room(before, outcomes)
            fs.set_faults()
            self._refuse_exchange()

    def _save_once(self, size: int, before: int | None = None) -> list[Any]:
        """A job of one save. before: the bytes on the disk, to be compared at once."""
        self._step, self._serial = self._step + 1, self._serial + 1
        step, serial = self._step, self._serial
        job = self._job(size)

        def program(rank: int) -> str:
            self._oracle.begin(step, serial, size)
            state = content(rank, step, serial, shares=self._shares)
            try:
                save = job.ckpts[rank].save(step, state, metrics=metrics_of(step))
                save.wait("committed", HANG_S)
            except StateholdError as error:
                inside(job.ckpts[rank]).pipeline.drain()
                if before is not None:
                    self._check_room(before, error)
                return type(error).__name__
            self._oracle.promise(step, serial)
            return "committed"

        job.start(program)
        outcomes = job.end()
        job.close()
        return outcomes

    def _check_room(self, before: int, why: object) -> None:
        if (now := used_bytes(self._fs, "")) > before:
            self.report.wrong(f"{why}: it has left {now - before} bytes on a full disk")

    def _look_at_second_level(self) -> None:
        """Its steps are whole by themselves: what is there was compared on the way."""
        if not self._has_levels:
            return
        alone = checkpointer_on(self._fs, FAR, coordination="none", **SMALL)
        for step in alone.steps():
            state = blank(shares=self._shares)
            self.report.counts["copied"] += 1
            try:
                alone.restore(state, step, only=self._alike)
            except CorruptionError as error:
                if step not in self._oracle.suspect:
                    self.report.wrong(f"step {step} is damaged at the second level: {error}")
            else:
                if state["serial"] not in self._oracle.begun.get(step, {}):
                    self.report.wrong(f"step {step} of the second level was never saved")
        end(alone)

    def _rot(self) -> None:
        """Change a byte of some file of some committed step."""
        root = self._random.choice((RUN, FAR)) if self._has_levels else RUN
        names = [name for name, is_dir in self._listed(root) if is_dir and len(name) == 17]
        if not names:
            return
        folder = f"{root}/{self._random.choice(names)}"
        if not (files := self._listed(folder)):  # the step has lost them all
            return
        path = f"{folder}/{self._random.choice(files)[0]}"
        if size := self._fs.stat_bytes(path):
            self._fs.corrupt(path, self._random.randrange(size), 1 << self._random.randrange(8))
            self._say(f"rot in {path}")

    def _lose_a_file(self) -> None:
        """A file of a committed step is gone, or cut: somebody has cleared up."""
        chance, fs = self._apart, self._fs
        found = [step for step in self._listed(RUN) if step[1] and len(step[0]) == 17]
        if not found:
            return
        name = chance.choice(found)[0]
        if not (files := self._listed(f"{RUN}/{name}")):
            return
        path = f"{RUN}/{name}/{chance.choice(files)[0]}"
        content = fs.read_file(path, fs.stat_bytes(path) or 0)
        fs.unlink(path)
        if chance.random() < 0.5:
            fs.write_file(path, content[: len(content) // 2])
        self._oracle.suspect.add(int(name[5:]))
        self.report.counts["lost file"] += 1
        self._say(f"lost {path}")

    def _prune(self) -> None:
        """What `statehold prune` does: the rules choose among the steps that have their files."""
        store = Store(self._fs, RUN, keep=self._keep, reuse=False)
        before = whole_steps(store)
        store.retain(among=before)
        if before[-1:] != whole_steps(store)[-1:]:
            self.report.wrong(f"prune has deleted the newest of {before}")

    def _listed(self, path: str) -> list[tuple[str, bool]]:
        return self._fs.listdir(path) if self._fs.is_dir(path) else []

    def _look_and_go_on(
        self, job: Job, rank: int, visible: list[int], step: int, serial: int
    ) -> None:
        ckpt = job.ckpts[rank]
        good = [each for each in visible if self._is_good(job, rank, each)]
        self._restore_newest(job, rank, visible, good)
        for ahead in (1, 2):
            self._oracle.begin(step + ahead, serial + ahead - 2, job.size)
            state = content(rank, step + ahead, serial + ahead - 2, shares=self._shares)
            metrics = metrics_of(step + ahead)
            save = ckpt.save(step + ahead, state, metrics=metrics).wait("committed", HANG_S)
            self.report.counts["linked"] += save.stats.linked_bytes > 0
            self._oracle.promise(step + ahead, serial + ahead - 2)

    def _is_good(self, job: Job, rank: int, step: int) -> bool:
        state = blank(shares=self._shares)
        names = self._alike if self._oracle.ranks_of(step) != {job.size} else tuple(state)
        try:
            job.ckpts[rank].restore(state, step, only=names)
        except CorruptionError as error:
            self.report.counts["refused step"] += 1
            if step not in self._oracle.suspect:
                self.report.wrong(f"step {step} is damaged, rank {rank}: {error}")
            return False
        for wrong in self._oracle.judge_content(step, rank, state, names):
            self.report.wrong(wrong)
        self.report.counts["restored"] += 1
        return True

    def _restore_newest(self, job: Job, rank: int, visible: list[int], good: list[int]) -> None:
        state = blank(shares=self._shares)
        try:
            found = job.ckpts[rank].restore(state, only=self._alike)
        except CorruptionError:
            # Parts that only other names are in may be damaged.
            if good and not set(visible) & self._oracle.suspect:
                self.report.wrong(f"no step is intact, but {good} are")
            return
        if found is None and visible:
            self.report.wrong(f"restored nothing, though there are {visible}")
        if found is not None and good and found < max(good):
            self.report.wrong(f"restored {found}, though {max(good)} is intact")


def _two_levels(chance: random.Random, keep: int | Keep | None) -> list[Directory]:
    far = {"every": chance.choice((1, 1, 2, 3)), "keep": chance.choice((None, keep))}
    return [Directory(path=RUN, name="near", keep=keep), Directory(path=FAR, name="far", **far)]


def used_bytes(fs: SimFs, path: str) -> int:
    total = 0
    for name, is_dir in fs.listdir(path or "/"):
        inner = f"{path}/{name}"
        total += used_bytes(fs, inner) if is_dir else fs.stat_bytes(inner) or 0
    return total


def run_seed(seed: int) -> Report:
    """Run one seed; what goes wrong is in the report."""
    return _run(Report(seed))


def run_shared(seed: int) -> Report:
    """The same, of a job whose steps share files."""
    return _run(Report(seed, options=" --shared"), shares=True)


def _run(report: Report, *, shares: bool = False) -> Report:
    try:
        with small_files(), simulated(report.seed) as turns:
            Seed(report, shares=shares).run()
    except (Exception, Deadlock) as error:
        report.wrong(f"{type(error).__name__}: {error}")
    report.digest, report.schedule = turns.digest, turns.trace
    return report
