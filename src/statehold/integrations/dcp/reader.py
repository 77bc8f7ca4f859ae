"""StorageReader: dcp.load from a step directory of a Checkpointer or a StorageWriter.

Owns: a step in the terms of torch: items by name, chunks as a planner needs them, objects; which
bytes are read straight into their place, and which go through separate memory.
Invariants: names are those that torch's planners give to the saved state. Every byte that is used
was verified. read_metadata() reads the records of a step, read_data() its data. One load reads one
save: if the step is saved again or retired between the two, or if two ranks opened different saves,
the load raises an error.
Not here: which items are loaded (the planner), the engine (machine).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as _StorageReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.futures import Future

from statehold.checkpoint.restore.read_plan import ReadPlan
from statehold.checkpoint.telemetry.watch import RestoreWatch
from statehold.encoding import values
from statehold.errors import (
    CorruptionError,
    StateMismatchError,
    StorageError,
    UsageError,
    storage_error,
)
from statehold.format.entries import DOCUMENT_BYTES_MAX, sha256
from statehold.format.manifest import Manifest
from statehold.format.saved import MANIFEST_NAME, PlacedChunk, SavedStep, open_step
from statehold.format.trees import tensors_of
from statehold.integrations.dcp.machine import Machine, StepEndpoint, rank_and_world, traced
from statehold.integrations.dcp.tree import containers, leaves, tensor_of
from statehold.integrations.formats.untrusted import tensor_metadata
from statehold.layout.layout import Box
from statehold.options import Options
from statehold.options.io import Io
from statehold.options.keywords import answering
from statehold.steps.directories import REPLACED
from statehold.steps.publish import look_beside_a_writer, missing_path, read_standing
from statehold.tensors import dtypes, nodes
from statehold.tensors.composed import value_of
from statehold.tensors.destinations import Casts, Destination, destinations_of
from statehold.tensors.devices import Devices
from statehold.tensors.devices.graphs import refuse_in_capture
from statehold.tensors.storable import is_external, is_view_of_other_values, overlaps_itself

# -- the reader ------------------------------------------------------------------------------------


@answering(io=Io)
class StorageReader(StepEndpoint, _StorageReader):
    """Reads a step of a Checkpointer or of a StorageWriter; for torch.distributed.checkpoint.

    Args:
        path: the directory of the step; the `checkpoint_id` of a load replaces it.
        staging_bytes: as for a Checkpointer.
        io: as for a Checkpointer.
        trace: a file for a trace, written at the end of each load.
    """

    _call = "load"

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        staging_bytes: int | str = "256MiB",
        io: Io | None = None,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        settings = Options(staging_bytes=staging_bytes, io=Io() if io is None else io, trace=trace)
        super().__init__(path, settings)
        self._step: Contents | None = None
        self._save: str | None = None  # which save of it: the sha256 of its manifest

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        final = os.path.realpath(checkpoint_id)
        names = (final, final + REPLACED)
        return any(os.path.isfile(os.path.join(name, MANIFEST_NAME)) for name in names)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        self._step = self._save = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._step, self._save = self._open()
        return Metadata(
            state_dict_metadata=cast(Any, self._step.items),  # used as a Mapping only
            planner_data={name: leaf.path for name, leaf in self._step.leaves.items()},
            storage_meta=StorageMeta(checkpoint_id=self._path),
        )

    # torch passes rank and use_collectives only to a parameter of this very name.
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing: read_metadata has everything."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self._save)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        saves = {plan.storage_data for plan in plans if isinstance(plan.storage_data, str)}
        if len(saves) > 1:
            raise _changed(self._directory(), "ranks opened different saves of it")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        step = self._step
        if step is None or self._path is None or self._save is None:
            raise UsageError("read_data() was called before read_metadata()")
        refuse_in_capture("dcp.load()")
        machine = self._machine.at(self._path)
        with traced(machine.watch), machine.watch.restore() as watch:
            self._read_items(machine, step, plan, planner, watch)
            watch.restored_step = step.saved.step
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_items(
        self,
        machine: Machine,
        step: Contents,
        plan: LoadPlan,
        planner: LoadPlanner,
        watch: RestoreWatch,
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
        with watch.stage("read", step=step.saved.step):
            self._read(machine, step, [*wanted, *builder.wanted], watch)
        for item, target in zip(tensors, targets, strict=True):
            planner.commit_tensor(item, target)
        for item, value in zip(objects, built, strict=True):
            planner.load_bytes(item, _pickled(value))

    def _read(
        self, machine: Machine, step: Contents, wanted: Sequence[Destination], watch: RestoreWatch
    ) -> None:
        """Raises ESTALE if the step is another save by now: its bytes are not damaged."""

        def look(directory: str) -> None:
            read(machine, directory, step, wanted, watch)

        try:
            with self._machine.storage() as fs:
                read_standing(fs, self._final(), look)
        except (CorruptionError, StorageError) as error:
            now = self._which()
            if now == self._save:
                raise
            found = "it was retired" if now is None else "it was saved again"
            raise _changed(self._directory(), found) from error

    def _open(self) -> tuple[Contents, str]:
        """The step, and its save. Begins again if it is saved meanwhile."""
        opened = look_beside_a_writer(self._look, self._which, self._directory())
        return opened or self._look()

    def _look(self) -> tuple[Contents, str]:
        path = f"{self._final()}/{MANIFEST_NAME}"
        raw = self._read_file(path, DOCUMENT_BYTES_MAX)

        def of_this_save(asked: str, bytes_max: int) -> bytes:
            return raw if asked == path else self._read_file(asked, bytes_max)

        step = Manifest.decode(raw, path).step
        opened = open_step(of_this_save, self._final(), step, *rank_and_world())
        # This looks at every tensor, and so reads the records of all ranks.
        return Contents(opened.widened()), sha256(raw)

    def _which(self) -> str | None:
        """The save that exists now; None if there is none."""
        try:
            return sha256(self._read_file(f"{self._final()}/{MANIFEST_NAME}", DOCUMENT_BYTES_MAX))
        except (CorruptionError, StorageError) as error:
            if missing_path(error) is None:
                raise
            return None

    def _final(self) -> str:
        """The directory, which a link may lead to."""
        return os.path.realpath(self._directory())

    def _read_file(self, path: str, bytes_max: int) -> bytes:
        directory, _, name = path.rpartition("/")
        with self._machine.storage() as fs:
            return read_standing(
                fs, directory, lambda found: fs.read_file(f"{found}/{name}", bytes_max)
            )


def _changed(directory: str, found: str) -> StorageError:
    error = storage_error("load a step", errno.ESTALE, directory)
    error.with_fact("found", found)
    error.hint = (
        "load it again: nothing is damaged, and nothing was changed on disk; "
        "the state that was being loaded is incomplete"
    )
    return error


def _among(planner: LoadPlanner, item: ReadItem) -> tuple[int, ...] | None:
    """The ranks that together hold the tensor of an item, as far as the planner shows it.

    None for a tensor that a rank has for itself.
    """
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
    """The type in which load planners take values; it never leaves memory."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data


