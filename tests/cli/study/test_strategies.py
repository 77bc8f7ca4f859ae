"""States and strategies: sizes as of a model, and a sweep that changes one thing at a time."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from statehold.cli.study.strategies import (
    JUDGED,
    PAGE_BYTES,
    Operation,
    State,
    Strategy,
    cases_of,
    centre,
    comparisons,
    llama,
    neighbours,
    ordered,
    spans_of,
    strategies,
)
from statehold.units import MiB

MIDDLE = centre(2)
COMPARED = comparisons(MIDDLE)
SWEEP = list(dict.fromkeys(strategy for strategy, _ in strategies(MIDDLE, True, COMPARED)))


@pytest.mark.parametrize("size", [1 * MiB, 50 * MiB, 1024 * MiB, 100_000 * MiB])
def test_a_model_has_about_the_size_and_the_tensors_of_one(size: int) -> None:
    state = llama(size)
    assert abs(state.total_bytes / size - 1) < 0.15
    assert state.sizes.count(4) == len(state.sizes) / 5
    layers = (len(state.sizes) / 5 - 3) / 9
    assert layers == int(layers)
    assert 8 <= layers < 60


def test_aligned_tensors_begin_on_a_page() -> None:
    state = State((1, PAGE_BYTES, 5))
    assert spans_of(state, aligned=False) == [(0, 1), (1, 4097), (4097, 4102)]
    assert spans_of(state, aligned=True) == [(0, 4096), (4096, 8192), (8192, 12288)]


def test_a_strategy_has_a_name_of_its_own() -> None:
    assert len({each.name for each in SWEEP}) == len(SWEEP)


# -- the sweep -------------------------------------------------------------------------------------


def changed(a: Strategy, b: Strategy) -> set[str]:
    return {f.name for f in fields(Strategy) if getattr(a, f.name) != getattr(b, f.name)}


@pytest.mark.parametrize("full", [False, True])
def test_neighbours_differ_in_one_setting(full: bool) -> None:
    found = neighbours(MIDDLE, full)
    assert found[0] == MIDDLE
    assert len(set(found)) == len(found)
    assert all(len(changed(each, MIDDLE)) == 1 for each in found[1:])
    seen = set().union(*(changed(each, MIDDLE) for each in found))
    assert seen == {"mover", "block_bytes", "depth", "copy_threads"}


def test_a_profile_can_ask_for_every_engine_of_the_sweep() -> None:
    engines = [each for each in SWEEP if each.is_engine]
    assert len(engines) > 10
    assert all(each.block_bytes % MiB == 0 for each in engines)


def test_full_has_more() -> None:
    few, all_of_them = (set(strategies(MIDDLE, full, COMPARED)) for full in (False, True))
    assert few < all_of_them


def test_a_comparison_has_one_cause() -> None:
    for each in COMPARED:
        (a, a_op), (b, b_op) = each.a, each.b
        assert len(changed(a, b)) + (a_op is not b_op) == 1, each


def test_what_is_compared_is_measured() -> None:
    figures = set(strategies(MIDDLE, False, COMPARED))
    assert all({each.a, each.b} <= figures for each in COMPARED)


def test_cases_write_before_they_read() -> None:
    cases = cases_of([(MIDDLE, Operation.WARM), (MIDDLE, Operation.COLD)])
    assert [case.operations for case in cases] == [
        (Operation.FRESH, Operation.COLD, Operation.WARM)
    ]


def test_those_to_choose_from_come_first() -> None:
    engines = [each for each in SWEEP if each.is_engine]
    assert SWEEP[: len(engines)] == engines


def test_rounds_go_there_and_back() -> None:
    cases = cases_of([(replace(MIDDLE, depth=depth), JUDGED[0]) for depth in (1, 2, 3)])
    assert ordered(cases, 0) == cases
    assert ordered(cases, 1) == cases[::-1]
