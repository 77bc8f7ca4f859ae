"""A recorded timeline has each read, update and write once, in an order that can be true."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from statehold import offload
from statehold.errors import ChecksumError
from support.twins import Twins

SUBGROUP = 196_608


def twins_on(folders: list[Path]) -> Twins:
    for folder in folders:
        folder.mkdir()
    tiers = [offload.Path(folder) for folder in folders]
    return Twins([(1 << 20,)], [torch.bfloat16], tiers=tiers, subgroup_bytes=SUBGROUP)


def test_every_transfer_and_update_is_recorded(tmp_path: Path) -> None:
    twins = twins_on([tmp_path / "one", tmp_path / "other"])
    twins.train(2)
    before = twins.ours.stats
    with twins.ours.recorded() as events:
        twins.train(1)
    after = twins.ours.stats
    for now, then in zip(after.paths, before.paths, strict=True):
        of_path = Counter(each.kind for each in events if each.path == now.path)
        assert of_path["read"] * SUBGROUP == now.read_bytes - then.read_bytes > 0
        assert of_path["write"] * SUBGROUP == now.written_bytes - then.written_bytes > 0
    updates = {each.subgroup: each for each in events if each.kind == "update"}
    assert sorted(updates) == list(range(64))
    for each in events:
        assert each.begin_s < each.end_s
        if each.kind == "read":
            assert each.end_s <= updates[each.subgroup].begin_s


def test_nothing_is_kept_outside_of_the_block(tmp_path: Path) -> None:
    twins = twins_on([tmp_path / "one"])
    with twins.ours.recorded() as events:
        pass
    twins.train(1)
    assert events == []


def test_a_read_that_fails_is_recorded(tmp_path: Path) -> None:
    twins = twins_on([tmp_path / "one"])
    twins.train(2)
    for path in (tmp_path / "one").rglob("*.state"):
        path.write_bytes(bytes(path.stat().st_size))
    with twins.ours.recorded() as events, pytest.raises(ChecksumError):
        twins.train(1)
    assert any(each.kind == "read" for each in events)
