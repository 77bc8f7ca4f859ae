"""Meshes and layouts at random, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from statehold.layout.layout import Box, ExplicitLayout, Layout, Mesh


@st.composite
def meshes(draw: st.DrawFn, world_size: int) -> Mesh:
    """All ranks in some grid, in some order."""
    sizes, left = [], world_size
    while left > 1:
        size = draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0]))
        sizes.append(size)
        left //= size
        if len(sizes) == 3:
            sizes[-1] *= left
            left = 1
    shape = tuple(sizes or [world_size])
    ranks = list(range(world_size))
    if draw(st.booleans()):
        ranks = draw(st.permutations(ranks))
    return Mesh(shape, tuple(ranks))


@st.composite
def layouts(draw: st.DrawFn, world_size: int, dims: int) -> Layout:
    """Some axes split, in any order, two of one dim among them; the others replicate."""
    mesh = draw(meshes(world_size))
    axes = draw(st.permutations(range(len(mesh.shape))))
    split = axes[: draw(st.integers(0, len(axes)))] if dims else []
    return Layout(mesh, tuple((axis, draw(st.integers(0, dims - 1))) for axis in split))


@st.composite
def explicit(draw: st.DrawFn, world_size: int, shape: tuple[int, ...]) -> ExplicitLayout:
    """The tensor cut at random, again and again."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[dim]))
        for begin, end in ((0, at), (at, box.shape[dim])):
            offsets, sizes = list(box.offsets), list(box.shape)
            offsets[dim], sizes[dim] = box.offsets[dim] + begin, end - begin
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    distinct = list(dict.fromkeys(boxes))
    return ExplicitLayout(tuple((box, draw(st.integers(0, world_size - 1))) for box in distinct))
