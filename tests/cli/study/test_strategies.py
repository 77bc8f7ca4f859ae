"""States and strategies: sizes as of a model; transfers that cover everything once."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import pytest

from statehold.cli.study.strategies import (
    PAGE_BYTES,
    Mover,
    Operation,
    State,
    Strategy,
    files_of,
    llama,
    spans_of,
    uniform,
)
from statehold.cli.study.sweep import (
    JUDGED,
    cases_of,
    centre,
    comparisons,
    neighbours,
    ordered,
    strategies,
)
from statehold.units import KiB, MiB

STATES = {state.name: state for state in (llama(6 * MiB), uniform(6 * MiB))}
MIDDLE = centre(2)
SWEEP = list(dict.fromkeys(strategy for strategy, _ in strategies(MIDDLE, full=True)))


@pytest.mark.parametrize("size", [1 * MiB, 50 * MiB, 1024 * MiB, 100_000 * MiB])
def test_a_model_has_about_the_size_and_the_tensors_of_one(size: int) -> None:
    state = llama(size)
    assert abs(state.total_bytes / size - 1) < 0.15
    assert state.sizes.count(4) == len(state.sizes) / 5
    layers = (len(state.sizes) / 5 - 3) / 9
    assert layers == int(layers)
    assert 8 <= layers < 60


def test_equal_tensors_are_equal() -> None:
    assert set(uniform(1024 * MiB).sizes) == {16 * MiB}
    assert uniform(1 * MiB).sizes == (128 * KiB,) * 8


@pytest.mark.parametrize("strategy", SWEEP, ids=lambda strategy: strategy.name)
def test_transfers_cover_every_byte_once(strategy: Strategy) -> None:
    state = STATES[strategy.state]
    spans = spans_of(strategy, state)
    moved = []
    for plan in files_of(strategy, state):
        in_file = sorted((t.offset, t.offset + t.nbytes) for t in plan.transfers)
        assert in_file[0][0] == 0
        assert in_file[-1][1] == plan.nbytes
        assert all(a[1] == b[0] for a, b in itertools.pairwise(in_file))
        moved += [(t.memory, t.memory + t.nbytes) for t in plan.transfers]
    moved.sort()
    assert moved[0][0] == 0
    assert moved[-1][1] == spans[-1][1]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(moved))


@pytest.mark.parametrize("strategy", SWEEP, ids=lambda strategy: strategy.name)
def test_transfers_keep_to_their_strategy(strategy: Strategy) -> None:
    state = STATES[strategy.state]
    spans = spans_of(strategy, state)
    begins = {begin for begin, _ in spans}
    transfers = [t for plan in files_of(strategy, state) for t in plan.transfers]
    assert max(t.nbytes for t in transfers) <= strategy.block_bytes
    if strategy.direct and not strategy.is_engine:
        assert all(t.offset % PAGE_BYTES == t.nbytes % PAGE_BYTES == 0 for t in transfers)
    if not strategy.coalesced:
        assert begins <= {t.memory for t in transfers}
        assert len(transfers) >= len(state.sizes)


def test_a_shared_file_is_written_by_all_in_turns() -> None:
    shared = Strategy(layout="shared", ranks=4, block_bytes=PAGE_BYTES, mover=Mover.PYTHON)
    state = State("model", (4 * PAGE_BYTES,) * 4)
    (plan,) = files_of(shared, state)
    begins = [t.offset // PAGE_BYTES for t in plan.transfers]
    assert begins[:8] == [0, 4, 8, 12, 1, 5, 9, 13]


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
    assert all(each.block_bytes % MiB == 0 and each.layout == "rank" for each in engines)


def test_full_has_more() -> None:
    few, all_of_them = (set(strategies(MIDDLE, full)) for full in (False, True))
    assert few < all_of_them


def test_a_comparison_has_one_cause() -> None:
    for each in comparisons(MIDDLE):
        (a, a_op), (b, b_op) = each.a, each.b
        # The engine copies tensors that lie unaligned to blocks that are aligned: one thing.
        causes = len(changed(a, b) - {"aligned"} or changed(a, b)) + (a_op is not b_op)
        assert causes == 1, each


def test_what_is_compared_is_measured() -> None:
    figures = set(strategies(MIDDLE, full=False))
    assert all({each.a, each.b} <= figures for each in comparisons(MIDDLE))


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
