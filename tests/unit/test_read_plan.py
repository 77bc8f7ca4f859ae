"""What a rank reads of a step: what it asked for, and what it verifies in addition."""

from __future__ import annotations

from collections.abc import Container
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from statehold.checkpoint.restore import read_plan  # noqa: E402
from statehold.format.saved import PlacedChunk  # noqa: E402
from statehold.layout.layout import Box  # noqa: E402
from statehold.tensors.destinations import Destination  # noqa: E402

SUM = "0" * 16
ELSEWHERE = PlacedChunk(Box((0,), (4,)), "f", 100, 0, 16, SUM)
OWN = PlacedChunk(Box((4,), (4,)), "f", 100, 16, 32, SUM)


class Step:
    """Two chunks of tensor "a": one that is asked for, and one that this rank once wrote."""

    block_bytes = 1 << 20
    files = (SimpleNamespace(name="f", data_begin=0, header_sums=""),)

    def chunks(self, name: str, box: Box, among: Any = None) -> list[PlacedChunk]:
        return [ELSEWHERE]

    def unread(self, asked: Container[str]) -> list[tuple[str, PlacedChunk]]:
        return [(name, OWN) for name in ("a", "b") if name not in asked]


def test_what_others_ask_for_is_not_verified_again() -> None:
    tensor = torch.zeros(4)
    destination = Destination("a", tensor, False, ELSEWHERE.box, shared=False)
    step: Any = Step()
    plan = read_plan.ReadPlan(step, [destination], complete=True, rank=0, ranks=2)
    assert list(zip(plan.segments.names, plan.segments.begins, strict=True)) == [
        ("a", 0),
        ("b", 16),
    ]


def test_boxes_of_packed_tensors_are_cut_in_bytes() -> None:
    """Two values are one element of torch: four rows of eight are sixteen bytes."""
    saved = PlacedChunk(Box((0, 0), (4, 8)), "f", 100, 0, 16, SUM)
    target = torch.zeros(4, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    step: Any = SimpleNamespace(block_bytes=1 << 20, chunks=lambda *_: [saved])
    plan = read_plan.ReadPlan(step, [Destination("a", target, False, Box((0, 4), (4, 4)), False)])
    assert (list(plan.segments.begins), list(plan.segments.ends)) == ([0], [16])
    assert plan.segments.boxes == {0: (1, (4, 4), (0, 2), (4, 2), (2, 1), 0)}
