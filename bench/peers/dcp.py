"""torch.distributed.checkpoint: save, async_save in a thread, async_save in a process.

Facts (torch 2.13): `async_save` without a stager copies into fresh memory at every save; a
`DefaultStager` that is kept is its cached form; with `use_shared_memory` the process mode maps the
copy instead of pickling it through a pipe. All of them copy before `async_save` returns on a CPU.
The process mode needs an initialised process group, of one rank here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.staging import DefaultStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from bench.peers.base import FilePeer, PeerOptions
from bench.peers.stager import kept_stager
from bench.state import TrainingState


class Dcp(FilePeer):
    """DCP save with a number of writer threads (one file per thread)."""

    threads = 1

    def whole(self) -> dict[str, Any]:
        return {
            "model": self.state.model.state_dict(),
            "optimizer": self.state.optimizer.state_dict(),
            "progress": dict(self.state.progress),
        }

    def writer(self, path: Path) -> FileSystemWriter:
        return FileSystemWriter(path, thread_count=self.threads, sync_files=True)

    def write(self, path: Path) -> Callable[[], object] | None:
        save(self.whole(), storage_writer=self.writer(path), no_dist=True)
        return None

    def read(self, path: Path, warm: bool) -> None:
        whole = self.whole()
        load(whole, storage_reader=FileSystemReader(path), no_dist=True)
        self.state.optimizer.load_state_dict(whole["optimizer"])
        self.state.progress.update(whole["progress"])


class DcpOneThread(Dcp):
    threads = 1


class DcpTwoThreads(Dcp):
    threads = 2


class DcpHuggingFace(Dcp):
    """The safetensors writer; it holds tensors only, so plain values go into a file beside."""

    def write(self, path: Path) -> None:
        groups = self.state.optimizer.state_dict()["param_groups"]
        plain = {"param_groups": groups, "progress": self.state.progress}
        save(self.state.tensors(), storage_writer=HuggingFaceStorageWriter(str(path)), no_dist=True)
        (path / "plain.json").write_text(json.dumps(plain))

    def read(self, path: Path, warm: bool) -> None:
        live = self.state.tensors()
        load(live, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
        plain = json.loads((path / "plain.json").read_text())
        self.state.optimizer.param_groups[0]["step"] = plain["param_groups"][0]["step"]
        self.state.progress.update(plain["progress"])


class DcpAsync(Dcp):
    """async_save; `stager` None means the library's default, fresh memory at every save."""

    kind = AsyncCheckpointerType.THREAD
    stager: DefaultStager | None = None

    def write(self, path: Path) -> Callable[[], object]:
        saving = async_save(
            self.whole(),
            storage_writer=self.writer(path),
            async_checkpointer_type=self.kind,
            async_stager=self.stager,
            no_dist=True,
        )
        return saving.result  # type: ignore[union-attr]  # a Future unless staging is asynchronous

    def close(self) -> None:
        super().close()
        if self.stager is not None:
            self.stager.close()


class DcpAsyncCached(DcpAsync):
    def __init__(self, directory: Path, state: TrainingState, options: PeerOptions) -> None:
        super().__init__(directory, state, options)
        self.stager = kept_stager(shared=False)


class DcpProcess(DcpAsync):
    kind = AsyncCheckpointerType.PROCESS

    def __init__(self, directory: Path, state: TrainingState, options: PeerOptions) -> None:
        super().__init__(directory, state, options)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        if not dist.is_initialized():
            store = dist.HashStore()  # type: ignore[attr-defined]  # public, not listed in __all__
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    def close(self) -> None:
        super().close()
        if dist.is_initialized():
            dist.destroy_process_group()


class DcpProcessShared(DcpProcess):
    def __init__(self, directory: Path, state: TrainingState, options: PeerOptions) -> None:
        super().__init__(directory, state, options)
        self.stager = kept_stager(shared=True)
