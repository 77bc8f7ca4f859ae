"""Which pieces differ, by checksums alone: nothing is left out unless it is certainly the same."""

from __future__ import annotations

import pytest

from statehold.format.saved import PlacedChunk
from statehold.layout.layout import Box
from statehold.subscription.preparing import KnownTensor, changed_pieces

BLOCK = 100


def chunk(begin: int, sums: list[int], nbytes: int = 250, rows: int = 5) -> PlacedChunk:
    box = Box((0, 0), (rows, 50))
    return PlacedChunk(box, "file", 1000, begin, begin + nbytes, "".join(f"{s:016x}" for s in sums))


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (chunk(100, [1, 2, 3]), []),
        (chunk(400, [1, 2, 3]), []),  # elsewhere in its file, cut at the same elements
        (chunk(100, [1, 9, 3]), [(200, 300)]),
        (chunk(100, [9, 2, 9]), [(100, 200), (300, 350)]),
        (chunk(150, [1, 2, 3]), [(100, 200), (200, 300), (300, 350)]),  # cut at other elements
        (chunk(100, [1, 2, 3], rows=4), [(100, 200), (200, 300), (300, 350)]),  # another box
        (chunk(100, [1, 2], nbytes=200), [(100, 200), (200, 300), (300, 350)]),  # other elements
    ],
)
def test_pieces_that_differ(before: PlacedChunk, expected: list[tuple[int, int]]) -> None:
    now = chunk(100, [1, 2, 3])
    found = list(changed_pieces(now, BLOCK, KnownTensor.of([before], BLOCK)))
    assert [(piece.begin, piece.end) for piece in found] == expected
    assert all(piece.sum == f"{piece.begin // BLOCK:016x}" for piece in found)


def test_without_a_step_in_place_or_on_another_grid_all_pieces_differ() -> None:
    now = chunk(100, [1, 2, 3])
    for known in (None, KnownTensor.of([], BLOCK), KnownTensor.of([now], 2 * BLOCK)):
        assert len(list(changed_pieces(now, BLOCK, known))) == 3
