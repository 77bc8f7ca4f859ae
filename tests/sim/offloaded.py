"""One seed of a trainer with an offloaded optimizer: faults, losses of power, and what is left.

A job trains and saves on a simulated disk that has the paths of the optimizer and the run. What a
step must hold is known beforehand (support.offload_trainer), and is compared bit for bit. Within a
job, an update that fails is followed by a restore, as the error asks for. After each job the faults
end, and a new one looks at every step.

    promised    steps that a save has called committed, and that keep= has not retired since
    suspect     steps with bytes that rot has changed: these may be refused

The seed also decides in which order threads go on, and in which order transfers end (stepped).
"""

from __future__ import annotations

import errno
import random
from typing import Any

from sim.seeds import Report, used_bytes
from statehold import Save, offload
from statehold.errors import CorruptionError, StateholdError, UsageError, WaitTimeout
from support.faults import small
from support.in_memory import SimFs, checkpointer_on
from support.offload_trainer import SUBGROUP, Trainer
from support.scheduler import Deadlock
from support.stepped import simulated

RUN, PATHS = "/run", ("/opt/a", "/opt/b")
SMALL = small(copy_threads=1)
HANG_S = 6000.0
OPERATIONS = (
    "sync", "sync_dir", "rename", "mkdir", "unlink", "link", "write_file", "read_file",
    "open_write", "open_read", "read", "write",
)  # fmt: skip
# What has to have happened in a campaign, or it has tested too little.
FAULTS = (
    "short", "eio", "enospc", "lost name", "power", "power loss", "rot", "refused step",
    "failed update", "restored in a job", "given up", "read again", "linked", "committed",
    *(f"injected {each}" for each in OPERATIONS),
)  # fmt: skip


