"""What a benchmark asks of a checkpoint library, and the durable directory protocol of the peers.

Invariants: `save` returns when the trainer may go on with forward and backward; `wait_mutable` when
the optimizer may change the state; `wait_durable` when the newest save survives a power cut.
Everyone is durable: `FilePeer` writes into a `.partial` directory, fsyncs every file and directory
in it, renames it and fsyncs the parent, which none of the libraries does by itself. Generous to the
peers: that work and the deletion of the previous step run in a background thread, so the trainer
pays for them only when the next save comes before they are done.
Not here: timing.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.harness import publish
from bench.state import TrainingState

DEADLINE_S = 600.0


class Unavailable(Exception):
    """This peer cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """What the benchmark decides for a peer."""

    staging_bytes: int = 1 << 30


class Peer(ABC):
    """One checkpoint library on one run directory, keeping the newest durable step only."""

    reuses_files = False  # the limit of its later saves is overwriting, not fresh files
    reports_staged = False  # `wait_staged` means something else than "save returned"
    staging_bytes = 0  # memory that was asked for, part of the extra memory

    def __init__(self, directory: Path, state: TrainingState, options: PeerOptions) -> None:
        self.directory = directory
        self.state = state
        self.options = options

    def begin(self) -> None:
        """What a trainer calls once before its first step: look for a step to resume from."""
        return

    @abstractmethod
    def save(self, step: int) -> None:
        """Start saving; waits first for the previous save where the library needs that."""

    def wait_staged(self) -> None:
        """Until every byte of the newest save is copied."""
        return

    def wait_mutable(self) -> None:
        """Until the optimizer may change the state (the peers copy before `save` returns)."""
        return

    @abstractmethod
    def wait_durable(self) -> None:
        """Until the newest save is durable and visible."""

    def settle(self) -> None:
        """Until nothing runs in the background any more (deletion of the previous step)."""
        return

    def statistics(self) -> dict[str, Any]:
        """What the library itself says about its newest save."""
        return {}

    @abstractmethod
    def restore(self, warm: bool) -> None:
        """Load the newest step into the tensors of the live state."""

    def step_directory(self) -> Path:
        """Where the newest durable step lies."""
        return max(path for path in self.directory.iterdir() if path.name.startswith("step-"))

    def close(self) -> None:
        """Stop threads and processes."""
        return


class Finisher:
    """A background thread that ends saves, one after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bench-finish")
        self._pending: Future[None] | None = None

    def finish(self, act: Callable[..., None], *args: Any) -> None:
        """What makes the newest save durable."""
        self._pending = self._thread.submit(act, *args)

    def later(self, act: Callable[..., object], *args: Any) -> None:
        """After that, what no save waits for."""
        self._thread.submit(act, *args)

    def wait(self) -> None:
        """Until the newest save is durable."""
        if self._pending is not None:
            self._pending.result(DEADLINE_S)
            self._pending = None

    def settle(self) -> None:
        """Until there is nothing left to do."""
        self.wait()
        self._thread.submit(lambda: None).result(DEADLINE_S)

    def close(self) -> None:
        self.settle()
        self._thread.shutdown()


class FilePeer(Peer):
    """A peer that writes a directory per step: durable, atomic, keep = 1."""

    def __init__(self, directory: Path, state: TrainingState, options: PeerOptions) -> None:
        super().__init__(directory, state, options)
        self._finisher = Finisher()

    @abstractmethod
    def write(self, path: Path) -> Callable[[], object] | None:
        """Save into the new directory `path`; returns what to wait for, or None when it is done."""

    @abstractmethod
    def read(self, path: Path, warm: bool) -> None:
        """Load from `path` into the live state."""

    def save(self, step: int) -> None:
        self.wait_durable()
        previous = [path for path in self.directory.iterdir() if path.suffix == ""]
        partial = self.directory / f"step-{step:012d}.partial"
        partial.mkdir()
        wait = self.write(partial)
        self._finisher.finish(self._publish, partial, wait)
        for path in previous:
            self._finisher.later(shutil.rmtree, path)

    @staticmethod
    def _publish(partial: Path, wait: Callable[[], object] | None) -> None:
        if wait is not None:
            wait()
        publish(partial)

    def wait_durable(self) -> None:
        self._finisher.wait()

    def settle(self) -> None:
        self._finisher.settle()

    def restore(self, warm: bool) -> None:
        self.read(self.step_directory(), warm)

    def close(self) -> None:
        self._finisher.close()


@torch.no_grad()
def copy_into(live: dict[str, torch.Tensor], name: str, source: torch.Tensor) -> None:
    """Bring one loaded tensor into its existing storage."""
    live[name].copy_(source)
