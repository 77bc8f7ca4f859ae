"""The log of a disk, and the states that are drawn from it: by the rules of a volatile cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from powerloss import images, states
from powerloss.journal import FLUSH, WRITE, ZERO, Journal, Position, Recorder, parse
from powerloss.states import State

SECTOR = 4096


class Log:
    """A log that is written by hand: w(number of sectors) and so on give numbers of requests."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "log"
        self.position = Position()
        self._recorder = Recorder(str(self._path), self.position)
        self._next = 1

    def write(self, at: int, sectors: int = 1) -> int:
        data = memoryview(b"".join(bytes([self._next + i]) * SECTOR for i in range(sectors)))
        self._next += sectors
        return self._recorder.asked(WRITE, at * SECTOR, len(data), data)

    def zero(self, at: int) -> int:
        return self._recorder.asked(ZERO, at * SECTOR, SECTOR)

    def flush(self) -> int:
        return self._recorder.asked(FLUSH)

    def answer(self, *numbers: int) -> None:
        for number in numbers:
            self._recorder.answered(number)

    def journal(self) -> Journal:
        return parse(self._path.read_bytes())

    def cut_off(self, size: int) -> Journal:
        return parse(self._path.read_bytes()[:-size])


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def drawn(journal: Journal, cut: int, kind: str, seed: int = 0) -> State:
    return states.draw(journal, cut, kind, random.Random(seed), SECTOR)


def shown(state: State) -> str:
    """The first sectors of the disk after that: each is 0, or the number of its write."""
    disk = [0] * 6
    for piece in state.pieces:
        for index in range(piece.size // SECTOR):
            at = piece.offset // SECTOR + index
            disk[at] = 0 if piece.data is None else piece.data[index * SECTOR]
    return "".join(map(str, disk))


def seen(journal: Journal, cut: int, kind: str, seeds: Sequence[int] = range(200)) -> set[str]:
    return {shown(drawn(journal, cut, kind, seed)) for seed in seeds}


def test_a_log_is_read_as_it_was_written(log: Log) -> None:
    first, flush = log.write(0, 2), log.flush()
    log.answer(flush)
    zero = log.zero(3)
    log.answer(first)
    journal = log.journal()
    assert journal.records == log.position.get() == 5
    assert journal.flushes == ((1, 2),)
    assert [(each.asked, each.answered, each.offset, each.size) for each in journal.changes] == [
        (0, 4, 0, 2 * SECTOR),
        (3, None, 3 * SECTOR, SECTOR),
    ]
    assert journal.changes[1].data is None
    assert zero == 2


def test_a_record_that_is_cut_off_was_not_made(log: Log) -> None:
    log.write(0)
    log.write(1)
    assert len(log.cut_off(1).changes) == 1


def test_what_was_answered_before_an_answered_flush_was_asked_for_is_there(log: Log) -> None:
    kept, late = log.write(0), log.write(1)
    log.answer(kept)
    flush = log.flush()
    log.answer(late)  # after the flush was asked for: it promises nothing
    log.answer(flush)
    journal = log.journal()
    assert shown(drawn(journal, journal.records, "none")) == "100000"
    assert seen(journal, journal.records, "subset") == {"100000", "120000"}


def test_a_flush_that_is_not_answered_promises_nothing(log: Log) -> None:
    write = log.write(0)
    log.answer(write)
    flush = log.flush()
    before = log.position.get()
    log.answer(flush)
    journal = log.journal()
    assert shown(drawn(journal, before, "none")) == "000000"
    assert drawn(journal, before + 1, "none").kind == "certain"
    assert shown(drawn(journal, before + 1, "none")) == "100000"


def test_nothing_is_there_that_was_asked_for_later(log: Log) -> None:
    log.write(0)
    cut = log.position.get()
    log.write(1)
    assert shown(drawn(log.journal(), cut, "all")) == "100000"


def test_every_prefix_and_every_subset_is_drawn(log: Log) -> None:
    for at in range(3):
        log.write(at)
    journal = log.journal()
    prefixes = {"000000", "100000", "120000", "123000"}
    assert seen(journal, 3, "prefix") == prefixes
    assert seen(journal, 3, "subset") == prefixes | {"020000", "003000", "103000", "023000"}
    assert seen(journal, 3, "none") == {"000000"}
    assert seen(journal, 3, "all") == {"123000"}


def test_a_torn_write_has_any_of_its_sectors(log: Log) -> None:
    log.write(0, 3)
    assert seen(log.journal(), 1, "torn") >= {"123000", "100000", "023000", "103000", "000000"}


def test_what_is_there_came_in_order(log: Log) -> None:
    old = log.write(0)
    log.answer(old)
    log.write(0)
    log.zero(0)
    journal = log.journal()
    assert shown(drawn(journal, journal.records, "all")) == "000000"
    assert shown(drawn(journal, journal.records - 1, "all")) == "200000"
    assert seen(journal, journal.records - 1, "subset") == {"000000", "100000", "200000"}


def test_moments_are_near_what_was_told_and_while_changes_are_open(log: Log) -> None:
    for at in range(5):
        write, flush = log.write(at), log.flush()
        log.answer(write, flush)
    journal = log.journal()
    found = states.moments(journal, [8, 999], 500, random.Random(0))
    assert set(found) <= set(range(journal.records + 1))
    assert {8, 4, journal.records} <= set(found)


def test_a_flush_during_which_a_change_is_under_way_is_counted(log: Log) -> None:
    write, flush = log.write(0), log.flush()
    log.answer(flush, write)
    later = log.flush()
    log.answer(later)
    assert states.overlapped(log.journal()) == 1


def test_an_image_becomes_the_state(log: Log, tmp_path: Path) -> None:
    base, image = tmp_path / "base", tmp_path / "image"
    base.write_bytes(b"x" * SECTOR)
    with base.open("r+b") as file:
        file.truncate(8 << 20)
        file.seek(6 << 20)
        file.write(b"y" * SECTOR)
    log.write(3, 2)
    log.zero(0)
    images.copy(base, image)
    assert image.read_bytes() == base.read_bytes()
    images.apply(drawn(log.journal(), 2, "all"), image)
    expected = bytearray(base.read_bytes())
    expected[:SECTOR] = bytes(SECTOR)
    expected[3 * SECTOR : 5 * SECTOR] = b"\x01" * SECTOR + b"\x02" * SECTOR
    assert image.read_bytes() == expected
