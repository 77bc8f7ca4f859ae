"""A job of a plan: its Checkpointers, whose directories lie on the disk that loses power.

The ranks are threads of this process. They meet as the plan's kind says: in memory, through a store
as that of torch.distributed, or through files on that disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import statehold
from powerloss.content import Contents, Found, State
from powerloss.offloaded import Offloaded
from powerloss.plans import Plan
from statehold import Checkpointer, Directory, Memory
from statehold._core import Fs
from statehold.checkpoint.levels.specs import Level
from statehold.ranks.board import Board, DirectoryBoard, StoreBoard
from statehold.ranks.joining import PEERS_NAME
from statehold.ranks.membership import Membership
from statehold.ranks.peers import Peers
from support.faults import small
from support.in_memory import MemoryBoard, checkpointer_on
from support.in_memory.board import MemoryStore
from support.ranks import Ranks


class Where:
    """Where the places of a plan are. memory: a directory on a tmpfs. paths: of its optimizer."""

    def __init__(self, plan: Plan, root: Path, memory: Path) -> None:
        self.run = str(root / "run")
        self.far = str(root / "far")
        self.memory = str(memory)
        self.paths = [str(root / f"path-{index}") for index in range(plan.paths)]
        self.places = {name: str(root / name) for name in plan.keeps}


def options_of(plan: Plan, where: Where, agent: bool = False) -> dict[str, Any]:
    """What a Checkpointer of this plan is given."""
    options: dict[str, Any] = small(reuse_files=plan.reuse, backend=plan.backend)
    levels = _levels(plan, where, agent)
    return options | ({"levels": levels} if levels else {"keep": plan.keep})


def _levels(plan: Plan, where: Where, agent: bool) -> list[Level]:
    if plan.kind == "levels":
        return [Directory(keep=plan.keep), Directory(path=where.far, keep=2, name="far")]
    memory = Memory(path=where.memory, agent=agent)
    if plan.kind in ("memory", "agent"):
        return [memory, Directory(keep=plan.keep)]
    if plan.kind == "memory-path":
        return [memory, Directory(path=where.far, keep=plan.keep)]
    return []


class Restoring(Ranks):
    """The Checkpointers of all ranks, each with a thread of its own, and what they restore."""

    def __init__(self, fs: Fs, plan: Plan, run: str, paths: Sequence[str], **options: Any) -> None:
        self._plan = plan
        super().__init__(fs, plan.ranks, run, **options)
        self._states: Contents | Offloaded = Contents(plan, self.ckpts)
        if plan.kind == "offload":
            self._states = Offloaded(self.ckpts[0], paths, plan.has_host)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._states.close()

    def restore(self, step: int | None = None) -> list[Found]:
        """What each rank restores: a step, or the newest."""
        return self.each(lambda rank: self._states.restore(rank, step))


class Job(Restoring):
    """A job that saves."""

    def __init__(self, fs: Fs, plan: Plan, where: Where) -> None:
        super().__init__(fs, plan, where.run, where.paths, **options_of(plan, where))

    def _opened(self, options: dict[str, Any]) -> list[Checkpointer]:
        timeout_s = options.pop("peer_timeout_s")
        if self.size == 1:
            return [statehold.Checkpointer(self.run, **options)]
        board = self._boards()
        peers = [
            Peers(board(), Membership(rank, self.size), timeout_s) for rank in range(self.size)
        ]
        options["peer_timeout_s"] = timeout_s
        return [checkpointer_on(self.fs, self.run, each, **options) for each in peers]

    def _boards(self) -> Callable[[], Board]:
        if self._plan.kind == "ranks":
            memory = MemoryBoard()
            return lambda: memory
        if self._plan.kind == "ranks-store":
            store = MemoryStore()
            return lambda: StoreBoard(store, self.run)
        return lambda: DirectoryBoard(f"{self.run}/{PEERS_NAME}")

    def state(self, rank: int, step: int, serial: int) -> State:
        """What a rank saves."""
        return self._states.state(rank, step, serial)

    def finish(self) -> None:
        """Close all of them; raises what close() raises."""
        self.each(lambda rank: self.ckpts[rank].close())


class Readers(Restoring):
    """The ranks of a job that only looks at the directory of one place."""

    def __init__(self, fs: Fs, plan: Plan, path: str) -> None:
        super().__init__(fs, plan, path, (), keep=None)
