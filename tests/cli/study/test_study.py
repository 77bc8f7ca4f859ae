"""Every strategy really moves its bytes; a study ends in a profile that a Checkpointer takes."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import statehold
from statehold.cli import main
from statehold.cli.bench import Remeasured, Study, is_lost, study_of
from statehold.cli.study.measure import Bench, EngineSession, Timing, open_session
from statehold.cli.study.strategies import (
    Case,
    MappedMemory,
    Operation,
    State,
    Strategy,
    cases_of,
    centre,
    comparisons,
    kept,
    spans_of,
    strategies,
)
from statehold.io.mounts import mount_of
from statehold.io.profile import Profile, decode, path_for, save
from statehold.options.io import Io, Moving
from statehold.units import KiB, MiB
from support.inside import inside

STATE = State((700 * KiB, 4, 2 * MiB, 5000, 4, 300 * KiB + 2, 1))
MIDDLE = centre(2)
FIGURES = strategies(MIDDLE, False, comparisons(MIDDLE))
SWEEP = list(dict.fromkeys(strategy for strategy, _ in FIGURES))


@pytest.fixture(scope="module")
def pattern() -> MappedMemory:
    return kept(4 * MiB)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", SWEEP, ids=lambda strategy: strategy.name)
def test_every_strategy_saves_and_restores(
    tmp_path: Path, pattern: MappedMemory, strategy: Strategy
) -> None:
    session = open_session(strategy, STATE, pattern, str(tmp_path))
    nbytes = spans_of(STATE, aligned=not strategy.is_engine)[-1][1]
    try:
        took = [session.seconds(Operation.FRESH), session.seconds(Operation.OVERWRITE)]
        (content,) = [Path(path).read_bytes() for path in session.paths]
        assert len(content) == nbytes
        wanted = bytes(pattern.view)
        if strategy.is_engine:  # the core's raw mode has memory of its own
            assert content == wanted[:nbytes]
            pattern.view[:nbytes] = bytes(nbytes)
        took.append(session.seconds(Operation.COLD))
        assert bytes(pattern.view) == wanted
        took.append(session.seconds(Operation.COLD_NEW))
    finally:
        session.close()
    assert all(seconds > 0 for seconds in took)


@pytest.mark.thorough
def test_a_bench_runs_whole_cases_and_leaves_nothing(tmp_path: Path) -> None:
    bench = Bench(str(tmp_path), STATE)
    for case in cases_of(FIGURES):
        timing = bench.time(case)
        assert timing.refused == ""
        assert set(timing.rates) == set(case.operations)
        assert os.listdir(tmp_path) == []


def test_what_is_refused_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    bench = Bench(str(tmp_path / "none"), STATE)
    timing = bench.time(Case(MIDDLE, (Operation.FRESH,)))
    assert timing.rates == {}
    assert "open_write" in timing.refused or "no such" in timing.refused.lower()


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(session: object, path: str, *, reuse: bool) -> None:
        Path(path).touch()
        raise OSError("the disk is full")

    monkeypatch.setattr(EngineSession, "_save", fail)
    timing = Bench(str(tmp_path), STATE).time(Case(MIDDLE, (Operation.FRESH,)))
    assert timing.refused == "the disk is full"
    assert os.listdir(tmp_path) == []


def test_without_time_the_candidates_come_first(tmp_path: Path) -> None:
    bench = Bench(str(tmp_path), STATE)
    study = study_of(bench, 2, 0.2, False, lambda name, share: None)
    assert study.unmeasured
    assert MIDDLE not in study.unmeasured
    assert study.chosen.is_engine


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def studied(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `statehold bench io` says of a small study, in seconds."""
    (tmp_path / "here").mkdir()
    words = [str(tmp_path / "here"), "--size", "1MiB", "--seconds", "2", "--json"]
    code = main(["bench", "io", *words, "--out", str(tmp_path / "out")])
    assert code == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.thorough
