"""How copies from a device are scheduled: the product's loop over buffers, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from support.benches import ROOT

WHOLE = 12e9

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def schedule() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        import bench.gpu.schedule

        yield bench.gpu.schedule


def test_the_model_has_the_figures_of_the_device(schedule: Any) -> None:
    """An H200 at 2c8b861: 19.13 GB/s, 122.8 ms, and 1.527."""
    found = schedule.saved(WHOLE, 1.01 * WHOLE, plan=schedule.BEFORE)
    assert WHOLE / found.staged == pytest.approx(19.13e9, rel=0.05)
    assert found.gate(0.5) == pytest.approx(0.1228, rel=0.1)
    bound = schedule.saved(4e9, 4.1e9, plan=schedule.BEFORE)
    assert 1 + bound.takes * schedule.Costs().lock == pytest.approx(1.527, rel=0.05)


def test_a_state_is_staged_at_the_rate_of_the_device(schedule: Any) -> None:
    costs = schedule.Costs()
    found = schedule.saved(WHOLE, 1.01 * WHOLE)
    assert WHOLE / found.staged > 0.9 * costs.d2h
    assert found.gate(0.5) == 0
    assert found.gate(0) < WHOLE / costs.d2h + 0.01


def test_checksums_are_why_it_was_slow(schedule: Any) -> None:
    four = replace(schedule.NOW, threads=4)
    hashed = schedule.saved(WHOLE, 1.01 * WHOLE, plan=replace(four, staged_hashed=True))
    assert WHOLE / hashed.staged < 0.5 * schedule.Costs().d2h
    late, first = (
        schedule.saved(WHOLE, 1.01 * WHOLE, plan=replace(four, at_once=1, lends_first=way))
        for way in (False, True)
    )
    assert late.gate(0) > 2 * first.gate(0)


@pytest.mark.thorough
@pytest.mark.parametrize("buffers", [2, 4, 64])
def test_with_less_staging_memory_the_disk_sets_the_rate(schedule: Any, buffers: int) -> None:
    found = schedule.saved(WHOLE, buffers * schedule.BUFFER)
    assert WHOLE / found.written > 0.9 * schedule.Costs().disk


def test_a_program_that_launches_kernels_keeps_its_lock(schedule: Any) -> None:
    lock = schedule.Costs().lock
    now, each = (
        schedule.saved(4e9, 4.1e9, plan=plan)
        for plan in (schedule.NOW, replace(schedule.NOW, at_once=1))
    )
    assert now.takes * lock < 0.05
    assert each.takes * lock > 0.05


def test_what_is_predicted_to_miss_its_target_pins(schedule: Any) -> None:
    """bench/README.md names these, and says what the next device has to tell about them."""
    found = schedule.predicted()
    missed = {(name, each.name) for name, of in found.items() for each in of if is_missed(each)}
    assert missed == {
        ("first save", "gate, update at once"),
        ("first save", "pinned on its way"),
        ("restore", "restore, warm / H2D"),
    }


def is_missed(figure: Any) -> bool:
    return bool(figure.verdict == "missed")


def test_a_warm_restore_needs_more_than_four_threads(schedule: Any) -> None:
    target = 0.5 * schedule.Costs().h2d
    few = schedule.restored(WHOLE, 1 << 30, plan=replace(schedule.NOW, threads=4))
    assert WHOLE / few < target
    assert WHOLE / schedule.restored(WHOLE, 1 << 30) > target
