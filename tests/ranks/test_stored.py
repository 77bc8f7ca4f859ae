"""State of several ranks that lies in files is linked into steps, and restores into any layout."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch

from statehold.errors import PeerFailedError, StorageError
from statehold.layout.layout import Layout, Mesh
from support.faults import DEADLINE_S, SMALL
from support.in_memory import SimFs, checkpointer_on
from support.inside import inside
from support.ranks import RUN, Ranks
from support.stored import OnFiles

ROWS, COLUMNS = 37, 50


def whole() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)


def parts_of(fs: SimFs, size: int) -> list[OnFiles]:
    """Rows over all ranks, in three files of each: the first ends within a row."""
    layout, found = Layout(Mesh((size,), tuple(range(size))), ((0, 0),)), []
    for rank in range(size):
        box = layout.box((ROWS, COLUMNS), rank)
        local = whole()[box.offsets[0] : box.ends[0]].clone()
        cuts = (
            [("avg", 0, 20)],
            [("avg", 20, 50)],
            [("avg", 50, local.numel())],
        )
        placed = {"avg": (layout, (ROWS, COLUMNS), rank)}
        found.append(OnFiles(fs, f"/opt-{size}-{rank}", {"avg": local}, cuts, placed))
    return found


def blank() -> dict[str, Any]:
    return {"optimizer": {"moments": {"avg": torch.zeros(ROWS, COLUMNS)}, "value": -1.0}}


def check(found: dict[str, Any], value: float) -> None:
    assert torch.equal(found["optimizer"]["moments"]["avg"], whole() + value)
    assert found["optimizer"]["value"] == value


@pytest.mark.parametrize("size", [2, 3, 4])
def test_steps_restore_on_any_number_of_ranks(size: int) -> None:
    fs = SimFs(seed=1)
    parts = parts_of(fs, size)
    with Ranks(fs, size, keep=2) as ranks:
        for step in range(1, 5):
            saves = ranks.save(step, lambda rank: {"optimizer": parts[rank]})
            for save, part in zip(saves, parts, strict=True):
                assert save.stats.linked_bytes == sum(file.file_bytes for file in part.files)
            for part in parts:
                part.update(1.0)
    assert [part.released for part in parts] == [4] * size
    assert all(part.held == [] for part in parts)
    assert sum(part.reused for part in parts) > 0
    for other in (1, 2, 4):
        with Ranks(fs, other) as ranks:
            for step in (3, 4):
                found = [blank() for _ in range(other)]
                ranks.each(lambda rank, s=step, f=found: ranks.ckpts[rank].restore(f[rank], step=s))
                for each in found:
                    check(each, step - 1.0)
    with checkpointer_on(fs, RUN, **SMALL) as ckpt:
        state = blank()
        ckpt.restore(state)
        check(state, 3.0)
    for part in parts:
        part.close()
    fs.close()


def test_what_all_ranks_hold_is_linked_by_the_first() -> None:
    fs = SimFs(seed=1)
    layout = Layout(Mesh((2,), (0, 1)))
    cuts = ([("avg", 0, 50)], [("avg", 50, whole().numel())])
    parts = [
        OnFiles(
            fs, f"/opt-{rank}", {"avg": whole()}, cuts,
            {"avg": (layout, (ROWS, COLUMNS), rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    with Ranks(fs, 2) as ranks:
        saves = ranks.save(1, lambda rank: {"optimizer": parts[rank]})
        assert [save.stats.linked_bytes > 0 for save in saves] == [True, False]
        found = [blank(), blank()]
        ranks.each(lambda rank: ranks.ckpts[rank].restore(found[rank]))
    for each in found:
        check(each, 0.0)
    for part in parts:
        part.close()
    fs.close()


def test_a_file_that_is_lost_on_one_rank_fails_all_and_gives_the_files_back() -> None:
    fs = SimFs(seed=1)
    parts = parts_of(fs, 3)
    with Ranks(fs, 3) as ranks:
        ranks.save(1, lambda rank: {"optimizer": parts[rank]})
        for part in parts:
            part.update(1.0)
        fs.unlink(parts[1].files[2].path)
        errors = ranks.failures(2, lambda rank: {"optimizer": parts[rank]})
        kinds = [type(error) for error in errors]
        assert kinds == [PeerFailedError, StorageError, PeerFailedError], errors
        assert errors[1].errno == errno.ENOENT
        ranks.each(lambda rank: inside(ranks.ckpts[rank]).pipeline.drain(DEADLINE_S))
        assert [part.held for part in parts] == [[], [], []]
        found = [blank() for _ in range(3)]
        assert ranks.each(lambda rank: ranks.ckpts[rank].restore(found[rank])) == [1, 1, 1]
    for each in found:
        check(each, 0.0)
    for part in parts:
        part.close()
    fs.close()