class Offloaded:
    """Runs one seed."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self._random = chance = random.Random(report.seed)
        self._fs = SimFs(report.seed)
        for path in ("/opt", *PATHS):
            self._fs.mkdir(path)
        for path in ("/opt", "/"):
            self._fs.sync_dir(path)
        self._keep = chance.choice((None, 1, 2))
        self._tiers: list[Any] = list(map(offload.Path, PATHS[: chance.choice((1, 2))]))
        if chance.random() < 0.3:
            self._tiers.insert(0, offload.Host(2 * SUBGROUP))
        self._weather = {
            kind: chance.random() < 0.5
            for kind in ("short_io", "eio", "capacity", "injected", "rot")
        }
        self._promised: set[int] = set()
        self._begun: set[int] = set()
        self._suspect: set[int] = set()

    def run(self) -> None:
        try:
            for _ in range(self._random.randint(1, 3)):
                self._job()
                self._recover()
        finally:
            self.report.counts.update(self._fs.fired)

    def _say(self, line: str) -> None:
        self.report.trace.append(line)

    def _trainer(self) -> Trainer:
        return Trainer(
            lambda: checkpointer_on(self._fs, RUN, keep=self._keep, **SMALL), self._tiers, self._fs
        )

    # -- a job under faults ----------------------------------------------------------------

    def _job(self) -> None:
        chance, fs = self._random, self._fs
        loses_power = chance.random() < 0.6
        self._stir()
        if loses_power:
            fs.cut_power(chance.randint(0, 250))
        trainer, saves = None, list[tuple[int, Save]]()
        try:
            trainer = self._trainer()
            self._say(f"restored {trainer.restore()}")
            for _ in range(chance.randint(2, 6)):
                self._next(trainer, saves)
        except UsageError as error:
            self.report.wrong(f"a call that no program would mend: {error}")
        except StateholdError as error:
            self._say(f"the job ends: {type(error).__name__}: {error.summary}")
        for step, save in saves:
            self._settle(step, save)
        if trainer is not None:
            stats = trainer.optimizer.stats
            self.report.counts["given up"] += sum(bool(path.given_up) for path in stats.paths)
            self.report.counts["read again"] += stats.misses
            self._end(trainer)
        if loses_power:
            fs.crash()
            self.report.counts["power loss"] += 1

    def _stir(self) -> None:
        chance, weather, fs = self._random, self._weather, self._fs
        free = chance.randint(200_000, 900_000)
        fs.set_faults(
            chance.getrandbits(60),
            short_io=0.3 * weather["short_io"],
            eio=chance.choice((0.002, 0.02)) * weather["eio"],
            capacity=used_bytes(fs, "") + free if weather["capacity"] else None,
        )
        if weather["injected"]:
            for operation in chance.sample(OPERATIONS, chance.randint(1, 3)):
                code = chance.choice((errno.EIO, errno.ENOSPC, errno.EROFS))
                often = operation in {"read", "write", "open_read", "open_write"}
                skip = chance.randint(0, 60 if often else 8)
                fs.fail_next(operation, code, chance.randint(1, 2), skip)

    def _next(self, trainer: Trainer, saves: list[tuple[int, Save]]) -> None:
        """One update, and sometimes a save; an update that fails is made good by a restore."""
        try:
            trainer.train()
        except UsageError:
            raise
        except StateholdError as error:
            self._say(f"update {trainer.update + 1}: {type(error).__name__}: {error.summary}")
            self.report.counts["failed update"] += 1
            for step, save in saves:
                self._settle(step, save)
            saves.clear()
            if trainer.restore() is None:
                raise StateholdError("there is no step to go on from") from error
            self.report.counts["restored in a job"] += 1
            return
        if self._random.random() < 0.7:
            self._begun.add(trainer.update)
            saves.append((trainer.update, trainer.ckpt.save(trainer.update, trainer.state)))
            if self._random.random() < 0.3:
                self._settle(*saves.pop())

    def _settle(self, step: int, save: Save) -> None:
        try:
            save.wait("committed", HANG_S)
        except WaitTimeout as error:
            self.report.wrong(f"hang: {error}")
        except StateholdError as error:
            self._say(f"save {step}: {type(error).__name__}: {error.summary}")
        else:
            self._promised.add(step)
            self.report.counts["committed"] += 1
            self.report.counts["linked"] += save.stats.linked_bytes > 0

    def _end(self, trainer: Trainer) -> None:
        try:
            trainer.close()
        except StateholdError as error:
            self._say(f"close: {type(error).__name__}: {error.summary}")

    # -- without faults --------------------------------------------------------------------

    def _recover(self) -> None:
        self._fs.set_faults()
        if self._weather["rot"] and self._random.random() < 0.5:
            self._suspect |= self._rot()
        suspect = self._suspect
        trainer = self._trainer()
        visible = trainer.ckpt.steps()
        self._say(f"steps {visible}, promised {sorted(self._promised)}, suspect {sorted(suspect)}")
        for step in sorted(self._promised)[-(self._keep or len(self._promised)) :]:
            newer = [each for each in visible if each > step]
            if step not in {*visible, *suspect} and len(newer) < (self._keep or len(visible) + 1):
                self.report.wrong(f"step {step} was committed and is not there")
        good = [step for step in visible if self._is_good(trainer, step)]
        self._promised &= set(visible)
        if good:
            found = trainer.restore(max(good))
            self._say(f"goes on from {found}")
            trainer.ckpt.rewind(max(good))  # a newer step may be there, too damaged to be listed
            trainer.train()
            self._begun.add(trainer.update)
            self._settle(trainer.update, trainer.ckpt.save(trainer.update, trainer.state))
            trainer.train()
            if wrong := trainer.wrong():
                self.report.wrong(f"after the next updates: {wrong}")
        trainer.close()

    def _is_good(self, trainer: Trainer, step: int) -> bool:
        try:
            trainer.restore(step)
        except CorruptionError as error:
            self.report.counts["refused step"] += 1
            if step not in self._suspect:
                self.report.wrong(f"step {step} is damaged: {error}")
            return False
        if step not in self._begun or trainer.update != step:
            self.report.wrong(f"step {step} holds update {trainer.update}")
        if wrong := trainer.wrong():
            self.report.wrong(f"step {step}: {wrong}")
        return True

    def _rot(self) -> set[int]:
        """Change a byte of a file of some step; returns the steps that have this file."""
        fs = self._fs
        steps = [name for name, is_dir in fs.listdir(RUN) if is_dir] if fs.is_dir(RUN) else []
        if not steps:
            return set()
        folder = f"{RUN}/{self._random.choice(steps)}"
        files = fs.listdir(folder)
        if not files:
            return set()
        path = f"{folder}/{self._random.choice(files)[0]}"
        before = set(fs.damaged)
        if size := fs.stat_bytes(path):
            fs.corrupt(path, self._random.randrange(size), 1 << self._random.randrange(8))
        self._say(f"rot in {path}")
        hit = {each for each in {path, *fs.damaged} - before if each.startswith(f"{RUN}/step-")}
        return {int(each.removeprefix(f"{RUN}/step-")[:12]) for each in hit}


def run_offloaded(seed: int) -> Report:
    """Run one seed; what goes wrong is in the report."""
    report = Report(seed, options=" --offloaded")
    try:
        with simulated(seed) as turns:
            Offloaded(report).run()
    except (Exception, Deadlock) as error:
        report.wrong(f"{type(error).__name__}: {error}")
    report.digest, report.schedule = turns.digest, turns.trace
    return report
