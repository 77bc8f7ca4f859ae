"""What runs on the disk until its power goes off: saves of a plan, and what they reported.

Runs in a process of its own, to its end; the power goes off afterwards, at positions of the log.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from powerloss.content import blank, content
from powerloss.history import History
from powerloss.jobs import Job, Where, options_of
from powerloss.linux import die_with_parent
from powerloss.plans import Plan
from statehold import Checkpointer
from statehold.reading.places import file_system
from support.agents import said, steps_in, wait_no_agent
from support.faults import DEADLINE_S, must
from support.sharing import small_files


class Workload:
    """One session's saves. serial: of the last save, or rewind; first: what they count from."""

    def __init__(self, plan: Plan, where: Where, history: History, first: int = 0) -> None:
        self.plan = plan
        self.where = where
        self.history = history
        self.serial = first
        self.linked = 0  # saves that gave files of earlier steps second names
        self._chance = random.Random(plan.seed)
        self._all = tuple(plan.keeps)
        # Where the first level is memory, a commit promises nothing of the disk.
        self._at_commit = () if plan.is_in_memory else ("run",)

    def run(self) -> None:
        if self.plan.kind == "processes":
            self._processes()
        elif self.plan.kind == "agent":
            for _ in range(2):
                self._killed()
        else:
            files = small_files() if self.plan.shares else nullcontext()
            with files, Job(file_system(), self.plan, self.where) as job:
                self._train(job)
                job.finish()
            must(self.linked or not self.plan.shares, "no step shares files")

    # -- a job of threads ------------------------------------------------------------------

    def _train(self, job: Job) -> None:
        step = 0
        for _ in range(self.plan.saves):
            step = self.save(job, self._next(job, step))
            if self.plan.has_levels and self._chance.random() < 0.5:
                self.flush(job, step)

    def _next(self, job: Job, step: int) -> int:
        """Which step comes after this one."""
        if step and self.plan.has_resaves and self._chance.random() < 0.5:
            return step
        if self.plan.kind == "rewind":
            older = job.ckpts[0].steps()[:-1]
            if older and self._chance.random() < 0.4:
                return self._rewind(job, self._chance.choice(older)) + 1
        return step + self._chance.randint(1, 3)

    def save(self, job: Job, step: int) -> int:
        """Save a step on all ranks, in some plans also the next, before the first is committed;
        returns the newest."""
        steps = [step, step + 1] if self.plan.has_overlap else [step]
        serials = [self._begin(each) for each in steps]

        def act(rank: int) -> None:
            ckpt = job.ckpts[rank]
            begun = []
            for each, serial in zip(steps, serials, strict=True):
                ckpt.gate()
                begun.append(ckpt.save(each, job.state(rank, each, serial)))
            for save, serial in zip(begun, serials, strict=True):
                save.wait("committed", DEADLINE_S)
                self.history.note("promise", self._at_commit, save.step, serial)
                self.linked += save.stats.linked_bytes > 0
                must(save.stats.linked_bytes or not self.plan.paths, "no file was linked")

        job.each(act)
        return steps[-1]

    def _begin(self, step: int) -> int:
        self.serial += 1
        self.history.note("begin", self._all, step, self.serial, self.plan.ranks)
        return self.serial

    def _rewind(self, job: Job, step: int) -> int:
        """Give up what is newer than a step; returns the newest that is left."""
        self.serial += 1
        self.history.note("doubt", self._all, step, self.serial)
        job.each(lambda rank: job.ckpts[rank].rewind(step))
        self.history.note("forget", self._all, step, self.serial)
        return max(job.ckpts[0].steps(), default=0)

    def flush(self, job: Job, step: int) -> None:
        """Bring the newest step to all levels, and note that it is there."""
        job.each(lambda rank: job.ckpts[rank].flush(DEADLINE_S))
        told = job.ckpts[0].levels()
        must(all(level.newest == step and level.error is None for level in told), told)
        self.history.note("promise", self._all, step, self.serial)

    # -- ranks that are processes ----------------------------------------------------------

    def _processes(self) -> None:
        steps = [1 + 2 * index for index in range(self.plan.saves)]
        serials = [self._begin(step) for step in steps]
        pids = [_forked(self._rank, rank, steps, serials) for rank in range(self.plan.ranks)]
        for pid in pids:
            _, status = os.waitpid(pid, 0)
            must(status == 0, f"a rank ended with {os.waitstatus_to_exitcode(status)}")

    def _rank(self, rank: int, steps: Sequence[int], serials: Sequence[int]) -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(self.plan.ranks)}
        options = options_of(self.plan, self.where)
        run = self.where.run
        together = {"coordination": "directory", "peer_timeout_s": DEADLINE_S}
        with Checkpointer(run, **options, **together) as ckpt:
            for step, serial in zip(steps, serials, strict=True):
                state = content(self.plan, rank, step, serial)
                ckpt.save(step, state).wait("committed", DEADLINE_S)
                self.history.note("promise", self._at_commit, step, serial)

    # -- a trainer that is killed ----------------------------------------------------------

    def _killed(self) -> None:
        """Train, die, and let the agent bring what is in memory to the disk."""
        begun = steps_in(Path(self.where.memory))
        steps = [(begun[-1] if begun else 0) + 1 + index for index in range(3)]
        serials = [self._begin(step) for step in steps]
        pid = _forked(self._victim, steps, serials)
        _, status = os.waitpid(pid, 0)
        must(os.WIFSIGNALED(status), "the trainer was to be killed")
        wait_no_agent(Path(self.where.run))
        must(f"step {steps[-1]} is committed" in said(Path(self.where.run)), "the agent failed")
        self.history.note("promise", self._all, steps[-1], serials[-1])

    def _victim(self, steps: Sequence[int], serials: Sequence[int]) -> None:
        ckpt = Checkpointer(self.where.run, **options_of(self.plan, self.where, agent=True))
        ckpt.restore(blank(self.plan))
        for step, serial in zip(steps, serials, strict=True):
            state = content(self.plan, 0, step, serial)
            ckpt.save(step, state).wait("committed", DEADLINE_S)
        os.kill(os.getpid(), signal.SIGKILL)


def _forked(act: Callable[..., None], *args: object) -> int:
    """Do that in a process of its own; its number."""
    pid = os.fork()
    if pid == 0:
        in_own_process(act, *args)
    return pid


def in_own_process(act: Callable[..., None], *args: object) -> None:
    """What a fork does to its end; its code is 0 if nothing was raised."""
    code = 1
    try:
        die_with_parent()
        faulthandler.enable()  # SIGABRT ends what hangs, and shows where
        # Two threads of a fork that were the first to use torch's pool got "Invalid thread pool!".
        torch.set_num_threads(1)
        act(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
