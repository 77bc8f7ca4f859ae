"""Where a tensor lies in a job of several ranks: layouts read off DTensors and process groups.

Owns: the way from a DTensor to its Layout, checked against the shape of the local tensor; what is
replicated; `Piece` and `Pieced`, for frameworks whose parts of a global tensor are not DTensors.
Invariants: in a job of one rank, or without torch.distributed, nothing has a layout. The ranks of a
mesh come to the same layouts, without a word between them.

Not here: boxes (layout), who writes what (share), memory (tensors), the cutting of the framework
(integrations).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import distributed

from statehold.errors import UnsupportedValueError
from statehold.layout.layout import AnyLayout, Box, Layout, Mesh
from statehold.tensors.storable import is_dtensor, local_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# -- DTensors --------------------------------------------------------------------------------------
# Facts about PyTorch that decide what is here (torch 2.13):
# - Splits apply in the order of the mesh axes, unless `shard_order` says otherwise. FSDP over
#   tensor parallel on one dim is `_StridedShard(dim, split_factor)`: the later axes of that dim
#   whose sizes multiply to split_factor are applied before it.
# - Uneven pieces are those of torch.chunk; DTensor.from_local() takes any, so shapes are compared.
# - A plain tensor in the optimizer state of a sharded parameter is the same on all ranks (`step`)
#   when it is a scalar, and a piece like the parameter's when it has the local shape. Other shapes,
#   as those of quantized moments, only their own rank understands.

# A job has few meshes and shapes, but a layout for each spec is looked up at every save.
_CACHED_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Placed:
    """What a tensor is of a global one, in elements of torch; all None for a rank's own tensor."""

    layout: AnyLayout | None = None
    shape: tuple[int, ...] | None = None
    box: Box | None = None


OWN = Placed()


def placed(tensor: torch.Tensor, path: str, rank: int | None) -> Placed:
    """Where a DTensor's local tensor lies; OWN for plain tensors, and for a rank that is alone.

    Raises UnsupportedValueError, with the path, for a DTensor that cannot be written box by box, or
    of which a rank that is alone (rank None) has a part only.
    """
    if not is_dtensor(tensor):
        return OWN
    spec: Any = tensor._spec  # type: ignore[attr-defined]
    found = _placed(spec, rank)
    if isinstance(found, str):
        raise _refused(found, path, spec)
    local = tuple(local_of(tensor).shape)
    if found.box is None or found.box.shape != local:
        what = f"its local tensor has the shape {list(local)}, and its place is {found.box}"
        raise _refused(what, path, spec)
    if rank is not None:
        return found
    if local != tuple(spec.shape):
        raise _refused("the other ranks that hold it take no part", path, spec)
    return OWN


def place_of(
    tensor: torch.Tensor, path: str, rank: int | None, replicas: Mapping[int, Layout]
) -> Placed:
    """Where any tensor lies; `replicas` are the layouts of plain ones by their ids."""
    layout = replicas.get(id(tensor))
    if layout is not None and not is_dtensor(tensor):
        return replicated(tensor.shape, layout)
    return placed(tensor, path, rank)


def replicated(shape: Sequence[int], layout: Layout) -> Placed:
    """A tensor that all ranks of the layout's mesh hold whole."""
    return Placed(_unsplit(layout.mesh), tuple(shape), Box.whole(shape))


def of_group(group: Any) -> Layout | None:
    """The layout of what DistributedDataParallel replicates; None in a group of one."""
    ranks = tuple(distributed.get_process_group_ranks(group))
    return _unsplit(Mesh((len(ranks),), ranks)) if len(ranks) > 1 else None


def beside(tensor: torch.Tensor, parameter: torch.Tensor, of_parameter: Placed) -> Placed:
    """Where a plain tensor in the optimizer state of a parameter lies, which itself lies there."""
    layout = of_parameter.layout
    if not isinstance(layout, Layout):
        return OWN
    shape = tuple(tensor.shape)
    if not shape or not layout.splits:
        return replicated(shape, layout)
    return of_parameter if shape == tuple(local_of(parameter).shape) else OWN


@lru_cache(_CACHED_MAX)
def _placed(spec: Any, rank: int | None) -> Placed | str:
    """The place that a DTensorSpec describes, or why it describes none."""
    mesh = _mesh(spec.mesh)
    rank = mesh.ranks[0] if rank is None else rank
    if rank not in mesh:
        return f"rank {rank} has it in its state, but is not in its mesh"
    try:
        layout = Layout(mesh, tuple(_splits(spec)))
    except _Unmapped as reason:
        return str(reason)
    shape = tuple(spec.shape)
    return Placed(layout, shape, layout.box(shape, rank))


@lru_cache(_CACHED_MAX)
def _mesh(mesh: DeviceMesh) -> Mesh:
    ranks = mesh.mesh
    return Mesh(tuple(ranks.shape), tuple(ranks.flatten().tolist()))


