"""Pieces: plain memory of which a rank says what it is a part of, in any cut, to any other cut."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import statehold
from statehold.errors import StateMismatchError, UnsupportedValueError
from statehold.integrations.deepspeed import Weights
from statehold.layout.layout import Box, ExplicitLayout, Layout, Mesh
from statehold.tensors.kinds import capture
from statehold.tensors.placements import Piece
from support.gloo import run_ranks

SIZE = 23
WHOLE = torch.arange(SIZE, dtype=torch.float32)
# Where the ranks of a world cut. A rank may have nothing: the second of three.
CUTS = {1: (0, 23), 2: (0, 5, 23), 3: (0, 17, 17, 23)}


def piece(rank: int, world: int, whole: torch.Tensor | None) -> Piece:
    """This rank's run of a tensor, or memory for it."""
    runs = list(pairwise(CUTS[world]))
    layout = ExplicitLayout(
        tuple((Box((a,), (b - a,)), each) for each, (a, b) in enumerate(runs) if a < b)
    )
    begin, end = runs[rank]
    own = torch.full((end - begin,), -1.0) if whole is None else whole[begin:end].clone()
    return Piece(own, (SIZE,), layout, rank)


def replica(rank: int, world: int, value: float) -> Piece:
    mesh = Mesh((world,), tuple(range(world)))
    return Piece(torch.full((3, 2), value), (3, 2), Layout(mesh), rank)


class Moments:
    """An object that has its pieces only once they are needed, as an optimizer does."""

    def __init__(self, rank: int, world: int, pieces: dict[str, Any]) -> None:
        self.rank, self.world, self.pieces = rank, world, pieces

    def state_dict(self) -> dict[str, Any]:
        return {**self.pieces, "betas": (0.9, 0.95)}

    def state_to_fill(self, saved: dict[str, Any]) -> dict[str, Any]:
        if saved["betas"] != (0.9, 0.95) or not saved["m"].is_meta:
            raise StateMismatchError("what was saved came in another form")
        return {"m": piece(self.rank, self.world, None), "betas": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pieces = {"m": state["m"]}


def saved_by(rank: int, world: int, run: str) -> None:
    state = {
        "flat": {"a": piece(rank, world, WHOLE)},
        "copy": replica(rank, world, 7.0),
        "moments": Moments(rank, world, {"m": piece(rank, world, WHOLE * 2)}),
        "own": statehold.Volatile(piece(rank, world, WHOLE * 3)),
    }
    with statehold.Checkpointer(run, staging_bytes="64MiB") as ckpt:
        ckpt.save(1, state).wait("committed")
        state["flat"]["a"].tensor.add_(0.5)  # the plan of the next save is the same
        ckpt.save(2, state).wait("committed")


def restored_by(rank: int, world: int, run: str) -> list[torch.Tensor]:
    moments = Moments(rank, world, {})
    state = {
        "flat": {"a": piece(rank, world, None)},
        "copy": replica(rank, world, 0.0),
        "moments": moments,
        "own": piece(rank, world, None),
    }
    with statehold.Checkpointer(run, staging_bytes="64MiB") as ckpt:
        assert ckpt.restore(state) == 2
    assert torch.equal(state["copy"].tensor, torch.full((3, 2), 7.0))
    return [state["flat"]["a"].tensor, moments.pieces["m"].tensor, state["own"].tensor]


def in_process(worker: Callable[..., Any], world: int, folder: Path, *args: Any) -> list[Any]:
    return [worker(0, world, *args)]


@pytest.mark.thorough
def test_any_cut_becomes_any_other(tmp_path: Path) -> None:
    run_ranks(saved_by, 2, tmp_path, str(tmp_path / "run"))
    for world in (1, 2, 3):
        many = run_ranks if world > 1 else in_process
        parts = many(restored_by, world, tmp_path, str(tmp_path / "run"))
        flat, moments, own = (torch.cat(each) for each in zip(*parts, strict=True))
        assert torch.equal(flat, WHOLE + 0.5)
        assert torch.equal(moments, WHOLE * 2)
        assert torch.equal(own, WHOLE * 3)
    loaded = statehold.load(tmp_path / "run")
    assert torch.equal(loaded["flat"]["a"], WHOLE + 0.5)


SHAPES = {"matrix": (5, 7), "cube": (3, 2, 2), "vector": (4,), "number": (), "empty": (0, 3)}


def filled(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


def wholes(rank: int, world: int, factor: float) -> dict[str, Piece]:
    layout = Layout(Mesh((world,), tuple(range(world))))
    return {
        name: Piece(filled(shape) * factor, shape, layout, rank) for name, shape in SHAPES.items()
    }


def runs(rank: int, world: int, factor: float) -> Weights:
    """Each flattened tensor cut into equal parts, as ZeRO-3 holds them."""
    layout, found = Layout(Mesh((world,), tuple(range(world))), ((0, 0),)), {}
    for name, shape in SHAPES.items():
        flat = filled(shape).view(-1) * factor
        (begin,), (count,) = (box := layout.box(flat.shape, rank)).offsets, box.shape
        found[name] = Piece(flat[begin : begin + count], tuple(flat.shape), layout, rank)
    return Weights(SimpleNamespace(persistent_parameters=[]), found)


def becomes_the_other(rank: int, world: int, run: str, saved: Any, live: Any) -> None:
    with statehold.Checkpointer(run, staging_bytes="64MiB") as ckpt:
        if saved is not None:
            ckpt.save(1, {"model": saved(rank, world, 1.0)}).wait("committed")
        got, expected = ({"model": live(rank, world, factor)} for factor in (-1.0, 1.0))
        assert ckpt.restore(got) == 1
    got, expected = (
        each if isinstance(each, dict) else each.state_dict()
        for each in (got["model"], expected["model"])
    )
    for name in SHAPES:
        assert torch.equal(got[name].tensor, expected[name].tensor), name


@pytest.mark.thorough
@pytest.mark.parametrize(("saved", "live"), [(wholes, runs), (runs, wholes)])
def test_whole_tensors_and_runs_of_flattened_ones_take_each_other(
    tmp_path: Path, saved: Any, live: Any
) -> None:
    run = str(tmp_path / "run")
    run_ranks(becomes_the_other, 2, tmp_path, run, saved, live)
    run_ranks(becomes_the_other, 3, tmp_path, run, None, live)


def test_a_rank_that_is_alone_saves_no_part() -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        capture({"flat": {"a": piece(0, 2, WHOLE)}})
    assert caught.value.facts["path"] == "flat.a"
    assert "the ranks that have the rest" in str(caught.value)


def test_another_shape_is_refused_before_anything_changes(tmp_path: Path) -> None:
    run, live = tmp_path / "run", piece(0, 1, None)
    with statehold.Checkpointer(run, staging_bytes="64MiB") as ckpt:
        ckpt.save(1, {"flat": {"a": torch.zeros(4)}, "m": {"betas": 1}}).wait("committed")
        with pytest.raises(StateMismatchError, match=r"flat\.a"):
            ckpt.restore({"flat": {"a": live}, "m": {"betas": 0}})
        with pytest.raises(StateMismatchError, match=r"m\.betas"):
            ckpt.restore({"flat": {"a": torch.ones(4)}, "m": {"betas": live}})
    assert torch.equal(live.tensor, torch.full((SIZE,), -1.0))
