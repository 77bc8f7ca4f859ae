"""StorageReader: dcp.load from a step directory, whoever wrote the step.

Holds: names are those that torch's planners give to the state that was saved; a subtree can be
loaded as one object, too; every byte that is used was verified; the records of a step are read
when metadata is asked for, its data when they are placed. What ranks saved each for itself is never
put together in a tensor that they share now.
Not here: what is asked for (the planner), chunks (saved), bytes (reading).
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.futures import Future

from statehold.dcp.machine import Machine
from statehold.dcp.reading import Wanted, read
from statehold.dcp.tree import containers, leaves, tensor_of
from statehold.encoding import values
from statehold.errors import StateMismatchError, UsageError
from statehold.planning.layout import Box
from statehold.state import dtypes
from statehold.state.restore import foreign
from statehold.steps.manifest import MANIFEST_BYTES_MAX, Manifest
from statehold.steps.saved import MANIFEST_NAME, PlacedChunk, SavedStep, open_step
from statehold.steps.trees import Differs, tensors_of

_Asked = tuple[str, tuple[int, ...] | None]  # the name of a tensor, and the ranks it is one among


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
        self._step = self._open()
        return Metadata(
            state_dict_metadata=cast(Any, self._step.items),  # used as a Mapping only
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
        wanted = [
            step.wanted(item, target, _among(planner, item))
            for item, target in zip(tensors, targets, strict=True)
        ]
        builder = _Builder(step)
        built = [builder.build(item.storage_index.fqn) for item in objects]
        read(self._machine, self._path, step.saved, [*wanted, *builder.wanted])
        for item, target in zip(tensors, targets, strict=True):
            planner.commit_tensor(item, target)
        for item, value in zip(objects, built, strict=True):
            planner.load_bytes(item, _pickled(value))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _open(self) -> _Step:
        if self._path is None:
            raise UsageError(
                "a load needs a directory",
                hint="give load() a checkpoint_id, or the StorageReader a path",
            )
        path = f"{self._path}/{MANIFEST_NAME}"
        step = Manifest.decode(self._read_file(path, MANIFEST_BYTES_MAX), path).step
        # Looks at every tensor, and so reads the records of all ranks.
        return _Step(open_step(self._read_file, self._path, step, *_place()).widened())

    def _read_file(self, path: str, bytes_max: int) -> bytes:
        with self._machine.storage() as fs:
            return fs.read_file(path, bytes_max)


def _place() -> tuple[int, int]:
    """This process among those that load: of what each rank saved for itself it gets its own."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _among(planner: LoadPlanner, item: ReadItem) -> tuple[int, ...] | None:
    """The ranks that hold the tensor that an item goes to together, as far as the planner shows it;
    None for one that a rank has for itself."""
    live = getattr(planner, "state_dict", {}).get(item.dest_index.fqn)
    if isinstance(live, DTensor):
        return _ranks_of(live.device_mesh)
    if isinstance(live, ShardedTensor) or hasattr(live, "__create_chunk_list__"):
        return tuple(range(_place()[1]))
    return None


@lru_cache(maxsize=64)
def _ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(mesh.mesh.flatten().tolist())


