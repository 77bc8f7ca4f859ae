"""DCP's async_save with the staging that it has for devices, beside bench.peers.own.

Facts: `DefaultStager` pins its memory and copies on a stream and a thread of its own. The state may
change once `staging_completion` is there. In process mode the staged state is shared memory.
Without CUDA it refuses copies that do not block, and ignores pinning. In torch 2.13 a stager keeps
its memory from one save to the next. In 2.11 it forgets its memory after each save, and the next
save fails with a KeyError. With that release every save gets a new stager, which pins again.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
)

from bench.gpu.model import Trained
from bench.peers.base import DEADLINE_S, Peer, PeerOptions
from bench.peers.dcp import DcpAsync, DcpProcess
from bench.peers.own import StateholdDefault, StateholdFull

__all__ = ["DCP", "OWN", "open_peer"]


def _stager(shared: bool) -> DefaultStager:
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=True,
            use_shared_memory=shared,
            use_async_staging=True,
            use_non_blocking_copy=torch.cuda.is_available(),
        )
    )


def _can_be_kept(stager: DefaultStager) -> bool:
    """Whether it stages twice. It is closed afterwards."""
    try:
        for _ in range(2):
            staged = stager.stage({"x": torch.zeros(8, device="cpu")})
            if isinstance(staged, Future):
                staged.result(DEADLINE_S)
    except KeyError:
        return False
    finally:
        stager.close()
    return True


class DcpPinned(DcpAsync):
    """async_save into pinned memory; a thread writes."""

    threads = 2

    def __init__(self, directory: Path, state: Any, options: PeerOptions) -> None:
        super().__init__(directory, state, options)
        self._keeps = _can_be_kept(self._new_stager())
        self.stager = self._new_stager()
        self._staged: Future[None] | None = None

    def _new_stager(self) -> DefaultStager:
        return _stager(shared=self.kind is AsyncCheckpointerType.PROCESS)

    def statistics(self) -> dict[str, Any]:
        return {"stager": "kept" if self._keeps else "new for each save"}

    def write(self, path: Path) -> Callable[[], object]:
        if not self._keeps:
            self.stager.close()
            self.stager = self._new_stager()
        response = async_save(
            self.whole(),
            storage_writer=self.writer(path),
            async_checkpointer_type=self.kind,
            async_stager=self.stager,
            no_dist=True,
        )
        if not isinstance(response, AsyncSaveResponse):
            raise TypeError("async_save did not stage asynchronously")
        self._staged = response.staging_completion
        return response.upload_completion.result

    def wait_mutable(self) -> None:
        if self._staged is not None:
            self._staged.result(DEADLINE_S)


class DcpPinnedProcess(DcpPinned, DcpProcess):
    """The same into shared memory; a process writes."""

    kind = AsyncCheckpointerType.PROCESS


# Staging memory as large as the state, and what statehold chooses.
OWN: dict[str, type[Peer]] = {"given": StateholdFull, "chosen": StateholdDefault}
DCP: dict[str, type[Peer]] = {"dcp-thread": DcpPinned, "dcp-process": DcpPinnedProcess}


def open_peer(name: str, directory: Path, trained: Trained) -> Peer:
    """A library that saves `trained`, which stands in for a TrainingState, into a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    return (OWN | DCP)[name](directory, trained, PeerOptions())  # type: ignore[arg-type]
