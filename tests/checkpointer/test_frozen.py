"""A step knows which parameters needed gradients, and restore() names those that differ."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import statehold
from statehold.checkpoint.save import sharing
from statehold.encoding import header
from support.faults import DEADLINE_S, SMALL
from support.in_memory import SimFs
from support.ranks import Ranks


def made(frozen: tuple[int, ...], width: int = 4) -> dict[str, Any]:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
    for index in frozen:
        model[index].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"model": model, "optimizer": optimizer}


def told(ckpt: statehold.Checkpointer, state: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        ckpt.restore(state, **options)
    return [str(each.message) for each in found if each.category is RuntimeWarning]


@pytest.mark.parametrize("then", [(), (0,), (0, 1)])
@pytest.mark.parametrize("now", [(), (0,), (2,)])
def test_parameters_that_differ_are_named(
    tmp_path: Path, then: tuple[int, ...], now: tuple[int, ...]
) -> None:
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, made(then)).wait("committed", DEADLINE_S)
        live = made(now)
        found = told(ckpt, live)
    assert [index for index in range(3) if not live["model"][index].weight.requires_grad] == [*now]
    froze, freed = sorted({*now} - {*then}), sorted({*then} - {*now})
    texts = [text for text in found if "needed gradients when" in text]
    assert len(texts) == bool(froze)
    assert all(f"model.{index}.weight" in texts[0] for index in froze)
    texts = [text for text in found if "needed no gradients when" in text]
    assert len(texts) == bool(freed)
    assert all(f"model.{index}.bias" in texts[0] for index in freed)


def test_what_is_set_free_between_two_saves_is_known(tmp_path: Path) -> None:
    """The structure stays the same, so plans of the save before may be used again."""
    state = made((0,))
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        for step in (1, 2, 3):
            if step == 3:
                state["model"][0].requires_grad_(True)
            ckpt.save(step, state).wait("committed", DEADLINE_S)
        assert not told(ckpt, made((0,)), step=2)
        assert "model.0.weight, model.0.bias" in told(ckpt, made((0,)), step=3)[0]


def test_files_that_steps_share_do_not_say_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A linked file has the header of an earlier step; the own file of the rank is of this one."""
    monkeypatch.setattr(sharing, "PART_BYTES_MIN", 8 << 10)
    monkeypatch.setattr(sharing, "FILE_BYTES_MIN", 16 << 10)
    state = made((0, 1), width=128)
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        for step in range(1, 5):
            if step == 4:
                state["model"][1].requires_grad_(True)
            ckpt.save(step, state).wait("committed", DEADLINE_S)
        names = {each.name for each in (tmp_path / "run" / "step-000000000004").iterdir()}
        assert any(name.endswith("-1.safetensors") for name in names)
        assert not told(ckpt, made((0,), width=128))
        assert "model.1.weight" in told(ckpt, made((0, 1), width=128))[0]


def test_only_a_run_that_goes_on_is_told(tmp_path: Path) -> None:
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, made(())).wait("committed", DEADLINE_S)
        assert not told(ckpt, made((0,)), only=["model"])
        renamed = {"net": made((1,))["model"], "optimizer": None}
        renamed["optimizer"] = torch.optim.SGD(renamed["net"].parameters(), lr=0.1, momentum=0.9)
        assert "net.1.weight" in told(ckpt, renamed, rename={"model": "net"})[0]


def test_a_step_that_does_not_say_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, made(())).wait("committed", DEADLINE_S)
        assert told(ckpt, made((0,)))
        monkeypatch.setattr(header, "metadata_in", lambda *_: None)
        assert not told(ckpt, made((0,)))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_on_several_ranks(size: int) -> None:
    fs = SimFs(seed=1)

    def stage(rank: int, frozen: tuple[int, ...]) -> dict[str, Any]:
        return {f"stage{rank % 2}": made(frozen)}

    with Ranks(fs, 2) as ranks:
        ranks.save(1, lambda rank: stage(rank, (0,) if rank else ()))
    with Ranks(fs, size) as ranks, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        both = {**stage(0, ()), **stage(1, (1,))}
        states = [both if size == 1 else stage(rank, (rank % 2,)) for rank in range(size)]
        ranks.each(lambda rank: ranks.ckpts[rank].restore(states[rank], strict=False))
    texts = "\n".join(str(each.message) for each in found if each.category is RuntimeWarning)
    assert ("stage0.model.0.weight" in texts) == (size > 1)
    for name in ("stage1.model.1.weight", "stage1.model.0.weight"):
        assert name in texts


def test_the_note_is_found_whatever_tensors_are_called() -> None:
    name = 'statehold.frozen":"["x'
    entry = header.Entry(name, "U8", (1,), 0, 1)
    shapes = '{"statehold.frozen":"no"}'
    raw = header.encode([entry], {"statehold.global_shapes": shapes})
    assert header.metadata_in(raw, "statehold.frozen") is None
    raw = header.encode([entry], {"a": shapes, "statehold.frozen": '["ü"]', "b": "x"})
    assert header.metadata_in(raw, "statehold.frozen") == '["ü"]'