@lru_cache(_CACHED_MAX)
def _unsplit(mesh: Mesh) -> Layout:
    return Layout(mesh)


class _Unmapped(Exception):
    """Why a DTensor has no layout."""


def _splits(spec: Any) -> Iterator[tuple[int, int]]:
    """(mesh axis, tensor dim) in the order of splitting, one tensor dim after the other."""
    sizes, ndim = spec.mesh.mesh.shape, len(spec.shape)
    axes: dict[int, list[int]] = {}
    for axis in reversed(range(len(sizes))):
        placement = spec.placements[axis]
        dim, factor = _split_of(placement)
        if dim is None:
            continue
        earlier = axes.setdefault(dim % ndim, [])
        earlier.insert(_after(earlier, sizes, factor, placement), axis)
    shard_order = getattr(spec, "shard_order", None)  # older torch lacks it
    if shard_order and all(_split_of(each)[1] == 1 for each in spec.placements):
        axes = {dim: list(order) for dim, order in shard_order}
    for dim in sorted(axes):
        yield from ((axis, dim) for axis in axes[dim])


def _split_of(placement: Any) -> tuple[int | None, int]:
    """(tensor dim, how many pieces the dim was already cut into); None for a replica."""
    kind = type(placement).__name__
    if kind == "Replicate":
        return None, 1
    if kind == "Shard":
        return placement.dim, 1
    if kind == "_StridedShard":
        return placement.dim, placement.split_factor
    raise _Unmapped(f"its placement {placement!r} is neither Shard nor Replicate")


def _after(axes: list[int], sizes: Sequence[int], factor: int, placement: Any) -> int:
    """How many of the `axes`, in their order, cut a dim into `factor` pieces."""
    counts = [math.prod(sizes[axis] for axis in axes[:count]) for count in range(len(axes) + 1)]
    if factor not in counts:
        raise _Unmapped(f"no later mesh axes explain its placement {placement!r}")
    return counts.index(factor)


def _refused(what: str, path: str, spec: Any) -> UnsupportedValueError:
    return UnsupportedValueError(
        "a DTensor has a layout that no step can hold",
        facts={
            "path": path,
            "because": what,
            "placements": ", ".join(map(repr, spec.placements)),
            "mesh": str(spec.mesh),
            "shape": list(spec.shape),
        },
        hint="redistribute() it to Shard and Replicate placements over ranks that hold it",
    )


# -- pieces ----------------------------------------------------------------------------------------
# All ranks that hold a tensor give the same shape and the same layout for it. A rank without a part
# has a Piece with an empty tensor, so that every rank names the same tensors.


class Piece:
    """What rank `rank` has of a tensor of `shape`: the box that `layout` gives it.

    memory: a tensor of the shape of that box; or what returns it, where it may move between saves.
    The memory is copied lazily, as that of an optimizer is: it may only change behind the gate. A
    piece in Volatile is copied before save() returns.
    """

    __slots__ = ("_layout", "_memory", "_rank", "box", "place", "shape")

    def __init__(
        self,
        memory: torch.Tensor | Callable[[], torch.Tensor],
        shape: tuple[int, ...],
        layout: AnyLayout,
        rank: int,
    ) -> None:
        self._memory, self.shape, self._layout, self._rank = memory, shape, layout, rank
        self.box = layout.box(shape, rank)
        self.place = Placed(layout, shape, self.box)

    @property
    def tensor(self) -> torch.Tensor:
        """The memory, as it lies now."""
        memory = self._memory
        return (memory if isinstance(memory, torch.Tensor) else memory()).detach()

    def as_saved(self, shape: tuple[int, ...]) -> Piece:
        """The piece that takes a saved tensor of `shape`; a whole one takes a flattened one."""
        memory = self.tensor
        is_whole = self.box == Box.whole(self.shape) and memory.is_contiguous()
        if shape == self.shape or shape != (memory.numel(),) or not is_whole:
            return self
        return Piece(memory.view(-1), shape, self._layout, self._rank)

    def at(self, path: str, rank: int | None) -> Placed:
        """Where it lies; OWN for a rank that is alone (None).

        Raises UnsupportedValueError, with the path, if the memory has another shape than its place,
        or if a rank that is alone has a part only.
        """
        expected = self.shape if rank is None else self.box.shape
        got = tuple(self.tensor.shape)
        if got == expected:
            return OWN if rank is None else self.place
        raise UnsupportedValueError(
            "a part of a tensor has another shape than its place",
            facts={"path": path, "expected": list(expected), "got": list(got)},
            hint="save it together with the ranks that have the rest" if rank is None else None,
        )


@runtime_checkable
class Pieced(Protocol):
    """An object with state_dict() and load_state_dict() whose state has pieces.

    It makes room for a step that has more of them than it has itself.
    """

    def state_to_fill(self, saved: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """The state that takes what a step has of this object.

        saved: the content of the step, with tensors on the meta device. It changes nothing that is
        live: load_state_dict() gets the same pieces once they are filled. Raises
        StateMismatchError.
        """
