"""A step of four ranks, written once and for all, restores on any number of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from golden.make_v2 import HELD, SIZE, STEP, boxes_of, content, element
from statehold import _core
from statehold.errors import StateMismatchError
from statehold.format.saved import open_step
from statehold.layout.layout import Box
from support.ranks import Ranks

GOLDEN = Path(__file__).parent / "v2"
GLOBAL = [held for held in HELD if held.name.startswith("model.")]


def blank() -> dict[str, Any]:
    model = {each.name.removeprefix("model."): torch.full(each.shape, -1.0) for each in GLOBAL}
    return {"model": model, "own": torch.zeros(2, 2), "epoch": 0, "sampler": {"seed": 0, "at": ()}}


def expected(name: str, shape: tuple[int, ...], rank: int) -> torch.Tensor:
    elements = [element(name, index, rank) for index in range(math.prod(shape))]
    return torch.tensor(elements).reshape(shape)


def check_global(state: dict[str, Any]) -> None:
    for held in GLOBAL:
        found = state["model"][held.name.removeprefix("model.")]
        assert torch.equal(found, expected(held.name, held.shape, 0)), held.name
    assert state["epoch"] == 3


@pytest.fixture(params=[1, 2, 3, 4, 8])
def ranks(request: pytest.FixtureRequest) -> Any:
    fs = _core.open_fs("threads")
    with Ranks(fs, request.param, str(GOLDEN)) as ranks:
        yield ranks
    fs.close()


@pytest.mark.thorough
def test_every_number_of_ranks_restores_it(ranks: Ranks) -> None:
    found = [blank() for _ in range(ranks.size)]
    if ranks.size == SIZE:
        told = ranks.each(lambda rank: ranks.ckpts[rank].restore(found[rank]))
    else:
        for error in ranks.outcomes(lambda rank: ranks.ckpts[rank].restore(found[rank])):
            assert type(error) is StateMismatchError
            assert {"sampler.seed", "sampler.at"} <= error.facts.keys()
        parts = ["own", "sampler"]
        told = ranks.each(lambda rank: ranks.ckpts[rank].restore(found[rank], skip=parts))
    assert told == [STEP] * ranks.size
    for rank, state in enumerate(found):
        check_global(state)
        if ranks.size == SIZE:
            assert torch.equal(state["own"], expected("own", (2, 2), rank))
            assert state["sampler"] == {"seed": 1000 + rank, "at": (rank, 5)}


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("rank", range(SIZE))
def test_boxes_are_where_it_says(rank: int, world_size: int) -> None:
    def read(path: str, max_bytes: int) -> bytes:
        return Path(path).read_bytes()

    directory = GOLDEN / f"step-{STEP:012d}"
    here = rank if world_size == SIZE else 0
    saved = open_step(read, str(directory), STEP, here, world_size)
    for held in GLOBAL:
        for box in boxes_of(held, rank):
            for chunk in saved.chunks(held.name, box):
                raw = (directory / chunk.file).read_bytes()
                assert len(raw) == chunk.file_bytes
                assert raw[chunk.begin : chunk.end] == content(held, chunk.box, rank)
        whole = saved.chunks(held.name, Box.whole(held.shape))
        assert sum(chunk.box.numel for chunk in whole) == math.prod(held.shape)
