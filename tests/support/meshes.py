"""Meshes, layouts, and what each rank of a job would capture; for examples and for hypothesis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from statehold.encoding.header import bytes_of
from statehold.layout.layout import Layout, Mesh
from statehold.layout.plan import TensorSpec


def mesh(*shape: int) -> Mesh:
    return Mesh(shape, tuple(range(math.prod(shape))))


def local_spec(
    name: str, dtype: str, shape: Sequence[int], layout: Layout, rank: int
) -> TensorSpec:
    """What `rank` captures of a tensor of the global `shape`."""
    box = layout.box(shape, rank)
    nbytes = bytes_of(dtype, box.shape)
    if nbytes is None:
        raise ValueError("not a whole number of bytes")
    return TensorSpec(
        name,
        dtype,
        box.shape,
        nbytes,
        layout=layout,
        global_shape=tuple(shape),
        offsets=box.offsets,
    )


def local_specs(
    tensors: Mapping[str, tuple[str, Sequence[int], Layout]], rank: int
) -> list[TensorSpec]:
    """What `rank` captures of {name: (dtype, global shape, layout)}."""
    return [
        local_spec(name, dtype, shape, layout, rank)
        for name, (dtype, shape, layout) in tensors.items()
        if rank in layout.mesh
    ]


@st.composite
def meshes(draw: st.DrawFn, world: int | None = None) -> Mesh:
    """Up to four axes; ranks in any order, and numbered with gaps where no `world` is given."""
    if world is None:
        shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
        if math.prod(shape) > 64:
            shape = shape[:2]
    else:
        shape, left = (), world
        while left > 1:
            size = draw(st.sampled_from([n for n in range(2, left + 1) if left % n == 0]))
            shape, left = (*shape, size), left // size
        shape = shape or (1,)
    count = math.prod(shape)
    ranks = draw(st.permutations(range(count)))
    return Mesh(shape, tuple(ranks))


@st.composite
def layouts(draw: st.DrawFn, on: Mesh, dims: int) -> Layout:
    """Any axes split any dims, in any order; several may split one dim."""
    axes = draw(st.permutations(range(len(on.shape)))) if dims else []
    splits = [(axis, draw(st.integers(0, dims - 1))) for axis in axes if draw(st.booleans())]
    return Layout(on, tuple(splits))
