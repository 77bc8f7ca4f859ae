"""statehold itself: the gate is automatic, so the trainer calls nothing but save."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.peers.base import DEADLINE_S, Peer, PeerOptions, Unavailable
from bench.state import TrainingState


def _missing() -> str | None:
    """The part of statehold that is not here; a part that is here but broken is a failure."""
    for name in ("statehold", "statehold._core", "statehold.checkpoint.checkpointer"):
        if importlib.util.find_spec(name) is None:
            return name
    return None


_MISSING = _missing()
if _MISSING is None:  # at import, so that its memory is not counted as that of a save
    from statehold import Checkpointer


class Statehold(Peer):
    """keep=1: from the third save on, the files of the step that retention retired are reused."""

    reuses_files = True
    reports_staged = True

    def __init__(self, directory: Path, state: TrainingState, options: PeerOptions) -> None:
        super().__init__(directory, state, options)
        if _MISSING is not None:
            raise Unavailable(f"{_MISSING} is not importable: build the package first")
        self._checkpointer = Checkpointer(directory, keep=1, staging_bytes=self._asked(options))
        self._save: Any = None

    def _asked(self, options: PeerOptions) -> int | None:
        """The option staging_bytes."""
        return options.staging_bytes

    @property
    def staging_bytes(self) -> int:
        """What it was given or has chosen."""
        return int(self._checkpointer._opened().runtime.staging_bytes)

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.state.model,
            "optimizer": self.state.optimizer,
            "progress": self.state.progress,
        }

    def begin(self) -> None:
        self._checkpointer.restore(self._state())

    def save(self, step: int) -> None:
        self._save = self._checkpointer.save(step, self._state())

    def wait_staged(self) -> None:
        self._save.wait("staged", timeout=DEADLINE_S)

    def wait_durable(self) -> None:
        if self._save is not None:
            self._save.wait("committed", timeout=DEADLINE_S)

    def statistics(self) -> dict[str, Any]:
        return asdict(self._save.stats)

    def restore(self, warm: bool) -> None:
        self._checkpointer.restore(self._state())

    def step_directory(self) -> Path:
        return self.directory / f"step-{self._checkpointer.steps()[-1]:012d}"

    def close(self) -> None:
        self._checkpointer.close()


class StateholdDefault(Statehold):
    """As it comes: the staging memory follows from the state and the memory of the host."""

    def _asked(self, options: PeerOptions) -> None:
        return None


class StateholdFull(Statehold):
    """Staging as large as the state: nothing waits for the disk before it is copied."""

    def __init__(self, directory: Path, state: TrainingState, options: PeerOptions) -> None:
        whole = state.total_bytes() + (64 << 20)  # headers and the last, partly filled buffer
        super().__init__(directory, state, replace(options, staging_bytes=whole))