# -- a step in the terms of torch ------------------------------------------------------------------
# A subtree can be loaded as one object, too. Entries that each rank saved for itself are never put
# together in a tensor that ranks share now. An item that is not available is an error only for a
# caller that asks for it.


_Asked = tuple[str, tuple[int, ...] | None]  # the name of a tensor, and the ranks that share it


class Contents:
    """The contents of a step: its items, and the places of their tensors' chunks."""

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
            except StateMismatchError as error:  # raised to a caller that asks for this tensor
                self._chunks[name, among] = error
        return self._chunks[name, among]

    def node(self, name: str) -> Any:
        """The node of an item in the tree: a leaf, or a whole subtree. KeyError."""
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

    def wanted(
        self, item: ReadItem, target: torch.Tensor, among: tuple[int, ...] | None
    ) -> Destination:
        """The request of a planner for one chunk."""
        name = self.node(item.storage_index.fqn)["$tensor"]
        offsets = tuple(item.storage_index.offset or ())
        chunks = self.chunks_of(name, among)
        chunk = next((c for c in chunks if self.shape(name, c.box.offsets) == offsets), None)
        if chunk is None or tuple(target.shape) != tuple(item.lengths):
            raise UsageError(
                "a planner asks for an entry that the checkpoint does not have",
                facts={
                    "name": item.storage_index.fqn,
                    "chunk at": list(offsets),
                    "expected": f"a tensor of shape {list(item.lengths)}",
                    "got": list(target.shape) if chunk else "no such chunk",
                },
            )
        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        stored = dtypes.stored_box(self.dtype(name), box, name).within(chunk.box)
        return self.boxed(name, stored, target, among)

    def boxed(
        self, name: str, box: Box, target: torch.Tensor, among: tuple[int, ...] | None = None
    ) -> Destination:
        """A box of a tensor. Other ranks may want the same if it is all of the tensor."""
        shared = box.shape == self.saved.tensors[name].shape and rank_and_world()[1] > 1
        return Destination(name, target, is_external(target), box, shared, among)


