"""Sets of ranks, what is left of a box, and layouts that somebody else decided."""

from __future__ import annotations

import itertools

from statehold.layout.layout import Box, ExplicitLayout, Ranks


def test_ranks_are_ranges() -> None:
    ranks = Ranks.of([5, 3, 4, 9, 0, 3])
    assert ranks.ranges == ((0, 0), (3, 5), (9, 9))
    assert (len(ranks), ranks.lowest, str(ranks)) == (5, 0, "0, 3-5, 9")
    assert [rank for rank in range(12) if rank in ranks] == [0, 3, 4, 5, 9]
    assert Ranks.of(range(100_000)).ranges == ((0, 99_999),)


def test_unions_and_covers() -> None:
    a, b = Ranks(((0, 3), (8, 9))), Ranks(((2, 5), (7, 7)))
    union = Ranks.union([a, b])
    assert union.ranges == ((0, 5), (7, 9))
    assert union.covers(a)
    assert union.covers(b)
    assert not a.covers(b)
    assert not a.covers(union)


def cells(box: Box) -> set[tuple[int, ...]]:
    ranges = zip(box.offsets, box.ends, strict=True)
    return set(itertools.product(*(range(a, b) for a, b in ranges)))


def test_what_is_left_of_a_box() -> None:
    box = Box((1, 0, 2), (3, 4, 3))
    for offsets in itertools.product(range(5), range(5), range(6)):
        other = Box(offsets, (2, 3, 2))
        left = box.minus(other)
        assert sum(part.numel for part in left) == len(cells(box) - cells(other))
        assert set().union(*map(cells, left)) == cells(box) - cells(other)
    assert Box((), ()).minus(Box((), ())) == []
    assert Box((0,), (0,)).minus(Box((0,), (1,))) == []


def test_explicit_layouts() -> None:
    parts = [(Box((0,), (2,)), 1), (Box((2,), (0,)), 0), (Box((2,), (3,)), 0), (Box((5,), (1,)), 1)]
    layout = ExplicitLayout(tuple(parts))
    assert list(layout.boxes((6,))) == [(box, (rank,)) for box, rank in parts if box.numel]
    assert list(layout.boxes((6,), Box((1,), (2,)))) == [
        (Box((0,), (2,)), (1,)),
        (Box((2,), (3,)), (0,)),
    ]
    assert layout.boxes_of(1) == [Box((0,), (2,)), Box((5,), (1,))]
    assert layout.boxes_of(0) == [Box((2,), (3,))]
