"""Strategies that statehold does not have: each moves all of its bytes, and is compared fairly."""

from __future__ import annotations

import itertools
import os
from dataclasses import fields
from pathlib import Path

import pytest
from bench.io_study.__main__ import AllStrategies, main
from bench.io_study.alternatives import Alternative, comparisons, files_of, uniform
from bench.io_study.threads import PythonSession, in_turns

from statehold.cli.study.strategies import (
    PAGE_BYTES,
    MappedMemory,
    Operation,
    State,
    Strategy,
    cases_of,
    kept,
    llama,
    spans_of,
)
from statehold.units import KiB, MiB

COMPARED = comparisons()
FIGURES = list(dict.fromkeys(figure for each in COMPARED for figure in (each.a, each.b)))
SWEEP = list(dict.fromkeys(s for s, _ in FIGURES if isinstance(s, Alternative)))
STATES = {"model": llama(6 * MiB), "uniform": uniform(6 * MiB)}
SMALL = {
    "model": State((700 * KiB, 4, 2 * MiB, 5000, 4, 300 * KiB + 2, 1)),
    "uniform": State((512 * KiB,) * 6),
}


@pytest.fixture(scope="module")
def pattern() -> MappedMemory:
    return kept(4 * MiB)


def test_equal_tensors_are_equal() -> None:
    assert set(uniform(1024 * MiB).sizes) == {16 * MiB}
    assert uniform(1 * MiB).sizes == (128 * KiB,) * 8


@pytest.mark.parametrize("strategy", SWEEP, ids=lambda strategy: strategy.name)
def test_transfers_cover_every_byte_once(strategy: Alternative) -> None:
    state = STATES[strategy.state]
    spans = spans_of(state, aligned=strategy.aligned)
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
def test_transfers_keep_to_their_strategy(strategy: Alternative) -> None:
    state = STATES[strategy.state]
    spans = spans_of(state, aligned=strategy.aligned)
    begins = {begin for begin, _ in spans}
    transfers = [t for plan in files_of(strategy, state) for t in plan.transfers]
    assert max(t.nbytes for t in transfers) <= strategy.block_bytes
    if strategy.direct:
        assert all(t.offset % PAGE_BYTES == t.nbytes % PAGE_BYTES == 0 for t in transfers)
    if not strategy.coalesced:
        assert begins <= {t.memory for t in transfers}
        assert len(transfers) >= len(state.sizes)


def test_a_shared_file_is_written_by_all_in_turns() -> None:
    shared = Alternative(layout="shared", ranks=4, block_bytes=PAGE_BYTES)
    state = State((4 * PAGE_BYTES,) * 4)
    (plan,) = files_of(shared, state)
    begins = [t.offset // PAGE_BYTES for t in plan.transfers]
    assert begins[:8] == [0, 4, 8, 12, 1, 5, 9, 13]


def test_a_strategy_has_a_name_of_its_own() -> None:
    assert len({each.name for each in SWEEP}) == len(SWEEP) > 10


def changed(a: Strategy, b: Strategy) -> set[str]:
    return {f.name for f in fields(a) if getattr(a, f.name) != getattr(b, f.name)}


def test_a_comparison_has_one_cause() -> None:
    for each in COMPARED:
        (a, a_op), (b, b_op) = each.a, each.b
        assert len(changed(a, b)) + (a_op is not b_op) == 1, each


@pytest.mark.parametrize("strategy", SWEEP, ids=lambda strategy: strategy.name)
def test_every_strategy_saves_and_restores(
    tmp_path: Path, pattern: MappedMemory, strategy: Alternative
) -> None:
    state = SMALL[strategy.state]
    session = PythonSession(strategy, state, pattern, str(tmp_path))
    took = [session.seconds(Operation.FRESH), session.seconds(Operation.OVERWRITE)]
    plans = files_of(strategy, state)
    wanted = bytes(pattern.view)
    for path, plan in zip(session.paths, plans, strict=True):
        content = Path(path).read_bytes()
        assert len(content) == plan.nbytes
        for t in plan.transfers:
            part = content[t.offset : t.offset + t.nbytes]
            assert part == wanted[t.memory : t.memory + t.nbytes]
    moved = sum(plan.nbytes for plan in plans)
    pattern.view[:moved] = bytes(moved)
    took.append(session.seconds(Operation.COLD))
    assert bytes(pattern.view) == wanted
    took.append(session.seconds(Operation.COLD_NEW))
    assert all(seconds > 0 for seconds in took)


def test_a_bench_runs_whole_cases_and_leaves_nothing(tmp_path: Path) -> None:
    bench = AllStrategies(str(tmp_path), SMALL["model"], SMALL["uniform"])
    for case in cases_of(FIGURES):
        timing = bench.time(case)
        assert timing.refused == ""
        assert set(timing.rates) == set(case.operations)
        assert os.listdir(tmp_path) == []


def test_the_first_error_of_a_thread_is_raised() -> None:
    done: list[int] = []

    def move(number: int) -> None:
        if number == 5:
            raise OSError("this one")
        done.append(number)

    with pytest.raises(OSError, match="this one"):
        in_turns(iter([lambda n=n: move(n) for n in range(100)]), 3)
    assert set(range(5)) <= set(done)


@pytest.mark.thorough
def test_the_study_writes_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    out = tmp_path / "out"
    words = [str(tmp_path), "--size", "1MiB", "--seconds", "2", "--no-profile", "--out", str(out)]
    assert main(words) == 0
    assert {"io-results.json", "io-table.txt"} <= set(os.listdir(out))
    assert "What to use:" in capsys.readouterr().out
