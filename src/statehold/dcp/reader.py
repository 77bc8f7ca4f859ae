"""StorageReader: dcp.load from a step directory, whoever wrote the step.

Holds: names are those that torch's planners give to the state that was saved; a subtree can be
loaded as one object, too; every byte that is used was verified; the records of a step are read
when metadata is asked for, its data when they are placed.
Not here: what is asked for (the planner), items and chunks (contents), bytes (reading).
"""

from __future__ import annotations

import io
import os
from functools import lru_cache
from typing import Any, cast

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as _StorageReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.futures import Future

from statehold.dcp.among import rank_and_world
from statehold.dcp.contents import Builder, Contents
from statehold.dcp.endpoint import Endpoint
from statehold.dcp.machine import Machine
from statehold.dcp.reading import read
from statehold.dcp.watched import traced
from statehold.errors import UsageError
from statehold.seeing.watching import RestoreWatch
from statehold.steps.manifest import MANIFEST_BYTES_MAX, Manifest
from statehold.steps.saved import MANIFEST_NAME, open_step


class StorageReader(Endpoint, _StorageReader):
    """Reads a step of statehold, by a Checkpointer or by a StorageWriter; for
    torch.distributed.checkpoint.

    path: the directory of the step; the `checkpoint_id` of a load replaces it.
    staging_bytes, buffer_bytes, queue_depth, copy_threads, backend, profile: as for a Checkpointer.
    trace: a file for what happened when, written at the end of each load.
    """

    _what, _call = "a load", "load"

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        staging_bytes: int | str = "256MiB",
        buffer_bytes: int | str | None = None,
        queue_depth: int | None = None,
        copy_threads: int | None = None,
        backend: str | None = None,
        profile: str | os.PathLike[str] | None = "auto",
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(
            path,
            staging_bytes=staging_bytes,
            buffer_bytes=buffer_bytes,
            queue_depth=queue_depth,
            copy_threads=copy_threads,
            backend=backend,
            profile=profile,
            trace=trace,
        )
        self._step: Contents | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return os.path.isfile(os.path.join(checkpoint_id, MANIFEST_NAME))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
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
        machine = self._machine.at(self._path)
        with traced(machine.watch), machine.watch.restore() as seen:
            self._read_items(machine, step, plan, planner, seen)
            seen.restored_step = step.saved.step
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_items(
        self,
        machine: Machine,
        step: Contents,
        plan: LoadPlan,
        planner: LoadPlanner,
        seen: RestoreWatch,
    ) -> None:
        objects = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        targets = [planner.resolve_tensor(item).detach() for item in tensors]
        wanted = [
            step.wanted(item, target, _among(planner, item))
            for item, target in zip(tensors, targets, strict=True)
        ]
        builder = Builder(step)
        built = [builder.build(item.storage_index.fqn) for item in objects]
        with seen.stage("read", step=step.saved.step):
            read(machine, self._directory(), step.saved, [*wanted, *builder.wanted], seen)
        for item, target in zip(tensors, targets, strict=True):
            planner.commit_tensor(item, target)
        for item, value in zip(objects, built, strict=True):
            planner.load_bytes(item, _pickled(value))

    def _open(self) -> Contents:
        directory = self._directory()
        path = f"{directory}/{MANIFEST_NAME}"
        step = Manifest.decode(self._read_file(path, MANIFEST_BYTES_MAX), path).step
        # Looks at every tensor, and so reads the records of all ranks.
        return Contents(open_step(self._read_file, directory, step, *rank_and_world()).widened())

    def _read_file(self, path: str, bytes_max: int) -> bytes:
        with self._machine.storage() as fs:
            return fs.read_file(path, bytes_max)


def _among(planner: LoadPlanner, item: ReadItem) -> tuple[int, ...] | None:
    """The ranks that hold the tensor that an item goes to together, as far as the planner shows it;
    None for one that a rank has for itself."""
    live = getattr(planner, "state_dict", {}).get(item.dest_index.fqn)
    if isinstance(live, DTensor):
        return _ranks_of(live.device_mesh)
    if isinstance(live, ShardedTensor) or hasattr(live, "__create_chunk_list__"):
        return tuple(range(rank_and_world()[1]))
    return None


@lru_cache(maxsize=64)
def _ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(mesh.mesh.flatten().tolist())


def _pickled(value: Any) -> io.BytesIO:
    """What load planners take values as; it never leaves memory."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