class _Step:
    """A step in the words of torch: its items by name, and where the chunks of tensors are."""

    def __init__(self, saved: SavedStep) -> None:
        self.saved = saved
        self.leaves = leaves(saved.state)
        self.containers = containers(saved.state)
        self._chunks: dict[_Asked, list[PlacedChunk] | StateMismatchError] = {}
        for name in tensors_of(saved.state):
            self._look_up(name, None)
        self.items = _Items(self)

    def _look_up(
        self, name: str, among: tuple[int, ...] | None
    ) -> list[PlacedChunk] | StateMismatchError:
        if (name, among) not in self._chunks:
            box = Box.whole(self.saved.tensors[name].shape)
            try:
                self._chunks[name, among] = self.saved.chunks(name, box, among)
            except StateMismatchError as error:  # raised to whoever asks for this tensor
                self._chunks[name, among] = error
        return self._chunks[name, among]

    def node(self, name: str) -> Any:
        """What an item is in the tree: a leaf, or a whole subtree. KeyError."""
        return self.leaves[name].node if name in self.leaves else self.containers[name]

    def chunks_of(self, name: str, among: tuple[int, ...] | None = None) -> list[PlacedChunk]:
        """The chunks of a tensor. `among`: the ranks that hold it together; None: each its own."""
        found = self._look_up(name, among)
        if isinstance(found, StateMismatchError):
            raise found
        return found

    def dtype(self, name: str) -> torch.dtype:
        return dtypes.dtype_of(self.saved.tensors[name].dtype, name)

    def shape(self, name: str, stored: tuple[int, ...]) -> tuple[int, ...]:
        """A shape, or offsets, of the step in elements of torch."""
        return dtypes.torch_shape(self.dtype(name), stored)

    def wanted(self, item: ReadItem, target: torch.Tensor, among: tuple[int, ...] | None) -> Wanted:
        """What a planner asks for, of one chunk."""
        name = self.node(item.storage_index.fqn)["$tensor"]
        offsets = tuple(item.storage_index.offset or ())
        chunks = self.chunks_of(name, among)
        chunk = next((c for c in chunks if self.shape(name, c.box.offsets) == offsets), None)
        if chunk is None or tuple(target.shape) != tuple(item.lengths):
            raise UsageError(
                "a planner asks for what the checkpoint does not have",
                facts={
                    "name": item.storage_index.fqn,
                    "chunk at": list(offsets),
                    "expected": f"a tensor of shape {list(item.lengths)}",
                    "got": list(target.shape) if chunk else "no such chunk",
                },
            )
        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        return self.part(name, chunk, box, target)

    def part(self, name: str, chunk: PlacedChunk, box: Box, target: torch.Tensor) -> Wanted:
        shape = self.shape(name, chunk.box.shape)
        is_whole = chunk.box.shape == self.saved.tensors[name].shape and box == Box.whole(shape)
        shared = is_whole and _place()[1] > 1
        return Wanted(name, chunk, self.dtype(name), box, target, shared)


class _Items(Mapping[str, TensorStorageMetadata | BytesStorageMetadata]):
    """The items of a step. Containers are found by name, for planners that do not flatten state
    dicts, but not listed."""

    def __init__(self, step: _Step) -> None:
        self._step = step

    def __getitem__(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        tensor = tensor_of(self._step.node(name))
        return BytesStorageMetadata() if tensor is None else self._tensor(tensor)

    def __contains__(self, name: object) -> bool:
        return name in self._step.leaves or name in self._step.containers

    def __iter__(self) -> Iterator[str]:
        return iter(self._step.leaves)

    def __len__(self) -> int:
        return len(self._step.leaves)

    def _tensor(self, name: str) -> TensorStorageMetadata:
        step = self._step
        chunks = [
            ChunkStorageMetadata(
                offsets=torch.Size(step.shape(name, chunk.box.offsets)),
                sizes=torch.Size(step.shape(name, chunk.box.shape)),
            )
            for chunk in step.chunks_of(name)
        ]
        return TensorStorageMetadata(
            properties=TensorProperties(dtype=step.dtype(name)),
            size=torch.Size(step.shape(name, step.saved.tensors[name].shape)),
            chunks=chunks,
        )


class _Builder:
    """Makes objects of nodes; their tensors are filled once `wanted` was read."""

    def __init__(self, step: _Step) -> None:
        self._step = step
        self.wanted: list[Wanted] = []

    def build(self, name: str) -> Any:
        node = self._step.node(name)
        if isinstance(node, Differs):
            raise StateMismatchError(
                "ranks saved different values under one name",
                facts={"name": name, "saved": str(node)},
                hint="load on as many ranks as saved, where each takes its own",
            )
        return values.decode(node, self._leaf)

    def _leaf(self, tag: str, payload: Any) -> Any:
        if tag == "$tensor":
            return self._tensor(payload)
        if tag == "$ndarray":
            return self._tensor(payload).numpy()
        return foreign(tag, payload)

    def _tensor(self, name: str) -> torch.Tensor:
        step = self._step
        shape = step.shape(name, step.saved.tensors[name].shape)
        made = torch.empty(shape, dtype=step.dtype(name))
        for chunk in step.chunks_of(name):
            offsets = step.shape(name, chunk.box.offsets)
            box = Box.whole(step.shape(name, chunk.box.shape))
            target = made[tuple(slice(a, a + n) for a, n in zip(offsets, box.shape, strict=True))]
            self.wanted.append(step.part(name, chunk, box, target))
        return made


def _pickled(value: Any) -> io.BytesIO:
    """What load planners take values as; it never leaves memory."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
