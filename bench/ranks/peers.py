"""The checkpoint libraries on several ranks: statehold and torch.distributed.checkpoint (DCP).

Invariants: as in bench/peers, `save` returns when the trainer may continue, and `wait_durable` when
the newest save survives a power cut. So DCP writes into a `.partial` directory. Each rank fsyncs
its files. Rank 0 fsyncs the directory, renames it and fsyncs the parent in the background, where it
also removes the previous step. DCP gets live tensors in one flat dict, and loads in place into it.
The cost of get_state_dict and set_state_dict does not count.
Not here: timing; meeting the other ranks after a wait (measure.py).
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from bench.harness import publish
from bench.peers.base import DEADLINE_S, Finisher
from bench.peers.stager import kept_stager
from bench.ranks.state import RankState
from bench.ranks.task import Task
from statehold import Checkpointer

TITLES = {
    "statehold": "statehold, 4 ranks",
    "statehold-independent": "statehold, 4 programs that are alone",
    "statehold-alone": "statehold, 1 program with 1/4",
    "dcp-1": "DCP save, 1 thread",
    "dcp-2": "DCP save, 2 threads",
    "dcp-async": "DCP async_save, thread",
    "dcp-async-cached": "DCP async_save, thread, cached stager",
    "dcp-process": "DCP async_save, process",
    "dcp-process-shm": "DCP async_save, process, shared memory",
}


class RankPeer(ABC):
    """One library on this rank. All ranks make the same calls."""

    reuses_files = False

    def __init__(self, task: Task, state: RankState) -> None:
        self.task = task
        self.state = state

    @abstractmethod
    def save(self, step: int) -> None:
        """Start saving; waits first for the previous save where the library needs that."""

    @abstractmethod
    def wait_durable(self) -> None:
        """Until what this rank has to do for the newest save is done."""

    def settle(self) -> None:
        """Until nothing runs in the background any more."""
        return

    def statistics(self) -> dict[str, Any]:
        """What the library says about its newest save."""
        return {}

    @abstractmethod
    def restore(self) -> None:
        """Load the newest step into the live state."""

    def close(self) -> None:
        """Stop threads and processes."""
        return


def open_peer(task: Task, state: RankState) -> RankPeer:
    factory = Statehold if task.peer.startswith("statehold") else DCP[task.peer]
    return factory(task, state)


class Statehold(RankPeer):
    """keep=1: from the third save on, the files of the retired step are overwritten."""

    reuses_files = True

    def __init__(self, task: Task, state: RankState) -> None:
        super().__init__(task, state)
        independent = task.peer == "statehold-independent"
        self._checkpointer = Checkpointer(
            task.path / f"alone-{dist.get_rank()}" if independent else task.path / "run",
            keep=1,
            staging_bytes=task.staging_bytes,
            coordination="none" if independent else "auto",
        )
        self._save: Any = None

    def save(self, step: int) -> None:
        self._save = self._checkpointer.save(step, self.state.application_state())

    def wait_durable(self) -> None:
        if self._save is not None:
            self._save.wait("committed", timeout=DEADLINE_S)

    def statistics(self) -> dict[str, Any]:
        return asdict(self._save.stats)

    def restore(self) -> None:
        self._checkpointer.restore(self.state.application_state())

    def close(self) -> None:
        self._checkpointer.close()


class Dcp(RankPeer):
    """dcp.save with a number of writer threads (one file per thread and rank)."""

    threads = 1

    def __init__(self, task: Task, state: RankState) -> None:
        super().__init__(task, state)
        # Of its own: a background save must not meet the trainer's collectives.
        self._group = dist.new_group(backend="gloo")
        self._leads = dist.get_rank() == 0
        self._finisher = Finisher()

    def whole(self) -> dict[str, Any]:
        return {**self.state.tensors(), "progress": self.state.progress}

    def writer(self, step: int) -> FileSystemWriter:
        path = self.task.path / f"step-{step:012d}.partial"
        return FileSystemWriter(path, thread_count=self.threads, sync_files=True)

    def write(self, step: int) -> Callable[[], object] | None:
        """Save; returns what to wait for, or None when it is done."""
        save(self.whole(), storage_writer=self.writer(step), process_group=self._group)
        return None

    def save(self, step: int) -> None:
        self.wait_durable()
        old = [path for path in self.task.path.iterdir() if path.suffix == ""]
        wait = self.write(step)
        self._finisher.finish(self._publish, step, wait)
        for path in old if self._leads else ():
            self._finisher.later(shutil.rmtree, path)

    def _publish(self, step: int, wait: Callable[[], object] | None) -> None:
        """Rank 0's save is done when all ranks have written."""
        if wait is not None:
            wait()
        if self._leads:
            publish(self.task.path / f"step-{step:012d}.partial")

    def wait_durable(self) -> None:
        self._finisher.wait()

    def settle(self) -> None:
        self._finisher.settle()

    def restore(self) -> None:
        newest = max(path for path in self.task.path.iterdir() if path.name.startswith("step-"))
        whole = self.whole()
        load(whole, storage_reader=FileSystemReader(newest), process_group=self._group)
        self.state.progress.update(whole["progress"])

    def close(self) -> None:
        self._finisher.close()


class DcpTwoThreads(Dcp):
    threads = 2


class DcpAsync(Dcp):
    """async_save; `stager` None means the library's default, fresh memory at every save."""

    kind = AsyncCheckpointerType.THREAD
    stager: DefaultStager | None = None

    def write(self, step: int) -> Callable[[], object]:
        saving = async_save(
            self.whole(),
            storage_writer=self.writer(step),
            async_checkpointer_type=self.kind,
            async_stager=self.stager,
            process_group=self._group,
        )
        return saving.result  # type: ignore[union-attr]  # a Future unless staging is asynchronous

    def close(self) -> None:
        super().close()
        if self.stager is not None:
            self.stager.close()


class DcpAsyncCached(DcpAsync):
    def __init__(self, task: Task, state: RankState) -> None:
        super().__init__(task, state)
        self.stager = kept_stager(shared=False)


class DcpProcess(DcpAsync):
    kind = AsyncCheckpointerType.PROCESS


class DcpProcessShared(DcpProcess):
    def __init__(self, task: Task, state: RankState) -> None:
        super().__init__(task, state)
        self.stager = kept_stager(shared=True)


DCP: dict[str, type[Dcp]] = {
    "dcp-1": Dcp,
    "dcp-2": DcpTwoThreads,
    "dcp-async": DcpAsync,
    "dcp-async-cached": DcpAsyncCached,
    "dcp-process": DcpProcess,
    "dcp-process-shm": DcpProcessShared,
}