class _Items(Mapping[str, TensorStorageMetadata | BytesStorageMetadata]):
    """The items of a step.

    Containers are found by name, for planners that do not flatten state dicts, but are not listed.
    """

    def __init__(self, step: Contents) -> None:
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
        step, dtype = self._step, self._step.dtype(name)
        boxes = [dtypes.torch_box(dtype, chunk.box) for chunk in step.chunks_of(name)]
        return tensor_metadata(dtype, step.shape(name, step.saved.tensors[name].shape), boxes)


class Builder:
    """Makes objects of nodes; their tensors are filled once `wanted` was read."""

    def __init__(self, step: Contents) -> None:
        self._step = step
        self.wanted: list[Destination] = []

    def build(self, name: str) -> Any:
        node = self._step.node(name)
        hint = "load on as many ranks as saved, where each takes its own"
        nodes.check_same(node, hint, name=name)
        return values.decode(node, lambda tag, payload: value_of(tag, payload, self._tensor))

    def _tensor(self, name: str) -> torch.Tensor:
        step, stored = self._step, self._step.saved.tensors[name].shape
        made = torch.empty(step.shape(name, stored), dtype=step.dtype(name), device="cpu")
        self.wanted.append(step.boxed(name, Box.whole(stored), made))
        return made


# -- reading ---------------------------------------------------------------------------------------
# Boxes of chunks go to the tensors that a planner shows. Host tensors of the saved dtype are read
# straight, and tensors on a device, which take other dtypes, too. Other host tensors (torch's
# readers convert, too) are read and converted block by block (tensors/destinations).
#
# Nothing is reported as read before its checksum was verified. A box costs the pieces that hold it,
# not its chunk. Memory in addition to the targets is the staging memory, a buffer on each device,
# and a block. One engine reads all of a load.

_HINT = "load an older checkpoint; the state that was being loaded is incomplete"


def _is_straight(wanted: Destination, saved: torch.dtype) -> bool:
    """Whether bytes that were saved as this dtype go to their place as they are."""
    target = wanted.tensor
    if overlaps_itself(target):
        return False
    is_as_saved = target.dtype == saved and not is_view_of_other_values(target)
    return is_as_saved or wanted.external


def read(
    machine: Machine,
    directory: str,
    step: Contents,
    wanted: Sequence[Destination],
    watch: RestoreWatch,
) -> None:
    """Fill every target. Raises ChecksumError, with the tensor, for damaged bytes."""
    saved, casts, nbytes = step.saved, Casts({}), 0
    plan = ReadPlan(saved, hint=_HINT)
    for each in wanted:
        dtype = step.dtype(each.name)
        nbytes += each.tensor.numel() * dtype.itemsize
        if _is_straight(each, dtype):
            plan.fill(each, dtype)
        else:
            casts.add(each.name, each.box, dtype, each.part)
    with contextlib.ExitStack() as opened:
        fs = opened.enter_context(machine.storage())
        engine = opened.enter_context(machine.engine(fs, nbytes))
        devices = opened.enter_context(contextlib.closing(Devices()))  # unpins before that

        def fill(plan: ReadPlan) -> None:
            if not plan.segments:
                return
            reading = plan.start(engine, lambda name, *_: f"{directory}/{name}")
            with watch.reading(saved.step, reading.job):
                reading.finish(devices.load)

        fill(plan)
        casts.fill(lambda found: fill(ReadPlan(saved, destinations_of(found), hint=_HINT)))
    # Autograd did not see these writes: raise the version, for tensors that it saved for backward.
    targets = [each.tensor for each in wanted if not each.tensor.is_inference()]
    torch.autograd.graph.increment_version(targets)