def test_a_study_writes_a_profile_and_records(studied: dict[str, Any], tmp_path: Path) -> None:
    here = tmp_path / "here"
    assert os.listdir(here) == []
    file = path_for(str(here))
    assert studied["profile"] == str(file)
    profile = decode(file.read_bytes(), "f")
    assert profile.moving.buffer_bytes == studied["chosen"]["buffer_bytes"]
    assert profile.rates is not None
    assert asdict(profile.rates) == studied["rates"]
    text = (tmp_path / "out" / "io-table.txt").read_text()
    assert f"{profile.rates.write_bytes_per_s / 1e9:.2f} GB/s writing" in text
    assert {proof["kind"] for proof in studied["proofs"]} <= {"statehold", "bytes"}
    assert sorted(os.listdir(tmp_path / "out")) == ["io-results.json", "io-table.txt"]
    assert str(tmp_path) not in (tmp_path / "out" / "io-results.json").read_text()


QUICK = ("--size", "1MiB", "--seconds", "0.2")


@pytest.mark.parametrize("what", ["--profile", "--out", "HOME", "a directory"])
def test_what_cannot_be_written_is_found_before_anything_is_measured(
    home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    (tmp_path / "file").touch()
    bad = str(tmp_path / "file" / "below")
    words = {"HOME": [], "a directory": ["--profile", str(tmp_path)]}.get(what, [what, bad])
    if what == "HOME":
        monkeypatch.setenv("HOME", bad)
    measured: list[str] = []
    monkeypatch.setattr("statehold.cli.bench._measured", lambda path, *_: measured.append(path))
    code = main(["bench", "io", str(tmp_path), *QUICK, *words])
    assert (code, measured) == (4, [])
    assert "cannot write the results" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["file", "home"]


def test_it_says_who_takes_the_profile(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = "A Checkpointer takes these settings for runs on this storage."
    mine = tmp_path / "mine.json"
    said = {}
    for words in ([], ["--profile", str(mine)], ["--no-profile"]):
        assert main(["bench", "io", str(tmp_path), *QUICK, *words]) == 0
        said[" ".join(words[:1])] = capsys.readouterr().out
    assert taken in said[""]
    assert taken not in said["--profile"]
    assert f'Checkpointer(..., io=Io(profile="{mine}"))' in said["--profile"]
    assert "Checkpointer(" not in said["--no-profile"]
    assert (
        main(["bench", "io", str(tmp_path), *QUICK, "--profile", str(path_for(str(tmp_path)))]) == 0
    )
    assert taken in capsys.readouterr().out


def test_a_checkpointer_takes_the_profile(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moving = Moving(buffer_bytes=2 * MiB, queue_depth=4, backend="threads", copy_threads=1)
    save(Profile(mount_of(str(tmp_path)), moving, "today"), path_for(str(tmp_path)))
    with statehold.Checkpointer(tmp_path / "run", staging_bytes="64MiB") as ckpt:
        assert ckpt.backend == "threads"
        assert inside(ckpt).runtime.engine.buffer_bytes == 2 * MiB
    given = {"io": Io(buffer_bytes="1MiB"), "staging_bytes": "64MiB"}
    with statehold.Checkpointer(tmp_path / "run", **given) as ckpt:
        assert inside(ckpt).runtime.engine.buffer_bytes == MiB
        assert ckpt.backend == "threads"
    with statehold.Checkpointer(
        tmp_path / "run", io=Io(profile=None), staging_bytes="64MiB"
    ) as ckpt:
        assert inside(ckpt).runtime.engine.buffer_bytes == 16 * MiB
    assert main(["doctor", str(tmp_path)]) == 0
    assert "buffers of 2 MiB" in capsys.readouterr().out


def test_the_profile_is_that_of_the_nearest_directory(
    home: Path, tmp_path: Path, memory: Path
) -> None:
    """The run directory may lie on a slow disk that nothing is written to."""
    if mount_of(str(memory)) == mount_of(str(tmp_path)):
        pytest.skip("needs two storages")
    moving = Moving(buffer_bytes=2 * MiB, queue_depth=4, backend="threads", copy_threads=1)
    save(Profile(mount_of(str(memory)), moving, "today"), path_for(str(memory)))
    levels = [statehold.Directory(path=memory), statehold.Directory(name="run")]
    run = tmp_path / "run"
    for found, nbytes in ((levels, 2 * MiB), (levels[::-1], 16 * MiB), (None, 16 * MiB)):
        with statehold.Checkpointer(run, levels=found, staging_bytes="64MiB") as ckpt:
            assert inside(ckpt).runtime.engine.buffer_bytes == nbytes


def test_a_broken_profile_is_ignored_with_one_warning(
    home: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = path_for(str(tmp_path))
    file.parent.mkdir(parents=True)
    file.write_text('{"format": "statehold-io-profile", "version": 99}')
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with statehold.Checkpointer(tmp_path / "run", staging_bytes="64MiB") as ckpt:
                assert inside(ckpt).runtime.engine.buffer_bytes == 16 * MiB
    said = [record for record in caplog.records if "ignoring the profile" in record.message]
    assert len(said) == 1
    assert main(["doctor", str(tmp_path)]) == 0
    assert "unusable" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["nowhere"], 3),
        ([".", "--size", "1KiB"], 2),
        ([".", "--seconds", "0"], 2),
        ([".", "--seconds", "nan"], 2),
        ([".", "--size", "1000000TiB"], 4),
    ],
)
def test_exit_codes(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir(tmp_path))
    assert main(["bench", "io", *words]) == code
    assert sorted(os.listdir(tmp_path)) == before


# -- the course of a study, on a storage that was made up ------------------------------------------


class FakeBench:
    """Rates by a rule that counts how many cases were timed."""

    def __init__(self, rate: Callable[[Strategy, int], float]) -> None:
        self.rate = rate
        self.timed: list[Strategy] = []

    def time(self, case: Case) -> Timing:
        self.timed.append(case.strategy)
        rate = self.rate(case.strategy, len(self.timed))
        return Timing(dict.fromkeys(case.operations, rate))


def studied_on(rate: Callable[[Strategy, int], float]) -> Study:
    bench: Any = FakeBench(rate)
    return study_of(bench, 2, 60.0, False, lambda name, share: None)


def test_the_best_is_found_and_proved() -> None:
    study = studied_on(lambda s, _: 5.0 if s.block_bytes == 4 * MiB else 4.0)
    assert study.chosen.block_bytes == 4 * MiB
    assert {proof.operation for proof in study.proofs} == {Operation.OVERWRITE, Operation.COLD}
    assert all(proof.ratio >= 1.0 for proof in study.proofs if proof.kind == "statehold")
    assert study.unmeasured == []


def test_who_is_better_side_by_side_takes_the_place() -> None:
    cases = len(cases_of(FIGURES))

    def rate(strategy: Strategy, number: int) -> float:
        # While rounds are made, the storage drifts too far for any figure to be believed.
        drift = 1.0 if number > 9 * cases + 60 else 0.6 + 0.1 * (number // cases)
        return drift * (4.4 if strategy.block_bytes == 4 * MiB else 4.0)

    study = studied_on(rate)
    assert study.margin > 0.1
    assert study.chosen.block_bytes == 4 * MiB
    own = [proof for proof in study.proofs if proof.kind == "statehold"]
    assert own
    assert all(proof.chosen == study.chosen and proof.ratio >= 1 for proof in own)


def test_a_rival_that_is_worse_in_something_wins_nothing() -> None:
    def proof(operation: Operation, ratio: float) -> Remeasured:
        return Remeasured("statehold", operation, MIDDLE, MIDDLE, ratio, ratio, ratio, 3)

    writes, reads = Operation.OVERWRITE, Operation.COLD
    assert is_lost([proof(writes, 0.9), proof(reads, 1.0)])
    assert not is_lost([proof(writes, 0.96), proof(reads, 0.96)])
    assert not is_lost([proof(writes, 0.9), proof(reads, 1.2)])
    assert not is_lost([])
