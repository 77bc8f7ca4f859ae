"""TorchSnapshot 0.1.0 (its last release): take and async_take.

Fact: with this torch it writes 2-byte tensors through a 4-byte view and refuses those whose size is
not a multiple of four, so bench/state.py has even sizes only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.peers.base import FilePeer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # uses torch.jit.script, deprecated since its last release
    from torchsnapshot import Snapshot, StateDict


class TorchSnapshotTake(FilePeer):
    def application_state(self) -> dict[str, Any]:
        return {
            "model": self.state.model,
            "optimizer": self.state.optimizer,
            "progress": StateDict(**self.state.progress),
        }

    def write(self, path: Path) -> Callable[[], object] | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TypedStorage is deprecated
            Snapshot.take(str(path), self.application_state())
        return None

    def read(self, path: Path, warm: bool) -> None:
        application_state = self.application_state()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Snapshot(str(path)).restore(application_state)
        self.state.progress.update(application_state["progress"])


class TorchSnapshotAsync(TorchSnapshotTake):
    def write(self, path: Path) -> Callable[[], object]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Snapshot.async_take(str(path), self.application_state()).wait
