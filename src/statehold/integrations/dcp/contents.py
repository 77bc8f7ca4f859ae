"""A step in the terms of torch: items by name, chunks as a planner needs them, objects.

Invariants: entries that each rank saved for itself are never put together in a tensor that ranks
share now. An item that is not available is an error only for a caller that asks for it.
Not here: the names of torch (reader), which chunk has what (saved), bytes (targets).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from statehold.encoding import values
from statehold.errors import StateMismatchError, UsageError
from statehold.format.saved import PlacedChunk, SavedStep
from statehold.format.trees import Differs, tensors_of
from statehold.integrations.dcp.among import rank_and_world
from statehold.integrations.dcp.targets import WantedBox
from statehold.integrations.dcp.tree import containers, leaves, tensor_of
from statehold.layout.layout import Box
from statehold.tensors import dtypes
from statehold.tensors.nodes import value_of

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
    ) -> WantedBox:
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
        return self.part(name, chunk, box, target)

    def part(self, name: str, chunk: PlacedChunk, box: Box, target: torch.Tensor) -> WantedBox:
        shape = self.shape(name, chunk.box.shape)
        is_whole = chunk.box.shape == self.saved.tensors[name].shape and box == Box.whole(shape)
        shared = is_whole and rank_and_world()[1] > 1
        return WantedBox(name, chunk, self.dtype(name), box, target, shared)


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


class Builder:
    """Makes objects of nodes; their tensors are filled once `wanted` was read."""

    def __init__(self, step: Contents) -> None:
        self._step = step
        self.wanted: list[WantedBox] = []

    def build(self, name: str) -> Any:
        node = self._step.node(name)
        if isinstance(node, Differs):
            raise StateMismatchError(
                "ranks saved different values under one name",
                facts={"name": name, "saved": str(node)},
                hint="load on as many ranks as saved, where each takes its own",
            )
        return values.decode(node, lambda tag, payload: value_of(tag, payload, self._tensor))

    def _tensor(self, name: str) -> torch.Tensor:
        step = self._step
        shape = step.shape(name, step.saved.tensors[name].shape)
        made = torch.empty(shape, dtype=step.dtype(name), device="cpu")
        for chunk in step.chunks_of(name):
            offsets = step.shape(name, chunk.box.offsets)
            box = Box.whole(step.shape(name, chunk.box.shape))
            target = made[tuple(slice(a, a + n) for a, n in zip(offsets, box.shape, strict=True))]
            self.wanted.append(step.part(name, chunk, box, target))
        return made
