"""StorageReader: dcp.load from a step directory, whoever wrote the step.

Holds: names are those that torch's planners give to the state that was saved; a subtree can be
loaded as one object, too; every byte that is used was verified; the records of a step are read
when metadata is asked for, its data when they are placed.
Not here: what is asked for (the planner), chunks (saved), bytes (reading).
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as _StorageReader
from torch.futures import Future

from statehold import values
from statehold.dcp.machine import Machine
from statehold.dcp.reading import Wanted, read
from statehold.dcp.tree import containers, leaves, tensor_of
from statehold.errors import StateMismatchError, UsageError
from statehold.layout import Box
from statehold.manifest import MANIFEST_BYTES_MAX, Manifest
from statehold.publish import MANIFEST_NAME
from statehold.saved import PlacedChunk, SavedStep, open_step
from statehold.state import dtypes
from statehold.state.restore import foreign
from statehold.trees import Differs, tensors_of

Items = Mapping[str, TensorStorageMetadata | BytesStorageMetadata]


class StorageReader(_StorageReader):
    """Reads a step of statehold, by a Checkpointer or by a StorageWriter; for
    torch.distributed.checkpoint.

    path: the directory of the step; the `checkpoint_id` of a load replaces it.
    staging_bytes, buffer_bytes, queue_depth, copy_threads, backend: as for a Checkpointer.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        staging_bytes: int | str = "256MiB",
        buffer_bytes: int | str = "16MiB",
        queue_depth: int = 32,
        copy_threads: int | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self._path = None if path is None else os.path.abspath(os.fspath(path))
        self._machine = Machine(
            staging_bytes=staging_bytes,
            buffer_bytes=buffer_bytes,
            queue_depth=queue_depth,
            copy_threads=copy_threads,
            backend=backend,
        )
        self._step: _Step | None = None

    @property
    def checkpoint_id(self) -> str | None:
        """The directory that the next load reads."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return os.path.isfile(os.path.join(checkpoint_id, MANIFEST_NAME))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._path = os.path.abspath(os.fspath(checkpoint_id))
        self._step = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._step = _Step(self._open())
        items = self._step.items
        return Metadata(
            state_dict_metadata=items,  # type: ignore[arg-type]  # a Mapping is all it is used as
            planner_data={name: leaf.path for name, leaf in self._step.leaves.items()},
            storage_meta=StorageMeta(checkpoint_id=self._path),
        )

    # torch passes rank and use_collectives only to a parameter of this very name.
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing: read_metadata has it all."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        step = self._step
        if step is None or self._path is None:
            raise UsageError("read_data() was called before read_metadata()")
        objects = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        targets = [planner.resolve_tensor(item).detach() for item in tensors]
        wanted = [step.wanted(*pair) for pair in zip(tensors, targets, strict=True)]
        builder = _Builder(step)
        built = [builder.build(item.storage_index.fqn) for item in objects]
        read(self._machine, self._path, step.saved.block_bytes, [*wanted, *builder.wanted])
        for item, target in zip(tensors, targets, strict=True):
            planner.commit_tensor(item, target)
        for item, value in zip(objects, built, strict=True):
            planner.load_bytes(item, _pickled(value))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _open(self) -> SavedStep:
        if self._path is None:
            raise UsageError(
                "a load needs a directory",
                hint="give load() a checkpoint_id, or the StorageReader a path",
            )
        manifest_path = f"{self._path}/{MANIFEST_NAME}"
        with self._machine.storage() as fs:
            number = Manifest.decode(fs.read_file(manifest_path, MANIFEST_BYTES_MAX), manifest_path)
            rank, world_size = _place()
            step = open_step(fs.read_file, self._path, number.step, rank, world_size).widened()
            _ = _Step(step).items  # all records are read while the file system is open
        return step
